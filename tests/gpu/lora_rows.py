"""Time LoRA linears, in a process of its own: `python -m tests.gpu.lora_rows OUT.json DEVICE`.

Sides: the frozen linear alone; PEFT's eager forward, under autocast with adapters in float32 (as
Trainer runs it) and with adapters in bfloat16; shardwise's with each backend. All except the first
compute the same. A side's outputs and gradients are compared with float64 before it is timed; one
that is wrong is not timed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from tools.paired import Results
from torch import nn
from torch.nn import functional as F

from shardwise.kernels.dropout import Dropout
from shardwise.kernels.lora_linear import Linear, load_backend, lora_linear, naive
from tests.gpu.draw import machine
from tests.gpu.measure import METHOD, Clock, ceilings, floors
from tests.gpu.shapes import ODD, Setting, sizes_of

OURS = ("torch", "triton")
SIDES = ("frozen", "peft", "peft bfloat16", *OURS)
Forward = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def main(out: str, device_type: str) -> None:
    """Write a row for each gate, and one for each setting and side."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    sizes = sizes_of(device_type)
    torch.backends.cuda.matmul.allow_tf32 = False
    clock = Clock(device, sizes.repeats)
    missing = {side: why_not(side, device) for side in SIDES}
    rates = ceilings(clock)
    results = Results(
        Path(out),
        {
            "environment": machine(),
            "method": METHOD[device.type],
            "tokens": sizes.tokens,
            # What `lora.kernel: auto` takes, right or wrong.
            "auto": "torch" if missing["triton"] else "triton",
            "ceilings": rates,
        },
    )
    # Odd sizes first: a side that is wrong there is timed nowhere.
    for setting in ODD:
        problem = Problem(setting, 131, device)
        for side in SIDES:
            if missing[side] is None:
                case = f"gate {setting.k} {side}"
                results.add(case, partial(gate_row, problem, side))
                if results.rows[case]["status"] != "green":
                    missing[side] = f"red gate: {results.rows[case]['reason']}"
    for i, setting in enumerate(sizes.settings):
        problem = Problem(setting, sizes.tokens, device)
        floor = floors(setting, sizes.tokens, rates)
        for side in SIDES:
            row = partial(time_row, problem, side, missing[side], floor, clock)
            results.add(f"setting {i} {side}", row)
    results.write()


def gate_row(problem: Problem, side: str) -> dict[str, Any]:
    """Return whether a side is right at an odd size."""
    row = {"kind": "gate", "setting": vars(problem.setting), "side": side}
    return {**row, **checked(problem, side)}


def time_row(
    problem: Problem, side: str, missing: str | None, floor: dict[str, float], clock: Clock
) -> dict[str, Any]:
    """Return gate and times of a side, or why it cannot run."""
    row = {"kind": "row", "setting": vars(problem.setting), "side": side, "floor": floor}
    if missing is not None:
        return {**row, "status": "skipped", "reason": missing}
    return {**row, **timed(problem, side, clock)}


class Problem:
    """The numbers of a setting: x, weights, adapters, gradients of the outputs; and what float64
    makes of them.
    """

    def __init__(self, setting: Setting, tokens: int, device: torch.device) -> None:
        self.setting, self.device = setting, device
        generator = torch.Generator(device).manual_seed(setting.k + sum(setting.n) + setting.r)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        k, r = setting.k, setting.r
        self.x = randn(1, tokens, k).bfloat16().requires_grad_()
        self.dys = [randn(1, tokens, n).bfloat16() for n in setting.n]
        self.linears = [
            Linear(
                (randn(n, k) / math.sqrt(k)).bfloat16(),
                None,
                (randn(r, k) / math.sqrt(k)).requires_grad_(),
                (randn(n, r) / math.sqrt(r)).requires_grad_(),
                2.0,
            )
            for n in setting.n
        ]
        shape = (len(setting.n), tokens)
        seeds = torch.randint(
            -(2**31), 2**31, shape, generator=generator, device=device, dtype=torch.int32
        )
        self.drop = Dropout(setting.p, seeds) if setting.p else None
        self._exact: list[torch.Tensor] | None = None
        self._control: list[float] = []

    def errors(self, results: list[torch.Tensor]) -> list[float]:
        """Return the errors of outputs and gradients, by norm, relative to float64."""
        if self._exact is None:
            x, linears = self.x.detach().double().requires_grad_(), []
            for weight, _, a, b, scale in self.linears:
                factors = (factor.detach().double().requires_grad_() for factor in (a, b))
                linears.append(Linear(weight.double(), None, *factors, scale))
            self._exact = self._reference(x, linears)
        pairs = zip(results, self._exact, strict=True)
        return [float((result.double() - exact).norm() / exact.norm()) for result, exact in pairs]

    def control(self) -> list[float]:
        """Return the errors of the plain reference under autocast: what bfloat16 alone does."""
        if not self._control:
            with autocast(self.device):
                results = self._reference(self.x, self.linears)
            self._control = self.errors(results)
        return self._control

    def _reference(self, x: torch.Tensor, linears: list[Linear]) -> list[torch.Tensor]:
        ys = naive.lora_linear(x, linears, self.drop)
        inputs = [x, *(factor for linear in linears for factor in (linear.a, linear.b))]
        return outputs_and_gradients(ys, inputs, self.dys)


def outputs_and_gradients(
    ys: tuple[torch.Tensor, ...], inputs: list[torch.Tensor], dys: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs, and the gradients of x and of all factors."""
    gradients = torch.autograd.grad(ys, inputs, [dy.to(y.dtype) for y, dy in zip(ys, dys)])
    return [*(y.detach() for y in ys), *gradients]


def autocast(device: torch.device, side: str = "") -> torch.autocast:
    """Return the autocast of training; PEFT's side with bfloat16 adapters is without."""
    return torch.autocast(device.type, torch.bfloat16, enabled=side != "peft bfloat16")


def why_not(side: str, device: torch.device) -> str | None:
    """Return why a side cannot run here, None if it can."""
    if side not in OURS:
        return None
    try:
        return load_backend(side).missing(device)
    except ImportError as error:
        return str(error)


def forward_of(side: str, problem: Problem) -> tuple[Forward, list[torch.Tensor]]:
    """Return the forward of a side, and the factors that it trains."""
    linears = problem.linears
    factors = [factor for linear in linears for factor in (linear.a, linear.b)]
    if side == "frozen":
        return lambda x: tuple(F.linear(x, linear.weight) for linear in linears), []
    if side.startswith("peft"):
        model = peft_model(problem, torch.float32 if side == "peft" else torch.bfloat16)
        trained = [p for p in model.parameters() if p.requires_grad]
        return lambda x: tuple(module(x) for module in model.values()), trained
    backend = load_backend(side)
    return lambda x: lora_linear(x, linears, problem.drop, backend), factors


def peft_model(problem: Problem, dtype: torch.dtype) -> nn.ModuleDict:
    """Return the same linears and factors in PEFT's layers."""
    setting = problem.setting
    model = nn.ModuleDict()
    for i, linear in enumerate(problem.linears):
        n, k = linear.weight.shape
        model[f"linear{i}"] = nn.Linear(k, n, bias=False, device="meta")
        model[f"linear{i}"].weight = nn.Parameter(linear.weight, requires_grad=False)
    config = LoraConfig(
        r=setting.r,
        lora_alpha=2 * setting.r,
        lora_dropout=setting.p,
        target_modules=list(model.keys()),
    )
    inject_adapter_in_model(config, model)
    for module, linear in zip(model.values(), problem.linears):
        for factors, value in ((module.lora_A, linear.a), (module.lora_B, linear.b)):
            factors["default"].weight = nn.Parameter(value.detach().to(problem.device, dtype))
    return model


def checked(problem: Problem, side: str) -> dict[str, Any]:
    """Check that a side is as close to float64 as bfloat16 allows, and that two runs are equal."""
    if side == "frozen" or (side.startswith("peft") and problem.drop is not None):
        return {"status": "green", "reason": "not ours: torch's own random masks, or none"}
    try:
        forward, factors = forward_of(side, problem)
        twice = []
        for _ in range(2):
            with autocast(problem.device, side):
                ys = forward(problem.x)
            twice.append(outputs_and_gradients(ys, [problem.x, *factors], problem.dys))
    except Exception as error:
        return {"status": "red", "reason": f"{type(error).__name__}: {error}"[:300]}
    errors, control = problem.errors(twice[0]), problem.control()
    off = [i for i, (error, allowed) in enumerate(zip(errors, control)) if not error <= 2 * allowed]
    reason = ""
    if off:
        reason = f"errors of the tensors {off} are over twice the control's"
    elif side in OURS and not all(torch.equal(a, b) for a, b in zip(*twice)):
        reason = "two runs differ"
    status = "red" if reason else "green"
    return {"status": status, "reason": reason, "errors": errors, "control": control}


def timed(problem: Problem, side: str, clock: Clock) -> dict[str, Any]:
    """Return the gate of a side, and the times of its forward and backward if it is green."""
    gate = checked(problem, side)
    if gate["status"] != "green":
        return {"status": "failed", "reason": f"red gate: {gate['reason']}", "gate": gate}
    forward, factors = forward_of(side, problem)

    def run(_: Any) -> tuple[torch.Tensor, ...]:
        with autocast(problem.device, side):
            return forward(problem.x)

    def backward(ys: tuple[torch.Tensor, ...]) -> None:
        torch.autograd.grad(ys, [problem.x, *factors], problem.dys)

    row = {"status": "ok", "reason": "", "gate": gate}
    row["forward"] = clock.time(run)
    row["backward"] = clock.time(backward, prepare=lambda: run(None))
    return row


if __name__ == "__main__":
    main(*sys.argv[1:])
