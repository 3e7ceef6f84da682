"""Compile what fla and shardwise may run: `python -m tests.gpu.warm SHARE SHARES FOLDER`.

A kernel of fla has up to dozens of forms, each compiled for seconds in one thread when it is first
called: minutes, before the first step ends. Each of SHARES processes compiles its share of the
forms into Triton's cache on disk. What is timed afterwards still tries all of them and chooses.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from triton.runtime import autotuner
from triton.runtime.errors import OutOfResources, PTXASError

from tests.gpu import kernels


def main(share: str, shares: str, scratch: str) -> None:
    """Take a step of each model that fla is tested with, in the timed heads, rows and length."""
    keep_share(int(share), int(shares))  # before the kernels are defined
    kernels.choose("fla")
    from shardwise.training.step import forward_backward
    from tests.gpu import sides
    from tests.gpu.workload import FLA_SHAPES, WORKLOADS, preset

    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    for name, (on_a_device, _) in zip(FLA_SHAPES, WORKLOADS.values(), strict=True):
        model = preset(name) | FLA_SHAPES[name]
        folder = Path(scratch, f"{name}-{share}")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        workload = replace(on_a_device, model=model)
        cfg = sides.run_config(workload, str(folder), "none", device)
        cfg = replace(cfg, model=replace(cfg.model, init="random"))
        mesh, job, batch = sides.prepared(cfg, workload, device)
        forward_backward(job.pm, [batch], mesh)
    dist.destroy_process_group()


def keep_share(share: int, shares: int) -> None:
    """Let each kernel have its share of its forms alone, and go on where none of them can run.

    What it then computes is worthless.
    """

    class Share(autotuner.Autotuner):
        def __init__(self, *args, **more) -> None:
            super().__init__(*args, **more)
            self.configs = self.configs[share::shares] or self.configs[:1]

        def run(self, *args, **more):
            try:
                return super().run(*args, **more)
            except (OutOfResources, PTXASError):
                return None

    autotuner.Autotuner = Share  # which `triton.autotune` makes


if __name__ == "__main__":
    main(*sys.argv[1:])
