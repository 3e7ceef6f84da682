"""Operators and waits of the host: what is counted, and how many a step has."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.base import batches
from shardwise.base.batches import Batch
from shardwise.kernels import delta_rule, linear_cross_entropy
from shardwise.kernels.gated_delta_rule import chunked
from shardwise.kernels.packed import packed
from shardwise.kernels.short_conv import shifted
from shardwise.metrics.dispatch import Dispatches, counts_of_steps
from shardwise.models import masks, routed_experts
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import FAMILIES as FAMILY_FACTS
from shardwise.models.families import family_of, spec_of
from shardwise.models.patches import patch
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.models.tiny import with_adapters
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config


def test_what_computes_is_launched_and_views_are_not():
    x, y = torch.randn(4, 3), torch.randn(3, 5)
    with Dispatches() as counts:
        (x @ y).t().view(5, 4)[1:].detach()
        x.new_empty(3)
    assert counts.operators == {"aten.mm.default": 1}
    assert counts.num_waits == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
    ],
)
def test_what_the_host_must_know_is_a_wait(read):
    with Dispatches() as counts:
        read(torch.randn(3))
    assert counts.num_waits == 1


def of_two_steps(cell: Cell) -> tuple[Counter[str], int]:
    """The waits of a second step, and its micro-batches. It is AdamW's, which counts steps."""
    cfg = run_config(cell, optimizer="adamw")
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    for step in (1, 2):
        of_step = [batch.to(mesh.device) for batch in microbatches(cfg, mesh, step)]
        with Dispatches(counts_of_steps(job.optimizer)) as counts:
            training_step(job, of_step, mesh, max_grad_norm=1.0)
    return counts.waits, len(of_step)


TWICE = {"tolist": 2}
"""The number of targets, which every gradient is divided by; the loss with the norm."""
CELLS = (
    Cell("qwen3_5_text", "single", "lora"),
    Cell("qwen3_5_text", "fsdp2", "full", 2),
    Cell("nemotron_h", "ddp-tp", "lora", 4),
    Cell("qwen3_5_text", "cp", "lora", 2, "isolated"),
    Cell("qwen3_next", "single", "full", variant="isolated"),  # its routers have a loss
)
REST = (
    Cell("llama", "pp-ddp", "lora", 4),
    Cell("qwen3_5_text", "cp", "lora", 2),
    Cell("qwen3_5_text", "single", "lora", variant="isolated"),
    *(
        cell
        for family, facts in FAMILY_FACTS.items()
        for variant in ("isolated" if facts.keeps_documents_apart else "",)
        for cell in (
            Cell(family, "single", "full", variant=variant),
            Cell(family, "cp", "full", 2, variant),
        )
        if cell not in CELLS
    ),
)
"""Stages, and every family, which `make parity` runs."""


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=cell.id) for cell in CELLS),
        *(pytest.param(cell, id=cell.id, marks=pytest.mark.slow) for cell in REST),
    ],
)
def test_the_host_waits_twice_a_step(cell, monkeypatch):
    # On a GPU experts are multiplied by one grouped product; a loop would wait for their counts.
    monkeypatch.setattr(routed_experts, "takes", lambda *args: True)
    for waits, num_microbatches in run_ranks(cell.nproc, of_two_steps, cell):
        assert num_microbatches > 1
        assert waits == TWICE


@pytest.mark.parametrize(
    ("num_ranks", "is_known"),
    [pytest.param(1, True, marks=pytest.mark.slow), (1, False), (2, True)],
)
def test_fla_is_given_documents_that_the_host_knows(num_ranks, is_known, monkeypatch):
    """The torch path needs no borders of documents; here it looks for them as fla's path does."""
    rule = chunked.gated_delta_rule

    def after_a_look(*args):
        packed(args[-1])
        return rule(*args)

    monkeypatch.setattr(chunked, "gated_delta_rule", after_a_look)
    if not is_known:
        monkeypatch.setattr(batches, "keep_on_host", lambda *args: None)
    layout = "single" if num_ranks == 1 else "cp"
    cell = Cell("qwen3_5_text", layout, "lora", num_ranks, "isolated")
    for waits, num_microbatches in run_ranks(num_ranks, of_two_steps, cell):
        assert waits == TWICE | ({} if is_known else {"numpy": num_microbatches})


def test_a_hybrid_with_lora_launches_fewer_operators_than_with_peft(monkeypatch):
    """As on a GPU: all chunks of a row at once, a convolution in one block, logits in one chunk."""
    monkeypatch.setitem(delta_rule.AT_ONCE, "cpu", delta_rule.AT_ONCE["cuda"])
    monkeypatch.setattr(shifted, "BLOCK", 512)
    monkeypatch.setattr(linear_cross_entropy.chunked, "CPU_ROWS", 1024)
    cfg = run_config(Cell("qwen3_5_text", "single", "lora"))
    assert cfg.lora is not None
    ours, _ = with_adapters(cfg.model, replace(cfg.lora, targets="all-linear"))
    part = CausalLM(ours, spec_of(ours.config, ours), family_of(ours), cfg)
    part = patch(part, cfg, torch.device("cpu"))
    theirs, _ = with_adapters(cfg.model, replace(cfg.lora, targets="all-linear"))
    ids = torch.randint(0, 256, (2, 512), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, ids, torch.zeros_like(ids), (0, 1), step=1).to(torch.device("cpu"))
    with Dispatches() as in_ours:
        part(batch).backward()
    with Dispatches() as in_theirs:
        theirs(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert in_ours.num_launches <= 0.7 * in_theirs.num_launches


def test_a_wait_of_a_layer_is_seen(monkeypatch):
    monkeypatch.setattr(masks, "_no_packed_rows", masks.masking_utils.find_packed_sequence_indices)
    cell = Cell("qwen3_5_text", "single", "lora")
    ((waits, num_microbatches),) = run_ranks(1, of_two_steps, cell)
    assert waits.total() == 2 + num_microbatches
