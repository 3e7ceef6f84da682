"""What one process computes, once per code and machine: kept on disk for every file of tests and
every worker.

A reference is kept under the hash of all that it depends on: the code, the run, the libraries, the
CPU and what the environment tells them. So it is never one of other code. It hides no bug that a
test is to find, since only references are kept: the layout under test always runs, and bugs are
planted in its forked ranks, after the reference was asked for. A bug of one process itself (a
planted one too, in test_sensitivity.py) changes the layout's side, as before. `make parity` does
not read these files: its rows are evidence.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tests.distributed import run_ranks
from tests.parity.harness import Cell, Outcome, run_cell, run_config
from tests.parity.together import run_together

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".pytest_cache" / "parity"
LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "triton",
    "flash-linear-attention",
)
VARIABLES = ("OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH", "PYTORCH_", "GOMP_")
"""Beginnings of the environment variables that may choose another way to compute."""
DIGEST_BYTES = 32
NOT_IN_A_CELL = {"benchmark", "report", "drawing", "commands", "cli.py", "launch"}
"""Packages and modules of src/ that no cell imports."""


@cache
def reference(cell: Cell) -> Outcome:
    """The outcome of a cell of one process, from disk if it is there."""
    path = FOLDER / _machine_and_code() / _of_cell(cell)
    outcome = read(path)
    if outcome is None:
        (outcome,) = run_ranks(1, run_cell, cell)
        write(path, outcome)
    return outcome


def compute_together(cells: Iterable[Cell]) -> None:
    """Compute those of the cells that are not on disk in one process, whose start takes as long as
    several of them."""
    folder = FOLDER / _machine_and_code()
    missing = [cell for cell in dict.fromkeys(cells) if read(folder / _of_cell(cell)) is None]
    if missing:
        for cell, (outcome,) in run_together(tuple(missing)).items():
            write(folder / _of_cell(cell), outcome)


def fingerprint() -> str:
    """A hash of everything that a cell's outcome depends on but the library versions."""
    digest = hashlib.sha256()
    for folder in ("src", "tests/parity"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".json") and not NOT_IN_A_CELL & set(file.parts):
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _machine_and_code() -> str:
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    parts = (
        fingerprint(),
        sys.version,
        {name: _version(name) for name in LIBRARIES},
        _cpu(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        sorted(variables.items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _of_cell(cell: Cell) -> str:
    """A file's name, by the run that `run_config` makes of the cell at this moment."""
    cfg = run_config(cell)
    model = (Path(cfg.model.path) / "config.json").read_bytes()
    return hashlib.sha256(repr((cell, cfg)).encode() + model).hexdigest()[:32]


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _cpu() -> tuple[str, ...]:
    """The make of the first CPU and what it can do."""
    told = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        return tuple(line for line in lines if line.partition("\t")[0].strip() in told)
    return (platform.machine(), platform.processor())


def read(path: Path) -> Outcome | None:
    """The outcome that `write` has kept; none where there is none or the file is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, body = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        return None
    return Outcome(**torch.load(io.BytesIO(body), weights_only=True))


def write(path: Path, outcome: Outcome) -> None:
    """Keep an outcome in one step; in a folder that cannot be written, none is kept."""
    buffer = io.BytesIO()
    torch.save(asdict(outcome), buffer)
    body = buffer.getvalue()
    with contextlib.suppress(OSError):
        if not path.parent.exists():
            for other in path.parent.parent.glob("*"):  # of other code
                shutil.rmtree(other, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(hashlib.sha256(body).digest() + body)
        temporary.replace(path)
