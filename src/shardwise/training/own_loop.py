"""A training loop of the caller, on the same session as `train`."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.assembly.build import Job, build
from shardwise.assembly.describe import describe
from shardwise.assembly.own import describe_own, own_state
from shardwise.base.batches import IGNORED, AnyBatch, Batch, TensorBatch
from shardwise.base.interfaces import Evaluation, Mesh
from shardwise.base.process.watchdog import paused
from shardwise.base.records.record import RunRecord
from shardwise.checkpoint.resume import Start, find_start
from shardwise.config import RunConfig, require
from shardwise.config.ranges import shown
from shardwise.data.loader import Loaders
from shardwise.data.state import Position, SlotState
from shardwise.metrics.meter import Meter
from shardwise.models.own import OwnModel
from shardwise.training.instruments import Instruments, StepObserver
from shardwise.training.session import Session
from shardwise.training.step import StepResult

_prepared: WeakValueDictionary[int, Mesh] = WeakValueDictionary()
"""The meshes, of which each run has one, that a loop was prepared on, by their `id`."""


def prepare(
    cfg: RunConfig, mesh: Mesh, model: nn.Module | None, instruments: Instruments
) -> "OwnLoop":
    """Return the run of a caller's loop on this rank: see `commands.library.prepare`."""
    _check("prepare", "cfg", cfg, RunConfig)
    _check("prepare", "mesh", mesh, Mesh)
    _check("prepare", "model", model, nn.Module | None)
    require(
        not isinstance(model, PreTrainedModel),
        "model is a transformers model; name its folder in model.path, and leave the argument out",
    )
    require(
        model is not None or not cfg.model.is_callers,
        "there is no model; name its folder in model.path, or give `prepare` a module",
    )
    require(
        cfg.training.num_steps is not None,
        "training.epochs counts documents, which a loop of the caller reads itself; set "
        "training.steps instead",
    )
    require(
        id(mesh) not in _prepared,
        "`prepare` was called twice in a run, which has one record; start another run for it",
    )
    meter = Meter(cfg.measure.warmup_steps)
    with paused():  # reads a whole checkpoint for its checksums
        start = find_start(cfg)
    state, describing = start.state(), describe
    if model is not None:
        own = OwnModel.of(model)
        describing = partial(describe_own, own)
        state = own_state(cfg, own) if start.folder is None else state
    chosen = instruments.choose(cfg, mesh, state.lora, describing)
    job = build(cfg, mesh, state, chosen=chosen, describe=describing)
    loop = OwnLoop(cfg, mesh, job, start, meter, instruments.observer(cfg, mesh))
    _prepared[id(mesh)] = mesh
    return loop


class OwnLoop(Session):
    """A session whose rows are the caller's."""

    def __init__(
        self,
        cfg: RunConfig,
        mesh: Mesh,
        job: Job,
        start: Start,
        meter: Meter,
        observer: StepObserver,
    ) -> None:
        slots = mesh.slots(cfg.training.global_batch_size)
        beginning, filled = dict.fromkeys(slots, SlotState()), dict.fromkeys(slots, 0)
        source, num_steps = {"the rows": "those of a loop of the caller"}, job.num_steps
        loaders = Loaders(
            train=_nothing(),
            validation=None,
            state=lambda: Position(self.done, beginning, filled).to_dict(source),
            first_step=list,
            again=_nothing,
            num_steps=lambda slots, gather: num_steps,
        )
        super().__init__(cfg, mesh, job, start, loaders, meter, observer)
        self._latest: Sequence[AnyBatch] = ()

    def step(self, microbatches: Sequence[AnyBatch]) -> StepResult:
        """See Session; UserError for other rows than this rank's of the next step."""
        _check_microbatches("step", microbatches)
        number, slots = self.done + 1, [slot for batch in microbatches for slot in batch.slots]
        require(
            slots == list(self.slots) and all(batch.step == number for batch in microbatches),
            f"step {number}: this rank reads the slots {list(self.slots)}, and was given those of "
            f"{slots} of step {microbatches[0].step if microbatches else 'none'}; make them with "
            f"microbatches({number}, rows)",
        )
        self._latest = microbatches
        return super().step(microbatches)

    def evaluate(self, batches: Iterable[Sequence[AnyBatch]]) -> Evaluation:
        """See Session; UserError for what are no global batches."""
        _check("evaluate", "batches", batches, Iterable)
        return super().evaluate(_checked(batches))

    def finish(self, tokenizer: PreTrainedTokenizerBase | None = None) -> RunRecord | None:
        """See Session; with `measure.memory` the latest rows run once more, to measure memory."""
        _check("finish", "tokenizer", tokenizer, _Saves | None)
        record = super().finish(tokenizer)
        if self.cfg.measure.memory and self._latest:
            record = self.measure_memory(self._latest)
        return record

    def microbatches(
        self, step: int, rows: Mapping[str, torch.Tensor], targets: Sequence[int] | None = None
    ) -> list[AnyBatch]:
        """Return this rank's rows of a global batch as micro-batches, which `step` takes.

        `rows`: tensors whose first dim is the rows of `slots`, in their order. A transformers model
        needs `input_ids` and `labels` [S, T] int64, where labels[s, t] is the token after
        input_ids[s, t], or -100; it takes `document_ids` too, which packing needs. A module of the
        caller gets all tensors under their names. `targets`: of each row, of what the module's
        loss is a sum; None: as many as its `labels` has numbers other than -100.
        """
        _check("microbatches", "step", step, Integral)
        _check("microbatches", "rows", rows, Mapping)
        _check("microbatches", "targets", targets, Sequence | torch.Tensor | None)
        for number in () if targets is None else targets:
            _check("microbatches", "targets", number, Integral | torch.Tensor)
        size, slots = self.cfg.training.micro_batch_size, list(self.slots)
        for name, tensor in rows.items():
            require(
                isinstance(tensor, torch.Tensor),
                f"step {step}: {name} is a {type(tensor).__name__}; give a tensor",
            )
            require(
                tensor.dim() > 0 and len(tensor) == len(slots),
                f"step {step}: {name} has shape {list(tensor.shape)}, but this rank reads "
                f"{len(slots)} rows, {slots[0]} to {slots[-1]}; give these",
            )
        num_targets = len(slots) if targets is None else len(targets)
        require(
            num_targets == len(slots),
            f"step {step}: `targets` has {num_targets} numbers, but this rank reads "
            f"{len(slots)} rows, {slots[0]} to {slots[-1]}; give one for each",
        )
        is_own = self.job.run.spec.is_own
        microbatches: list[AnyBatch] = []
        for first in range(0, len(slots), size):
            part = {name: tensor[first : first + size] for name, tensor in rows.items()}
            places = tuple(slots[first : first + size])
            if is_own:
                counts = None if targets is None else sum(targets[first : first + size])
                microbatches.append(_tensor_batch(part, counts, places, step))
            else:
                microbatches.append(self._token_batch(part, places, step))
        return microbatches

    def _token_batch(
        self, rows: Mapping[str, torch.Tensor], slots: tuple[int, ...], step: int
    ) -> Batch:
        length = self.cfg.data.sequence_length
        for name in ("input_ids", "labels"):
            require(
                name in rows and rows[name].shape == (len(slots), length),
                f"step {step}: {name} has to be [rows, {length}]; give it, or set "
                "data.sequence_length",
            )
        for name, tensor in rows.items():
            require(
                tensor.dtype == torch.int64, f"step {step}: {name} is of {tensor.dtype}; give int64"
            )
        vocab_size, labels = self.job.run.spec.vocab_size, rows["labels"]
        for name, tokens in (
            ("input_ids", rows["input_ids"]),
            ("labels", labels[labels != IGNORED]),
        ):
            require(
                bool(((tokens >= 0) & (tokens < vocab_size)).all()),
                f"step {step}: {name} has a token id that is not in the vocabulary, which is 0 to "
                f"{vocab_size - 1}; use the tokenizer of the model",
            )
        documents = rows.get("document_ids")
        if documents is None:
            documents = torch.zeros_like(rows["input_ids"])
        return Batch(rows["input_ids"], rows["labels"], documents, slots, step)


@runtime_checkable
class _Saves(Protocol):
    """A tokenizer, of which no more is asked."""

    def save_pretrained(self, folder: str) -> object:
        """Write its files."""
        ...


def _check(method: str, name: str, value: object, kind: Any) -> None:
    """Raise UserError for an argument that is not of its type."""
    wanted = getattr(kind, "__name__", str(kind)).replace("_Saves", "a tokenizer")
    require(
        isinstance(value, kind) and not isinstance(value, str),
        f"`{method}` was given {shown(value)} as {name}; give {wanted}",
    )


def _check_microbatches(method: str, microbatches: Any) -> None:
    _check(method, "microbatches", microbatches, Sequence)
    for batch in microbatches:
        _check(method, "a micro-batch", batch, Batch | TensorBatch)


def _checked(batches: Iterable[Sequence[AnyBatch]]) -> Iterator[Sequence[AnyBatch]]:
    for microbatches in batches:
        _check_microbatches("evaluate", microbatches)
        require(
            len(microbatches) > 0,
            "`evaluate` was given a global batch without micro-batches; make them with "
            "microbatches(step, rows)",
        )
        yield microbatches


def _tensor_batch(
    rows: Mapping[str, torch.Tensor], targets: int | None, slots: tuple[int, ...], step: int
) -> TensorBatch:
    if targets is None:
        require(
            "labels" in rows,
            f"step {step}: the number of targets is not known; give `targets`, a number for each "
            "row, or a tensor `labels`",
        )
        targets = int((rows["labels"] != IGNORED).sum())
    return TensorBatch(rows, targets, slots, step)


def _nothing() -> Generator[list[Batch], None, None]:
    yield from ()
