"""Times LoRA linears, in a process of its own: `python -m tests.gpu.lora_rows OUT.jsonl DEVICE`.

Sides: the frozen linear alone; PEFT's eager forward, under autocast with adapters in float32 (as
Trainer runs it) and with adapters in bfloat16; shardwise's with each backend. All but the first
compute the same. A side's outputs and gradients are compared with float64 before it is timed; one
that is off is not timed.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional as F

from shardwise.kernels.dropout import Dropout
from shardwise.kernels.lora_linear import Linear, lora_linear, naive
from tests.gpu.draw import where
from tests.gpu.measure import METHOD, Clock, ceilings, floors
from tests.gpu.shapes import FULL, REHEARSAL, Setting

OURS = ("torch", "triton", "cuda")
SIDES = ("frozen", "peft", "peft bfloat16", *OURS)
Forward = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def main(out: str, device_type: str) -> None:
    """A line for the device, one for each gate, one for each row."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    sizes = FULL if device_type == "cuda" else REHEARSAL
    torch.backends.cuda.matmul.allow_tf32 = False
    clock = Clock(device, sizes.repeats)

    def say(**line: Any) -> None:
        with Path(out).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    missing = {side: why_not(side, device) for side in SIDES}
    auto = (
        "torch" if missing["triton"] else "triton"
    )  # what `lora.kernel: auto` takes, right or wrong
    say(
        kind="environment",
        environment=where(),
        method=METHOD[device.type],
        tokens=sizes.tokens,
        auto=auto,
    )
    measured = ceilings(clock)
    say(kind="ceilings", **measured)
    # Odd sizes first: a side that is wrong there is timed nowhere.
    for setting in (
        Setting("odd", "", 77, (61,), 5, 0.1),
        Setting("odd", "", 136, (40, 24), 200, 0.0),
    ):
        problem = Problem(setting, 131, device)
        for side in SIDES:
            if missing[side] is None:
                gate = checked(problem, side)
                say(kind="gate", setting=vars(setting), side=side, **gate)
                if gate["status"] != "green":
                    missing[side] = f"red gate: {gate['reason']}"
    for setting in sizes.settings:
        problem = Problem(setting, sizes.tokens, device)
        for side in SIDES:
            row = {
                "setting": vars(setting),
                "side": side,
                "floor": floors(setting, sizes.tokens, measured),
            }
            if missing[side] is not None:
                say(kind="row", **row, status="skipped", reason=missing[side])
            else:
                say(kind="row", **row, **timed(problem, side, clock))


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

    def errors(self, found: list[torch.Tensor]) -> list[float]:
        """Of outputs and gradients, by norm, relative to float64."""
        if self._exact is None:
            x, linears = self.x.detach().double().requires_grad_(), []
            for weight, _, a, b, scale in self.linears:
                factors = (factor.detach().double().requires_grad_() for factor in (a, b))
                linears.append(Linear(weight.double(), None, *factors, scale))
            self._exact = gradients(
                lambda x: naive.lora_linear(x, linears, self.drop), x, linears, self.dys
            )
        return [
            float((f.double() - e).norm() / e.norm())
            for f, e in zip(found, self._exact, strict=True)
        ]

    def control(self) -> list[float]:
        """Errors of the plain reference under autocast: what bfloat16 alone does."""
        if not self._control:
            with autocast(self.device):
                found = gradients(
                    lambda x: naive.lora_linear(x, self.linears, self.drop),
                    self.x,
                    self.linears,
                    self.dys,
                )
            self._control = self.errors(found)
        return self._control


def gradients(
    forward: Forward, x: torch.Tensor, linears: list[Linear], dys: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Outputs, and gradients of x and all factors."""
    ys = forward(x)
    inputs = [x, *(factor for linear in linears for factor in (linear.a, linear.b))]
    found = torch.autograd.grad(ys, inputs, [dy.to(y.dtype) for y, dy in zip(ys, dys)])
    return [y.detach() for y in ys] + list(found)


@contextmanager
def autocast(device: torch.device, enabled: bool = True) -> Iterator[None]:
    """Autocast to bfloat16, as training has it."""
    with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
        yield


def backend_of(side: str) -> Any:
    """The module with the five functions of a side of shardwise's."""
    return importlib.import_module(
        f"shardwise.kernels.lora_linear.{'torch_backend' if side == 'torch' else side}"
    )


def why_not(side: str, device: torch.device) -> str | None:
    """What keeps a side from running here."""
    if side not in OURS:
        return None
    try:
        return backend_of(side).missing(device)
    except ImportError as error:
        return str(error)


def forward_of(side: str, problem: Problem) -> tuple[Forward, list[torch.Tensor]]:
    """What a side calls, and the factors that it trains."""
    linears = problem.linears
    factors = [factor for linear in linears for factor in (linear.a, linear.b)]
    if side == "frozen":
        return lambda x: tuple(F.linear(x, linear.weight) for linear in linears), []
    if side.startswith("peft"):
        model = peft_model(problem, torch.float32 if side == "peft" else torch.bfloat16)
        return lambda x: tuple(module(x) for module in model.values()), [
            p for p in model.parameters() if p.requires_grad
        ]
    backend = backend_of(side)
    return lambda x: lora_linear(x, linears, problem.drop, backend), factors


def peft_model(problem: Problem, dtype: torch.dtype) -> nn.ModuleDict:
    """The same linears and factors in PEFT's layers."""
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
    """Whether a side's outputs and gradients are as close to float64 as bfloat16 allows, and come
    out equal twice.
    """
    if side == "frozen" or (side.startswith("peft") and problem.drop is not None):
        return {"status": "green", "reason": "not ours: torch's own random masks, or none"}
    try:
        forward, factors = forward_of(side, problem)
        twice = []
        for _ in range(2):
            with autocast(problem.device, side != "peft bfloat16"):
                ys = forward(problem.x)
            found = torch.autograd.grad(ys, [problem.x, *factors], problem.dys)
            twice.append([y.detach() for y in ys] + list(found))
    except Exception as error:
        return {"status": "red", "reason": f"{type(error).__name__}: {error}"[:300]}
    errors = problem.errors(twice[0])
    control = problem.control()
    gate: dict[str, Any] = {"errors": errors, "control": control}
    off = [i for i, (error, allowed) in enumerate(zip(errors, control)) if not error <= 2 * allowed]
    if off:
        return {
            "status": "red",
            "reason": f"errors of the tensors {off} are over twice the control's",
            **gate,
        }
    if not side.startswith("peft") and not all(torch.equal(a, b) for a, b in zip(*twice)):
        return {"status": "red", "reason": "two runs differ", **gate}
    return {"status": "green", "reason": "", **gate}


def timed(problem: Problem, side: str, clock: Clock) -> dict[str, Any]:
    """Gate, forward and backward of one side."""
    gate = checked(problem, side)
    if gate["status"] != "green":
        return {"status": "failed", "reason": f"red gate: {gate['reason']}", "gate": gate}
    forward, factors = forward_of(side, problem)

    def run(_: Any) -> tuple[torch.Tensor, ...]:
        with autocast(problem.device, side != "peft bfloat16"):
            return forward(problem.x)

    def backward(ys: tuple[torch.Tensor, ...]) -> None:
        torch.autograd.grad(ys, [problem.x, *factors], problem.dys)

    times = {
        "forward": clock.time(run),
        "backward": clock.time(backward, prepare=lambda: run(None)),
    }
    return {"status": "ok", "reason": "", "gate": gate, **times}


if __name__ == "__main__":
    main(*sys.argv[1:])
