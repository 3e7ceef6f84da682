"""DoRA on one process is PEFT's: where it starts, loss, gradients, four steps of AdamW, files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from shardwise.assembly.build import build
from shardwise.base.batches import IGNORED
from shardwise.config import Lora, Model, Optimizer, RunConfig, UserError
from shardwise.models.adapters.coverage import audit
from shardwise.models.adapters.lora import inject
from shardwise.models.adapters.peft_config import folder_weights, section_of
from shardwise.models.adapters.writing import export_adapter, merge_adapter, save_adapter
from shardwise.models.families import spec_of
from shardwise.models.kinds import RATES
from shardwise.models.multimodal import multimodal_of
from shardwise.models.names import adapter_layers, hf_name, is_adapter, is_magnitude
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward, training_step
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models import multimodal
from tests.models.tiny import entries, logits, on_meta, relative_error, trained, with_adapters
from tests.parity.harness import Cell, DrawnStart, microbatches, run_config

STEPS = 4
FAMILIES = ("llama", "gpt2", "qwen3_5_text", "jamba")
EXACT = 1e-5


def config(family: str) -> RunConfig:
    cfg = run_config(Cell(family, "single", "lora", dora=True), optimizer="adamw")
    # Above most gradients: AdamW makes steps of rounding errors in tiny ones.
    optimizer = Optimizer(lr=0.01, eps=1e-3, weight_decay=0.1, max_grad_norm=1e9)
    training = replace(cfg.training, steps=STEPS, global_batch_size=2)
    model = replace(cfg.model, router_aux_loss_coef=0.0)
    return replace(cfg, model=model, optimizer=optimizer, training=training)


def of_peft(cfg: RunConfig, job: Any) -> PreTrainedModel:
    """The model of transformers with PEFT's own DoRA, with the factors of a run."""
    model = AutoModelForCausalLM.from_config(job.run.hf.config)
    model.load_state_dict(entries(cfg.model, cfg.training.seed), strict=False)
    model.requires_grad_(False)
    ours = dict(job.pm.named_parameters())
    assert cfg.lora is not None
    holder = nn.ModuleDict({"model": model})
    config = LoraConfig(
        r=cfg.lora.r,
        lora_alpha=int(cfg.lora.alpha),
        use_dora=True,
        fan_in_fan_out=job.run.spec.family == "gpt2",
        target_modules=[f"model.{path}" for path in adapter_layers(job.run.hf)],
    )
    inject_adapter_in_model(config, holder)
    for name, parameter in model.named_parameters():
        is_factor = is_adapter(name) and not is_magnitude(name)
        if is_factor or name.rpartition(".")[2] in RATES:  # `DrawnStart` draws both
            parameter.data.copy_(ours[name])
        elif not is_adapter(name):
            assert torch.equal(parameter, ours[name]), hf_name(name)
    return model.train()


def loss_of(model: PreTrainedModel, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    return F.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED
    )


def steps(family: str) -> tuple[dict[str, float], set[str]]:
    """The largest relative differences between a run and PEFT's model by kind, and what weight
    decay acts on."""
    cfg = config(family)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, DrawnStart())
    ours = {n: p for n, p in job.pm.named_parameters() if p.requires_grad}
    peft = of_peft(cfg, job)
    theirs = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()

    def worst(of_ours: Any, of_theirs: Any) -> float:
        return max(relative_error(of_ours(ours[n]), of_theirs(theirs[n])) for n in ours)

    names = filter(is_magnitude, ours)
    errors = {"start": max(relative_error(ours[n], theirs[n]) for n in names)}
    decayed = {
        name
        for group in job.optimizer.param_groups
        if group["weight_decay"]
        for name in group["param_names"]
    }
    groups = [
        {
            "params": [p for n, p in theirs.items() if (n in decayed) == is_decayed],
            "weight_decay": d,
        }
        for is_decayed, d in ((True, cfg.optimizer.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.optimizer.lr, eps=cfg.optimizer.eps)
    (batch,) = microbatches(cfg, mesh, 1)
    forward_backward(job.pm, [batch], mesh)
    loss_of(peft, batch).backward()
    errors["gradients"] = worst(lambda p: p.grad, lambda p: p.grad)
    for parameter in ours.values():
        parameter.grad = None
    errors["loss"] = 0.0
    for step in range(1, STEPS + 1):
        (batch,) = microbatches(cfg, mesh, step)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = (
            job.lr_schedule.get_last_lr()[0]
        )
        loss = training_step(job, [batch], mesh, cfg.optimizer.max_grad_norm).loss
        optimizer.zero_grad()
        expected = loss_of(peft, batch)
        expected.backward()
        optimizer.step()
        errors["loss"] = max(errors["loss"], abs(loss / expected.item() - 1))
    errors["parameters"] = worst(lambda p: p.detach(), lambda p: p.detach())
    moved = [n for n in ours if is_magnitude(n)]
    assert all(len(optimizer.state[theirs[n]]) for n in moved)
    return errors, decayed


@pytest.mark.parametrize("family", some_now(FAMILIES, ("gpt2", "qwen3_5_text")))
def test_four_steps_are_those_of_peft(family):
    ((errors, decayed),) = run_ranks(1, steps, family)
    assert max(errors.values()) < EXACT, errors
    assert decayed
    assert not any(map(is_magnitude, decayed))


def test_an_adapter_of_a_multimodal_class_is_read_by_all_and_by_no_server(tmp_path):
    """PEFT loads it, a merge has it, `lora.path` starts from it, and `shardwise check` finds
    nothing."""
    multimodal.write(tmp_path / "base")
    base, section = Model(str(tmp_path / "base")), Lora(r=3, alpha=7.0, dora=True)
    model, _ = with_adapters(base, section)
    expected, adapter = logits(model), tmp_path / "adapter"
    save_adapter(model, section, trained(model), adapter, base.path, multimodal_of(base, model))
    whole = AutoModelForImageTextToText.from_pretrained(base.path)
    with pytest.warns(FutureWarning):  # PEFT 0.21 uses a name that transformers will drop
        loaded: Any = PeftModel.from_pretrained(whole, adapter)
    assert relative_error(logits(loaded), expected) < EXACT
    merge_adapter(base, adapter, tmp_path / "merged")
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert relative_error(logits(merged), expected) < EXACT
    text = on_meta(base)
    found = section_of(Lora(path=str(adapter)), base, text)
    assert (found.dora, found.r) == (True, 3)
    inject(text, found, spec_of(text.config, text))
    names = {name for name, p in text.named_parameters() if p.requires_grad}
    assert dict(folder_weights(found, base, text, names)).keys() == names
    assert audit(adapter, base).findings == ()
    export_adapter(base, adapter, tmp_path / "hf", "hf")
    assert len(load_file(tmp_path / "hf" / "adapter_model.safetensors")) == len(trained(model))
    with pytest.raises(UserError, match=r"plain LoRA only, .* use_dora"):
        export_adapter(base, adapter, tmp_path / "vllm", "vllm")
