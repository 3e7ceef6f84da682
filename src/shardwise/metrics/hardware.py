"""Where a run ran, and how many FLOPs a second its device could do at best."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from shardwise import __version__

# Dense peaks in TFLOP/s, without sparsity, from NVIDIA's datasheets: (bfloat16, float32 on CUDA cores).
# The part's name as torch gives it must contain the key; the first match counts, so the longer names come first.
_PUBLISHED = {
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.0, 51.2),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "B200": (2250.0, 80.0),
    "A100": (312.0, 19.5),
    "L40S": (362.05, 91.6),
    "L4": (121.0, 30.3),
    "RTX 4090": (165.2, 82.6),
}


@dataclass(frozen=True)
class PeakFlops:
    """The denominator of MFU and HFU, per device."""

    flops_per_second: float
    source: str


def peak_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """The published dense peak of a known GPU; for a CPU or an unknown GPU the best matrix product measured here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, (bfloat16, float32) in _PUBLISHED.items():
            if key in name:
                teraflops = bfloat16 if dtype == torch.bfloat16 else float32
                return PeakFlops(teraflops * 1e12, f"published dense {dtype} peak of {name}".replace("torch.", ""))
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.4) -> PeakFlops:
    """The fastest of the square matrix products that fit in about `seconds`, random data, at this process's threads."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    a @ b
    while time.perf_counter() < end:
        _synchronize(device)
        start = time.perf_counter()
        a @ b
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    where = f"{torch.get_num_threads()} CPU threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    source = f"measured here: {size} x {size} matrix product in {dtype} on {where}".replace("torch.", "")
    return PeakFlops(2 * size**3 / best, source)


def environment() -> dict[str, Any]:
    """Versions, device and commit: what a figure must be quoted with."""
    return {
        "shardwise": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in ("torch", "transformers", "peft")},
        "fla": _version("flash-linear-attention"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "cuda": torch.version.cuda,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of the source tree this runs from, with `+changes` where it has any; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        # `-- .` asks for changes to the library only: a run's own output must not mark its code as changed.
        head, changes = (
            subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for command in (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--", ".."])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changes else "")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
