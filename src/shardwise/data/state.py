"""Where a run is in its data: saved with a checkpoint, checked and taken up again at a resume."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.config import RunConfig, UserError
from shardwise.data.corpus import Corpus
from shardwise.data.order import METHOD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LoaderState = dict[str, Any]
"""Plain data, safe for JSON: `step` (the last one handed out), `read_from` (what the batches are a function of) and
`slots` (the fields of SlotState by slot number, which is a string)."""

NUM_DOCUMENTS = "documents to train on"


@dataclass(frozen=True)
class SlotState:
    """Where a slot's next row begins: a place in its share of an epoch, and a token of the document there."""

    epoch: int = 1
    place: int = 0
    token: int = 0
    documents: int = 0
    """How many the slot has read before that one, over all epochs, those that were left out among them."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """How many of them were left out, by reason."""

    @property
    def begun(self) -> int:
        """How many documents the slot has read, or begun to read."""
        return self.documents + (self.token > 0)


@dataclass(frozen=True)
class Counts:
    """Rows that were handed out, and documents that were read for them, each as often as it was."""

    rows: int
    begun: int
    """Documents of which a row has had a token."""
    finished: int
    """Documents that were read to their end; those that were left out among them."""
    skipped: Mapping[str, int]
    """How many of those were left out, by reason."""

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as the record of a run has them."""
        return {
            "rows": self.rows,
            "documents_begun": self.begun,
            "documents_finished": self.finished,
            "documents_skipped": sum(self.skipped.values()),
            "skipped_by_reason": dict(self.skipped),
        }

    def __str__(self) -> str:
        left_out = f", {sum(self.skipped.values()):,} left out ({describe(self.skipped)})" if self.skipped else ""
        return f"{self.rows:,} rows; documents: {self.begun:,} begun, {self.finished:,} finished{left_out}"


def describe(skipped: Mapping[str, int]) -> str:
    """The reasons why documents were left out, with their numbers."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items())) or "none"


def counts(state: LoaderState) -> Counts:
    """Return what all slots of a state have read up to its step.

    Where there are fewer documents than slots, slots share a document and read a piece of it each (`TrainStream`). It
    is begun with the first of its pieces, finished with the last, and left out where each of them was.
    """
    sharing: dict[int, list[SlotState]] = {}
    for slot, fields in state["slots"].items():
        sharing.setdefault(int(slot) % state["read_from"][NUM_DOCUMENTS], []).append(SlotState(**fields))
    skipped = Counter[str]()
    for slots in sharing.values():
        skipped += functools.reduce(operator.and_, [Counter(slot.skipped) for slot in slots])  # of each the smallest
    return Counts(
        state["step"] * len(state["slots"]),
        sum(max(slot.begun for slot in slots) for slots in sharing.values()),
        sum(min(slot.documents for slot in slots) for slots in sharing.values()),
        dict(skipped),
    )


def merge_states(states: Iterable[LoaderState]) -> LoaderState:
    """The state of the whole global batch from those of all ranks, which have handed out the same step."""
    first, *others = states
    slots = dict(first["slots"])
    for state in others:
        assert (state["step"], state["read_from"]) == (first["step"], first["read_from"]), "ranks are not in step"
        slots.update(state["slots"])
    return {**first, "slots": slots}


def loader_state(step: int, read_from: dict[str, Any], slots: Mapping[int, SlotState]) -> LoaderState:
    """The state after `step`, of these slots."""
    return {"step": step, "read_from": read_from, "slots": {str(slot): asdict(at) for slot, at in slots.items()}}


def starts(state: LoaderState | None, read_from: dict[str, Any], slots: range) -> tuple[int, dict[int, SlotState]]:
    """The step that was handed out last, and where each slot goes on; without a state, the beginning.

    UserError for a state that was saved by a run with other data.
    """
    if state is None:
        return 0, {slot: SlotState() for slot in slots}
    saved = state["read_from"]
    changed = [name for name in read_from if saved.get(name) != read_from[name]]
    if changed:
        what = ", ".join(f"{name} (was {saved.get(name)}, is {read_from[name]})" for name in changed)
        raise UserError(f"the data of this run is not that of the checkpoint: {what}; restore it, or start a new run")
    if missing := [slot for slot in slots if str(slot) not in state["slots"]]:
        raise UserError(
            f"the checkpoint does not say where slot {missing[0]} of the batch is; take another, or start anew"
        )
    return state["step"], {slot: SlotState(**state["slots"][str(slot)]) for slot in slots}


def read_from(
    cfg: RunConfig, corpus: Corpus, validation: Corpus | None, num_documents: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What the batches of a run, and of an evaluation, are a function of, under the names that an error shows."""
    return {
        NUM_DOCUMENTS: num_documents,
        "the text of data.train": corpus.fingerprint(),
        "the text of data.validation": (
            None if validation is None or validation is corpus else validation.fingerprint()
        ),
        "training.seed": cfg.training.seed,
        "training.global_batch_size": cfg.training.global_batch_size,
        "data.sequence_length": cfg.data.sequence_length,
        "data.packing": cfg.data.packing,
        "data.format": cfg.data.format,
        "data.text_field": cfg.data.text_field,
        "data.weights": cfg.data.weights,
        "the order of the documents": METHOD,
        "the tokenizer": _tokenizer_fingerprint(tokenizer),
    }


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # the fast ones' whole pipeline; slow ones have none
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    special = json.dumps([tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.chat_template])
    return hashlib.blake2b((vocabulary + special).encode(), digest_size=8).hexdigest()
