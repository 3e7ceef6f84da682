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

# Dense peaks in TFLOP/s, without sparsity, from NVIDIA's datasheets: (bfloat16 = float16 with float32 accumulation,
# float32 on CUDA cores). Keys are whole names as torch gives them: part of a name would also match slices of a GPU
# (MIG), other boards of the same chip (NVL, D, laptop) and other chips (L40 for L4, GB200 for B200), which differ.
_PUBLISHED = {
    "NVIDIA A100-SXM4-40GB": (312.0, 19.5),
    "NVIDIA A100-SXM4-80GB": (312.0, 19.5),
    "NVIDIA A100-PCIE-40GB": (312.0, 19.5),
    "NVIDIA A100 80GB PCIe": (312.0, 19.5),
    "NVIDIA H100 80GB HBM3": (989.4, 66.9),
    "NVIDIA H100 PCIe": (756.0, 51.2),
    "NVIDIA H100 NVL": (835.5, 60.0),
    "NVIDIA H200": (989.4, 66.9),
    "NVIDIA B200": (2250.0, 75.0),
    "NVIDIA L40S": (362.05, 91.6),
    "NVIDIA L4": (121.0, 30.3),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
}


@dataclass(frozen=True)
class PeakFlops:
    """The denominator of MFU and HFU, per device."""

    flops_per_second: float
    source: str


def peak_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """The published dense peak of a known GPU; for a CPU or an unknown GPU the best matrix product measured here.

    float32 has a published peak as long as TF32 is off; with TF32 on, products run faster than it, so it is measured.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        half = dtype in (torch.bfloat16, torch.float16)
        plain_float32 = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        if name in _PUBLISHED and (half or plain_float32):
            teraflops = _PUBLISHED[name][0 if half else 1]
            return PeakFlops(teraflops * 1e12, f"published dense {dtype} peak of {name}".replace("torch.", ""))
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.4) -> PeakFlops:
    """The fastest of the square matrix products that fit in about `seconds`, random data, at this process's threads.

    Sizes double from 256 to at most 8192 as long as a few products of the next size fit: where a dtype has no fast
    path, one product of a fixed size could take longer than the whole measurement.
    """
    size, best, best_size = 256, 0.0, 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        # Random, since a GPU multiplies zeros faster than data.
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        a @ b
        fastest = min(_seconds_of_product(a, b) for _ in range(3))
        if 2 * size**3 / fastest > best:
            best, best_size = 2 * size**3 / fastest, size
        if size < 8192 and time.perf_counter() + 4 * 8 * fastest < end:
            size *= 2
    where = f"{torch.get_num_threads()} CPU threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    source = f"measured here: {best_size} x {best_size} matrix product in {dtype} on {where}".replace("torch.", "")
    return PeakFlops(best, source)


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Versions, device and commit: what a figure must be quoted with. `device`: default a GPU where there is one."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "shardwise": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version(name) for name in ("torch", "transformers", "peft")},
        "fla-core": version("fla-core"),
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "cuda": torch.version.cuda,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """The commit of the source tree this runs from, with `+changes` where it has any; None outside a checkout."""
    here = Path(__file__)
    try:
        # The first fails where this file is not tracked: a virtual environment may lie in another project's checkout.
        # `-- ..` asks for changes to the library only: a run's own output must not mark its code as changed.
        _, head, changes = (
            subprocess.run(command, cwd=here.parent, capture_output=True, text=True, check=True).stdout.strip()
            for command in (
                ["git", "ls-files", "--error-unmatch", here.name],
                ["git", "rev-parse", "HEAD"],
                ["git", "status", "--porcelain", "--", ".."],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+changes" if changes else "")


def version(name: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
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


def _seconds_of_product(a: torch.Tensor, b: torch.Tensor) -> float:
    _synchronize(a.device)
    start = time.perf_counter()
    a @ b
    _synchronize(a.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
