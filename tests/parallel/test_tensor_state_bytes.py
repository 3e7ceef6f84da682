"""Bytes that each rank holds under tensor parallelism, against a closed formula: 0 bytes off."""

from __future__ import annotations

import re
from math import prod

import pytest

from tests.distributed import run_ranks
from tests.parallel.test_state_bytes import Measured, measure, share, tell
from tests.parity.harness import Cell

CUTS = {
    r"embed_tokens|lm_head": 0,
    r"(q_proj|k_proj|v_proj|gate_proj|up_proj|in_proj_\w+)\.(base_layer\.)?weight": 0,
    r"(o_proj|out_proj|down_proj)\.(base_layer\.)?weight": 1,
    r"linear_attn\.(conv1d\.weight|A_log|dt_bias)": 0,
    r"layernorm|model\.norm|_norm|linear_attn\.norm": None,
}
"""For qwen3_5_text, by pattern of a parameter's name: the dim that is sharded; None: no dim."""


def tensor_dim(name: str) -> int | None:
    """The dim of a parameter that tensor parallelism cuts: of an adapter B's out or A's in, as its
    base is cut."""
    if ".lora_" in name:
        goes_in = re.search(r"\.(o_proj|out_proj|down_proj)\.", name) is not None
        return (1 if goes_in else None) if ".lora_A." in name else (None if goes_in else 0)
    (dim,) = (dim for pattern, dim in CUTS.items() if re.search(pattern, name))
    return dim


def by_tensor(
    measured: Measured, tp: int, tp_rank: int, num_shards: int, rank: int
) -> dict[str, int]:
    """Weights: a share of the dim that is cut, ceil(rows / tp) rows or what is left for the last
    rank; of that, fsdp2's share of another dim that divides evenly, if there is one. Gradients and
    AdamW as in `by_dim`."""
    result = {"weights": 0, "gradients": 0, "optimizer": 0}
    for name, (shape, size, trainable) in measured.shapes.items():
        own, dim = list(shape), tensor_dim(name)
        if dim is not None:
            rows = -(-shape[dim] // tp)
            own[dim] = min(rows, shape[dim] - tp_rank * rows)
        padded = held = prod(own)
        if dim is None:
            padded, held = share(shape, num_shards, rank)
        elif any(length % num_shards == 0 for place, length in enumerate(shape) if place != dim):
            padded = held = prod(own) // num_shards
        result["weights"] += padded * size
        if trainable:
            result["gradients"] += padded * size
            result["optimizer"] += 2 * held * size + 4
    return result


CELLS = [
    *(
        Cell("qwen3_5_text", layout, mode, 2)
        for layout, mode in (("tp", "lora"), ("tp", "full"), ("tp-sp", "lora"))
    ),
    *(Cell("qwen3_5_text", "fsdp2-tp", mode, 4) for mode in ("lora", "full")),
    Cell("qwen3_5_text", "pp-tp", "full", 4, schedule="1f1b"),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_state_bytes_equal_the_formula(cell, capsys):
    num_shards = cell.nproc // cell.pp // cell.tp
    for rank, one in enumerate(run_ranks(cell.nproc, measure, cell)):
        found = by_tensor(one, cell.tp, rank % cell.tp, num_shards, rank // cell.tp % num_shards)
        assert one.state == found, f"rank {rank}"
        with capsys.disabled():
            tell(f"{cell.id} rank {rank}", one.state)
