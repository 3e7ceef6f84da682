"""Mixers compute the project's cores: which, by what package, and the same as transformers' own."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.config import UserError
from shardwise.kernels.recurrence import Tokens
from shardwise.models.families import spec_of
from shardwise.models.kinds.base import Kind
from shardwise.models.patches.cores import backends, use_cores
from shardwise.models.patches.forget_gate import use_finite_gates
from tests.left_out import some_now
from tests.metrics.tiny_models import CONFIGS, build
from tests.models.tiny import relative_error, with_every_kind
from tests.parity.harness import Cell, run_config

CUDA = torch.device("cuda")


def kinds(family: str) -> set[Kind]:
    """The kinds of mixers of a tiny model."""
    _, spec = build(family, "meta")
    return {block.kind for layer in spec.layers for block in layer.mixers}


WITH_CORES = sorted(family for family in CONFIGS if any(kind.functions for kind in kinds(family)))


@pytest.mark.parametrize(
    "family", some_now(WITH_CORES, (*with_every_kind(WITH_CORES), "qwen3_next", "olmo_hybrid"))
)
def test_a_model_computes_what_it_computes_with_transformers_functions(family):
    ours, spec = build(family)
    config = deepcopy(ours.config)  # which knows no attention but ours, where that takes a place
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    theirs.load_state_dict(ours.state_dict())
    use_finite_gates(theirs)
    assert spec_of(theirs.config, theirs) == spec
    ids = torch.randint(0, 64, (2, 70), generator=torch.Generator().manual_seed(0))
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for model in (ours, theirs)]
    assert relative_error(*losses) < 1e-5
    for loss in losses:
        loss.backward()
    others = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None and others[name].grad.abs().max() > 0:
            assert relative_error(parameter.grad, others[name].grad) < 1e-3, name


def test_attention_that_makes_no_mask_refuses_one_that_hides_tokens():
    ours, _ = build("gemma2")
    ids, mask = torch.ones(2, 12, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
    whole = ours(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(whole, ours(input_ids=ids).logits)
    mask[0, :5] = 0
    with pytest.raises(UserError, match=r"attention_mask hides tokens.* give rows without padding"):
        ours(input_ids=ids, attention_mask=mask)


def test_a_function_that_a_mixer_does_not_call_is_an_error(monkeypatch):
    model, spec = build("lfm2")
    conv = model.get_submodule("model.layers.0.conv")
    monkeypatch.setattr(conv, "forward", MethodType(lambda self, x: x, conv))
    with pytest.raises(AssertionError, match="calls no causal_conv1d_fn"):
        use_cores(model, spec, Tokens)


@pytest.fixture
def fla(monkeypatch) -> None:
    """Pretend that fla is installed."""
    package = ModuleType("fla")
    package.__spec__ = ModuleSpec("fla", None)
    monkeypatch.setitem(sys.modules, "fla", package)


def config(precision: str = "float32", **model: Any):
    cfg = run_config(Cell("qwen3_5_text", "single", "full"))
    training = replace(cfg.training, precision=precision)
    return replace(cfg, model=replace(cfg.model, **model), training=training)


def test_a_slow_core_on_a_gpu_is_refused_unless_it_is_allowed():
    _, spec = build("qwen3_5_text", "meta")
    cores = {"gated delta rule": "torch", "short convolution": "torch"}
    assert backends(spec, config(), torch.device("cpu")) == cores
    with pytest.raises(UserError, match=r"the gated delta rule in float32 .* model.slow_cores"):
        backends(spec, config(), CUDA)
    assert backends(spec, config(slow_cores="allow"), CUDA) == cores
    _, without = build("llama", "meta")
    assert backends(without, config(), CUDA) == {}


def test_an_installed_package_computes_what_it_takes(fla):
    _, spec = build("qwen3_5_text", "meta")
    for cfg in (config("bfloat16"), config(dtype="bfloat16")):
        assert backends(spec, cfg, CUDA)["gated delta rule"] == "fla"
    assert backends(spec, config("bfloat16"), torch.device("cpu"))["gated delta rule"] == "torch"
    with pytest.raises(UserError, match="slow_cores"):
        backends(spec, config(), CUDA)  # float32, which fla does not take


@pytest.fixture
def mamba_ssm(monkeypatch) -> None:
    """Pretend that mamba_ssm is installed."""
    package = ModuleType("mamba_ssm")
    package.__spec__ = ModuleSpec("mamba_ssm", None)
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)


def test_a_kernel_that_takes_no_state_is_not_used_under_cp(mamba_ssm):
    cfg = config("bfloat16")
    cut = replace(cfg, parallel=replace(cfg.parallel, cp=2))
    _, mamba = build("jamba", "meta")
    with pytest.raises(UserError, match=r"selective scan in bfloat16 with parallel\.cp"):
        backends(mamba, cut, CUDA)
    allowed = replace(cut, model=replace(cut.model, slow_cores="allow"))
    assert backends(mamba, allowed, CUDA)["selective scan"] == "torch"
    _, mamba2 = build("granitemoehybrid", "meta")
    assert backends(mamba2, cut, CUDA)["Mamba2 scan"] == "mamba_ssm"


def test_a_kernel_that_takes_no_documents_is_not_used_for_isolated_ones(mamba_ssm):
    cfg = config("bfloat16")
    isolated = replace(cfg, data=replace(cfg.data, packing="isolated"))
    _, mamba = build("jamba", "meta")
    assert backends(mamba, cfg, CUDA)["selective scan"] == "mamba_ssm"
    with pytest.raises(UserError, match="selective scan in bfloat16 with isolated documents"):
        backends(mamba, isolated, CUDA)
    _, mamba2 = build("granitemoehybrid", "meta")
    assert backends(mamba2, isolated, CUDA)["Mamba2 scan"] == "mamba_ssm"
