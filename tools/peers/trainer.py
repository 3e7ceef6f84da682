"""Hugging Face Trainer with PEFT: its own loop, watched by a callback."""

from __future__ import annotations

from typing import Any

from tools.peers.sides import MAX_NORM, MICROBATCHES, ROWS
from tools.peers.work import Rows, Watch, Work, layers_of
from transformers import Trainer, TrainerCallback, TrainingArguments

Built = list[Any]


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
    return [model, arguments]


def train(built: Built, batches: list[list[Rows]], watch: Watch, work: Work) -> None:
    """Train on the batches, whose micro-batches its loader gives to the ranks in turn."""
    rows = [
        {name: tensor[row] for name, tensor in microbatch.items()}
        for batch in batches
        for microbatch in batch
        for row in range(ROWS)
    ]
    trainer = Trainer(*built, train_dataset=rows, callbacks=[Watching(watch)])
    trainer.train()
    built[0] = trainer.model


class Watching(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.watch.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.watch.end()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.watch.took(logs["loss"], logs["grad_norm"])
