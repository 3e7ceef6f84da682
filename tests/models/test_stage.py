"""Stages one after the other compute what the whole model computes, and hold no more than their own
share of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.base.batches import Batch
from shardwise.config import Lora, Parallel, RunConfig
from shardwise.models import load
from shardwise.models.adapters import lora
from shardwise.models.causal_lm import CausalLM
from shardwise.models.dtypes import hidden_dtype
from shardwise.models.families import FAMILIES, family_of, spec_of
from shardwise.models.families.base import StageFacts
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.patches import patch
from shardwise.models.spec import ModelSpec
from shardwise.models.stage import Stage, stages
from shardwise.parallel.activation_checkpoint import recompute
from shardwise.parallel.place import materialise
from tests.left_out import some_now
from tests.models.tiny import relative_error, with_every_kind
from tests.parity.harness import Cell, drawn, microbatches, run_config

SCALE = 0.125  # of the loss, before its backward
ROUTED = [name for name, family in FAMILIES.items() if family.router]
MODES = ("full", "lora")
EACH = with_every_kind(FAMILIES)
SCALED = [
    name for name, family in FAMILIES.items() if family.cut != StageFacts() and name not in EACH
]
"""Beside families with every kind of block, those whose models do more around their layers."""
IN_TURN = [(family, MODES[place % 2]) for place, family in enumerate([*EACH, *SCALED])]
"""`make test` takes these in one mode, and `make parity` all families in both."""


def config(family: str, mode: str = "full", variant: str = "", **training: Any) -> RunConfig:
    cfg = run_config(
        Cell(family, "single", mode, variant=variant)
    )  # with the router loss, where there is one
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
    patch(part, cfg, torch.device("cpu"))
    values = dict(drawn(part.hf))
    factors = [(n, values.get(n, value)) for n, value in lora.adapter_weights(part.hf, seed=0)]
    wanted = names_of(part.hf)
    load.fill(part.hf, chain(load.weights(part.hf, cfg.model, 0, wanted), factors))
    return part.train()


def edges(spec: ModelSpec) -> list[int]:
    """Uneven boundaries: stages with the embedding only, with one layer, with all the others, and
    without a layer."""
    return [0, 1, 2, len(spec.layers) + 1, len(spec.layers) + 2]


def cut(cfg: RunConfig, boundaries: Sequence[int] = (), **changed: Any) -> list[Stage]:
    hf, spec = on_meta(cfg, **changed)
    boundaries = boundaries or edges(spec)
    return [
        filled(stage, cfg)
        for stage in stages(hf, spec, boundaries, range(len(boundaries) - 1), cfg)
    ]


def whole(cfg: RunConfig, **changed: Any) -> CausalLM:
    hf, spec = on_meta(cfg, **changed)
    return filled(CausalLM(hf, spec, family_of(hf), cfg), cfg)


def gradients(parts: Sequence[CausalLM]) -> dict[str, torch.Tensor]:
    """By name; where two stages hold one weight, added up."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.hf.named_parameters():
            if parameter.grad is not None:
                found[name] = (
                    found[name] + parameter.grad if name in found else parameter.grad.clone()
                )
    return found


def run_whole(lm: CausalLM, rows: Sequence[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses = [lm(batch) for batch in rows]
    (sum(losses) * SCALE).backward()
    return sum(losses).detach(), gradients([lm])


def run_chain(
    made: Sequence[Stage], rows: Sequence[Batch]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All forwards, then all backwards from the last micro-batch to the first, as no schedule of
    one process would."""
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


def forwards(
    made: Sequence[Stage], microbatch: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    carried = microbatch
    for stage in made:
        out = stage(carried, microbatch)
        yield carried, out
        if not stage.spec.last:
            assert out.is_contiguous()
            assert not out._is_view()  # zero-bubble schedules detach it in place
        carried = out.detach().requires_grad_(out.requires_grad)


def check_equal(
    one: tuple[torch.Tensor, dict[str, Any]], other: tuple[torch.Tensor, dict[str, Any]]
) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=0)
    assert worst(one[1], other[1]) <= 1e-5


def worst(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys() != set()
    assert all(grad.abs().max() > 0 for grad in other.values())
    return max(relative_error(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("family", "mode"), some_now(product(FAMILIES, MODES), IN_TURN))
def test_a_chain_of_stages_is_the_whole_model(family, mode):
    cfg = config(family, mode)
    check_equal(run_chain(cut(cfg), batches(cfg)), run_whole(whole(cfg), batches(cfg)))


VARIANTS: tuple[tuple[str, str, str, dict[str, Any], dict[str, Any]], ...] = (
    # family, mode, variant, of training, of the model's config
    ("llama", "lora", "dropout", {}, {}),
    ("olmo_hybrid", "lora", "dropout", {"checkpointing": "full"}, {}),
    ("gpt2", "full", "", {}, {"embd_pdrop": 0.1, "resid_pdrop": 0.1}),
    ("qwen3_5_text", "full", "tied", {}, {}),
    ("qwen3_5_text", "lora", "tied", {}, {}),
    ("llama", "lora", "head", {}, {}),  # trained as a copy, in `modules_to_save`
    ("qwen3_next", "full", "isolated", {}, {}),
    ("nemotron_h", "lora", "isolated", {"checkpointing": "full"}, {}),
    ("qwen3_next", "full", "", {"checkpointing": "full"}, {}),
    ("gpt2", "full", "", {"checkpointing": "full"}, {}),
    ("qwen3_moe", "full", "", {"checkpointing": "operators"}, {}),
    ("llama", "full", "", {"precision": "bfloat16"}, {}),
    ("nemotron_h", "lora", "", {"precision": "bfloat16"}, {}),
    ("jamba", "full", "", {"loss": "plain"}, {}),
)
LATER = (
    ("olmo_hybrid", "lora", "dropout", {"checkpointing": "full"}, {}),
    ("qwen3_5_text", "lora", "tied", {}, {}),
    ("nemotron_h", "lora", "isolated", {"checkpointing": "full"}, {}),
    ("gpt2", "full", "", {"checkpointing": "full"}, {}),
    ("nemotron_h", "lora", "", {"precision": "bfloat16"}, {}),
)
"""Second families of a variant, which `make parity` runs."""


@pytest.mark.parametrize(
    ("family", "mode", "variant", "training", "changed"),
    some_now(VARIANTS, [case for case in VARIANTS if case not in LATER]),
)
def test_a_chain_of_stages_is_the_whole_model_whatever_else_is_asked(
    family, mode, variant, training, changed
):
    cfg = config(family, mode, variant, **training)
    made, lm = cut(cfg, **changed), whole(cfg, **changed)
    for part in (*made, lm):
        recompute(part.hf, part.spec, cfg.training.checkpointing, part.dropout)
    check_equal(run_chain(made, batches(cfg)), run_whole(lm, batches(cfg)))


@pytest.mark.parametrize("family", some_now(ROUTED, ("qwen3_moe", "jamba")))
def test_router_loss_adds_up_over_stages(family):
    cfg = config(family)
    cfg = replace(cfg, model=replace(cfg.model, router_aux_loss_coef=0.5))
    made = cut(cfg)
    expected = run_whole(whole(cfg), batches(cfg))
    check_equal(run_chain(made, batches(cfg)), expected)
    assert sum(stage.router_total for stage in made[:-1]) > 1
    without = replace(cfg, model=replace(cfg.model, router_aux_loss_coef=0.0))
    _, plain = run_whole(whole(without), batches(cfg))
    assert worst(plain, expected[1]) > 1e-2
    with torch.no_grad():
        outs = [out for _, out in forwards([stage.eval() for stage in made], torch.tensor([0]))]
        torch.testing.assert_close(outs[-1], whole(cfg).eval()(batches(cfg)[0]), rtol=1e-6, atol=0)


def test_what_acts_on_embeddings_acts_once():
    """Cut by a table that lacks an entry, a model has other gradients; so the equal chains show
    that each is needed."""
    for family, table, spec, changed in (
        ("granitemoehybrid", {"cut": StageFacts()}, {}, {}),
        ("gpt2", {}, {"positions": None}, {}),
        ("gpt2", {"cut": StageFacts()}, {}, {"embd_pdrop": 0.5}),
    ):
        cfg = config(family)
        hf, known = on_meta(cfg, **changed)
        boundaries, facts = (0, 2, len(known.layers) + 2), replace(FAMILIES[family], **table)
        made = [
            filled(stage, cfg)
            for stage in stages(hf, replace(known, **spec), boundaries, (0, 1), cfg, facts)
        ]
        _, wrong = run_chain(made, batches(cfg))
        _, right = run_chain(cut(cfg, boundaries, **changed), batches(cfg))
        layer = f"{known.layers[0].name}."
        below = [
            {n: grad for n, grad in grads.items() if n.startswith(layer)}
            for grads in (wrong, right)
        ]
        assert worst(*below) > 1e-2


@pytest.mark.parametrize("family", some_now(FAMILIES, EACH))
def test_each_stage_holds_exactly_its_own(family):
    cfg = config(family, "lora")
    hf, spec = on_meta(cfg)
    before = [(name, type(module)) for name, module in hf.named_modules()]
    everything = {name: p.nbytes for name, p in hf.named_parameters()}
    made = stages(hf, spec, edges(spec), range(4), cfg)
    assert [(name, type(module)) for name, module in hf.named_modules()] == before
    assert {name: p.nbytes for name, p in hf.named_parameters()} == everything
    bottom = tuple(f"{path}." for path in (spec.embed, spec.positions) if path)
    layers = [(f"{layer.name}.",) for layer in spec.layers]
    top = (f"{spec.norm}.", f"{spec.head}.", *bottom[: spec.tied])  # a tied weight by its one name
    for stage, own in zip(made, (bottom, layers[0], sum(layers[1:], ()), top)):
        held = {name: p.nbytes for name, p in stage.hf.named_parameters()}
        assert held == {name: size for name, size in everything.items() if name.startswith(own)}
        print(f"{family}: {sum(held.values()):,} B of {sum(everything.values()):,} B")
    assert {name for stage in made for name, _ in stage.hf.named_parameters()} == everything.keys()


@pytest.mark.parametrize("family", ["gpt2", "lfm2"])
def test_a_tied_weight_is_one_parameter_of_the_stages_of_one_rank(family):
    cfg = config(family)
    hf, spec = on_meta(cfg)
    for chunks in ((0, 3), (3, 0)):
        made = {stage.spec.first: stage for stage in stages(hf, spec, edges(spec), chunks, cfg)}
        materialise(torch.nn.ModuleList(made.values()), torch.device("cpu"))
        embedding = made[True].hf.get_parameter(f"{spec.embed}.weight")
        assert not embedding.is_meta
        assert made[False].hf.get_parameter(f"{spec.embed}.weight") is embedding
        assert made[False].hf.get_parameter(f"{spec.head}.weight") is embedding
    (alone,) = stages(hf, spec, edges(spec), (3,), cfg)
    assert alone.hf.get_parameter(f"{spec.head}.weight") is alone.hf.get_parameter(
        f"{spec.embed}.weight"
    )
    assert alone.hf.get_parameter(f"{spec.embed}.weight") is not hf.get_parameter(
        f"{spec.embed}.weight"
    )


def test_gradients_reach_as_low_as_is_asked():
    cfg = replace(config("llama", "lora"), lora=Lora(r=4, targets=["layers.2.mlp.down_proj"]))
    expected = run_whole(whole(cfg), batches(cfg))
    for schedule, reached in (("1f1b", [False, False, True, True]), ("zbv", [True] * 4)):
        made = cut(replace(cfg, parallel=Parallel(schedule=schedule)))
        check_equal(run_chain(made, batches(cfg)), expected)
        assert [out.requires_grad for _, out in forwards(made, torch.tensor([0]))] == reached
        with torch.no_grad():
            assert not any(out.requires_grad for _, out in forwards(made, torch.tensor([0])))


@pytest.mark.parametrize("family", ["gpt2", "granitemoehybrid", "qwen3_5_text"])
def test_logits_of_a_chain(family):
    cfg = config(family)
    batch, number = batches(cfg)[0], torch.zeros(1, dtype=torch.int64)
    carried = number
    with torch.no_grad():
        for stage in cut(cfg):
            stage.eval().microbatches = [batch]
            carried = stage(carried, number, return_logits=True)
        assert torch.equal(carried, whole(cfg).eval()(batch, return_logits=True))


@pytest.mark.parametrize(
    ("family", "mode"), some_now(product(FAMILIES, MODES), IN_TURN[: len(EACH)])
)
def test_hidden_states_have_the_dtype_of_the_weights(family, mode):
    for dtype, precision in (
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("float32", "float16"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
    ):
        cfg = config(family, mode, precision=precision)
        cfg = replace(cfg, model=replace(cfg.model, dtype=dtype))
        assert between_layers(cfg) == {hidden_dtype(cfg)} == {getattr(torch, dtype)}


def between_layers(cfg: RunConfig) -> set[torch.dtype]:
    """Of what goes into a layer or the final norm."""
    lm, seen = whole(cfg), set()
    for name in (*(layer.name for layer in lm.spec.layers), lm.spec.norm):
        lm.hf.get_submodule(name).register_forward_pre_hook(
            lambda module, args: seen.add(args[0].dtype)
        )
    lm(batches(cfg)[0])
    return seen


def test_float16_products_of_bfloat16_weights_change_the_dtype_of_hidden_states():
    """So a rule refuses them in a pipeline, where a stage takes hidden states of one dtype."""
    cfg = config("llama", precision="float16")
    cfg = replace(cfg, model=replace(cfg.model, dtype="bfloat16"))
    assert between_layers(cfg) == {torch.bfloat16, torch.float32}


def test_hidden_states_in_a_view_with_gaps_are_sent_without(monkeypatch):
    with_gaps = torch.arange(12.0).reshape(2, 3, 2).transpose(0, 1)
    monkeypatch.setattr(CausalLM, "hidden_of", lambda self, batch, inputs: with_gaps)
    first, *_ = cut(config("llama"))
    hidden = first.hidden_of(batches(config("llama"))[0], {})
    assert torch.equal(hidden, with_gaps)
    assert hidden.is_contiguous()
    assert not hidden._is_view()
