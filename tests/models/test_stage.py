"""Stages one after the other compute what the whole model computes, and hold no more than their own share of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.config import RunConfig
from shardwise.interfaces import Batch
from shardwise.models import load, lora
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import FAMILIES, family_of, spec_of
from shardwise.models.families.base import Family
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.spec import ModelSpec
from shardwise.models.stage import Stage, stages
from tests.parity.harness import Cell, microbatches, random_b, run_config

SCALE = 0.125  # of the loss, before its backward
ROUTED = [name for name, family in FAMILIES.items() if family.router]
ALL = [(family, mode) for family in FAMILIES for mode in ("full", "lora")]


def config(family: str, mode: str = "full", variant: str = "", **training: Any) -> RunConfig:
    cfg = run_config(Cell(family, "single", mode, variant=variant))  # with the router loss, where there is one
    return replace(cfg, training=replace(cfg.training, global_batch_size=4, **training))


def batches(cfg: RunConfig) -> list[Batch]:
    """Two micro-batches of two rows, of unequal numbers of targets."""
    mesh: Any = SimpleNamespace(slots=range)
    return microbatches(cfg, mesh, step=1)


def on_meta(cfg: RunConfig, **changed: Any) -> tuple[Any, ModelSpec]:
    hf_config = load.read_config(cfg.model)
    for key, value in changed.items():
        setattr(hf_config, key, value)
    hf = load.build_meta(cfg.model, hf_config)
    spec = spec_of(hf_config, hf)
    if cfg.lora:
        lora.inject(hf, cfg.lora, spec)
    return hf, spec


def names_of(hf: torch.nn.Module) -> set[str]:
    """Transformers names of all that a file has for a model or stage."""
    return {hf_name(name) for name in hf.state_dict() if not is_adapter(name)}


def filled(part: Any, cfg: RunConfig) -> Any:
    """The part with its weights, which depend on their names alone, and on a LoRA factor's."""
    drawn = random_b(cfg).parameters
    factors = [(n, drawn.get(n, value)) for n, value in lora.adapter_weights(part.hf, seed=0)]
    wanted = names_of(part.hf)
    load.fill(part.hf, chain(load.weights(part.hf, cfg.model, 0, wanted), factors))
    return part.train()


def edges(spec: ModelSpec) -> list[int]:
    """Uneven boundaries: stages with the embedding only, with one layer, with all the others, and without a layer."""
    return [0, 1, 2, len(spec.layers) + 1, len(spec.layers) + 2]


def cut(
    cfg: RunConfig, boundaries: Sequence[int] | None = None, family: Family | None = None, **changed: Any
) -> list[Stage]:
    hf, spec = on_meta(cfg, **changed)
    boundaries = boundaries or edges(spec)
    made = stages(hf, spec, boundaries, range(len(boundaries) - 1), cfg, family)
    return [filled(stage, cfg) for stage in made]


def whole(cfg: RunConfig, **changed: Any) -> CausalLM:
    hf, spec = on_meta(cfg, **changed)
    return filled(CausalLM(hf, spec, family_of(hf), cfg), cfg)


def gradients(parts: Sequence[CausalLM]) -> dict[str, torch.Tensor]:
    """By name; where two stages hold one weight, added up."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.hf.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad.clone()
    return found


def run_whole(lm: CausalLM, rows: Sequence[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses = [lm(batch) for batch in rows]
    (sum(losses) * SCALE).backward()
    return sum(losses).detach(), gradients([lm])


def run_chain(made: Sequence[Stage], rows: Sequence[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All forwards, then all backwards from the last micro-batch to the first, as no schedule of one process would."""
    for stage in made:
        stage.microbatches, stage.loss_scale = rows, SCALE
    done = [list(forwards(made, torch.tensor([number]))) for number in range(len(rows))]
    for pairs in reversed(done):
        (pairs[-1][1] * SCALE).backward()
        for (_, out), (above, _) in zip(reversed(pairs[:-1]), reversed(pairs[1:])):
            if out.requires_grad:
                out.backward(above.grad)
    loss = sum(pairs[-1][1].detach() for pairs in done) + sum(stage.router_total for stage in made)
    return loss, gradients(made)


def forwards(made: Sequence[Stage], microbatch: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    carried = microbatch
    for stage in made:
        out = stage(carried, microbatch)
        yield carried, out
        if not stage.spec.last:
            assert out.is_contiguous()
            assert not out._is_view()  # zero-bubble schedules detach it in place
        carried = out.detach().requires_grad_()


def check_equal(one: tuple[torch.Tensor, dict[str, Any]], other: tuple[torch.Tensor, dict[str, Any]]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    assert one[1].keys() == other[1].keys() != set()
    for name, grad in other[1].items():
        assert grad.abs().max() > 0, name
        assert (one[1][name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize(("family", "mode"), ALL)
def test_a_chain_of_stages_is_the_whole_model(family, mode):
    cfg = config(family, mode)
    check_equal(run_chain(cut(cfg), batches(cfg)), run_whole(whole(cfg), batches(cfg)))
