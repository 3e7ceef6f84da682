"""Build the kernels with nvcc, once per GPU architecture, and load them.

They are a C library, which no version of torch binds.
"""

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
WHEELS = " ".join(
    (
        "nvidia-cuda-nvcc==13.0.88",
        "nvidia-cuda-crt==13.0.88",
        "nvidia-nvvm==13.0.88",
        "nvidia-cuda-runtime==13.0.96",
    )
)
"""The compiler on PyPI, with the headers and the library that it needs."""


class Matrix(ctypes.Structure):
    """The struct `Matrix` of tiles.cuh."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("aligned", ctypes.c_int),
    ]


class Drop(ctypes.Structure):
    """The struct `Dropout` of dropout.cuh."""

    _fields_ = [
        ("seeds", ctypes.c_void_p),
        ("features", ctypes.c_void_p),
        ("threshold", ctypes.c_int32),
    ]


class Rows(ctypes.Structure):
    """The struct `RowsArguments` of skinny.cuh."""

    _fields_ = [
        ("tall", Matrix),
        ("factor", Matrix),
        ("dropout", Drop),
        ("scale", ctypes.c_float),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
    ]


class Columns(ctypes.Structure):
    """The struct `ColumnsArguments` of skinny.cuh."""

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
    """The struct `Term` of product.cuh."""

    _fields_ = [("left", Matrix), ("right", Matrix)]


MOST_TERMS = 9
"""As in product.cuh: an adapter, and at most 8 linears that share their input."""


class Product(ctypes.Structure):
    """The struct `ProductArguments` of product.cuh."""

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
    """The compiled functions of lora_linear.cu."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.lora_error.restype = ctypes.c_char_p
        sizes = (ctypes.c_int64 * 3)()
        self._library.lora_sizes(sizes)
        assert list(sizes) == [ctypes.sizeof(cls) for cls in (Rows, Columns, Product)]

    def why_not(self, index: int) -> str | None:
        """Return CUDA's message if its kernels cannot run on GPU number `index`, else None."""
        error = self._library.lora_ready(index)
        return self._library.lora_error(error).decode() if error else None

    def launch(
        self, name: str, arguments: ctypes.Structure, tensor: torch.Tensor, variant: bool
    ) -> None:
        """Launch `lora_NAME` on the device of `tensor`, for its dtype, in the current stream.

        `variant` chooses one of its two kernels. A CUDA error raises RuntimeError.
        """
        index, stream = 0, 0
        if tensor.is_cuda:
            index = tensor.get_device()
            stream = torch.cuda.current_stream(tensor.device).cuda_stream
        function = getattr(self._library, f"lora_{name}")
        bfloat16 = int(tensor.dtype == torch.bfloat16)
        place = (index, ctypes.c_void_p(stream))
        error = function(ctypes.byref(arguments), bfloat16, int(variant), *place)
        if error:
            message = self._library.lora_error(error).decode()
            raise RuntimeError(f"CUDA kernel lora_{name}: {message}")


@cache
def library(device: torch.device) -> Library:
    """Return the kernels for a device; build them first if need be.

    Raise UserError without nvcc, for a GPU before sm_80, if the sources do not compile, and if the
    driver is older than the compiler.
    """
    if device.type != "cuda":
        raise UserError(f"the kernels in CUDA C++ need a CUDA device, not {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise UserError(f"the kernels in CUDA C++ need sm_80 or later, not sm_{major}{minor}")
    path = build(10 * major + minor)
    loaded = Library(path)
    index = torch.cuda.current_device() if device.index is None else device.index
    if reason := loaded.why_not(index):
        raise UserError(
            f"the kernels in CUDA C++ were built and cannot run ({reason}); if the driver is too "
            "old (CUDA 13, which PyPI's nvcc is, needs 580 or later), set CUDA_HOME to a toolkit "
            f"of CUDA 12 and delete {path}"
        )
    return loaded


def build(architecture: int) -> Path:
    """Return the path of the library for sm_`architecture`, in the user's cache folder.

    Compile it there if need be, which takes about 20 s.
    """
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.cu*")))
    key = hashlib.sha256(text + repr(OPTIONS).encode()).hexdigest()[:16]
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache_home) / "shardwise"
    path = folder / f"lora_linear-{key}-sm_{architecture}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the kernels in CUDA C++ need a folder to be built in ({error})"
        raise UserError(f"{message}: set XDG_CACHE_HOME") from None
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank of a machine builds, the others wait
        if not path.exists():
            compile_to(path.with_suffix(".tmp"), (architecture,))
            path.with_suffix(".tmp").replace(path)
    return path


def compile_to(path: Path, architectures: tuple[int, ...], *options: str) -> str:
    """Compile the kernels to a library for some architectures; return the compiler's output."""
    compiler = nvcc()
    home = compiler.parents[1]
    codes = []
    for sm in architectures:
        codes += ["-gencode", f"arch=compute_{sm},code=sm_{sm}"]
    # PyPI's wheels have `lib`, a toolkit has `lib64`.
    folders = [f"-L{folder}" for folder in (home / "lib", home / "lib64") if folder.exists()]
    command = [str(compiler), *OPTIONS, *codes, *folders, *options]
    command += ["-o", str(path), "lora_linear.cu"]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
    output = (done.stderr + done.stdout).strip()
    if done.returncode:
        lines = output.splitlines() or ["it printed nothing"]
        reason = next((line for line in lines if "error" in line or "fatal" in line), lines[-1])
        raise UserError(f"{compiler} did not compile the kernels in CUDA C++: {reason}")
    return output


def nvcc() -> Path:
    """Return the compiler: of CUDA_HOME, on the path, of a CUDA toolkit, or of PyPI's wheels.

    Raise UserError if there is none.
    """
    paths = []
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            paths.append(Path(os.environ[name], "bin", "nvcc"))
    if on_path := shutil.which("nvcc"):
        paths.append(Path(on_path))
    paths.append(Path("/usr/local/cuda/bin/nvcc"))
    wheels = importlib.util.find_spec("nvidia")
    if wheels is not None:
        for folder in wheels.submodule_search_locations or []:
            paths += sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)
    for path in paths:
        if path.is_file():
            return path
    message = "the kernels in CUDA C++ need nvcc, of CUDA 12 or later"
    raise UserError(f"{message}: set CUDA_HOME, or `pip install {WHEELS}`")
