"""Measure this machine for `shardwise calibrate`: products, units of small models, AdamW, messages.

First rank 0 measures alone while the others wait, then all ranks measure at the same time, since
busy processes share caches and memory.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.assembly.describe import describe
from shardwise.assembly.optimizer import make_optimizer
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.interfaces import Mesh
from shardwise.metrics.hardware import environment
from shardwise.parallel.neighbours import NoNeighbours
from shardwise.parallel.reduce import of_every_rank
from shardwise.planner.calibration import Calibration, Speeds, prices_of, write
from shardwise.planner.measure_messages import ROUNDS, collectives, jitter, median_seconds
from shardwise.planner.profile import Bench, Start, make_bench
from shardwise.planner.unit_work import UnitWork, work_of_units
from shardwise.process.watchdog import beat
from shardwise.process.world import threads_each

SIZES = (8, 64, 256, 1024)
VOCABULARY = 1024
REFERENCES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "bamba": {
        "attn_layer_indices": [1, 3, 5],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
    },
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Families whose layers are measured, each in models of six layers: so many lie in no cache."""
POINTS = ((128, 128), (128, 512), (320, 128), (320, 512))
"""Hidden sizes of these models, and tokens."""
UNIT_ROUNDS = 3
"""A model has three units of each kind."""


def calibrate(num_processes: int, path: Path, start: Start) -> int:
    """Measure this machine with up to so many busy processes, and write the file.

    Returns the exit code of the processes; `start` has printed what went wrong.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        training = Training(output_dir=folder, global_batch_size=num_processes)
        cfg = RunConfig(
            Model(folder, init="random"),
            Data("-"),
            replace(training, device="cpu"),
            None,
            Parallel(data="ddp"),
        )
        return start(cfg, num_processes, partial(_on_rank, path, Path(folder)))


def _on_rank(path: Path, folder: Path, _: RunConfig, mesh: Mesh) -> None:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.set_num_threads(threads_each(num_ranks))
    own = folder / f"rank-{rank}"
    alone = _speeds(mesh, own) if rank == 0 or num_ranks == 1 else None
    dist.barrier()
    speeds = {1: alone} if alone is not None else {}
    if num_ranks > 1:
        speeds[num_ranks] = _speeds(mesh, own)
    bandwidth = statistics.mean(of_every_rank(_copy_bandwidth()))
    messages, waits = tuple(collectives()), jitter()
    if rank == 0:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
        facts = environment(mesh.device)
        measured = Calibration(facts, num_ranks, memory, bandwidth, speeds, messages, waits)
        write(measured, path)
    dist.barrier()


def _speeds(mesh: Mesh, folder: Path) -> Speeds:
    products = {of: _products(of) for of in ("forward", "input", "weight")}
    speeds = Speeds(SIZES, products, {}, _optimizer())
    return replace(speeds, units=_units(mesh, folder, speeds))


def _products(of: str) -> list[list[list[float]]]:
    """Return the seconds of products, laid out in memory as in the pass: [rows, inner, columns].

    What is multiplied with, a weight or what a forward kept, was last used long ago in training, so
    no cache of a core holds it. Here it is another part of a large tensor each time.
    """
    seconds = np.zeros((len(SIZES),) * 3)
    numbers = torch.randn(max(2**24, 2 * SIZES[-1] ** 2))
    pick = random.Random(0)
    for index in itertools.product(range(len(SIZES)), repeat=3):
        rows, inner, columns = (SIZES[i] for i in index)
        a, size = torch.randn(rows, inner), inner * columns
        starts = [pick.randrange(numbers.numel() - size) for _ in range(ROUNDS + 1)]
        parts = [numbers[start : start + size].view(inner, columns) for start in starts]
        if of == "forward":  # x W^T, W [columns, inner]
            parts = [part.view(columns, inner).T for part in parts]
        elif of == "weight":  # dy^T x, dy [inner, rows]
            a = torch.randn(inner, rows).T
        products = map(partial(torch.mm, a), parts)
        seconds[index] = median_seconds(partial(next, products))
        beat()
    return seconds.tolist()


def _optimizer() -> list[float]:
    """Return the seconds per tensor and per element of the gradient norm, clipping and AdamW."""
    points = []
    for numel, number in ((256, 64), (2**18, 16)):
        named = [(f"{i}", torch.nn.Parameter(torch.randn(numel))) for i in range(number)]
        for _, parameter in named:
            parameter.grad = torch.randn(numel)
        update = make_optimizer(Optimizer(), named, ())
        parameters = [parameter for _, parameter in named]

        def step(update: Any = update, parameters: Any = parameters) -> None:
            for parameter in parameters:
                parameter.grad.float().square().sum()
                parameter.grad.mul_(0.999)
            update.step()

        points.append((numel, median_seconds(step) / number))
    (small, few), (large, many) = points
    per_element = max(0.0, (many - few) / (large - small))
    return [max(0.0, few - per_element * small), per_element]


def _units(mesh: Mesh, folder: Path, speeds: Speeds) -> dict[str, dict[str, list[float]]]:
    """Return the prices of what units do beyond their products, by key and direction."""
    points: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = defaultdict(list)
    for (model_type, sizes), (width, tokens), lora in itertools.product(
        REFERENCES.items(), POINTS, (None, Lora(r=8, targets="auto"))
    ):
        cfg = _reference(folder, model_type, sizes, width, tokens, lora)
        for work, forward, backward in _unit_seconds(cfg, mesh):
            forward -= sum(map(speeds.product_seconds, work.forward))
            points[work.key, "forward"].append((work.rest_forward, forward))
            if work.has_backward:
                backward -= sum(map(speeds.product_seconds, work.backward))
                points[work.key, "backward"].append((work.rest_backward, backward))
            else:
                points[work.key, "backward"].append((work.rest_backward, 0.0))
        beat()
    units: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (key, direction), rows in points.items():
        amounts, seconds = zip(*rows, strict=True)
        units[key][direction] = prices_of(np.array(amounts), np.array(seconds))
    return dict(units)


def _reference(
    folder: Path, model_type: str, sizes: dict[str, Any], width: int, tokens: int, lora: Lora | None
) -> RunConfig:
    """Return a run of one row with a small model, whose config is written into the folder."""
    head = width // sizes["num_attention_heads"]
    config = {
        "model_type": model_type,
        "architectures": [_ARCHITECTURES[model_type]],
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 6,
        "head_dim": head,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        **sizes,
    }
    if model_type == "bamba":
        # States and chunks that follow width and tokens tell the core's FLOPs from its elements.
        config |= {"mamba_d_state": width // 4, "mamba_chunk_size": tokens // 4}
        config["mamba_d_head"] = 2 * width // sizes["mamba_n_heads"]
    if "linear_num_key_heads" in sizes:
        config |= {"linear_key_head_dim": head, "linear_value_head_dim": head}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    training = Training(output_dir="-", global_batch_size=1, micro_batch_size=1, device="cpu")
    data = Data("-", sequence_length=tokens)
    return RunConfig(Model(str(folder), init="random"), data, training, lora, Parallel())


_ARCHITECTURES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "bamba": "BambaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _unit_seconds(cfg: RunConfig, mesh: Mesh) -> Iterator[tuple[UnitWork, float, float]]:
    """Yield the work of each unit of a model, and the median seconds of its two passes.

    Units with a state come twice, once as under `cp` without its messages: the second time their
    cores compute more, so the two tell the price of a core's FLOPs from that of all else.
    """
    facts = describe(cfg, 1, mesh.device)
    works = work_of_units(cfg, facts.hf, facts.spec)
    bench = make_bench(cfg, mesh, facts, list(range(len(works))))
    yield from zip(works, *_passes(bench), strict=True)
    with_maps = work_of_units(cfg, facts.hf, facts.spec, has_neighbours=True)
    if with_maps != works:
        for stage in bench.stages:
            stage.microbatches = [replace(x, neighbours=NoNeighbours()) for x in stage.microbatches]
        yield from zip(with_maps, *_passes(bench), strict=True)


def _passes(bench: Bench) -> tuple[list[float], list[float]]:
    """Return the median seconds of the forward and of the backward of each unit."""
    for number in range(UNIT_ROUNDS + 1):
        if number == 1:  # gradients are added up from here on
            bench.seconds.clear()
        outputs = []
        for place in range(len(bench.stages)):
            bench.forward(0, "again")
            outputs.append(bench.forward(place))
        for place in reversed(range(len(bench.stages))):
            bench.backward(place, *outputs.pop(), halves=False)
    medians = {key: statistics.median(seconds) for key, seconds in bench.seconds.items()}
    places = range(len(bench.stages))
    around = medians[0, "F"]
    forwards = [around, *(max(0.0, medians[place, "F"] - around) for place in places[1:])]
    return forwards, [medians.get((place, "B"), 0.0) for place in places]


def _copy_bandwidth() -> float:
    source, target = torch.ones(2**23), torch.ones(2**23)
    return 2 * source.nbytes / median_seconds(partial(target.copy_, source))
