"""Times the loss with its head, in a process of its own: `python -m tests.gpu.loss_rows OUT.jsonl
DEVICE`.

Sides: all logits, then torch's cross entropy of them in float32, as transformers computes it;
shardwise's chunked loss with torch's operations and with Triton's kernels; Liger's fused linear
cross entropy where it is installed. Memory is the most that is alive above what was there before,
less the head's gradient where it is trained.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.interfaces import IGNORED
from shardwise.kernels.linear_cross_entropy import linear_cross_entropy
from shardwise.kernels.triton_support import why_not
from shardwise.metrics.memory import PeakMemory
from tests.gpu.measure import Clock
from tests.gpu.shapes import FULL, REHEARSAL, Head

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SIDES = ("eager", "torch", "triton", "liger")
TOLERANCE = {"loss": 1e-4, "gradient": 2.0**-7}
"""Relative to the chunked loss in float32; gradients by their norm, after two roundings to
bfloat16.
"""


def main(out: str, device_type: str) -> None:
    """A line for each row."""
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    sizes = FULL if device_type == "cuda" else REHEARSAL
    torch.backends.cuda.matmul.allow_tf32 = False
    clock = Clock(device, sizes.repeats)
    for head in sizes.heads:
        generator = torch.Generator(device).manual_seed(head.width)
        hidden = torch.randn(
            sizes.tokens, head.width, generator=generator, device=device
        ).bfloat16()
        weight = (
            torch.randn(head.vocabulary, head.width, generator=generator, device=device)
            .mul_(0.02)
            .bfloat16()
        )
        labels = torch.randint(head.vocabulary, (sizes.tokens,), generator=generator, device=device)
        labels[::16] = IGNORED
        hidden.requires_grad_()
        weight.requires_grad_(head.trained)
        exact = reference(hidden, weight, labels)
        for side in SIDES:
            loss, reason = loss_of(side, device)
            row = {"head": vars(head), "tokens": sizes.tokens, "side": side}
            if loss is None:
                row |= {"status": "skipped", "reason": reason}
            else:
                row |= measured(loss, head, hidden, weight, labels, exact, clock)
            with Path(out).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def loss_of(side: str, device: torch.device) -> tuple[Loss | None, str | None]:
    """What a side calls, or why it cannot run here."""
    match side:
        case "eager":
            return eager, None
        case "torch":
            return partial(linear_cross_entropy, kernel="torch"), None
        case "triton":
            reason = why_not(device)
            return (
                (None, reason) if reason else (partial(linear_cross_entropy, kernel="triton"), None)
            )
        case _:
            if find_spec("liger_kernel") is None:
                return None, "liger-kernel is not installed"
            if device.type != "cuda":
                return None, "liger-kernel needs a GPU"
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            liger = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
            return lambda hidden, weight, labels: liger(weight, hidden, labels), None


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As transformers' loss functions compute it."""
    return F.cross_entropy(
        F.linear(hidden, weight).float(), labels, ignore_index=IGNORED, reduction="sum"
    )


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """Loss and gradients in float32 throughout."""
    wide = [
        tensor.detach().float().requires_grad_(tensor.requires_grad) for tensor in (hidden, weight)
    ]
    loss = linear_cross_entropy(*wide, labels, kernel="torch")
    return loss.item(), torch.autograd.grad(
        loss, [tensor for tensor in wide if tensor.requires_grad]
    )


def measured(
    loss: Loss,
    head: Head,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    exact: tuple[float, tuple[torch.Tensor, ...]],
    clock: Clock,
) -> dict[str, Any]:
    """Gate, memory, and time of forward and backward together."""
    inputs = [hidden, weight] if head.trained else [hidden]

    def step(_: Any) -> tuple[torch.Tensor, ...]:
        value = loss(hidden, weight, labels)
        return (value.detach(), *torch.autograd.grad(value, inputs))

    try:
        with PeakMemory(hidden.device) as memory:
            value, *gradients = step(None)
        errors = {
            "loss": abs(value.item() - exact[0]) / exact[0],
            "gradient": max(
                float((g.float() - e).norm() / e.norm())
                for g, e in zip(gradients, exact[1], strict=True)
            ),
        }
        del gradients
        if not all(errors[key] <= TOLERANCE[key] for key in TOLERANCE):
            return {"status": "failed", "reason": f"red gate: errors {errors}", "gate": errors}
        assert memory.peak_bytes is not None
        assert memory.entry_bytes is not None
        peak = memory.peak_bytes - memory.entry_bytes - weight.nbytes * head.trained
        return {
            "status": "ok",
            "reason": "",
            "gate": errors,
            "peak_bytes": peak,
            "seconds": clock.time(step),
        }
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    main(*sys.argv[1:])
