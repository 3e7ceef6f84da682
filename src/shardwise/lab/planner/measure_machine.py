"""Measure this machine for `shardwise calibrate`: products, units of small models, AdamW, messages.

First rank 0 measures alone while the others wait, then all ranks measure at the same time, since
busy processes share caches and memory. GPUs share neither, so all measure at once. What is measured
is larger there and in bfloat16, and the seconds of the host that queues a layer's work are measured
beside those of the GPU.
"""

import itertools
import os
import random
import statistics
import sys
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
from shardwise.assembly.profiles import Measured
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import replicated
from shardwise.base.process.watchdog import beat
from shardwise.base.process.world import threads_each
from shardwise.config import Data, Launch, Lora, Model, Optimizer, RunConfig, Training, UserError
from shardwise.lab.planner.bench import Bench, make_bench
from shardwise.lab.planner.calibration import Calibration, Speeds, prices_of, write
from shardwise.lab.planner.measure_messages import collectives, jitter
from shardwise.lab.planner.measured_models import (
    OTHERS,
    REFERENCES,
    SCALES,
    DeviceType,
    reference_run,
)
from shardwise.lab.planner.profile import Start
from shardwise.lab.planner.unit_time import in_bytes
from shardwise.lab.planner.unit_work import UnitWork, work_of_units
from shardwise.metrics.hardware import environment
from shardwise.metrics.memory import free_cache
from shardwise.metrics.stopwatch import ROUNDS, Stopwatch
from shardwise.parallel.clip import clip_by_global_norm
from shardwise.parallel.neighbours import NoNeighbours
from shardwise.parallel.reduce import from_every_rank

UNIT_ROUNDS = 3
"""A model has three units of each kind."""
TIMEOUT_SECONDS = 3600.0
"""While fla's kernels are compiled, or other ranks wait for the first, nothing is finished for
minutes."""


def calibrate(num_processes: int, path: Path, start: Start, device: DeviceType = "cpu") -> int:
    """Measure this machine with up to so many busy processes, and write the file.

    `device`: cpu or cuda. Returns the exit code of the processes; `start` has printed what went
    wrong.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        training = Training(output_dir=folder, global_batch_size=num_processes)
        cfg = RunConfig(
            Model(folder, init="random"),
            Data("-"),
            replace(training, device=device),
            None,
            replicated(),
            launch=Launch(timeout_seconds=TIMEOUT_SECONDS),
        )
        return start(cfg, num_processes, partial(_on_rank, path, Path(folder)))


def _on_rank(path: Path, folder: Path, _: RunConfig, mesh: Mesh) -> None:
    num_ranks, rank, device = dist.get_world_size(), dist.get_rank(), mesh.device
    torch.set_num_threads(threads_each(num_ranks))
    own = folder / f"rank-{rank}"
    speeds: dict[int, Speeds] = {}
    if rank == 0 or device.type == "cuda":
        speeds[1] = _speeds(mesh, own)
    dist.barrier()
    if num_ranks > 1 and device.type == "cpu":
        speeds[num_ranks] = _speeds(mesh, own)
    bandwidth = statistics.mean(from_every_rank(_copy_bandwidth(device)))
    messages, waits = tuple(collectives(device)), jitter(device)
    if rank == 0:
        measured = Calibration(
            environment(device),
            num_ranks,
            _memory_bytes(device, num_ranks),
            bandwidth,
            speeds,
            messages,
            waits,
            "cuda" if device.type == "cuda" else "cpu",
            SCALES[device.type].dtype,
        )
        write(measured, path)
    dist.barrier()


def _speeds(mesh: Mesh, folder: Path) -> Speeds:
    products = {of: _products(of, mesh.device) for of in ("forward", "input", "weight")}
    sizes = SCALES[mesh.device.type].sizes
    speeds = Speeds(sizes, products, {}, _optimizer(mesh))
    units, host = _units(mesh, folder, speeds)
    return replace(speeds, units=units, host=host)


def _products(of: str, device: torch.device) -> list[list[list[float]]]:
    """Return the seconds of products, laid out in memory as in the pass: [rows, inner, columns].

    What is multiplied with, a weight or what a forward kept, was last used long ago in training, so
    no cache of a core holds it. Here it is another part of a large tensor each time.
    """
    scale, watch = SCALES[device.type], Stopwatch(device, "device")
    draw = partial(torch.randn, device=device, dtype=getattr(torch, scale.dtype))
    seconds = np.zeros((len(scale.sizes),) * 3)
    numbers = draw(max(2**24, 2 * scale.sizes[-1] ** 2))
    pick = random.Random(0)
    for index in itertools.product(range(len(scale.sizes)), repeat=3):
        rows, inner, columns = (scale.sizes[i] for i in index)
        a, size = draw(rows, inner), inner * columns
        starts = [pick.randrange(numbers.numel() - size) for _ in range(ROUNDS + 1)]
        # A GPU's units for products take rows that begin at whole 16 bytes, as weights do.
        parts = [numbers[start // 8 * 8 :][:size].view(inner, columns) for start in starts]
        if of == "forward":  # x W^T, W [columns, inner]
            parts = [part.view(columns, inner).T for part in parts]
        elif of == "weight":  # dy^T x, dy [inner, rows]
            a = draw(inner, rows).T
        products = map(partial(torch.mm, a), parts)
        seconds[index] = watch.median_seconds(partial(next, products))
        beat()
    return seconds.tolist()


def _optimizer(mesh: Mesh) -> list[float]:
    """Return the seconds per tensor and per element of the gradient norm, clipping and AdamW."""
    points = []
    for numel, number in SCALES[mesh.device.type].updated:
        draw = partial(torch.randn, numel, device=mesh.device)
        named = [(f"{i}", torch.nn.Parameter(draw())) for i in range(number)]
        for _, parameter in named:
            parameter.grad = draw()
        update = make_optimizer(Optimizer(), named, ())
        parameters = [parameter for _, parameter in named]

        def step(update: Any = update, parameters: Any = parameters) -> None:
            clip_by_global_norm(parameters, mesh, {}, max_norm=1.0)
            update.step()

        points.append((numel, Stopwatch(mesh.device).median_seconds(step) / number))
    (small, few), (large, many) = points
    per_element = max(0.0, (many - few) / (large - small))
    return [max(0.0, few - per_element * small), per_element]


def _units(
    mesh: Mesh, folder: Path, speeds: Speeds
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Return the prices of what units do beyond their products, by key and direction.

    Then the seconds of a GPU's host in each pass, the median of all that were measured.
    """
    points: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = defaultdict(list)
    queued: dict[tuple[str, str], list[float]] = defaultdict(list)
    device: DeviceType = "cuda" if mesh.device.type == "cuda" else "cpu"
    left_out, first = set[str](), dict[str, str]()
    families = [*REFERENCES, *(OTHERS if device == "cpu" else ())]
    for model_type, point, lora in itertools.product(
        families, SCALES[device].points, (None, Lora(r=8, targets="auto"))
    ):
        cfg = reference_run(folder, device, model_type, point, lora)
        try:
            for work, unit, host in _unit_seconds(cfg, mesh):
                if first.setdefault(work.key, model_type) != model_type and model_type in OTHERS:
                    continue
                backward = work.backward if work.has_backward else ()
                for direction, seconds, products, rest in (
                    ("forward", unit.forward_seconds, work.forward, work.rest_forward),
                    ("backward", unit.backward_seconds, backward, work.rest_backward),
                ):
                    rest_seconds = seconds - sum(map(speeds.product_seconds, products))
                    points[work.key, direction].append((rest, rest_seconds))
                if host is not None:
                    queued[work.key, "forward"].append(host.forward_seconds)
                    queued[work.key, "backward"].append(host.backward_seconds)
        except (UserError, RuntimeError) as error:
            # A GPU may lack kernels for a family's layers, or memory.
            if device == "cpu":
                raise
            left_out.add(f"not measured: {model_type}: {error}".splitlines()[0])
        free_cache(mesh.device)
        beat()
    if dist.get_rank() == 0:
        print(*sorted(left_out), sep="\n", end="\n" if left_out else "", file=sys.stderr)
    units: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (key, direction), rows in points.items():
        amounts, rest_seconds = zip(*rows, strict=True)
        units[key][direction] = prices_of(np.array(amounts), np.array(rest_seconds))
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for (key, direction), host_seconds in queued.items():
        medians[key][direction] = statistics.median(host_seconds)
    return dict(units), dict(medians)


def _unit_seconds(
    cfg: RunConfig, mesh: Mesh
) -> Iterator[tuple[UnitWork, Measured, Measured | None]]:
    """Yield the work of each unit, as the device prices it, and its seconds: those of the device,
    and those of a GPU's host.

    On a CPU units with a state come twice, once as under `cp` without its messages: the second time
    their cores compute more, so the two tell the price of a core's FLOPs from that of all else.
    """
    facts = describe(cfg, 1, mesh.device)
    works = work_of_units(cfg, facts.hf, facts.spec)
    bench = make_bench(cfg, mesh, facts, list(range(len(works))))
    if mesh.device.type == "cuda":
        works = tuple(in_bytes(cfg, facts, place, work) for place, work in enumerate(works))
    yield from zip(works, *_seconds_of(bench))
    with_maps = work_of_units(cfg, facts.hf, facts.spec, has_neighbours=True)
    if mesh.device.type == "cpu" and with_maps != works:
        bench.microbatches[0] = replace(bench.microbatches[0], neighbours=NoNeighbours())
        yield from zip(with_maps, *_seconds_of(bench))


def _seconds_of(bench: Bench) -> tuple[list[Measured], list[Measured] | list[None]]:
    """Return the seconds of each unit on the device, and on a GPU's host."""
    device = bench.watch.device
    if device.type == "cpu":
        return bench.units(UNIT_ROUNDS), [None] * len(bench.stages)
    bench.watch = Stopwatch(device, "host")
    host = bench.units(UNIT_ROUNDS)
    slowest = max(max(unit.forward_seconds, unit.backward_seconds) for unit in host)
    bench.watch = Stopwatch(device, "device")
    bench.watch.held_seconds = 0.001 + 2 * slowest
    return bench.units(UNIT_ROUNDS), host


def _copy_bandwidth(device: torch.device) -> float:
    numbers = torch.ones(SCALES[device.type].copied, device=device)
    target = torch.empty_like(numbers)
    seconds = Stopwatch(device).median_seconds(partial(target.copy_, numbers))
    return 2 * numbers.nbytes / seconds


def _memory_bytes(device: torch.device, num_ranks: int) -> int:
    """Return the memory of a rank: that of its GPU, or its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
