"""FLOPs per token of a training step: of the model (for MFU) and of the hardware (for HFU).

Both are sums over what `models/counts.py` finds in the model. CONVENTION says what is counted; the
record keeps it beside every figure.
"""

from dataclasses import dataclass

from shardwise.config import Checkpointing, Way, way_of
from shardwise.models.counts import ModelCounts, ProductWeight, Unit

CONVENTION = (
    "A multiply-add is 2 FLOPs; products only, lookups 0. Per weight and token: 2 forward, 2 if "
    "its input needs a gradient, 2 if it is trainable (experts by top_k / E). MFU: causal "
    "attention N(K+V)(T+1), delta rules 7NKV, generated convolutions 2WC, Mamba's scans 5NPS "
    "forward, twice that backward. HFU: what transformers' torch code runs: fused causal "
    "attention with scores computed again in the backward, chunked and padded recurrences, "
    "recomputed layers."
)


def model_flops_per_token(counts: ModelCounts, sequence_length: int) -> float:
    """Return the FLOPs per token that a training step of this model needs, forward and backward.

    A linear y = W x with n elements in W costs 2n in the forward, 2n for dx = W^T dy, and 2n for
    dW = dy x^T. dW is not needed where W is frozen, and dx where nothing at or below x is
    trainable. So a weight costs 6n trained in full, 4n frozen, 2n below the lowest trainable
    weight, 4n as that weight itself, and 6n as a factor of LoRA.

    The operands of a core are activations. So its backward has two products for each product of the
    forward, whether weights are frozen or not, and the core costs 3 times its forward; below the
    lowest trainable weight it has no backward. The head counts at every position, with a target or
    without.

    In the unit of the lowest trainable weight, a gradient counts where the walk of the layer
    (models/walk.py) needs it. A core has one backward for all of its inputs.
    """
    total = 0.0
    for unit in counts.units:
        total += sum(_passes(weight) * weight.active * weight.numel for weight in unit.weights)
        for core in unit.cores:
            total += core.model_forward(sequence_length) * (3 if unit.core_gradient else 1)
    return total


def hardware_flops_per_token(
    counts: ModelCounts, sequence_length: int, checkpointing: Checkpointing
) -> float:
    """Return the FLOPs per token that the same step runs on one process, with recomputation.

    They differ from the model's FLOPs in these points:

    - Cores count as they run, by their nodes in the walk of a layer (models/walk.py).
    - `checkpointing: full` runs the forward of every layer again, and a list of kinds that of these
      layers. The last product does not run again where nothing after it is saved
      (models/walk.py). A layer with nothing trainable at or below it saves nothing for a
      backward, so it runs once. Embedding and head are not checkpointed. `operators` runs only B
      of each linear's adapter again.
    - The backward of adapters on a stack of experts multiplies by A again.

    The head counts at positions without a target too. The chunked loss skips these, but their
    number depends on the data and is not known here.

    Not counted are the K - 1 columns of padding that a convolution computes and drops, and, under
    `operators`, the elementwise part of a core, which runs again.
    """
    total = 0.0
    for unit in counts.units:
        flops = unit_flops_per_token(unit, sequence_length, checkpointing)
        total += flops.total
    return total


@dataclass(frozen=True)
class UnitFlops:
    """The FLOPs per token that the hardware runs for one unit, by pass."""

    forward: float = 0.0
    input_gradient: float = 0.0
    """Gradients of the unit's input and of activations inside; the whole backward of a core."""
    weight_gradient: float = 0.0
    recomputed: float = 0.0
    """The forward that a checkpoint runs again in the backward."""

    def __add__(self, other: "UnitFlops") -> "UnitFlops":
        return UnitFlops(
            self.forward + other.forward,
            self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient,
            self.recomputed + other.recomputed,
        )

    @property
    def total(self) -> float:
        """The FLOPs of all passes."""
        return self.forward + self.input_gradient + self.weight_gradient + self.recomputed


def rerun_of(unit: Unit, checkpointing: Checkpointing) -> Way:
    """Return what the backward runs again of a unit; embedding, head and what has no backward run
    once.
    """
    if not unit.backward or unit.layer is None:
        return "none"
    return way_of(checkpointing, unit.layer, unit.kind)


def unit_flops_per_token(
    unit: Unit, sequence_length: int, checkpointing: Checkpointing
) -> UnitFlops:
    """Return the part of one unit in `hardware_flops_per_token`."""
    way = rerun_of(unit, checkpointing)
    passes = [_executed(weight, way) for weight in unit.weights]
    for core in unit.core_flops:
        forward, backward = core.per_token(sequence_length)
        recomputed = forward * (way == "full")
        passes.append(UnitFlops(forward, backward * unit.core_gradient, recomputed=recomputed))
    return sum(passes, start=UnitFlops())


def utilization(
    flops_per_token: float, tokens_per_second: float, peak_flops_per_second: float, num_devices: int
) -> float:
    """Return the used share of the peak of all devices together.

    It is MFU for model FLOPs and HFU for hardware FLOPs. `tokens_per_second` is global;
    `peak_flops_per_second` is that of one device.
    """
    return flops_per_token * tokens_per_second / (peak_flops_per_second * num_devices)


def _passes(weight: ProductWeight) -> int:
    """Return the FLOPs of a weight per element and token."""
    return 2 + 2 * weight.input_gradient + 2 * weight.trainable


def is_rerun(weight: ProductWeight, way: Way) -> bool:
    """Return whether a backward runs the product of a weight again that has such recomputation."""
    is_never_kept = weight.by_elements or (".lora_B." in weight.name and not weight.on_stack)
    return weight.rerun and (way != "none" if is_never_kept else way == "full")


def is_again(weight: ProductWeight) -> bool:
    """Return whether a backward multiplies by a weight again, with recomputation or without."""
    return weight.on_stack and ".lora_A." in weight.name


def _executed(weight: ProductWeight, way: Way) -> UnitFlops:
    """Return the FLOPs per token of a weight of a layer with such recomputation."""
    product = 2 * weight.active * weight.numel
    return UnitFlops(
        forward=product,
        input_gradient=product * weight.input_gradient,
        weight_gradient=product * weight.trainable,
        recomputed=product * (is_rerun(weight, way) + is_again(weight)),
    )
