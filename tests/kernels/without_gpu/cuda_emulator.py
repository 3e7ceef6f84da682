"""The CUDA kernels as a library for this CPU, see cuda_on_cpu.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise.kernels.lora_linear.cuda.library import SOURCES, Library

HERE = Path(__file__).parent


class Emulated(Library):
    """The kernels' library, run by fibers; another seed runs them in another order."""

    def seed(self, seed: int) -> None:
        self._library.emulator_seed(ctypes.c_uint64(seed))

    def bank_conflicts(self) -> int:
        """Of ldmatrix, since the library was loaded."""
        self._library.emulator_bank_conflicts.restype = ctypes.c_long
        return self._library.emulator_bank_conflicts()


def emulated(folder: Path, change: Callable[[str], str] = lambda source: source) -> Emulated:
    """Compile the sources, each changed by `change`, with g++."""
    for path in SOURCES.glob("*.cu*"):
        (folder / path.name).write_text(change(path.read_text()))
    compiler = shutil.which("g++")
    assert compiler, "the tests of the CUDA kernels need g++"
    command = [
        compiler,
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-Werror",
        "-fPIC",
        "-shared",
        "-x",
        "c++",
    ]
    subprocess.run(
        [*command, f"-I{HERE}", "-o", "kernels.so", "lora_linear.cu"], cwd=folder, check=True
    )
    return Emulated(folder / "kernels.so")


def stand_in(monkeypatch, library: Emulated) -> None:
    """Launch on the CPU, as if on a GPU of 6 processors."""
    from shardwise.kernels.lora_linear import cuda

    monkeypatch.setattr(cuda.launch, "library", lambda device: library)
    monkeypatch.setattr(cuda.launch, "_processors", lambda device: 6)
    monkeypatch.setattr(cuda.launch, "_most_row_tiles", lambda device: 2)
    assert not torch.cuda.is_available()
