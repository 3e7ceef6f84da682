"""CPU seconds of `shardwise plan`, in those that importing torch takes on the same machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SLOW = pytest.mark.slow


def cpu_seconds(*arguments: str, cache: str) -> float:
    """Return the user and system seconds of a Python process."""
    environment = {**os.environ, "SHARDWISE_CACHE": cache, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ("gemma-3-1b --devices 1xRTX4090", 5),
        pytest.param("qwen3_5-9b --devices 2xRTX3090", 9, marks=SLOW),
        pytest.param("llama-3.1-70b --devices 2xRTX4090 --model.base=nf4", 10, marks=SLOW),
        pytest.param("qwen3-next-80b-a3b --devices 8xH100-80GB", 18, marks=SLOW),
        pytest.param("llama-3.1-8b --devices 8xH100-80GB --nodes 2048 --full", 12, marks=SLOW),
    ],
)
def test_a_plan_takes_few_times_as_long_as_importing_torch(tmp_path, asked, most):
    """The bounds are twice what was measured: machines differ, and so do their caches."""
    torch_seconds = cpu_seconds("-c", "import torch", cache=str(tmp_path))
    arguments = ("-m", "shardwise", "plan", *asked.split())
    assert cpu_seconds(*arguments, cache=str(tmp_path)) < most * torch_seconds
