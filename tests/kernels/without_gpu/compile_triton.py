"""Compile what Triton's backends launch, for a GPU that need not be here.

    python compile_triton.py 90 [--all]

The functions themselves run, on tensors of the CPU, so that a kernel gets the arguments of a real
run. Where it would be launched, the first configuration that it may be tuned to (or all, and for
more ranks) is compiled to a cubin instead. The program prints a list of rows as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
EVERY = "--all" in sys.argv
launch = JITFunction.run
found: list[tuple[str, dict[str, Any], Any]] = []


class Row(NamedTuple):
    kernel: str
    dtype: str
    what: str
    settings: dict[str, int]
    registers: int
    shared_bytes: int
    spilled_bytes: int


class NoDevice:
    """What Triton asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> None:
        return None


def compile_only(kernel: JITFunction, *args: Any, warmup: bool, **options: Any) -> None:
    del warmup
    settings = {k: v for k, v in options.items() if k.startswith("BLOCK") or k.startswith("num_")}
    found.append((kernel.__name__, settings, launch(kernel, *args, warmup=True, **options)))


def every_configuration(tuner: Autotuner, *args: Any, **options: Any) -> None:
    for config in tuner.configs if EVERY else tuner.configs[:1]:
        tuner.fn.run(*args, **options, **config.all_kwargs())
    tuner.best_config = tuner.configs[0]


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its own that did not fit in them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = (
        int(re.findall(rf"{name}:(\d+)", listing.stdout)[0]) for name in ("REG", "STACK")
    )
    return registers, stack


def lora(dtype: torch.dtype, rank: int, p: float, m: int = 64, k: int = 128, n: int = 256) -> None:
    from shardwise.kernels.dropout import Dropout
    from shardwise.kernels.lora_linear import triton as backend

    s = 2
    x, weight, bias = (torch.zeros(shape, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
    a, b = [torch.zeros(rank, k)] * s, [torch.zeros(n, rank)] * s  # in 32 bits, as adapters are
    drop = (
        Dropout(p, torch.zeros(s, m, dtype=torch.int32), torch.arange(k, dtype=torch.int32))
        if p
        else None
    )
    h = backend.project(x, a, drop, dtype)
    ys = backend.products(x, [weight] * s, [bias] * s, h, b, [2.0, 1.0])
    backend.input_gradient(ys, [weight] * s, h, a, drop)
    backend.output_gradients(ys, b, h, [2.0, 1.0], dtype, True)
    backend.factor_gradient(h, x, drop)


def loss(dtype: torch.dtype, softcap: float | None) -> None:
    from shardwise.kernels.linear_cross_entropy import triton as backend

    bias = None if softcap is None else torch.zeros(4096, dtype=dtype)
    backend.softmax(
        torch.zeros(16, 4096, dtype=dtype),
        bias,
        torch.zeros(16, dtype=torch.int64),
        softcap,
        1.0,
        None,
    )


def main() -> None:
    driver.set_active(NoDevice(int(sys.argv[1])))
    JITFunction.run, Autotuner.run = compile_only, every_configuration
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        adapters = ((16, 0.0), (16, 0.1), (64, 0.0)) if EVERY else ((16, 0.1),)
        cases: list[Any] = [
            (f"rank {rank}, dropout {p}", lora, (dtype, rank, p)) for rank, p in adapters
        ]
        if dtype == torch.float32:  # Triton takes an argument that is 1 for a constant
            cases.append(("one of each", lora, (dtype, 1, 0.1, 1, 1, 1)))
        caps = (None, 30.0) if EVERY else (30.0,)
        for what, function, arguments in [
            *cases,
            *((f"soft cap {cap}", loss, (dtype, cap)) for cap in caps),
        ]:
            found.clear()
            function(*arguments)
            for kernel, settings, compiled in found:
                registers, spilled = resources(compiled.asm["cubin"])
                name = str(dtype).removeprefix("torch.")
                rows.append(
                    Row(kernel, name, what, settings, registers, compiled.metadata.shared, spilled)
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
