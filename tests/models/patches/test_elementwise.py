"""Norms and gated MLPs compute what transformers computes, and keep less."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from shardwise.models.patches import cores, elementwise
from shardwise.models.patches.elementwise import use_kernels
from tests.kernels.gates import kept_elements
from tests.left_out import some_now
from tests.metrics.tiny_models import CONFIGS, build
from tests.models.tiny import relative_error, with_every_kind
from tests.parity.harness import Cell, run_config

WITHOUT = {"gpt2"}
"""Families whose norms and MLPs are others."""


def replaced(model: nn.Module) -> dict[str, str]:
    """The names of the forwards that the patch gave, by the class of the module."""
    return {
        type(module).__name__: module.forward.__name__
        for module in model.modules()
        if module.forward.__module__ == elementwise.__name__
    }


@pytest.mark.parametrize("path", [*elementwise.REPLACED, *cores.ROTATED])
def test_what_is_compiled_from_its_text_is_what_transformers_imports(path):
    family, _, name = path.partition(".")
    theirs = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)
    code = elementwise.code_of if path in cores.ROTATED else elementwise._code_of
    ours = elementwise.reference(path)
    assert code(ours) == code(theirs)
    assert code(ours) not in ((), ((), ()))


@pytest.mark.parametrize("family", some_now(CONFIGS, with_every_kind(CONFIGS)))
def test_a_model_computes_what_it_computes_without(family):
    theirs, _ = build(family)
    ours = deepcopy(theirs)
    use_kernels(ours)
    assert (not replaced(ours)) == (family in WITHOUT)
    ids = torch.randint(0, 64, (2, 30), generator=torch.Generator().manual_seed(0))
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for model in (ours, theirs)]
    assert relative_error(*losses) < 1e-6
    for loss in losses:
        loss.backward()
    others = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None and others[name].grad.abs().max() > 0:
            assert relative_error(parameter.grad, others[name].grad) < 1e-4, name


def test_mlps_shared_experts_and_norms_are_found():
    model, _ = build("qwen3_next", "meta")
    use_kernels(model)
    assert replaced(model) == {
        "Qwen3NextMLP": "_mlp",
        "Qwen3NextRMSNorm": "_norm_around_one",
        "Qwen3NextRMSNormGated": "_gated_norm",
    }
    model, _ = build("kimi_linear", "meta")
    use_kernels(model)
    assert replaced(model) == {
        "KimiLinearMLP": "_mlp",
        "KimiLinearRMSNorm": "_norm",
        "KimiLinearRMSNormGated": "_gated_norm",
    }


def mlp(activation: str = "silu") -> LlamaMLP:
    model, _ = build("llama")
    block = model.model.layers[0].mlp
    block.act_fn = ACT2FN[activation]
    return block


class Doubled(LlamaMLP):
    """An MLP with a code of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_another_activation_is_left_alone(activation):
    block = mlp(activation)
    use_kernels(block)
    assert replaced(block) == {}


def test_another_forward_is_left_alone():
    block = Doubled(mlp().config)
    use_kernels(block)
    assert replaced(block) == {}


def test_an_mlp_keeps_no_activation():
    block = mlp().requires_grad_(False)
    x = torch.randn(1, 9, 32, requires_grad=True)
    before = kept_elements(block, [x])
    use_kernels(block)
    assert before - kept_elements(block, [x]) == 9 * block.intermediate_size


def test_a_multiplier_that_is_left_out_shows(monkeypatch):
    theirs, _ = build("falcon_h1")
    ours = deepcopy(theirs)
    for module in (*theirs.modules(), *ours.modules()):
        if hasattr(module, "gate_multiplier"):
            module.gate_multiplier = 3.0
    use_kernels(ours)
    ids = torch.arange(20)[None]
    expected = theirs(ids, use_cache=False).logits
    assert relative_error(ours(ids, use_cache=False).logits, expected) < 1e-5
    code = elementwise._code_of(FalconH1MLP)
    monkeypatch.setitem(elementwise.OURS, code, elementwise._mlp)
    use_kernels(ours)
    assert relative_error(ours(ids, use_cache=False).logits, expected) > 1e-3


@pytest.mark.parametrize(("package", "name"), [("liger_kernel", "norms"), ("fla", "gates")])
def test_what_computes_them_is_said_for_a_gpu(package, name, monkeypatch):
    cfg = run_config(Cell("llama", "single", "full"))
    cuda = torch.device("cuda")
    assert elementwise.backends(cfg, cuda) == {"norms": "torch", "gates": "torch"}
    module = ModuleType(package)
    module.__spec__ = ModuleSpec(package, None)
    monkeypatch.setitem(sys.modules, package, module)
    assert elementwise.backends(cfg, cuda)[name] == package
    compiled = replace(cfg, training=replace(cfg.training, compile="inductor"))
    assert elementwise.backends(compiled, cuda)[name] == "torch"
    assert elementwise.backends(cfg, torch.device("cpu")) == {}
