"""The pieces that diagrams show: they make up the whole, and are those of the right ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.pictures.placed import Placed, holding_of
from tools.pictures.ranks import Held
from tools.recipes import most_state_bytes

from shardwise.assembly.describe import describe
from shardwise.base.layouts import parallel_of
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training, UserError

MODELS = Path(__file__).parents[2] / "src" / "shardwise" / "config" / "presets" / "models"


def config(parallel: Parallel, model: str = "tiny-llama", lora: bool = False) -> RunConfig:
    return RunConfig(
        Model(str(MODELS / model), init="random"),
        Data("unused", sequence_length=32),
        Training(output_dir="unused", global_batch_size=8, micro_batch_size=1, device="cpu"),
        Lora(r=4) if lora else None,
        parallel,
    )


def held(layout: str, num_ranks: int = 4, **other: Any) -> dict[str, Held]:
    parallel = replace(parallel_of(layout), **other.pop("parallel", {}))
    cfg, one = config(parallel, **other), config(Parallel(), **other)
    model = describe(one, 1)
    placed = Placed.of(cfg, model, num_ranks)
    parts = holding_of(placed, Placed.of(one, model, 1), "a model").parts
    return {part.part: part for part in parts}


def test_every_rank_of_ddp_has_the_whole():
    parts = held("ddp")
    assert {*parts} == {"weights", "gradients", "buckets", "optimizer", "activations"}
    for part in parts.values():
        assert part.pieces == [[(0.0, 1.0)]] * 4
        assert part.num_bytes == [part.whole] * 4


@pytest.mark.parametrize("layout", ["fsdp2", "pp"])
def test_pieces_make_up_the_whole(layout):
    parts = held(layout, parallel={"pp": 4} if layout == "pp" else {})
    for name in ("weights", "gradients", "optimizer"):
        end = 0.0
        for (start, share), *others in parts[name].pieces:
            assert others == []
            assert start == pytest.approx(end, abs=1e-3)
            end = start + share
        assert end == pytest.approx(1.0, abs=1e-3)
    states = [parts[name].num_bytes for name in ("weights", "gradients", "optimizer")]
    cfg = config(parallel_of(layout))
    if layout == "fsdp2":
        assert max(map(sum, zip(*states, strict=True))) == most_state_bytes(cfg, 4)


def test_replicas_have_the_same_pieces():
    first, second, third, fourth = held("hsdp")["weights"].pieces
    assert (first, second) == (third, fourth)
    assert first != second


def test_zero1_holds_all_gradients_until_they_are_summed_and_zero2_does_not() -> None:
    # All of a model smaller than a bucket would be whole under zero2 too.
    zero1 = held("zero1", model="llama-3.1-8b")["gradients"]
    zero2 = held("zero2", model="llama-3.1-8b")["gradients"]
    assert zero1.num_passing == 1
    assert zero1.num_bytes == [zero1.whole] * 4
    for place, (complete, piece) in enumerate(zero1.pieces):
        assert complete == (0.0, 1.0)
        assert piece == pytest.approx((place / 4, 0.25), abs=1e-3)
    assert not zero2.num_passing
    assert [own for (own,) in zero2.pieces] == [piece for _, piece in zero1.pieces]


def test_a_rank_of_ep_has_all_but_experts_and_its_share_of_these():
    parts = held("ddp-ep", model="tiny-qwen3_moe", parallel={"ep": 4})
    assert parts["weights"].pieces == [[(0.0, 1.0)]] * 4
    starts = [pieces[0] for pieces in parts["experts"].pieces]
    assert starts == [(0.0, 0.25), (0.25, 0.25), (0.5, 0.25), (0.75, 0.25)]
    dense = parts["weights"].whole / (parts["weights"].whole + parts["experts"].whole)
    for place, ((start, share), own) in enumerate(parts["gradients"].pieces):
        assert (start, share) == pytest.approx((0.0, dense))
        assert own == pytest.approx((dense + place * (1 - dense) / 4, (1 - dense) / 4))


def test_adapters_are_a_part_of_their_own():
    parts = held("fsdp2", lora=True, model="tiny-qwen3_5")
    assert parts["adapters"].whole == parts["gradients"].whole < parts["weights"].whole


def test_groups_are_those_of_the_mesh():
    model = describe(config(Parallel()), 1)
    placed = Placed.of(config(parallel_of("pp-fsdp2-tp")), model, 8)
    assert placed.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert placed.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert placed.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_layout_that_is_refused_is_not_drawn():
    with pytest.raises(UserError, match="fsdp1"):
        Placed.of(config(Parallel("fsdp1", tp=2)), describe(config(Parallel()), 1), 4)


def test_under_tp_every_rank_has_whole_factors_and_its_piece_of_the_others():
    adapters = held("tp", lora=True, model="tiny-qwen3_5", parallel={"tp": 4})["adapters"]
    whole, _ = adapters.pieces[0]
    assert 0 < whole[1] < 1
    for place, (first, own) in enumerate(adapters.pieces):
        assert first == whole
        share = (1 - whole[1]) / 4
        assert own == pytest.approx((whole[1] + place * share, share), abs=1e-3)
