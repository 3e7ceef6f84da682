"""Time the loss with its head, in a process: `python -m tests.gpu.loss_rows OUT.json DEVICE`.

Sides: all logits, then torch's cross entropy of them in float32, as transformers computes it;
shardwise's chunked loss with torch's operators and with Triton's kernels; Liger's fused linear
cross entropy where it is installed. Memory is the most that is alive above what was there before,
less the head's gradient where it is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tools.paired import Results
from torch.nn import functional as F

from shardwise.base.batches import IGNORED
from shardwise.kernels.linear_cross_entropy import linear_cross_entropy
from shardwise.kernels.triton_support import why_not
from shardwise.metrics.memory import PeakMemory, free_cache
from tests.gpu.measure import Clock
from tests.gpu.shapes import Head, sizes_of

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SIDES = ("eager", "torch", "triton", "liger")
TOLERANCE = {"loss": 1e-4, "gradient": 2.0**-7}
"""Relative to the chunked loss in float32; gradients by norm, after two roundings to bfloat16."""


def main(out: str, device_type: str) -> None:
    """Write a row for each head and side."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    sizes = sizes_of(device_type)
    torch.backends.cuda.matmul.allow_tf32 = False
    clock = Clock(device, sizes.repeats)
    results = Results(Path(out), {"tokens": sizes.tokens})
    for i, head in enumerate(sizes.heads):
        problem = Problem(head, sizes.tokens, device)
        for side in SIDES:
            results.add(f"head {i} {side}", partial(row_of, problem, side, clock))
            free_cache(device)
    results.write()


class Problem:
    """The tensors of a head in bfloat16, and their loss and gradients in float32 throughout."""

    def __init__(self, head: Head, tokens: int, device: torch.device) -> None:
        self.head = head
        generator = torch.Generator(device).manual_seed(head.width)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.hidden = randn(tokens, head.width).bfloat16().requires_grad_()
        weight = randn(head.vocabulary, head.width).mul_(0.02)
        self.weight = weight.bfloat16().requires_grad_(head.trained)
        self.labels = torch.randint(head.vocabulary, (tokens,), generator=generator, device=device)
        self.labels[::16] = IGNORED
        self.trained = [self.hidden, self.weight] if head.trained else [self.hidden]
        wide = [self.hidden.detach().float().requires_grad_()]
        wide.append(self.weight.detach().float().requires_grad_(head.trained))
        loss = linear_cross_entropy(*wide, self.labels, kernel="torch")
        self.loss = loss.item()
        self.gradients = torch.autograd.grad(loss, wide[: len(self.trained)])


def row_of(problem: Problem, side: str, clock: Clock) -> dict[str, Any]:
    """Return gate, memory and time of a side, or why it cannot run."""
    row = {"head": vars(problem.head), "side": side}
    loss, reason = loss_of(side, problem.hidden.device)
    if loss is None:
        return {**row, "status": "skipped", "reason": reason}
    return {**row, **measured(loss, problem, clock)}


def loss_of(side: str, device: torch.device) -> tuple[Loss | None, str | None]:
    """Return the loss of a side, or why it cannot run here."""
    match side:
        case "eager":
            return eager, None
        case "torch":
            return partial(linear_cross_entropy, kernel="torch"), None
        case "triton":
            if reason := why_not(device):
                return None, reason
            return partial(linear_cross_entropy, kernel="triton"), None
        case _:
            if find_spec("liger_kernel") is None:
                return None, "liger-kernel is not installed"
            if device.type != "cuda":
                return None, "liger-kernel needs a GPU"
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            liger = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
            return lambda hidden, weight, labels: liger(weight, hidden, labels), None


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss as transformers' loss functions compute it."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def measured(loss: Loss, problem: Problem, clock: Clock) -> dict[str, Any]:
    """Return gate, memory, and time of forward and backward together."""

    def step(_: Any) -> tuple[torch.Tensor, ...]:
        value = loss(problem.hidden, problem.weight, problem.labels)
        return (value.detach(), *torch.autograd.grad(value, problem.trained))

    try:
        with PeakMemory(problem.hidden.device) as memory:
            value, *gradients = step(None)
        pairs = zip(gradients, problem.gradients, strict=True)
        errors = {
            "loss": abs(value.item() - problem.loss) / problem.loss,
            "gradient": max(float((g.float() - e).norm() / e.norm()) for g, e in pairs),
        }
        del gradients
        if not all(errors[key] <= TOLERANCE[key] for key in TOLERANCE):
            return {"status": "failed", "reason": f"red gate: errors {errors}", "gate": errors}
        head_bytes = problem.weight.nbytes if problem.head.trained else 0
        row = {"status": "ok", "reason": "", "gate": errors}
        return {**row, "peak_bytes": memory.added_bytes() - head_bytes, "seconds": clock.time(step)}
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    main(*sys.argv[1:])
