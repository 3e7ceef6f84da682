"""The work that is the same for every side, and what is taken from its steps.

A global batch has `MICROBATCHES` micro-batches of `ROWS` rows; rank r of n trains those of number
r, r + n and so on. A micro-batch is what a model of transformers takes: `input_ids` and `labels`,
which it shifts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from tools.peers.sides import MAX_NORM, MICROBATCHES, MODEL, RANK, ROWS, TOKENS
from tools.speed_of_cores import plain_model
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from shardwise.base.batches import IGNORED
from shardwise.config import Data, Lora, Model, Optimizer, RunConfig, Training
from shardwise.metrics.memory import PeakMemory, tensor_bytes

CPU = torch.device("cpu")
Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """What one process of a side does."""

    option: str
    """Which way of its system a side takes, such as the stage of ZeRO."""
    lora: bool
    rank: int
    num_ranks: int
    learning_rate: float
    folder: str

    def config(self) -> RunConfig:
        """Return our run, from which the model and the adapters of all sides follow."""
        size = {"global_batch_size": MICROBATCHES * ROWS, "micro_batch_size": ROWS}
        return RunConfig(
            model=Model(MODEL, init="random"),
            data=Data("unused", sequence_length=TOKENS),
            training=Training("unused", device="cpu", **size),
            lora=Lora(r=RANK, alpha=2 * RANK, targets="all-linear") if self.lora else None,
            optimizer=Optimizer(
                lr=self.learning_rate, lr_schedule="constant", max_grad_norm=MAX_NORM
            ),
        )

    def model(self) -> Any:
        """Return the model of transformers with our weights; with LoRA, adapted by PEFT."""
        return plain_model(self.config())

    def adamw(self, model: Any) -> AdamW:
        """Return torch's AdamW of the weights that are trained."""
        return AdamW(
            [p for p in model.parameters() if p.requires_grad],
            self.learning_rate,
            weight_decay=0,
            fused=True,  # as ours and Trainer's are
        )

    def share(self, batch: Sequence[Rows]) -> Sequence[Rows]:
        """Return this rank's micro-batches of a global batch."""
        return batch[self.rank :: self.num_ranks]


def layers_of(model: Any) -> Any:
    """Return the list of decoder layers, with or without PEFT's wrapper."""
    return getattr(model, "get_base_model", lambda: model)().model.layers


@cache
def _text() -> torch.Tensor:
    """Return the manual of Python as one token per byte."""
    return torch.frombuffer(
        bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8
    ).long()


def batch(step: int) -> list[Rows]:
    """Return a global batch in which every token but a row's first is a target."""
    size = MICROBATCHES * ROWS * TOKENS
    rows = _text()[step * size : (step + 1) * size].view(MICROBATCHES, ROWS, TOKENS)
    return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]


def uneven() -> list[Rows]:
    """Return a global batch whose micro-batches have 127, 95, 63 and 31 targets in a row."""
    rows = batch(0)
    for number, microbatch in enumerate(rows):
        microbatch["labels"][:, TOKENS * (MICROBATCHES - number) // MICROBATCHES :] = IGNORED
    return rows


def packed(number: int) -> list[Rows]:
    """Return rows of two documents, told by `position_ids`, of which the second has targets.

    The first documents of different numbers differ, the second ones are the same.
    """
    half = TOKENS // 2
    rows = batch(0)
    for microbatch, other in zip(rows, batch(number), strict=True):
        ids, labels = microbatch["input_ids"].clone(), microbatch["labels"]
        ids[:, :half] = other["input_ids"][:, :half]
        labels[:, : half + 1] = IGNORED
        positions = torch.arange(half).repeat(2).expand(ROWS, TOKENS).contiguous()
        microbatch |= {"input_ids": ids, "position_ids": positions}
    return rows


@dataclass
class Watch:
    """Takes the seconds of each step, the peak of the one numbered `memory_step`, and losses."""

    memory_step: int | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    _peak: PeakMemory | None = None
    _start: float = 0.0

    def begin(self) -> None:
        """Start a step on all ranks together."""
        dist.barrier()
        if len(self.seconds) == self.memory_step:
            self._peak = PeakMemory(CPU)
            self._peak.__enter__()
        self._start = time.perf_counter()

    def end(self) -> None:
        """End a step, after the update and the zeroing of gradients."""
        self.seconds.append(time.perf_counter() - self._start)
        if self._peak is not None:
            self._peak.__exit__(None, None, None)
            assert self._peak.peak_bytes is not None
            self.peak_bytes = self._peak.peak_bytes + hidden_bytes()
            self._peak = None

    def took(self, loss: float, norm: float) -> None:
        """Note a step's mean loss and gradient norm, as the side reports them."""
        self.losses.append(loss)
        self.norms.append(norm)


def hidden_bytes() -> int:
    """Return the buckets of torch's DDP that only C++ can reach: those that no gradient views."""
    wraps = [found for found in gc.get_objects() if type(found) is DistributedDataParallel]
    trained = [p for ddp in wraps for p in ddp.parameters() if p.requires_grad]
    return 0 if any(ddp.gradient_as_bucket_view for ddp in wraps) else tensor_bytes(trained)


def mean_over_ranks(losses: Iterable[torch.Tensor]) -> float:
    """Return the mean over a rank's micro-batches and over ranks, as usual loops report it."""
    mean = torch.stack([loss.detach() for loss in losses]).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
