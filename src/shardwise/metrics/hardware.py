"""The machine of a run: its versions and devices, and the peak rate of a device in FLOP/s."""

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from shardwise.base import __version__
from shardwise.metrics.stopwatch import Stopwatch

# Dense peaks in TFLOP/s, without sparsity, from datasheets: (bfloat16 = float16 with
# float32 accumulation, float32 on CUDA cores). Keys are full names as torch returns them. A part of
# a name would also match slices of a GPU (MIG), other boards with the same chip (NVL, D, laptop)
# and other chips (L40 for L4, GB300 for B300), whose peaks differ.
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
    "NVIDIA A10": (125.0, 31.2),
    "NVIDIA H20": (148.0, 44.0),
    "NVIDIA GB200": (2500.0, 80.0),
    "NVIDIA RTX A6000": (154.8, 38.7),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (503.8, 126.0),
    "NVIDIA GeForce RTX 3090": (71.0, 35.6),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "NVIDIA GeForce RTX 5090": (209.5, 104.8),
    "AMD Instinct MI300X": (1307.4, 163.4),
}


@dataclass(frozen=True)
class PeakFlops:
    """The peak rate of one device, the denominator of MFU and HFU."""

    flops_per_second: float
    source: str  # where the figure comes from, in words


def published_flops(name: str) -> dict[str, float]:
    """Return the published dense FLOP/s of a GPU by dtype; `name` is torch's name of it."""
    half, single = _PUBLISHED[name]
    return {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}


def peak_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """Return the published dense peak of a known GPU; else measure the best matrix product here.

    The published peak of float32 holds while TF32 is off. With TF32 products are faster, so they
    are measured.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        half = dtype in (torch.bfloat16, torch.float16)
        tf32_is_off = torch.get_float32_matmul_precision() == "highest"
        if name in _PUBLISHED and (half or (dtype == torch.float32 and tf32_is_off)):
            teraflops = _PUBLISHED[name][0 if half else 1]
            source = f"published dense {dtype} peak of {name}".replace("torch.", "")
            return PeakFlops(teraflops * 1e12, source)
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.4) -> PeakFlops:
    """Return the rate of the fastest of several square matrix products, in about `seconds`.

    Their data are random, and they use the threads of this process. Sizes double from 256 up to
    8192, as long as a few products of the next size fit. A fixed size would not do: where a dtype
    has no fast path, one product of it can take longer than the whole measurement.
    """
    size, best_rate, best_size, watch = 256, 0.0, 0, Stopwatch(device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        # Random, since a GPU multiplies zeros faster than data.
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        a @ b
        product_seconds: list[float] = []
        for _ in range(3):
            with watch.taking(product_seconds):
                a @ b
        fastest_seconds = min(product_seconds)
        if 2 * size**3 / fastest_seconds > best_rate:
            best_rate, best_size = 2 * size**3 / fastest_seconds, size
        if size < 8192 and time.perf_counter() + 4 * 8 * fastest_seconds < end:
            size *= 2
    where = f"{torch.get_num_threads()} CPU threads"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    product = f"{best_size} x {best_size} matrix product in {dtype}".replace("torch.", "")
    return PeakFlops(best_rate, f"measured here: {product} on {where}")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return versions, device and commit, which belong to every figure.

    `device` is by default a GPU where there is one.
    """
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
    """Return the commit of the source tree that runs, or None outside of a checkout.

    It ends with `+changes` where the library has uncommitted changes.
    """
    here = Path(__file__)
    try:
        # The first command fails where this file is not tracked, as in a virtual environment that
        # lies in the checkout of another project. `-- ..` limits the last one to the library: the
        # output of a run must not mark its code as changed.
        commands = (
            ["git", "ls-files", "--error-unmatch", here.name],
            ["git", "rev-parse", "HEAD"],
            ["git", "status", "--porcelain", "--", ".."],
        )
        options: Any = {"cwd": here.parent, "capture_output": True, "text": True, "check": True}
        outputs = [subprocess.run(command, **options).stdout.strip() for command in commands]
    except (OSError, subprocess.CalledProcessError):
        return None
    _, head, changes = outputs
    return f"{head}+changes" if changes else head


def version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
