"""What crosses from node to node, by formula. tests/clusters/test_bytes.py counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tools.between_nodes import _groups, bytes_between_nodes
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.assembly.describe import describe
from shardwise.base.interfaces import Mesh
from shardwise.base.layouts import EXPERT_AXES, parallel_of
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.lab.planner.share import boundaries_of, share_of
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.models.tiny import CONFIGS

TOKENS, WIDTH = 24, 64


def config(layout: str, family: str = "tiny-qwen3_5", **keys: int) -> RunConfig:
    parallel = replace(parallel_of(layout), **keys)
    if parallel.pp > 1:
        parallel = replace(parallel, split="uniform")
    training = Training(output_dir="unused", global_batch_size=8, micro_batch_size=1, device="cpu")
    model = Model(str(CONFIGS / family), init="random")
    data = Data("unused", sequence_length=TOKENS)
    return RunConfig(model, data, training, Lora(r=4, alpha=8), parallel)


def crossing(cfg: RunConfig, num_ranks: int, per_node: int) -> dict[str, int] | None:
    run = describe(cfg, num_ranks)
    return bytes_between_nodes(cfg, run, per_node, boundaries_of(cfg, run))


def trained_bytes(cfg: RunConfig, num_ranks: int) -> int:
    run = describe(cfg, num_ranks)
    places = dict.fromkeys(Mesh.AXES, 0)
    return sum(4 * weight.numel for weight in share_of(cfg, run, places).trained)


def test_on_one_node_nothing_crosses():
    assert crossing(config("hsdp"), 4, 4) == {}


def test_a_ring_crosses_from_each_node_to_the_next():
    cfg = config("ddp")
    # Targets in 8 bytes, the loss in 4.
    each = 2 * 3 / 4 * (trained_bytes(cfg, 4) + 8 + 4)
    assert crossing(cfg, 4, 2) == {"all-reduce": 2 * each}
    assert crossing(cfg, 4, 1) == {"all-reduce": 4 * each}


def test_tp_within_a_node_sends_nothing_to_another():
    cfg = config("ddp-tp")
    # Two rings of two ranks. Squares of the norm are added up along tp only.
    assert crossing(cfg, 4, 2) == {"all-reduce": 2 * 2 * (trained_bytes(cfg, 4) + 8 + 4)}


def test_hsdp_sends_its_shards_gradients_only():
    cfg = config("hsdp", "tiny-llama")
    cfg = replace(cfg, lora=None)
    # Two replicas of two shards.
    assert crossing(cfg, 4, 2) == {"all-reduce": 2 * 2 * (trained_bytes(cfg, 4) // 2 + 8 + 4)}


def test_a_pipeline_sends_over_its_cuts_between_nodes_only():
    m, hidden = 8, 4 * TOKENS * WIDTH
    deep = config("pp", pp=4)
    # One of three cuts lies between the nodes; the ring of the loss and the norm goes round both.
    assert crossing(deep, 4, 2) == {"send": 2 * m * hidden, "all-reduce": 2 * 2 * 3 / 4 * (4 + 4)}
    assert crossing(deep, 4, 1) == {
        "send": 3 * 2 * m * hidden,
        "all-reduce": 4 * 2 * 3 / 4 * (4 + 4),
    }


def test_the_ends_of_a_pipeline_exchange_the_gradients_of_a_tied_weight():
    cfg = replace(config("pp", "tiny-qwen3_5-tied", pp=4), lora=None)
    hidden = 2 * 8 * 4 * TOKENS * WIDTH
    sent = crossing(cfg, 4, 2)
    assert sent is not None
    assert sent["send"] == hidden + 2 * 4 * 256 * WIDTH


def test_experts_send_half_of_their_rows_to_another_node():
    cfg = config("ddp-ep", "tiny-qwen3_moe")
    on_two, apart = crossing(cfg, 4, 2), crossing(cfg, 4, 1)
    assert on_two is not None
    assert apart is not None
    assert "all-to-all" not in on_two
    whole = crossing(replace(cfg, parallel=replace(cfg.parallel, ep=4)), 4, 1)
    assert whole is not None
    assert whole["all-to-all"] == 1.5 * apart["all-to-all"]


def test_sends_of_cp_to_another_node_are_not_known():
    assert crossing(config("ddp-cp"), 4, 2) is not None
    assert crossing(config("cp", cp=4), 4, 2) is None


@pytest.mark.parametrize("layout", ["pp-ddp-cp-ep", "hsdp-cp-tp", "fsdp2-cp-ep-tp"])
def test_groups_are_those_of_the_mesh(layout):
    cfg = config(layout, "tiny-qwen3_moe")
    run_ranks(1, _compare_groups, cfg)


def _compare_groups(cfg: RunConfig) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    mesh = build_mesh(cfg, torch.device("cpu"))
    run = describe(cfg, 8)
    grid = torch.arange(8).view(*run.sizes.values())
    experts = EXPERT_AXES if mesh.ep > 1 else ()
    for axis in (*mesh.AXES, *mesh.gradient_axes, *experts):
        groups = _groups(cfg, run, grid, axis)
        assert dist.get_process_group_ranks(mesh.group(axis)) in groups
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(8))
