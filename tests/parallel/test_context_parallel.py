"""What context parallelism gets wrong if a part is missing; tests/parity has what is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise.models.kinds import KINDS
from shardwise.parallel import context_attention, context_parallel
from shardwise.parallel.neighbours import ContextNeighbours
from tests.distributed import run_ranks
from tests.parity.harness import Cell, compare, run_cell, verdict
from tests.parity.public_defects import red_of
from tests.parity.references import reference

HYBRID = Cell("qwen3_5_text", "cp", "full", 4, "isolated")
PAIRS = Cell("llama", "cp", "lora", 4, "isolated-ring")
MIXTURE = Cell("qwen3_moe", "cp", "full", 2)
Patch = pytest.MonkeyPatch


def _positions_from_0(patch: Patch) -> None:
    tokens_of = context_parallel.tokens_of

    def from_0(*args):
        batch = tokens_of(*args)
        places = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
        return replace(batch, positions=places)

    patch.setattr(context_parallel, "tokens_of", from_0)


def _gradients_not_added_up(patch: Patch) -> None:
    patch.setattr(context_parallel, "sum_over_copies", lambda *args: None)


def _no_state_of_other_ranks(patch: Patch) -> None:
    patch.setattr(
        ContextNeighbours,
        "state_before",
        lambda self, core, summary: torch.zeros_like(summary.after),
    )


def _no_gradient_of_later_ranks(patch: Patch) -> None:
    patch.setattr(
        ContextNeighbours,
        "grad_state_after",
        lambda self, core, transition, of: torch.zeros_like(of),
    )


def _state_across_a_border(patch: Patch) -> None:
    patch.setattr(ContextNeighbours, "_into", lambda self, x: x)


def _attention_across_a_border(patch: Patch) -> None:
    patch.setattr(ContextNeighbours, "documents", None)


def _places_of_a_stretch(patch: Patch) -> None:
    """Attention takes the chunks of a rank for one stretch of the row."""
    ranges_of = context_attention.ranges_of

    def in_a_row(chunks: tuple[int, ...], length: int) -> tuple[range, ...]:
        return ranges_of(tuple(chunks[0] + i for i in range(len(chunks))), length)

    patch.setattr(context_attention, "ranges_of", in_a_row)


def _router_shares_of_one_rank(patch: Patch) -> None:
    patch.setattr(ContextNeighbours, "total", lambda self, x: x)


@pytest.mark.parametrize(
    ("plant", "cell"),
    [
        (_positions_from_0, PAIRS),
        pytest.param(_gradients_not_added_up, PAIRS, marks=pytest.mark.slow),
        pytest.param(_attention_across_a_border, PAIRS, marks=pytest.mark.slow),
        pytest.param(_places_of_a_stretch, PAIRS, marks=pytest.mark.slow),
        pytest.param(_no_state_of_other_ranks, HYBRID, marks=pytest.mark.slow),
        pytest.param(_no_gradient_of_later_ranks, HYBRID, marks=pytest.mark.slow),
        pytest.param(_state_across_a_border, HYBRID, marks=pytest.mark.slow),
        (_router_shares_of_one_rank, MIXTURE),
    ],
)
def test_a_planted_mistake_is_seen(plant, cell, monkeypatch):
    expected = reference(cell.reference())
    plant(monkeypatch)
    errors = verdict(compare(run_ranks(cell.nproc, run_cell, cell), expected))
    assert errors
    claimed = red_of(plant.__name__, cell.id)
    assert claimed in (None, ", ".join(error.split()[0] for error in errors))


def test_every_kind_gives_its_cores_the_tokens():
    for kind in KINDS:
        takes_tokens = kind.is_attention or (kind.functions and kind.backends)
        assert takes_tokens or not kind.mixes_tokens, kind.name
