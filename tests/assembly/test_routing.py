"""What routers give to experts, and biases that even it out: the same under every layout."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from shardwise.assembly.build import build
from shardwise.assembly.routing import STATISTICS
from shardwise.base.batches import IGNORED, Batch
from shardwise.config import RunConfig
from shardwise.lab.proof.harness import RandomRows
from shardwise.models.expert_plan import biases_of, experts_of
from shardwise.models.families import FAMILIES, spec_of
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.parity.harness import Cell, microbatches, run_config

RATE, STEPS = 0.02, 3
Outcome = tuple[dict, list[dict[str, float]], dict[str, torch.Tensor], list[torch.Tensor]]
PADDING = 17
"""The token that fills rows up: tokens of documents are another one less often."""


def padded(slot: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row whose documents end where its targets do; up to 21 of its 24 tokens are padding."""
    tokens, labels, documents = RandomRows()(slot, step)
    begin = int((labels != IGNORED).sum()) + 1
    tokens[begin:], documents[begin:] = PADDING, -1
    return tokens, labels, documents


def outcome(cfg: RunConfig) -> Outcome:
    """The record's summary, the numbers of each step, the biases by the paths of experts, and the
    shares of each step."""
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    assert job.routing is not None
    steps, shares = [], []
    for step in range(1, STEPS + 1):
        batches = microbatches(cfg, mesh, step, padded)
        steps.append(training_step(job, batches, mesh, cfg.optimizer.max_grad_norm).routing)
        shares.append(job.routing.given.clone())
    parts = [*job.pm.parts]
    biases = {path: bias for part in parts for path, bias in biases_of(part.hf, part.spec)}
    return job.routing.summary(), steps, biases, shares


def balanced(cell: Cell) -> RunConfig:
    cfg = run_config(cell)
    return replace(cfg, model=replace(cfg.model, router_bias_rate=RATE, router_aux_loss_coef=0.0))


@pytest.fixture(scope="module")
def alone() -> Outcome:
    return run_ranks(1, outcome, balanced(Cell("nemotron_h", "single", "full")))[0]


@pytest.mark.parametrize(
    ("layout", "num_ranks", "schedule"),
    some_now(
        [("fsdp2-ep", 2, ""), ("pp-ddp", 4, "1f1b"), ("tp", 2, ""), ("cp", 2, "")],
        [("fsdp2-ep", 2, ""), ("tp", 2, "")],
    ),
)
def test_loads_and_biases_equal_one_process(alone, layout, num_ranks, schedule):
    cell = Cell("nemotron_h", layout, "full", num_ranks, schedule=schedule)
    summary, steps, biases, _ = alone
    outcomes = run_ranks(num_ranks, outcome, balanced(cell))
    for other_summary, other_steps, other_biases, _ in outcomes:
        assert other_summary["layers"] == summary["layers"]
        for key in ("max_over_mean", "entropy", "dropped", "share"):
            assert torch.allclose(
                torch.tensor(other_summary[key]), torch.tensor(summary[key]), atol=1e-6
            )
        assert [step.keys() for step in other_steps] == [{*STATISTICS}] * STEPS
        for step, other in zip(steps, other_steps, strict=True):
            assert other == pytest.approx(step, abs=1e-5)
        assert all(torch.equal(bias, biases[path]) for path, bias in other_biases.items())
    assert set().union(*(other[2] for other in outcomes)) == biases.keys()


def test_a_bias_moves_by_its_rate_towards_equal_loads(alone):
    summary, _, biases, shares = alone
    for path, bias in biases.items():
        layer = summary["layers"].index(path)
        moves = [(1 / len(bias) - share[layer, : len(bias)]).sign() for share in shares]
        assert torch.allclose(bias, RATE * torch.stack(moves).sum(0))
        assert bias.any()


def test_statistics_of_known_loads(alone):
    summary, steps, *_ = alone
    for shares, largest, entropy in zip(
        summary["share"], summary["max_over_mean"], summary["entropy"], strict=True
    ):
        share = torch.tensor(shares)
        assert share.sum() == pytest.approx(1, abs=1e-5)
        assert largest == pytest.approx(float(share.max() / share.mean()), rel=1e-5)
        expected = torch.distributions.Categorical(share).entropy() / torch.tensor(len(share)).log()
        assert entropy == pytest.approx(float(expected), rel=1e-4)
    assert all(step["router_max_over_mean"] >= 1 for step in steps)
    assert all(0 < step["router_entropy"] <= 1 + 1e-6 for step in steps)
    assert all(step["router_dropped"] == step["router_dropped_most"] == 0 for step in steps)


WITH_EXPERTS = [n for n, f in FAMILIES.items() if any(block.kind.experts for block in f.blocks)]


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_loads_are_those_of_the_documents_in_a_plain_forward(family, packing):
    cfg = run_config(Cell(family, "single", "full"))
    cfg = replace(cfg, data=replace(cfg.data, packing=packing))
    found, counted = run_ranks(1, loads, cfg)[0]
    assert torch.equal(found, counted / counted.sum(1, keepdim=True))


def loads(cfg: RunConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of a step on padded rows, and the choices of every document alone in transformers.

    A row is one document where packing does not keep them apart.
    """
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    assert job.routing is not None
    config = deepcopy(job.run.hf.config)
    config._attn_implementation = "eager"
    plain = type(job.run.hf)(config)
    plain.load_state_dict(job.run.hf.state_dict())
    batches = microbatches(cfg, mesh, 1, padded)
    training_step(job, batches, mesh, None)
    return job.routing.given, counted(plain, batches, cfg.data.keeps_documents_apart)


def counted(plain: PreTrainedModel, batches: list[Batch], is_apart: bool) -> torch.Tensor:
    """How often each expert of each layer is chosen, [L, E]."""
    experts = [module for _, module in experts_of(plain, spec_of(plain.config, plain))]
    counts = [torch.zeros(module.num_experts) for module in experts]
    for module, count in zip(experts, counts, strict=True):

        def count_choices(_, args: tuple[torch.Tensor, ...], count: torch.Tensor = count) -> None:
            count += torch.bincount(args[1].flatten(), minlength=len(count))

        module.register_forward_pre_hook(count_choices)
    for batch in batches:
        for tokens, ids in zip(batch.input_ids, batch.document_ids):
            ids = ids if is_apart else ids.clamp(max=0)
            for document in ids[ids >= 0].unique():
                with torch.no_grad():
                    plain.eval()(tokens[ids == document][None], use_cache=False)
    return torch.stack(counts)


def test_a_model_without_experts_has_none():
    cfg = run_config(Cell("llama", "single", "lora"))
    assert run_ranks(1, _has_routing, cfg) == [False]


def _has_routing(cfg: RunConfig) -> bool:
    return build(cfg, build_mesh(cfg, torch.device("cpu"))).routing is not None
