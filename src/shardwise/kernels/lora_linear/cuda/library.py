"""Builds the kernels with nvcc, once for a kind of GPU, and loads them: a C library, bound to no version of torch."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

from shardwise.config import UserError

SOURCES = Path(__file__).parent
OPTIONS = ("-std=c++20", "-O3", "-shared", "-cudart", "static", "-Xcompiler", "-fPIC")
WHEELS = "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96"
"""The compiler from PyPI, with the headers and the library that it needs."""


class Matrix(ctypes.Structure):
    """As in tiles.cuh."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("aligned", ctypes.c_int),
    ]


class Drop(ctypes.Structure):
    """As `Dropout` in dropout.cuh."""

    _fields_ = [("seeds", ctypes.c_void_p), ("features", ctypes.c_void_p), ("threshold", ctypes.c_int32)]


class Rows(ctypes.Structure):
    """As `RowsArguments` in skinny.cuh."""

    _fields_ = [
        ("tall", Matrix),
        ("factor", Matrix),
        ("dropout", Drop),
        ("scale", ctypes.c_float),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
    ]


class Columns(ctypes.Structure):
    """As `ColumnsArguments` in skinny.cuh."""

    _fields_ = [
        ("tall", Matrix),
        ("factor", Matrix),
        ("other", Matrix),
        ("dropout", Drop),
        ("scale", ctypes.c_float),
        ("row_tiles", ctypes.c_int),
        ("column_tiles", ctypes.c_int),
        ("columns_out", ctypes.c_void_p),
        ("transposed", ctypes.c_int),
        ("rows_out", ctypes.c_void_p),
    ]


class Term(ctypes.Structure):
    """As in product.cuh."""

    _fields_ = [("left", Matrix), ("right", Matrix)]


MOST_TERMS = 9


class Product(ctypes.Structure):
    """As `ProductArguments` in product.cuh."""

    _fields_ = [
        ("terms", Term * MOST_TERMS),
        ("count", ctypes.c_int),
        ("adapter", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("dropout", Drop),
        ("bias", ctypes.c_void_p),
        ("accumulate", ctypes.c_int),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("aligned", ctypes.c_int),
    ]


class Library:
    """The functions of lora_linear.cu; a CUDA error is a RuntimeError."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.lora_error.restype = ctypes.c_char_p
        sizes = (ctypes.c_int64 * 3)()
        self._library.lora_sizes(sizes)
        assert list(sizes) == [ctypes.sizeof(cls) for cls in (Rows, Columns, Product)]

    def why_not(self, index: int) -> str | None:
        """None if its kernels can run on a GPU; else what CUDA says."""
        error = self._library.lora_ready(index)
        return self._library.lora_error(error).decode() if error else None

    def launch(self, name: str, arguments: ctypes.Structure, tensor: torch.Tensor, variant: bool) -> None:
        """Launch `lora_NAME` in one of its two variants, of a tensor's dtype, on its device and the current stream."""
        index, stream = 0, 0
        if tensor.is_cuda:
            index, stream = tensor.get_device(), torch.cuda.current_stream(tensor.device).cuda_stream
        function = getattr(self._library, f"lora_{name}")
        bfloat16 = int(tensor.dtype == torch.bfloat16)
        error = function(ctypes.byref(arguments), bfloat16, int(variant), index, ctypes.c_void_p(stream))
        if error:
            raise RuntimeError(f"CUDA kernel lora_{name}: {self._library.lora_error(error).decode()}")


@cache
def library(device: torch.device) -> Library:
    """The kernels for a device, built first if need be.

    UserError: no nvcc, a GPU before sm_80, sources that do not compile, or a driver older than the compiler.
    """
    if device.type != "cuda":
        raise UserError(f"the kernels in CUDA C++ need a CUDA device, not {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise UserError(f"the kernels in CUDA C++ need a GPU of sm_80 or later, and this one is sm_{major}{minor}")
    path = build(10 * major + minor)
    loaded = Library(path)
    if why := loaded.why_not(torch.cuda.current_device() if device.index is None else device.index):
        raise UserError(
            f"the kernels in CUDA C++ were built and cannot run ({why}); if the driver is too old (CUDA 13, as of "
            f"PyPI's nvcc, needs 580 or later), set CUDA_HOME to a toolkit of CUDA 12 and delete {path}"
        )
    return loaded


def build(architecture: int) -> Path:
    """The library for sm_`architecture`; compiled (in about 20 s) if the cache folder does not have it."""
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.cu*")))
    key = hashlib.sha256(text + repr(OPTIONS).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"
    path = folder / f"lora_linear-{key}-sm_{architecture}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the kernels in CUDA C++ need a folder to be built in ({error}): set XDG_CACHE_HOME") from None
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a machine: one builds, the others wait
        if not path.exists():
            compile_to(path.with_suffix(".tmp"), (architecture,))
            path.with_suffix(".tmp").replace(path)
    return path


def compile_to(path: Path, architectures: tuple[int, ...], *options: str) -> str:
    """Compile the kernels to a library for some architectures; what the compiler said."""
    compiler = nvcc()
    home = compiler.parents[1]
    codes = [option for sm in architectures for option in ("-gencode", f"arch=compute_{sm},code=sm_{sm}")]
    folders = [f"-L{folder}" for folder in (home / "lib", home / "lib64") if folder.exists()]  # wheels have `lib`
    command = [str(compiler), *OPTIONS, *codes, *folders, *options, "-o", str(path), "lora_linear.cu"]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
    said = (done.stderr + done.stdout).strip()
    if done.returncode:
        lines = said.splitlines() or ["it said nothing"]
        why = next((line for line in lines if "error" in line or "fatal" in line), lines[-1])
        raise UserError(f"{compiler} did not compile the kernels in CUDA C++: {why}")
    return said


def nvcc() -> Path:
    """The compiler: CUDA_HOME's, the one on the path, that of a CUDA toolkit, or that of PyPI's wheels."""
    found = [Path(os.environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found += [Path(name) for name in [shutil.which("nvcc")] if name]
    found.append(Path("/usr/local/cuda/bin/nvcc"))
    wheels = importlib.util.find_spec("nvidia")
    for folder in wheels.submodule_search_locations or [] if wheels else []:
        found += sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)
    for path in found:
        if path.is_file():
            return path
    raise UserError(f"the kernels in CUDA C++ need nvcc, of CUDA 12 or later: set CUDA_HOME, or `pip install {WHEELS}`")
