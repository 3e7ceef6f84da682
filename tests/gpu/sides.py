"""The two programs that are timed: shardwise's own step, and Hugging Face's Trainer with PEFT, on
the same work.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
    default_data_collator,
)

from shardwise.assembly.build import Job, build
from shardwise.base.batches import IGNORED, Batch
from shardwise.base.interfaces import Mesh
from shardwise.config import Data, Lora, Model, Optimizer, RunConfig, Training
from shardwise.models import load
from shardwise.models.adapters import lora
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import spec_of
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import training_step
from tests.gpu import kernels
from tests.gpu.rounds import Rounds
from tests.gpu.workload import Workload

Checkpointing = Literal["none", "full"]

DIFFERENCES = (
    "Trainer (accelerate) runs the forward and the loss under autocast and turns the logits to "
    "float32 when the model returns; shardwise runs the forward under autocast and turns them to "
    "float32 for the loss.",
    "Trainer fetches, collates and pins the rows for every step (no worker processes); shardwise "
    "moves a ready batch.",
    "Both wait for the device in each step: Trainer to look for a loss that is not finite, "
    "shardwise to read it.",
    "With checkpointing, Trainer keeps and restores the random state around each layer; shardwise "
    "does not need to.",
)
"""What is not equal between the two sides."""


def run_config(
    workload: Workload,
    folder: str,
    checkpointing: Checkpointing,
    device: torch.device,
    kernel: str = "auto",
) -> RunConfig:
    """Return the work as a run file."""
    return RunConfig(
        model=Model(folder, dtype="bfloat16", slow_cores="allow"),
        lora=Lora(r=workload.r, alpha=workload.alpha, kernel=kernel),
        data=Data(train="unused", sequence_length=workload.sequence_length),
        optimizer=Optimizer(
            lr=workload.lr, lr_schedule="constant", max_grad_norm=workload.max_grad_norm
        ),
        training=Training(
            output_dir="unused",
            steps=10**6,
            global_batch_size=workload.batch,
            micro_batch_size=workload.batch,
            precision="bfloat16",
            loss="chunked" if kernel == "peft" else "auto",  # with kernels, or with none
            checkpointing=checkpointing,
            seed=workload.seed,
            device="cuda" if device.type == "cuda" else "cpu",
        ),
    )


def tokens(workload: Workload) -> torch.Tensor:
    """Return the rows of every step, [B, T] int64."""
    generator = torch.Generator().manual_seed(workload.seed)
    shape = (workload.batch, workload.sequence_length)
    return torch.randint(workload.model["vocab_size"], shape, generator=generator)


def targets(cfg: RunConfig) -> list[str]:
    """Return the names of the linears that get an adapter: shardwise's choice, for PEFT."""
    hf = load.build_meta(cfg.model, load.read_config(cfg.model))
    assert cfg.lora is not None
    lora.inject(hf, cfg.lora, spec_of(hf.config, hf))
    return list(lora.adapter_layers(hf))


def facts(hf: nn.Module, optimizer: str) -> dict[str, Any]:
    """Return what must be equal on both sides."""
    sizes: Counter[str] = Counter()
    for parameter in hf.parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        sizes[f"{kind} {parameter.dtype}".replace("torch.", "")] += parameter.numel()
    return {
        "parameters": dict(sorted(sizes.items())),
        "adapters": len(lora.adapter_layers(hf)),
        "optimizer": optimizer,
        "kernels": kernels.taken(hf),
    }


def shardwise(cfg: RunConfig, workload: Workload, device: torch.device, rounds: Rounds) -> None:
    """Run our step until `rounds` ends it; the process group must be up."""
    mesh, job, batch = prepared(cfg, workload, device)
    (part,) = job.pm.parts
    assert isinstance(part, CausalLM)
    rounds.channel.write(facts(part.hf, _describe(job.optimizer)))
    while rounds.more():
        result = training_step(job, [batch], mesh, cfg.optimizer.max_grad_norm)
        rounds.note(result.loss, result.grad_norm)


def prepared(cfg: RunConfig, workload: Workload, device: torch.device) -> tuple[Mesh, Job, Batch]:
    """Return our run and its only batch; the process group must be up."""
    mesh = build_mesh(cfg, device)
    ids = tokens(workload)
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
    batch = Batch(ids, labels, torch.zeros_like(ids), tuple(range(workload.batch)), step=1)
    return mesh, build(cfg, mesh), batch.to(device)


class _InRounds(TrainerCallback):
    """Lets Trainer's loop run in rounds."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if not self.rounds.more():
            control.should_training_stop = True  # after one more step, which is not timed

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        control.should_log = self.rounds.wants_figures

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        logs = more.get("logs") or {}
        if "loss" in logs:
            self.rounds.note(logs["loss"], logs["grad_norm"])


class _Rows(torch.utils.data.Dataset):
    def __init__(self, rows: torch.Tensor, steps: int) -> None:
        self.rows, self.steps = rows, steps

    def __len__(self) -> int:
        return len(self.rows) * self.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index % len(self.rows)]
        return {"input_ids": row, "labels": row}  # transformers shifts


def transformers(cfg: RunConfig, workload: Workload, device: torch.device, rounds: Rounds) -> None:
    """Trainer and PEFT with the same weights, first factors, rows and settings. Runs until `rounds`
    ends it.
    """
    assert cfg.lora is not None
    hf = AutoModelForCausalLM.from_pretrained(
        cfg.model.path, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    hf.config.use_cache = False
    r, alpha = cfg.lora.r, int(cfg.lora.alpha)
    adapted = get_peft_model(hf, LoraConfig(r=r, lora_alpha=alpha, target_modules=targets(cfg)))
    with torch.no_grad():
        for name, value in lora.adapter_weights(hf, cfg.training.seed):
            hf.get_parameter(name).copy_(value)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=cfg.training.steps,
            per_device_train_batch_size=workload.batch,
            train_sampling_strategy="sequential",
            bf16=True,
            optim="adamw_torch_fused",
            learning_rate=cfg.optimizer.lr,
            lr_scheduler_type="constant",
            adam_beta1=cfg.optimizer.betas[0],
            adam_beta2=cfg.optimizer.betas[1],
            adam_epsilon=cfg.optimizer.eps,
            weight_decay=cfg.optimizer.weight_decay,
            max_grad_norm=workload.max_grad_norm,
            gradient_checkpointing=cfg.training.checkpointing == "full",
            gradient_checkpointing_kwargs={"use_reentrant": False},
            seed=cfg.training.seed,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
        )
        trainer = Trainer(
            model=adapted,
            args=arguments,
            train_dataset=_Rows(tokens(workload), cfg.training.steps),
            data_collator=default_data_collator,
            callbacks=[_InRounds(rounds)],
        )
        rounds.channel.write(facts(hf, _describe(trainer.create_optimizer())))
        trainer.train()


def _describe(optimizer: torch.optim.Optimizer) -> str:
    """Return the class and the settings of an optimizer, as its groups of parameters have them."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    settings = {str({key: group[key] for key in sorted(optimizer.defaults)}) for group in groups}
    return f"{type(optimizer).__name__} {' and '.join(sorted(settings))}"
