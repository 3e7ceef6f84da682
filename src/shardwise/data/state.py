"""The position of a run in its data: saved with a checkpoint, and restored by a resume."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardwise.config import RunConfig, UserError
from shardwise.data.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shardwise.data.corpus import Corpus
    from shardwise.data.order import Order
    from shardwise.data.streaming import Streamed, StreamOrder, StreamPass

LoaderState = dict[str, Any]
"""Plain data, safe for JSON.

`step` is the last step whose batches were given out. `read_from` names everything that the batches
depend on. `slots` has the fields of SlotState by the number of the slot, as a string.
"""

NUM_DOCUMENTS = "documents to train on"


@dataclass(frozen=True)
class SlotState:
    """Where the next row of a slot begins: a place in its share of an epoch, and a token there."""

    epoch: int = 1
    place: int = 0
    part: int = 0
    """Which of the documents that the record at this place gives."""
    token: int = 0
    documents: int = 0
    """The number of records before this place that the slot has read, over all epochs.

    Records that were left out count too.
    """
    waiting: tuple[tuple[int, int, int, int], ...] = ()
    """Documents that were read, and are in no row yet: epoch, place and part of each, and how many
    documents with a target its record gives."""
    long: int = 0
    """How many of the records that a row has begun did not fit into a row, and were cut or
    split."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """How many of them were left out, by reason."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> SlotState:
        """Return a state from its fields as JSON has them."""
        waiting = [(epoch, place, part, n) for epoch, place, part, n in fields.get("waiting", ())]
        return replace(cls(**fields), waiting=tuple(waiting))

    @property
    def finished(self) -> int:
        """The number of records of which no document is left to be put into a row."""
        return self.documents - len({(epoch, place) for epoch, place, _, _ in self.waiting})

    @property
    def begun(self) -> int:
        """The number of records of which a row has had a token."""
        return self.documents - len(self.unbegun()) + (self.token > 0 or self.part > 0)

    def unbegun(self) -> set[tuple[int, int]]:
        """Return epoch and place of the records that were read, and of which no row has a token."""
        waiting = Counter((epoch, place, n) for epoch, place, _, n in self.waiting)
        return {(epoch, place) for (epoch, place, n), count in waiting.items() if count == n}


@dataclass(frozen=True)
class Counts:
    """Rows that were given out, and documents that were read for them, repetitions included."""

    rows: int
    begun: int
    """Documents of which at least one token was in a row."""
    finished: int
    """Documents that were read to their end, or left out."""
    skipped: Mapping[str, int]
    """How many documents were left out, by reason."""
    long: int = 0
    """How many documents did not fit into a row, and were cut or split."""
    epochs: float | None = None
    """How often all documents were finished; None for a stream and for an evaluation."""

    def to_dict(self) -> dict[str, Any]:
        """Return the counts in the form of a run's record."""
        return {
            "epochs": self.epochs,
            "rows": self.rows,
            "documents_begun": self.begun,
            "documents_finished": self.finished,
            "documents_long": self.long,
            "documents_skipped": sum(self.skipped.values()),
            "skipped_by_reason": dict(self.skipped),
        }

    def __str__(self) -> str:
        text = f"{self.rows:,} rows; documents: {self.begun:,} begun, {self.finished:,} finished"
        if self.epochs is not None:
            text = f"{self.epochs:.2f} epochs; {text}"
        if self.long:
            text = f"{text}, {self.long:,} longer than a row"
        if not self.skipped:
            return text
        return f"{text}, {sum(self.skipped.values()):,} left out ({describe(self.skipped)})"


def describe(skipped: Mapping[str, int]) -> str:
    """Return in words how many documents were left out for which reason."""
    words = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items())) or "none"
    return words.replace("longer than a row", "longer than a row of data.sequence_length")


def counts(state: LoaderState) -> Counts:
    """Return what all slots of a state have read up to its step.

    Where there are fewer documents than slots, several slots share a document and each reads a
    piece of it (`Order.places`). The document is begun with the first of its pieces, finished with
    the last one, and left out if each piece was left out.
    """
    sharing: dict[int, list[SlotState]] = {}
    num_documents = state["read_from"][NUM_DOCUMENTS]  # None for a stream
    for slot, fields in state["slots"].items():
        document = int(slot) % (num_documents or len(state["slots"]))
        sharing.setdefault(document, []).append(SlotState.read(fields))
    skipped = Counter[str]()
    for slots in sharing.values():
        # `&` takes the smaller count of each reason.
        skipped += functools.reduce(operator.and_, [Counter(slot.skipped) for slot in slots])
    num_finished = sum(min(slot.finished for slot in slots) for slots in sharing.values())
    return Counts(
        state["step"] * len(state["slots"]),
        sum(max(slot.begun for slot in slots) for slots in sharing.values()),
        num_finished,
        dict(skipped),
        sum(max(slot.long for slot in slots) for slots in sharing.values()),
        None if num_documents is None else num_finished / num_documents,
    )


def merge_states(states: Iterable[LoaderState]) -> LoaderState:
    """Return the state of the global batch from the states of all ranks after the same step."""
    first, *others = states
    slots = dict(first["slots"])
    for state in others:
        same = (state["step"], state["read_from"]) == (first["step"], first["read_from"])
        assert same, "the ranks are not at the same step of the same data"
        slots.update(state["slots"])
    return {**first, "slots": slots}


def loader_state(
    step: int, read_from: dict[str, Any], slots: Mapping[int, SlotState]
) -> LoaderState:
    """Return the state of these slots after `step`."""
    saved = {str(slot): asdict(position) for slot, position in slots.items()}
    return {"step": step, "read_from": read_from, "slots": saved}


def starts(
    state: LoaderState | None, read_from: dict[str, Any], slots: range
) -> tuple[int, dict[int, SlotState]]:
    """Return the last step of a state, and where each slot continues.

    Without a state it is step 0 and the beginning of the data. UserError for the state of a run
    with other data.
    """
    if state is None:
        return 0, {slot: SlotState() for slot in slots}
    saved = state["read_from"]
    changed = [name for name in read_from if saved.get(name) != read_from[name]]
    if changed:
        changes = [
            f"{name} (was {str(saved.get(name))[:100]}, is {str(read_from[name])[:100]})"
            for name in changed
        ]
        raise UserError(
            "the data of this run is not the data of the checkpoint: "
            f"{', '.join(changes)}; restore it, or start a new run"
        )
    if missing := [slot for slot in slots if str(slot) not in state["slots"]]:
        raise UserError(
            f"the checkpoint has no position in the data for slot {missing[0]} of the batch; use "
            "another checkpoint, or start a new run"
        )
    return state["step"], {slot: SlotState.read(state["slots"][str(slot)]) for slot in slots}


def read_from(
    cfg: RunConfig,
    corpus: Corpus | Streamed,
    validation: Corpus | StreamPass | None,
    order: Order | StreamOrder,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return everything that batches and evaluations depend on, by its name in error messages."""
    held_out = None if validation is corpus else validation
    return {
        NUM_DOCUMENTS: order.num_documents,
        "the text of data.train": corpus.fingerprint(),
        "the text of data.validation": None if held_out is None else held_out.fingerprint(),
        "training.seed": cfg.training.seed,
        "training.global_batch_size": cfg.training.global_batch_size,
        "data.sequence_length": cfg.data.sequence_length,
        "data.packing": cfg.data.packed,
        "data.long": cfg.data.long,
        "data.format": cfg.data.format,
        "data.train_on": cfg.data.train_on,
        "data.turns": cfg.data.turns,
        "data.template_arguments": cfg.data.template_arguments,
        "data.tools": _tools(cfg),
        "data.fields": cfg.data.fields,
        "data.text_field": cfg.data.text_field,
        "data.weights": cfg.data.weights,
        "the order of the documents": order.method,
        "the tokenizer": _tokenizer_fingerprint(tokenizer),
    }


def _tools(cfg: RunConfig) -> str | None:
    """Return the name of the field with the tools, or the content of the file with them."""
    tools = cfg.data.tools
    return read_text(tools, "data.tools") if tools and tools.endswith(".json") else tools


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short hash of the vocabulary, the rules and the special tokens."""
    # Fast tokenizers have a backend with all their rules. Slow ones have none.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tokens = tokenizer.get_vocab().items()
    rules = json.dumps(sorted(tokens)) if backend is None else backend.to_str()
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.chat_template]
    content = rules + json.dumps(special)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
