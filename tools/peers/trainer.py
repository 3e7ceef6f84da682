"""Hugging Face Trainer with PEFT: its own loop, watched by a callback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tools.peers.sides import MAX_NORM, MICROBATCHES, ROWS
from tools.peers.work import Rows, Watch, Work, layers_of
from transformers import Trainer, TrainerCallback, TrainingArguments

Built = dict[str, Any]


def build(work: Work) -> Built:
    """Return the model and the arguments; with the option `fsdp2`, those that ask for FSDP2."""
    model = work.model()
    asked: dict[str, Any] = {}
    if work.option == "fsdp2":
        layer = type(layers_of(model)[0]).__name__
        asked = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": [layer]}}
    arguments = TrainingArguments(
        work.folder,
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICROBATCHES // work.num_ranks,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_NORM,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **asked,
    )
    return {"model": model, "arguments": arguments}


def train(built: Built, batches: list[list[Rows]], watch: Watch, work: Work) -> None:
    """Train on the batches, whose micro-batches its loader gives to the ranks in turn."""
    rows = [
        {name: tensor[row] for name, tensor in microbatch.items()}
        for batch in batches
        for microbatch in batch
        for row in range(ROWS)
    ]
    trainer = Trainer(
        built["model"], built["arguments"], train_dataset=rows, callbacks=[_Watching(watch)]
    )
    trainer.train()
    built["model"] = trainer.model


def weights(built: Built) -> Iterable[torch.Tensor]:
    """Return what this rank holds of the weights."""
    return built["model"].parameters()


class _Watching(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.watch.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.watch.end()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.watch.took(logs["loss"], logs["grad_norm"])
