"""The module that strategies split: loss, router loss, logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

from shardwise.config import UserError
from shardwise.interfaces import IGNORED, Batch
from shardwise.models import load
from shardwise.models.causal_lm import CausalLM, RouterLoss
from shardwise.models.families import family_of, spec_of
from tests.parity.harness import Cell, run_config


def model(family: str, coefficient: float = 0.0) -> CausalLM:
    cfg = run_config(Cell(family, "single", "full"))
    cfg = replace(cfg, model=replace(cfg.model, router_aux_loss_coef=coefficient))
    hf_config = load.read_config(cfg.model)
    hf = load.load_whole(cfg.model, hf_config)
    return CausalLM(hf, spec_of(hf_config, hf), family_of(hf), cfg)


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
    expected = -F.log_softmax(logits.double(), -1).gather(-1, one.labels.clamp(min=0)[..., None])[..., 0][mask].sum()
    assert mask.sum() == 19
    torch.testing.assert_close(lm(one).double(), expected, rtol=1e-6, atol=0)


def test_router_loss_only_in_training_and_adds_up_over_rows():
    lm, whole = model("qwen3_next", coefficient=0.5), batch()
    plain = lm.eval()(whole)
    with_router = lm.train()(whole)
    assert with_router > plain + 1
    halves = [
        Batch(whole.input_ids[i : i + 1], whole.labels[i : i + 1], whole.document_ids[i : i + 1], (i,), 1)
        for i in (0, 1)
    ]
    torch.testing.assert_close(sum(lm(half) for half in halves), with_router, rtol=1e-6, atol=0)


def test_router_loss_of_one_row_and_layer_is_transformers_own():
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    router = torch.nn.Identity()
    loss = RouterLoss([router], coefficient=0.1)
    chosen = logits.softmax(-1).topk(2).indices
    loss.outputs = [(logits, chosen)]
    row = batch(rows=1, ignored=0)
    torch.testing.assert_close(loss(row), 0.1 * 12 * load_balancing_loss_func((logits,), 4, 2))


def test_router_loss_where_there_is_no_router():
    with pytest.raises(UserError, match=r"router_aux_loss_coef is 0.5, but llama has no router"):
        model("llama", coefficient=0.5)


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


@pytest.mark.parametrize(("family", "key"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")])
def test_attention_dropout_is_refused(family, key):
    cfg = run_config(Cell(family, "single", "full"))
    hf_config = load.read_config(cfg.model)
    setattr(hf_config, key, 0.1)
    hf = load.build_meta(cfg.model, hf_config)
    with pytest.raises(UserError, match=rf"{key} is 0.1 .* set it to 0.0"):
        CausalLM(hf, spec_of(hf_config, hf), family_of(hf), cfg)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_precision_is_what_products_are_computed_in(precision):
    cfg = run_config(Cell("llama", "single", "full"))
    cfg = replace(cfg, training=replace(cfg.training, precision=precision))
    hf_config = load.read_config(cfg.model)
    hf = load.load_whole(cfg.model, hf_config)
    seen = []
    hf.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    loss = CausalLM(hf, spec_of(hf_config, hf), family_of(hf), cfg)(batch())
    assert seen == [getattr(torch, precision)]
    assert loss.dtype == torch.float32
