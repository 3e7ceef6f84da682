"""One side of the timing: `python -m tests.gpu.worker SIDE GDN FOLDER DEVICE WORKLOAD`.

SIDE is `transformers`, `shardwise`, or `shardwise:KERNEL` with a value of `lora.kernel`.
"""

from __future__ import annotations

import sys

from tests.gpu import kernels


def main(side: str, gdn: str, folder: str, device_type: str, name: str) -> None:
    """Answer requests (see rounds.py) until one says stop; `folder` has the weights."""
    kernels.choose(gdn)  # before transformers is imported
    import torch
    import torch.distributed as dist

    from shardwise.metrics.memory import free_cache
    from tests.gpu import sides
    from tests.gpu.rounds import Channel, Rounds
    from tests.gpu.workload import workload_of

    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    workload = workload_of(name, device_type)
    rounds = Rounds(Channel(), device)
    program, _, kernel = side.partition(":")
    if program == "shardwise":  # Trainer starts its own group
        backend, bound = ("nccl", device) if device_type == "cuda" else ("gloo", None)
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=bound)
    rounds.wait()
    while rounds.request["do"] == "build":
        mode = rounds.request["checkpointing"]
        cfg = sides.run_config(workload, folder, mode, device, kernel or "auto")
        getattr(sides, program)(cfg, workload, device, rounds)
        free_cache(device)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
