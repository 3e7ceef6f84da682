"""Measure this machine for `shardwise calibrate`: products, units of small models, AdamW, messages.

First rank 0 measures alone while the others wait, then all ranks measure at the same time, since
busy processes share caches and memory.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardwise.assembly.describe import describe
from shardwise.assembly.optimizer import make_optimizer
from shardwise.assembly.profiles import unit_keys
from shardwise.config import Data, Lora, Model, Optimizer, Parallel, RunConfig, Training
from shardwise.interfaces import Mesh
from shardwise.metrics.hardware import environment
from shardwise.parallel.reduce import of_every_rank
from shardwise.planner.calibration import Calibration, Collective, Speeds, prices_of, write
from shardwise.planner.profile import Start, make_bench
from shardwise.planner.unit_work import UnitWork, work_of_units
from shardwise.process.watchdog import beat
from shardwise.process.world import threads_each

SIZES = (8, 64, 256, 1024)
MESSAGE_BYTES = (2**10, 2**14, 2**17, 2**20, 2**23, 2**25)
VOCABULARY = 1024
REFERENCES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
    },
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Families whose layers are measured, each in models of two layers."""
POINTS = ((128, 128), (128, 512), (320, 128), (320, 512))
"""Hidden sizes of these models, and tokens."""
ROUNDS = 5
COMPUTING = 0.005
"""Seconds of computing between two messages: about a layer of a small model."""
STRETCHES = 20
TENSORS_OF_LAYER = 24
"""About eight linears with their adapters."""


def calibrate(num_processes: int, path: Path, start: Start) -> int:
    """Measure this machine with up to so many busy processes, and write the file.

    Returns the exit code of the processes; `start` has printed what went wrong.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        training = Training(output_dir=folder, global_batch_size=num_processes, max_restarts=0)
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
    collectives, jitter = tuple(_collectives()), _jitter()
    if rank == 0:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
        facts = environment(mesh.device)
        measured = Calibration(facts, num_ranks, memory, bandwidth, speeds, collectives, jitter)
        write(measured, path)
    dist.barrier()


def _speeds(mesh: Mesh, folder: Path) -> Speeds:
    products = {of: _products(of) for of in ("forward", "input", "weight")}
    speeds = Speeds(SIZES, products, {}, _optimizer())
    return replace(speeds, units=_units(mesh, folder, speeds))


def median_seconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Return the median seconds of a function, which runs once before."""
    work()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _products(of: str) -> list[list[list[float]]]:
    """Return the seconds of products, laid out in memory as in the pass: [rows, inner, columns]."""
    seconds = np.zeros((len(SIZES),) * 3)
    for index in itertools.product(range(len(SIZES)), repeat=3):
        rows, inner, columns = (SIZES[i] for i in index)
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        if of == "forward":  # x W^T, W [columns, inner]
            b = torch.randn(columns, inner).T
        elif of == "weight":  # dy^T x, dy [inner, rows]
            a = torch.randn(inner, rows).T
        seconds[index] = median_seconds(partial(torch.mm, a, b))
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
        "num_hidden_layers": 2,
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
    """Yield the work of each distinct unit of a model, and the seconds of its two passes."""
    facts = describe(cfg, 1, mesh.device)
    works = work_of_units(cfg, facts.hf, facts.spec)
    keys = unit_keys(facts.hf, facts.spec, cfg.parallel.schedule)
    distinct = {key: place for place, key in reversed(list(enumerate(keys)))}
    bench = make_bench(cfg, mesh, facts, sorted(distinct.values()))
    for number in range(ROUNDS + 1):
        if number == 1:
            bench.seconds.clear()
        outputs = []
        for place in range(len(bench.stages)):
            bench.forward(0, "again")
            outputs.append(bench.forward(place))
        for place in reversed(range(len(bench.stages))):
            bench.backward(place, *outputs.pop(), halves=False)
        for stage in bench.stages:
            for parameter in stage.parameters():
                parameter.grad = None
    medians = {key: statistics.median(seconds) for key, seconds in bench.seconds.items()}
    for index, place in enumerate(sorted(distinct.values())):
        forward = medians[index, "F"]
        if index > 0:
            forward = max(0.0, forward - medians[0, "F"])
        yield works[place], forward, medians.get((index, "B"), 0.0)


def _copy_bandwidth() -> float:
    source, target = torch.ones(2**23), torch.ones(2**23)
    return 2 * source.nbytes / median_seconds(partial(target.copy_, source))


class Rhythm:
    """Measures messages as they fall in training: between stretches of computing.

    A message right after another one costs less: the ranks come together, and caches hold its data.
    """

    def __init__(self, seconds: float) -> None:
        self._x, self._w = torch.randn(256, 512), torch.randn(512, 512)
        self._products = max(
            1, round(seconds / median_seconds(partial(torch.mm, self._x, self._w)))
        )
        # Ranks that counted differently would wait for one another.
        self._products = min(of_every_rank(self._products))
        self.seconds = self._seconds_each(lambda: None, STRETCHES)

    def message_seconds(self, message: Callable[[], Any], stretches: int) -> float:
        """Return what one message adds to a stretch of computing, on the rank that it costs most.

        Every rank must call this, with the same kind of message.
        """
        added = [
            self._seconds_each(message, stretches) - self._seconds_each(lambda: None, stretches)
            for _ in range(ROUNDS)
        ]
        return max(of_every_rank(max(1e-6, statistics.median(added))))

    def _seconds_each(self, message: Callable[[], Any], stretches: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(stretches):
            for _ in range(self._products):
                torch.mm(self._x, self._w)
            message()
        beat()
        return (time.perf_counter() - start) / stretches


def _collectives() -> Iterator[Collective]:
    """Yield the seconds of every collective, among all ranks, over sizes of whole tensors."""
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return
    rhythm = Rhythm(COMPUTING)
    for num_bytes in MESSAGE_BYTES:
        complete = torch.zeros(num_bytes // 4)
        shards = torch.zeros(num_bytes // 4 // n * n)
        part = shards[: len(shards) // n]
        into = torch.zeros_like(shards)
        kinds: dict[str, Callable[[], Any]] = {
            "all-reduce": partial(_sum, complete),
            "all-gather": partial(dist.all_gather_single, into, part),
            "all-gather of weights": partial(_gather, _sharded_layer(num_bytes)),
            "reduce-scatter": partial(dist.reduce_scatter_single, part.clone(), shards),
            "reduce-scatter of weights": partial(_scatter_layer, shards, n),
            "all-to-all": partial(dist.all_to_all_single, into, shards),
            "broadcast": partial(dist.broadcast, complete, 0),
            "reduce": partial(dist.reduce, complete, 0),
            "send": partial(_transfer, complete, rank, is_two_way=False),
            "exchange": partial(_transfer, complete, rank, is_two_way=True),
        }
        stretches = STRETCHES if num_bytes < 2**23 else STRETCHES // 5
        for kind, message in kinds.items():
            yield Collective(kind, n, num_bytes, rhythm.message_seconds(message, stretches))


def _jitter() -> float:
    """Return the seconds that a rank waits for others per second of computing.

    Ranks with equal work do not end together: the longer they compute, the longer one waits.
    """
    if dist.get_world_size() == 1:
        return 0.0
    tiny = torch.zeros(8)
    short, long = (Rhythm(seconds) for seconds in (COMPUTING, 8 * COMPUTING))
    waits = [rhythm.message_seconds(partial(_sum, tiny), STRETCHES) for rhythm in (short, long)]
    return max(0.0, (waits[1] - waits[0]) / (long.seconds - short.seconds))


def _sum(tensor: torch.Tensor) -> None:
    """Add up a copy, as tensor parallelism does, which needs both."""
    dist.all_reduce(tensor.clone())


def _sharded_layer(num_bytes: int) -> FSDPModule:
    """Return a layer of FSDP whose weights have so many bytes, in as many tensors as with LoRA."""
    size = max(1, num_bytes // 4 // TENSORS_OF_LAYER)
    tensors = [
        nn.Parameter(torch.zeros(size), requires_grad=False) for _ in range(TENSORS_OF_LAYER)
    ]
    layer = nn.ParameterList(tensors)
    return fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _gather(layer: FSDPModule) -> None:
    """Do what FSDP does with a layer: copy, gather and copy its shards, and free the weights."""
    layer.unshard()
    layer.reshard()


def _scatter_layer(gradients: torch.Tensor, num_ranks: int) -> None:
    """Do what FSDP does with a layer's gradients: they are copied and reduced into a new shard."""
    copied = gradients.clone()
    dist.reduce_scatter_single(copied.new_empty(len(copied) // num_ranks), copied)


def _transfer(tensor: torch.Tensor, rank: int, is_two_way: bool) -> None:
    """Send from rank 0 to rank 1, as pipelines do, or both ways, as context parallelism does.

    Other ranks do nothing.
    """
    if rank > 1:
        return
    transfers = []
    if rank == 0 or is_two_way:
        transfers.append(dist.P2POp(dist.isend, tensor, 1 - rank))
    if rank == 1 or is_two_way:
        transfers.append(dist.P2POp(dist.irecv, torch.empty_like(tensor), 1 - rank))
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
