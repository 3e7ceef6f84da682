"""`training.cast: weights`: a forward of the class in bfloat16, an update in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from shardwise.assembly.build import build
from shardwise.base.batches import Batch
from shardwise.config import Data, Model, Optimizer, RunConfig, Training
from shardwise.models.load import load_whole, read_config
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.distributed import run_ranks
from tests.models.tiny import CONFIGS, TINY_OF

LENGTH, STEP = 16, 1e-3


def config(family: str) -> RunConfig:
    return RunConfig(
        model=Model(str(CONFIGS / TINY_OF[family]), init="random"),
        data=Data(train="unused", sequence_length=LENGTH),
        optimizer=Optimizer(name="sgd", lr=STEP, lr_schedule="constant", max_grad_norm=None),
        training=Training(
            "unused",
            steps=1,
            global_batch_size=4,
            micro_batch_size=2,
            precision="bfloat16",
            cast="weights",
            loss="plain",
            device="cpu",
        ),
    )


def rows(cfg: RunConfig) -> list[Batch]:
    ids = torch.randint(256, (2, 2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    slots = (0, 1)
    return [Batch(x[:, :-1], x[:, 1:], torch.zeros_like(x[:, 1:]), slots, step=1) for x in ids]


def one_step(cfg: RunConfig) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the loss of a step, the weights before it and those after it."""
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh)
    (part,) = job.pm.parts
    before = {name: p.detach().clone() for name, p in part.hf.named_parameters()}
    result = training_step(job, rows(cfg), mesh, cfg.optimizer.max_grad_norm)
    return result.loss, before, {n: p.detach().clone() for n, p in part.hf.named_parameters()}


def by_transformers(cfg: RunConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss of the class in bfloat16, and the float32 sum of its gradients."""
    narrow = replace(cfg.model, dtype="bfloat16")
    model = load_whole(narrow, read_config(narrow), seed=cfg.training.seed).train()
    sums: dict[str, torch.Tensor] = {}
    total, batches = 0.0, rows(cfg)
    num_targets = sum(batch.labels.numel() for batch in batches)
    for batch in batches:
        logits = model(input_ids=batch.input_ids, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        (loss / num_targets).backward()
        total += float(loss.detach())
        for name, p in model.named_parameters():
            assert p.grad is not None
            sums[name] = sums.get(name, torch.zeros_like(p, dtype=torch.float32)) + p.grad
        model.zero_grad()
    return total / num_targets, sums


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "falcon_h1", "gpt2", "lfm2"])
def test_a_step_is_that_of_the_class_in_bfloat16_with_float32_weights(family):
    """Half of such updates would be lost in bfloat16 weights; here they are the gradients."""
    cfg = config(family)
    ((loss, before, after),) = run_ranks(1, one_step, cfg)
    expected, gradients = by_transformers(cfg)
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in gradients.items():
        assert before[name].dtype == after[name].dtype == torch.float32
        error = after[name] - (before[name] - STEP * gradient)
        most = 0.05 * STEP * gradient.norm() + 2**-24 * before[name].norm()
        assert error.norm() <= most, name
