"""How experts are multiplied: all in one grouped product, or one expert after the other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from shardwise.config import RunConfig
from shardwise.models import tensor_plan
from shardwise.models.families import Family
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.spec import ModelSpec

if TYPE_CHECKING:
    from shardwise.models.causal_lm import CausalLM

ROW_BYTES = 16
"""What torch's grouped product wants the rows of its operands to be a multiple of."""
GROUPED, ONE_BY_ONE = "grouped_mm", "eager"
"""transformers' names of the two."""


def apply(part: CausalLM, cfg: RunConfig, device: torch.device) -> None:
    """Let the experts of a part run one by one where torch's grouped product cannot take them.

    What counts is a rank's share of them. transformers' own loop computes the same.
    """
    if why_one_by_one(part.hf, part.spec, part.family, cfg.parallel.tp):
        part.hf.set_experts_implementation(ONE_BY_ONE)


def why_one_by_one(
    hf: PreTrainedModel, spec: ModelSpec, family: Family, num_ranks: int
) -> str | None:
    """Return why the grouped product cannot take a rank's experts with `num_ranks` ranks of `tp`.

    Returns None if it can.
    """
    stack = _odd_stack(hf, spec, family, num_ranks)
    if stack is None or hf.config._experts_implementation != GROUPED:
        return None
    name, shape, multiple = stack
    return (
        f"{name} is {shape} on a rank, and torch's grouped product takes rows of multiples of "
        f"{ROW_BYTES} bytes: widths that are multiples of {multiple}"
    )


def _odd_stack(
    hf: PreTrainedModel, spec: ModelSpec, family: Family, num_ranks: int
) -> tuple[str, list[int], int] | None:
    """Return (name, a rank's shape, multiple) of the first stack whose rows have the wrong size.

    The widths of the whole stack must be multiples of `multiple`.
    """
    cuts = tensor_plan.cuts_of(hf, spec, num_ranks) if num_ranks > 1 else {}
    ends = tuple(f".{name}" for name in family.experts)
    for name, parameter in hf.named_parameters():
        if is_adapter(name) or not ends or not hf_name(name).endswith(ends):
            continue
        shape = list(parameter.shape)
        if name in cuts:
            shape[cuts[name].dim] = cuts[name].rows.local_size
        multiple = ROW_BYTES // parameter.element_size()
        if any(size % multiple for size in shape[1:]):
            return re.sub(r"\.\d+\.", ".*.", hf_name(name), count=1), shape, multiple * num_ranks
    return None
