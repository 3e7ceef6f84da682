#!/usr/bin/env bash
# torch 2.13.0: a send or a receive over gloo is never `is_completed()` before it is waited for.
#
# The documentation of `Work.is_completed` says that it tells whether the operation has ended. A collective's does. Of
# `isend` and `irecv` it stays False for seconds after the bytes have arrived, and is True only after `wait()`. A
# program that polls it, to free what it has sent or to look for the next message, waits for ever or keeps everything.
#
# Seen, for three seconds: all_reduce completed, the sum is there; irecv not completed, the numbers are there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def polled(work):
    """Return whether the work said in three seconds that it is completed."""
    end = time.monotonic() + 3
    while time.monotonic() < end:
        if work.is_completed():
            return True
        time.sleep(0.05)
    return False


def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x = torch.full((4,), float(rank + 1))
    work = dist.all_reduce(x, async_op=True)
    seen = {"all_reduce": (polled(work), x.tolist())}
    work.wait()
    y = torch.full((4,), float(rank + 1))
    work = dist.isend(y, 1) if rank == 0 else dist.irecv(y, 0)
    seen["isend" if rank == 0 else "irecv"] = (polled(work), y.tolist())
    work.wait()
    print("torch", torch.__version__, "rank", rank, seen, "after wait:", work.is_completed(), flush=True)
    assert seen["all_reduce"] == (True, [3.0] * 4), "the behaviour has changed"
    assert seen["isend" if rank == 0 else "irecv"] == (False, [1.0] * 4), "the behaviour has changed"
    assert work.is_completed(), "the behaviour has changed"
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), 2)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder"
