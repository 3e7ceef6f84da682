"""The module that strategies split: loss, router loss, logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import RecurrentGemmaConfig
from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

from shardwise.base.batches import IGNORED, Batch
from shardwise.base.layouts import ModelFacts
from shardwise.config import Data, Lora, Model, RunConfig, Training, UserError
from shardwise.models import load
from shardwise.models.causal_lm import CausalLM
from shardwise.models.facts import facts_of
from shardwise.models.families import FAMILIES, Family, family_of, spec_of
from shardwise.models.families.base import Mixer
from shardwise.models.patches import patch
from shardwise.models.patches.loss import loss_of_run
from shardwise.models.router_loss import RouterLoss
from tests.left_out import some_now
from tests.models.tiny import CONFIGS, EACH_KIND, with_adapters
from tests.parity.harness import Cell, run_config

CPU = torch.device("cpu")
PRESETS = [
    folder.name
    for folder in sorted(CONFIGS.glob("tiny-*"))
    if json.loads((folder / "config.json").read_text())["model_type"] in FAMILIES
]


def model(family: str, coefficient: float = 0.0) -> CausalLM:
    cfg = run_config(Cell(family, "single", "full"))
    cfg = replace(cfg, model=replace(cfg.model, router_aux_loss_coef=coefficient))
    hf_config = load.read_config(cfg.model)
    hf = load.load_whole(cfg.model, hf_config)
    return patch(CausalLM(hf, spec_of(hf_config, hf), family_of(hf), cfg), cfg, CPU)


def batch(rows: int = 2, tokens: int = 12, ignored: int = 5) -> Batch:
    ids = torch.randint(0, 256, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    labels[0, :ignored] = IGNORED
    return Batch(ids[:, :-1], labels, torch.zeros_like(labels), tuple(range(rows)), step=1)


def test_loss_is_the_sum_over_targets():
    lm, one = model("llama").eval(), batch()
    logits = lm(one, return_logits=True)
    assert logits.shape == (2, 12, 256)
    mask = one.labels != IGNORED
    expected = (
        -F.log_softmax(logits.double(), -1)
        .gather(-1, one.labels.clamp(min=0)[..., None])[..., 0][mask]
        .sum()
    )
    assert mask.sum() == 19
    torch.testing.assert_close(lm(one).double(), expected, rtol=1e-6, atol=0)


def test_positions_are_given_to_the_model_where_rows_are_not_complete():
    lm, one = model("gpt2").eval(), batch()
    positions = torch.arange(4, 16).expand(2, 12)
    later = lm(replace(one, positions=positions), return_logits=True)
    assert torch.equal(later, lm.hf(one.input_ids, position_ids=positions).logits)
    assert not torch.allclose(later, lm(one, return_logits=True))


def test_router_loss_only_in_training_and_adds_up_over_rows():
    lm, whole = model("qwen3_next", coefficient=0.5), batch()
    plain = lm.eval()(whole)
    with_router = lm.train()(whole)
    assert with_router > plain + 1
    halves = [
        Batch(
            whole.input_ids[i : i + 1],
            whole.labels[i : i + 1],
            whole.document_ids[i : i + 1],
            (i,),
            1,
        )
        for i in (0, 1)
    ]
    torch.testing.assert_close(sum(lm(half) for half in halves), with_router, rtol=1e-6, atol=0)


def test_router_loss_of_one_row_and_layer_is_transformers_own():
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    router = torch.nn.Identity()
    loss = RouterLoss([router], coefficient=0.1, num_layers=1)
    chosen = logits.softmax(-1).topk(2).indices
    loss.outputs = [(logits, chosen)]
    row = batch(rows=1, ignored=0)
    torch.testing.assert_close(loss(row), 0.1 * 12 * load_balancing_loss_func((logits,), 4, 2))


@pytest.mark.parametrize("family", [name for name, facts in FAMILIES.items() if facts.router])
def test_router_loss_of_one_row_and_layer_is_the_familys_own(family):
    cfg = run_config(Cell(family, "single", "full"))
    cfg = replace(cfg, model=replace(cfg.model, router_aux_loss_coef=0.5))
    config = load.read_config(cfg.model)
    config.num_hidden_layers = 1
    if family == "jamba":  # which sort a layer is of follows from where the first of that sort lies
        config.expert_layer_offset = 0
    elif family == "ernie4_5_moe":
        config.moe_layer_start_index = 0
    elif hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[:1]
    hf = load.load_whole(cfg.model, config)
    lm, row = (
        patch(CausalLM(hf, spec_of(config, hf), family_of(hf), cfg), cfg, CPU),
        batch(rows=1, ignored=0),
    )
    with torch.no_grad():
        routed = lm.train()(row) - lm.eval()(row)
        theirs = hf(input_ids=row.input_ids, output_router_logits=True).aux_loss
    torch.testing.assert_close(routed, 0.5 * 12 * theirs, rtol=1e-5, atol=0)  # 12 targets


def test_router_loss_where_there_is_no_router():
    assert not facts("llama").has_router_loss
    assert facts("qwen3_moe").has_router_loss


def facts(family: str, **config: Any) -> ModelFacts:
    cfg = run_config(Cell(family, "single", "full"))
    hf_config = load.read_config(cfg.model)
    hf_config.update(config)
    hf = load.build_meta(cfg.model, hf_config)
    return facts_of(hf, spec_of(hf_config, hf), family_of(hf))


def test_gradients_are_those_of_transformers_own_loss():
    lm, one = model("olmo_hybrid"), batch()
    lm.train()(one).backward()
    ours = {name: p.grad.clone() for name, p in lm.hf.named_parameters()}
    lm.hf.zero_grad()
    # transformers shifts labels itself: a last position without a target takes the shift.
    ids = torch.cat([one.input_ids, torch.zeros(2, 1, dtype=torch.long)], 1)
    labels = torch.cat([torch.full((2, 1), IGNORED), one.labels], 1)
    (lm.hf(input_ids=ids, labels=labels).loss * 19).backward()  # a mean over 19 targets
    for name, p in lm.hf.named_parameters():
        assert (ours[name] - p.grad).abs().max() <= 1e-5 * p.grad.abs().max(), name


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *(("llama", "attention_dropout"), ("gpt2", "attn_pdrop"), ("seed_oss", "residual_dropout")),
        ("mixtral", "router_jitter_noise"),
    ],
)
def test_noise_that_no_seed_reaches_is_a_fact(family, key):
    assert facts(family).unseeded_noise is None
    assert facts(family, **{key: 0.1}).unseeded_noise == (key, 0.1)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *((family, "is_causal", False) for family in ("llama", "qwen2", "olmo2", "gpt2")),
        ("gemma3_text", "use_bidirectional_attention", True),
    ],
)
def test_models_whose_tokens_see_later_ones_are_told_apart(family, key, value):
    """By what transformers computes with the key and without."""
    for changes in ({}, {key: value}):
        section = run_config(Cell(family, "single", "full")).model
        config = load.read_config(section)
        config.update(changes)
        hf = load.load_whole(section, config)
        ids = torch.arange(12)[None]
        later = ids.clone()
        later[0, -1] = 50
        with torch.no_grad():
            seen = not torch.equal(hf(ids).logits[0, :-1], hf(later).logits[0, :-1])
        assert seen == (facts(family, **changes).sees_ahead is not None), changes
        assert seen == bool(changes)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_precision_is_what_products_are_computed_in(precision):
    cfg = run_config(Cell("llama", "single", "full"))
    cfg = replace(cfg, training=replace(cfg.training, precision=precision))
    hf_config = load.read_config(cfg.model)
    hf = load.load_whole(cfg.model, hf_config)
    seen = []
    hf.model.layers[1].mlp.down_proj.register_forward_hook(
        lambda module, args, out: seen.append(out.dtype)
    )
    loss = patch(CausalLM(hf, spec_of(hf_config, hf), family_of(hf), cfg), cfg, CPU)(batch())
    assert seen == [getattr(torch, precision)]
    assert loss.dtype == torch.float32


def with_loss(
    path: str | Path, loss: str, lora: Lora | None = None, family: Family | None = None
) -> CausalLM:
    cfg = RunConfig(
        model=Model(str(path), init="random"),
        data=Data(train="unused"),
        training=Training(output_dir="unused", loss=loss),  # ty: ignore[invalid-argument-type]
    )
    hf_config = load.read_config(cfg.model)
    hf = with_adapters(cfg.model, lora)[0] if lora else load.load_whole(cfg.model, hf_config)
    return patch(
        CausalLM(hf, spec_of(hf_config, hf), family or family_of(hf), cfg), cfg, CPU
    ).train()


def head_and_below(lm: CausalLM) -> dict[str, Any]:
    """The loss and its gradients: of what the head reads, through which all others come, and of the
    head."""
    seen: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: Any, hidden: torch.Tensor) -> None:
        hidden.retain_grad()
        seen.append(hidden)

    with lm.hf.get_submodule(lm.spec.norm).register_forward_hook(keep):
        loss = lm(batch())
    loss.backward()
    (hidden,) = seen
    head = {
        n: p.grad
        for n, p in lm.hf.get_submodule(lm.spec.head).named_parameters()
        if p.grad is not None
    }
    return {
        "loss": loss.detach(),
        "names": {n for n, p in lm.named_parameters() if p.grad is not None},
    } | {"grads": {"hidden": hidden.grad, **head}}


def check_equal(chunked: dict[str, Any], plain: dict[str, Any]) -> None:
    torch.testing.assert_close(chunked["loss"], plain["loss"], rtol=1e-6, atol=0)
    assert chunked["names"] == plain["names"] != set()
    assert chunked["grads"].keys() == plain["grads"].keys()
    for name, grad in plain["grads"].items():
        assert grad.abs().max() > 0
        assert (chunked["grads"][name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize("preset", some_now(PRESETS, (*EACH_KIND, "tiny-qwen3_5-tied")))
def test_chunked_loss_is_that_of_transformers_logits(preset):
    chunked, plain = (with_loss(CONFIGS / preset, loss) for loss in ("chunked", "plain"))
    assert chunked.loss_in_head
    assert not plain.loss_in_head
    check_equal(head_and_below(chunked), head_and_below(plain))
    chunked, plain = chunked.eval(), plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(chunked(batch()), plain(batch()), rtol=1e-6, atol=0)
        assert torch.equal(chunked(batch(), return_logits=True), plain(batch(), return_logits=True))


def test_chunked_loss_of_a_head_in_modules_to_save():
    lora = Lora(r=4, modules_to_save=["lm_head"])
    chunked, plain = (
        with_loss(CONFIGS / "tiny-llama", loss, lora) for loss in ("chunked", "plain")
    )
    outcome = head_and_below(chunked)
    assert "modules_to_save.default.weight" in outcome["grads"]
    check_equal(outcome, head_and_below(plain))


def test_chunked_loss_with_a_soft_cap(monkeypatch, tmp_path):
    config = RecurrentGemmaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_hidden_layers=3,
        lru_width=32,
        logits_soft_cap=1.0,
    )
    config.save_pretrained(tmp_path)
    mixers = {layer_type: Mixer(layer_type, ()) for layer_type in config.layer_types}
    family = Family(
        "recurrent_gemma",
        norm="model.final_norm",
        mixers=mixers,
        logits_capped_by="logits_soft_cap",
    )
    monkeypatch.setitem(FAMILIES, "recurrent_gemma", family)
    chunked, plain = (with_loss(tmp_path, loss) for loss in ("chunked", "plain"))
    check_equal(head_and_below(chunked), head_and_below(plain))


@pytest.mark.parametrize(
    ("asked", "family", "found"),
    [
        *(
            ("auto", "llama", "chunked"),
            ("chunked", "llama", "chunked"),
            ("plain", "llama", "plain"),
        ),
        *(("auto", "unheard_of", "plain"), ("plain", "unheard_of", "plain")),
        ("triton", "llama", "is triton, but triton.*; use auto or chunked"),
    ],
)
def test_the_loss_that_a_run_has_is_known_before_it_begins(asked, family, found):
    cfg = RunConfig(Model(""), Data("unused"), Training("out", loss=asked))
    if len(found.split()) == 1:
        assert loss_of_run(cfg, Family(family), torch.device("cpu")) == found
    else:
        with pytest.raises(UserError, match=found):
            loss_of_run(cfg, Family(family), torch.device("cpu"))


def test_a_family_that_is_not_known_has_the_plain_loss():
    lm = with_loss(CONFIGS / "tiny-llama", "chunked", family=Family("unheard_of"))
    assert not lm.loss_in_head
    assert lm(batch()) == with_loss(CONFIGS / "tiny-llama", "plain")(batch())
