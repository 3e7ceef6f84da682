"""Every Triton kernel compiles for both generations of GPUs and fits their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.without_gpu import compile_triton

KERNELS = {
    "project",
    "expand",
    "combine",
    "output_gradients",
    "factor_gradient",
    "sum",
    "statistics",
    "gradient",
}
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""That a block may have: CUDA C++ Programming Guide, table of compute capabilities."""


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_and_fit(capability, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(compile_triton.__file__)
    done = subprocess.run(
        [sys.executable, script, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows = [compile_triton.Row(*row) for row in json.loads(done.stdout)]
    for dtype in ("bfloat16", "float32"):
        assert {row.kernel.removesuffix("_kernel") for row in rows if row.dtype == dtype} == KERNELS
    assert [row for row in rows if row.shared_bytes > SHARED_BYTES[capability]] == []
    assert [row for row in rows if row.dtype == "bfloat16" and row.spilled_bytes] == []
