"""One side of the timing, as a process of its own: `python -m tests.gpu.worker SIDE GDN FOLDER
DEVICE WORKLOAD`.

SIDE is `transformers`, or `shardwise`, then a colon and `lora.kernel` where that is not to be
`auto`.
"""

from __future__ import annotations

import gc
import sys

from tests.gpu import kernels


def main(side: str, gdn: str, folder: str, device_type: str, name: str) -> None:
    """Answer requests (see rounds.py) until told to stop; the model's weights lie in `folder`."""
    kernels.choose(gdn)  # before transformers is imported
    import torch
    import torch.distributed as dist

    from tests.gpu import sides
    from tests.gpu.rounds import Channel, Rounds
    from tests.gpu.workload import workload_of

    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    workload = workload_of(name, device_type)
    rounds = Rounds(Channel(), device)
    program, _, kernel = side.partition(":")
    if program == "shardwise":  # Trainer brings up what it needs
        backend, bound = ("nccl", device) if device_type == "cuda" else ("gloo", None)
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound
        )
    rounds.wait()
    while rounds.request["do"] == "build":
        cfg = sides.run_config(
            workload, folder, rounds.request["checkpointing"], device, kernel or "auto"
        )
        getattr(sides, program)(cfg, workload, device, rounds)
        gc.collect()
        if device_type == "cuda":
            torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
