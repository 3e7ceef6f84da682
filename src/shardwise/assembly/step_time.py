"""The least time of a step: one that cannot end in time is refused before weights are loaded."""

import torch

from shardwise.base.words import duration
from shardwise.config import RunConfig, require
from shardwise.metrics.flops import model_flops_per_token
from shardwise.metrics.hardware import PeakFlops, peak_flops
from shardwise.models.counts import ModelCounts
from shardwise.parallel.reduce import from_every_rank

MARGIN = 4.0
"""How much faster than its peak a device may seem: a busy machine measures too low a peak, and
products in 8 bits are faster than the dtype's."""
SLOW = {"cpu": 1e10, "cuda": 1e13}
"""The FLOP/s that a device always has: no peak is measured for a step that needs no more."""


def check_step_time(
    cfg: RunConfig, counts: ModelCounts, num_ranks: int, device: torch.device
) -> None:
    """Raise UserError where no step can end within `launch.timeout_seconds`, on every rank alike.

    A step takes at least the model's FLOPs at the peak of all devices. Where documents are kept
    apart, what attention needs depends on where they end, and is left out.
    """
    rows, length = cfg.training.global_batch_size, cfg.data.sequence_length
    reach = 1 if cfg.data.keeps_documents_apart else length
    flops = model_flops_per_token(counts, reach) * rows * length
    most = cfg.launch.timeout_seconds
    if flops / num_ranks <= most * SLOW[device.type]:
        return
    # A number from every rank to all, which may measure different ones.
    rate = sum(from_every_rank(peak_of(cfg, device).flops_per_second))
    least = flops / (MARGIN * rate)
    require(
        least <= most,
        f"a step of {rows:,} rows of {length:,} tokens has {flops:.2g} FLOPs, which take more than "
        f"{duration(least)} here, and launch.timeout_seconds ends it after {duration(most)}; lower "
        "data.sequence_length or training.global_batch_size, or raise launch.timeout_seconds",
    )


def peak_of(cfg: RunConfig, device: torch.device) -> PeakFlops:
    """Return the peak of a device in the dtype of the run's products."""
    in_16_bits = cfg.training.precision != "float32" or cfg.model.dtype != "float32"
    return peak_flops(device, torch.bfloat16 if in_16_bits else torch.float32)
