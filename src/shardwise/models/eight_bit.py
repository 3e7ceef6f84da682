"""Which parameters 8-bit AdamW keeps moments in 8 bits of, and where a cut would go through one."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from shardwise.base.layouts import shard_dim
from shardwise.kernels import eight_bit
from shardwise.models import expert_plan, tensor_plan
from shardwise.models.names import is_factor_b
from shardwise.models.spec import ModelSpec
from shardwise.models.tensor_cuts import Indivisible


def names_in_8_bits(hf: nn.Module) -> frozenset[str]:
    """Return the names of the parameters whose moments have 8 bits, by the shapes of full ones.

    LoRA's factors B are not among them: their rows are as short as the rank, and `ep` cuts those
    of a stack's factor between experts.
    """
    return frozenset(
        name
        for name, parameter in hf.named_parameters()
        if eight_bit.is_in_8_bits(parameter.shape) and not is_factor_b(name)
    )


def chunk_numel(shape: Sequence[int]) -> int:
    """Return the most elements of a tensor of this shape that a step computes at a time."""
    return eight_bit.chunk_rows(shape) * math.prod(shape[1:])


def facts_of(hf: nn.Module, spec: ModelSpec) -> dict[str, Any]:
    """Return what `ModelFacts` has of 8-bit AdamW, by its fields."""
    names = names_in_8_bits(hf)

    def cut_blocks(tp: int, ep: int, num_shards: int) -> str | None:
        block = eight_bit.BLOCK
        try:
            for name, columns in _columns(hf, spec, tp, ep, num_shards):
                if columns % block:
                    part = f"{columns} columns on a rank, which are no whole blocks of {block}"
                    return f"{name} has {part}"
        except Indivisible:  # which is refused for itself
            return None
        return None

    number = sum(p.requires_grad for name, p in hf.named_parameters() if name in names)
    return {"num_in_8_bits": number, "cut_blocks": cut_blocks}


def _columns(
    hf: nn.Module, spec: ModelSpec, tp: int, ep: int, num_shards: int
) -> Iterator[tuple[str, int]]:
    """Yield (name, consecutive columns on a rank) of what has moments in 8 bits and is trained."""
    over_tp = tensor_plan.cuts_of(hf, spec, tp) if tp > 1 else {}
    over_ep = expert_plan.cuts_of(hf, spec, ep) if ep > 1 else {}
    ends = tuple(f"{path}." for path in (spec.embed, spec.head) if tp > 1)
    names = names_in_8_bits(hf)
    for name, parameter in hf.named_parameters():
        if name not in names or not parameter.requires_grad:
            continue
        shape, last = [*parameter.shape], parameter.dim() - 1
        taken = {0} if name.startswith(ends) else set()
        for cuts in (over_ep, over_tp):
            if name in cuts:
                cut = cuts[name]
                taken.add(cut.dim)
                shape[cut.dim] = cut.rows.local_size
                if cut.dim == last:
                    yield from ((name, segment.length) for segment in cut.rows.segments)
        parts = max(1, num_shards // ep) if name in over_ep else num_shards
        if shard_dim(shape, parts, taken) == last:
            yield name, shape[last] // parts
