"""Tensor parallelism: what is refused before memory is taken, what is held whole, and an
embedding's padding token."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise.assembly import build
from shardwise.base.layouts import Facts
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training, UserError, rules
from shardwise.models import families, load
from shardwise.models.adapters import lora
from shardwise.models.facts import facts_of
from shardwise.models.families import family_of, spec_of
from shardwise.models.names import is_adapter
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.place import axes_of, local
from shardwise.parallel.tensor_axis import TensorAxis
from shardwise.parallel.tensor_modules import split_embedding
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import CONFIGS, on_meta, tiny, with_whole_feed_forwards
from tests.notes import beside_random_base
from tests.parity import harness
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config


@pytest.mark.parametrize(
    ("name", "tp", "told"),
    [
        # 8 heads of queries and 4 of keys and values, which neighbours may share; 172 feed-forward
        # features.
        (
            "tiny-llama",
            3,
            "parallel.tp is 3, but this llama has 8 attention heads, which .* use 1, 2 or 4$",
        ),
        ("tiny-llama", 8, "this llama has 172 feed-forward features, "),
        # Of 256 rows of an embedding 100 ranks would hold 3 each: those above the 86th have none.
        ("tiny-llama", 100, "this llama has 256 tokens in its vocabulary, "),
        # 12 heads of JetBlock and of attention, 2 of keys and values, 8,960 feed-forward features.
        (
            "jet-nemotron-2b",
            8,
            "this jet_nemotron has 12 heads of JetBlock, which .* use 1, 2 or 4$",
        ),
        (
            "tiny-qwen3_next",
            3,
            "this qwen3_next has 4 key heads of Gated DeltaNet, which .* use 1, 2 or 4$",
        ),
    ],
)
def test_a_model_that_cannot_be_dealt_out_says_to_how_many_it_can(name, tp, told):
    hf = on_meta(tiny(name))
    cfg = RunConfig(Model("m"), Data("d"), Training("o"), parallel=Parallel(tp=tp))
    facts = facts_of(hf, spec_of(hf.config, hf), family_of(hf))
    with pytest.raises(UserError, match=told):
        rules.check(cfg, Facts(tp, facts))


def refused_before_memory(changes: dict[str, Any]) -> str:
    """What `build` says on this rank; no parameter may be given memory before."""
    cfg = run_config(Cell("llama", "tp", "full", 3 if "tp" in changes else 2))
    cfg = replace(
        cfg,
        model=replace(cfg.model, dtype=changes.get("dtype", "float32")),
        parallel=replace(cfg.parallel, tp=changes.get("tp", 2)),
        training=replace(cfg.training, accumulation=changes.get("accumulation", "model")),
    )
    mesh = build_mesh(cfg, torch.device("cpu"))
    build.materialise = None  # ty: ignore[invalid-assignment] (in this forked process)
    with pytest.raises(UserError) as error:
        build.build(cfg, mesh)
    return str(error.value)


@pytest.mark.parametrize(
    ("nproc", "changes", "told"),
    [
        (3, {"tp": 3}, "which cannot be sharded evenly over 3 ranks; use 1, 2 or 4"),
        (
            2,
            {"dtype": "bfloat16", "accumulation": "float32"},
            "set it to model, or model.dtype to float32",
        ),
    ],
)
def test_every_rank_refuses_before_memory_is_taken(nproc, changes, told):
    first, *others = run_ranks(nproc, refused_before_memory, changes)
    assert told in first
    assert others == [first] * (nproc - 1)


def notes_and_matrices(cell: Cell) -> tuple[tuple[str, ...], int]:
    """A rank's notes, and the bytes of its weights' matrices that are not cut along tp."""
    cfg = run_config(cell)
    job = build.build(cfg, build_mesh(cfg, torch.device("cpu")))
    matrices = [p for name, p in job.pm.named_parameters() if p.dim() > 1 and not is_adapter(name)]
    return beside_random_base(job.notes), sum(
        local(p).nbytes for p in matrices if "tp" not in axes_of(p)
    )


TOLD = "parallel.tp: of these weights other ranks hold the same bytes: "
# Of qwen3_next's tiny model, in float32, 64 wide: a router of 8 experts, and the gate of the one
# that all tokens pass.
MIXTURE = (8 * 64 + 64) * 4


def test_what_every_rank_holds_whole_is_told_with_its_bytes(monkeypatch):
    assert run_ranks(2, notes_and_matrices, Cell("llama", "tp", "full", 2)) == [((), 0), ((), 0)]
    # In 3 of 4 layers.
    gates = f"mlp.gate ({3 * 8 * 64 * 4:,}), mlp.shared_expert_gate ({3 * 64 * 4:,})"
    parts = f"{gates}; {3 * MIXTURE:,} in the whole model"
    expected = ((TOLD + parts,), 3 * MIXTURE)
    assert run_ranks(2, notes_and_matrices, Cell("qwen3_next", "tp", "lora", 2)) == [expected] * 2
    # Learned positions, outside of all layers: 1,024 of them.
    parts = f"transformer.wpe ({1024 * 64 * 4:,}); {1024 * 64 * 4:,} in the whole model"
    assert (
        run_ranks(2, notes_and_matrices, Cell("gpt2", "tp", "full", 2))
        == [((TOLD + parts,), 1024 * 64 * 4)] * 2
    )
    # And a block that is not cut at all: up and down, 64 x 172 and back.
    llama = families.FAMILIES["llama"]
    monkeypatch.setitem(families.FAMILIES, "llama", with_whole_feed_forwards(llama))
    one = 4 * 64 * 172 * 4
    parts = ", ".join(f"mlp.{name} ({one:,})" for name in ("gate_proj", "up_proj", "down_proj"))
    expected = ((f"{TOLD}{parts}; {3 * one:,} in the whole model",), 3 * one)
    assert run_ranks(2, notes_and_matrices, Cell("llama", "tp", "full", 2)) == [expected] * 2


@pytest.mark.slow  # one note, and parts of the bytes that the test above counts
def test_what_stages_and_shards_hold_of_it_is_told():
    """Stages of 2 layers: the one without a mixture is in the first. Of two shards of one row, one
    is empty."""
    notes, matrices = zip(
        *run_ranks(4, notes_and_matrices, Cell("qwen3_next", "pp-tp", "full", 4, schedule="1f1b"))
    )
    ((said,),) = set(notes)
    assert said.endswith(
        f"; {3 * MIXTURE:,} in the whole model, on a rank of the pipeline at most {2 * MIXTURE:,}"
    )
    assert matrices == (MIXTURE, MIXTURE, 2 * MIXTURE, 2 * MIXTURE)
    notes, matrices = zip(
        *run_ranks(4, notes_and_matrices, Cell("qwen3_next", "fsdp2-tp", "full", 4))
    )
    ((said,),) = set(notes)
    assert said.endswith(
        f"; {3 * MIXTURE:,} in the whole model, of which fsdp2 leaves 1/2 on each rank"
    )
    assert sum(matrices) == 2 * 3 * MIXTURE  # once along tp's two ranks


def test_rows_that_some_ranks_share_are_told(tmp_path, monkeypatch):
    # On 4 ranks two share each of the 2 key/value heads, 16 wide (one of the 2 layers has any), ...
    ((said,),) = {
        notes
        for notes, _ in run_ranks(4, notes_and_matrices, Cell("granitemoehybrid", "tp", "full", 4))
    }
    assert all(f"self_attn.{name} ({16 * 64 * 4:,})" in said for name in ("k_proj", "v_proj"))
    # ... and the 2 groups of Mamba2's B and C, 16 rows each, of the way in and of the convolution
    # (of 4 taps).
    assert f"mamba.in_proj ({2 * 16 * 64 * 4:,})" in said
    assert f"mamba.conv1d ({2 * 16 * 4 * 4:,})" in said
    # The one group of B and C, 16 rows each, on both ranks; of a mixture the router, and the ways
    # to a width of 24 and back, of which the one back has a bias.
    path = CONFIGS / "tiny-nemotron_h" / "config.json"
    changed = json.loads(path.read_text()) | {
        "mlp_bias": True,
        "moe_latent_size": 24,
        "n_groups": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(changed))
    monkeypatch.setitem(harness.FAMILIES, "nemotron_h", str(tmp_path))
    ((said,),) = {
        notes for notes, _ in run_ranks(2, notes_and_matrices, Cell("nemotron_h", "tp", "full", 2))
    }
    parts = {
        "in_proj": 2 * 16 * 64,
        "conv1d": 2 * 16 * 4,
        "gate": 8 * 64,
        "fc1_latent_proj": 24 * 64,
        "fc2_latent_proj": 24 * 64,
    }
    told = dict(re.findall(r"mixer\.(\w+) \(([\d,]+)\)", said))
    assert told == {name: f"{4 * number:,}" for name, number in parts.items()}
    assert f"; {4 * sum(parts.values()):,} in the whole model" in said


def looked_up(padding: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What an embedding of 6 rows gives that 2 ranks hold, and this rank's gradient of the sum of
    its squares."""
    cfg = run_config(Cell("llama", "tp", "full", 2))
    axis = TensorAxis.of(build_mesh(cfg, torch.device("cpu")), False)
    rows = torch.arange(12.0).view(6, 2)
    embed = nn.Embedding(6, 2, padding_idx=padding)
    placed = DTensor.from_local(rows.chunk(2)[axis.rank], axis.mesh, [Shard(0)])
    embed.weight = nn.Parameter(placed)
    split_embedding(embed, axis)
    found = embed(TOKENS)
    found.square().sum().backward()
    return found.detach(), local(embed.weight.grad)


TOKENS = torch.tensor([[0, 4, 4, 1, 5]])


@pytest.mark.parametrize("padding", [None, 0, 4])
def test_a_padding_token_has_no_gradient_where_its_row_is(padding):
    whole = nn.Embedding.from_pretrained(
        torch.arange(12.0).view(6, 2), freeze=False, padding_idx=padding
    )
    whole(TOKENS).square().sum().backward()
    outcomes = run_ranks(2, looked_up, padding)
    assert all(torch.equal(found, whole(TOKENS)) for found, _ in outcomes)
    assert torch.equal(torch.cat([gradient for _, gradient in outcomes]), whole.weight.grad)


def test_a_whole_layer_to_save_is_refused(tmp_path):
    """Its blocks could not be found in the copy, and tokens would be shared out all the same."""
    cfg = run_config(Cell("llama", "tp-sp", "lora", 2))
    cfg = replace(cfg, lora=Lora(r=4, targets=["o_proj"], modules_to_save=["layers.0"]))
    hf_config = load.read_config(cfg.model)
    hf = load.build_meta(cfg.model, hf_config)
    spec = spec_of(hf_config, hf)
    lora.inject(hf, cfg.lora, spec)
    with pytest.raises(
        UserError,
        match=r"model\.layers\.0 holds whole layers.* \(self_attn, mlp\), or set parallel.tp to 1",
    ):
        rules.check(cfg, Facts(2, facts_of(hf, spec, family_of(hf))))


def curve(cell: Cell, saved: list[str]) -> list[float]:
    cfg = run_config(cell)
    cfg = replace(cfg, lora=Lora(r=4, modules_to_save=saved))
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build.build(cfg, mesh, DrawnStart())
    steps = [training_step(job, microbatches(cfg, mesh, step), mesh, None) for step in (1, 2, 3)]
    return [value for step in steps for value in (step.loss, step.grad_norm)]


SAVED = (
    ("gpt2", ["c_fc", "ln_1"], ""),
    ("nemotron_h", ["conv1d", "gate"], ""),
    ("llama", ["self_attn"], "isolated"),
)
"""A matrix and a norm, a convolution and a router, a whole block."""
SAVED_LATER = (
    ("llama", ["mlp"], ""),
    ("qwen3_next", ["mlp"], ""),
    ("jet_nemotron", ["dynamic_conv1d", "o_norm"], "isolated"),
    ("jet_nemotron", ["w2", "v_proj"], ""),
)


@pytest.mark.parametrize(("family", "saved", "variant"), some_now((*SAVED, *SAVED_LATER), SAVED))
def test_copies_that_are_trained_in_full_are_cut_as_what_they_stand_for(family, saved, variant):
    (alone,) = run_ranks(1, curve, Cell(family, "single", "lora", 1, variant), saved)
    for found in run_ranks(2, curve, Cell(family, "tp-sp", "lora", 2, variant), saved):
        assert found == pytest.approx(alone, rel=1e-5)  # as TOLERANCE has it for norms
