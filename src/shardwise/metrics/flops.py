"""FLOPs per token of a training step: of the model (for MFU) and of the hardware (for HFU).

Both are sums over what `models/counts.py` reads off the model. Convention, recorded with every figure: CONVENTION.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.models.counts import ModelCounts, Unit, Weight

CONVENTION = (
    "A multiply-add is 2 FLOPs; products only, lookups 0. Per weight and token: 2 forward, 2 if its input needs a "
    "gradient, 2 if it is trainable (experts by top_k / E). MFU: causal attention N(K+V)(T+1), delta rules 7NKV, "
    "generated convolutions 2WC, Mamba's scans 5NPS forward, twice that backward. HFU: what transformers' torch code "
    "runs: fused causal attention with scores computed again in the backward, chunked and padded recurrences, "
    "recomputed layers."
)


def model_flops_per_token(counts: ModelCounts, sequence_length: int) -> float:
    """FLOPs per token that one training step of this model takes at least, forward and backward.

    A linear y = W x of n elements costs 2n in the forward, 2n for dx = W^T dy and 2n for dW = dy x^T. The last is
    left out where W is frozen and the one before where nothing at or below x is trainable. So: 6n trained in full, 4n
    frozen, 2n below the lowest trainable weight, 4n for that weight itself, 6n for the factors of LoRA. A core's
    operands are activations, so its backward is two products per forward product, 3 times the forward, frozen or not,
    and none below the lowest trainable weight. The head counts on every position, with a target or without.

    Within the unit of the lowest trainable weight a gradient is counted wherever something at an earlier stage of
    the unit is trainable (`LayerSpec.stage_of`). There parallel branches share stages and a core has one backward
    for all of its inputs: an adapter on one branch only is counted up to a few products of one layer too high.
    """
    total = 0.0
    for unit in counts.units:
        total += sum(_passes(weight) * weight.active * weight.numel for weight in unit.weights)
        if unit.core is not None:
            total += unit.core.model_forward(sequence_length) * (3 if unit.core_gradient else 1)
    return total


def hardware_flops_per_token(
    counts: ModelCounts,
    sequence_length: int,
    micro_batch_size: int,
    checkpointing: Literal["none", "full", "operators"] | list[str],
) -> float:
    """FLOPs per token that the same step runs on one process, with recomputation.

    Against the model's FLOPs:

    - cores as executed (`Kind.core` in models/kinds);
    - `checkpointing: full` runs every layer's forward once more, a list of kinds those layers', less its last product
      where nothing after that is saved (`Kind.ends`). A layer with nothing trainable at or below it saves
      nothing for a backward, so its checkpoint is never opened and it runs once. Embedding and head are not
      checkpointed. `operators` runs only B of each adapter, and PEFT's folding, again;
    - PEFT adapts a stack of experts (or a router) by folding: in each forward it adds B A, of 2 r n FLOPs for a
      stack of n elements, to the whole stack, and torch's parametrization evaluates that once more to check its shape;
      the backward has two such products. They are spread over the micro-batch's tokens. The gradients of A and B come
      through that of the stack, 2 n per token and active share, and the low-rank products themselves, which the
      model's FLOPs count, are not run.

    The head counts on positions without a target too, which the chunked loss skips: how many there are is the data's
    affair, and not known here.

    Left out: the K - 1 columns of padding that a convolution computes and drops; under `operators`, what a core
    computes elementwise (`Kind.core`), which is run again.
    """
    units = (unit_flops_per_token(unit, sequence_length, micro_batch_size, checkpointing) for unit in counts.units)
    return sum(unit.total for unit in units)


@dataclass(frozen=True)
class UnitFlops:
    """What the hardware runs for one unit, in FLOPs per token, by the pass it runs them in."""

    forward: float
    input_gradient: float  # of the unit's input, and of whatever lies between; a core's whole backward
    weight_gradient: float
    again: float  # the forward that a checkpoint runs in the backward

    @property
    def total(self) -> float:
        """All of them."""
        return self.forward + self.input_gradient + self.weight_gradient + self.again


def unit_flops_per_token(
    unit: Unit,
    sequence_length: int,
    micro_batch_size: int,
    checkpointing: Literal["none", "full", "operators"] | list[str],
) -> UnitFlops:
    """What `hardware_flops_per_token` adds up."""
    layer = unit.backward and unit.kind not in ("embed", "head")
    again = layer and (unit.kind in checkpointing if isinstance(checkpointing, list) else checkpointing == "full")
    low_rank_again = again or (layer and checkpointing == "operators")
    passes = [_executed(weight, again, low_rank_again, sequence_length * micro_batch_size) for weight in unit.weights]
    passes.append(_executed_core(unit, again, sequence_length))
    return UnitFlops(*(sum(each) for each in zip(*passes, strict=True)))


def utilization(
    flops_per_token: float, tokens_per_second: float, peak_flops_per_second: float, num_devices: int
) -> float:
    """Share of the peak of all devices together that was used: MFU from model FLOPs, HFU from hardware FLOPs.

    `tokens_per_second` is global; `peak_flops_per_second` is one device's.
    """
    return flops_per_token * tokens_per_second / (peak_flops_per_second * num_devices)


def _passes(weight: Weight) -> int:
    return 2 + 2 * weight.input_gradient + 2 * weight.trainable


_Passes = tuple[float, float, float, float]  # the fields of UnitFlops


def _executed(weight: Weight, again: bool, low_rank_again: bool, tokens: int) -> _Passes:
    if weight.folded:
        return 0.0, 0.0, 0.0, 0.0
    weight_gradient = weight.trainable or weight.fold_rank > 0
    rerun = weight.rerun and (low_rank_again if ".lora_B." in weight.name else again)
    product = 2 * weight.active * weight.numel
    fold = 4 * weight.fold_rank * weight.numel / tokens  # evaluated twice; two products in its backward
    return (
        product + fold,
        product * weight.input_gradient,
        product * weight_gradient + fold,
        product * rerun + fold * (weight.rerun and low_rank_again),
    )


def _executed_core(unit: Unit, again: bool, sequence_length: int) -> _Passes:
    if unit.core is None:
        return 0.0, 0.0, 0.0, 0.0
    forward = unit.core.executed_forward(sequence_length)
    return (
        forward,
        unit.core.executed_backward(sequence_length) if unit.core_gradient else 0.0,
        0.0,
        forward if again else 0.0,
    )
