"""Where a LoRA step's time goes: `python -m tests.gpu.profiled GDN FOLDER DEVICE WORKLOAD OUT`.

Writes into OUT, for each `lora.kernel` of KERNELS, what the device does in a step, and how long
forward and backward take as a CUDA graph: that is without the host, which queues the graph once.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu import kernels

KERNELS = ("auto", "peft")
WARMUP_STEPS = 3
STEPS = 2
REPLAYS = 10
MOST_ENTRIES = 40
"""Of kernels and of the host's operations that take most."""


def main(gdn: str, folder: str, device_type: str, name: str, out: str) -> None:
    """Profile steps of the model in `folder`, once for each kernel."""
    kernels.choose(gdn)  # before transformers is imported
    import torch
    import torch.distributed as dist
    from tools.paired import write_json

    from shardwise.metrics.memory import free_cache
    from tests.gpu.workload import workload_of

    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    backend, bound = ("nccl", device) if device_type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    found: dict[str, Any] = {}
    for kernel in KERNELS:
        found[kernel] = profiled(workload_of(name, device_type), folder, kernel, device)
        write_json(Path(out), found)
        free_cache(device)
    dist.destroy_process_group()


def profiled(workload: Any, folder: str, kernel: str, device: Any) -> dict[str, Any]:
    """Return seconds and launches of a step, and what takes most of it on device and host."""
    from torch.profiler import ProfilerActivity, profile

    from shardwise.training.step import training_step
    from tests.gpu import sides

    cfg = sides.run_config(workload, folder, "none", device, kernel)
    mesh, job, batch = sides.prepared(cfg, workload, device)

    def step() -> None:
        training_step(job, [batch], mesh, cfg.optimizer.max_grad_norm)  # reads the loss

    for _ in range(WARMUP_STEPS):
        step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            seconds[event.name] += event.self_device_time_total / 1e6 / STEPS
            launches[event.name] += 1
    graph: dict[str, float] = {}
    if device.type == "cuda":
        number = int(batch.num_target_tokens())
        graph = as_a_graph(job.trainable(), lambda: job.pm.run(job.pm, [batch], 1 / number, True))
    host = [
        (entry.key, entry.count // STEPS, entry.self_cpu_time_total / 1e6 / STEPS)
        for entry in profiler.key_averages()
    ]
    return {
        "device_seconds": sum(seconds.values()),
        "launches": sum(launches.values()) // STEPS,
        "kernels": [
            (name[:200], launches[name] // STEPS, taken)
            for name, taken in seconds.most_common(MOST_ENTRIES)
        ],
        "host": sorted(host, key=lambda entry: -entry[2])[:MOST_ENTRIES],
        **graph,
    }


def as_a_graph(trained: Any, forward_backward: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of forward and backward as always and as a graph, and both losses."""
    import torch

    def timed(run: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / REPLAYS

    def fresh() -> Any:
        for parameter in trained:
            parameter.grad = None
        return forward_backward()

    side = torch.cuda.Stream()  # torch asks for a warm-up beside the default stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = float(fresh())
    torch.cuda.current_stream().wait_stream(side)
    seconds = timed(fresh)
    for parameter in trained:
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_backward()
    graph_seconds = timed(graph.replay)
    losses = {"loss": loss, "graph_loss": float(captured)}
    return {"forward_backward_seconds": seconds, "graph_seconds": graph_seconds, **losses}


if __name__ == "__main__":
    main(*sys.argv[1:])
