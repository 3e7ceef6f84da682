"""The position of a run in its data: saved with a checkpoint, and restored by a resume."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np

from shardwise.data.order import draws

LoaderState = dict[str, Any]
"""Plain data, safe for JSON.

`step` is the last step whose batches were given out. `read_from` names everything that the batches
depend on. `slots` has the fields of SlotState, and `filled` the positions of the rows so far that
held a token, by the number of the slot, as a string. `rest` has the fields of Rest, or is None.
"""

NUM_DOCUMENTS = "documents to train on"
NUM_BY_ENTRY = "documents of each entry of data.train"
WEIGHTS = "the weights of the entries of data.train"


@dataclass(frozen=True)
class SlotState:
    """Where the next row of a stream begins: a place in its share of records, and a token there."""

    place: int = 0
    """The number of records before this place that the stream has read, over all epochs.

    Records that were left out count too.
    """
    part: int = 0
    """Which of the documents that the record at this place gives."""
    token: int = 0
    is_begun: bool = False
    """Whether a row has ended on the token there, which may be the first one of its document."""
    waiting: tuple[tuple[int, int, int], ...] = ()
    """Documents that were read, and are in no row yet: place and part of each, and how many
    documents with a target its record gives."""
    long: int = 0
    """How many of the records that a row has begun did not fit into a row, and were cut or
    split."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """How many of them were left out, by reason."""
    continued: int = 0
    """How many of the records up to this place another stream has begun."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "SlotState":
        """Return a state from its fields as JSON has them."""
        waiting = [(place, part, n) for place, part, n in fields.get("waiting", ())]
        return replace(cls(**fields), waiting=tuple(waiting))

    @property
    def finished(self) -> int:
        """The number of records of which no document is left to be put into a row."""
        return self.place - len({place for place, _, _ in self.waiting})

    @property
    def begun(self) -> int:
        """The number of records of which this stream was the first to put a token into a row."""
        return self.place - len(self.unbegun()) + self.is_within - self.continued

    @property
    def is_within(self) -> bool:
        """Whether a row has a token of the record at this place."""
        return self.is_begun or self.part + self.token > 0

    def unbegun(self) -> set[int]:
        """Return the places of the records that were read, and of which no row has a token."""
        waiting = Counter((place, n) for place, _, n in self.waiting)
        return {place for (place, n), count in waiting.items() if count == n}


@dataclass(frozen=True)
class Rest:
    """How `training.epochs` end: what the slots leave is one stream, whose rows they share.

    A slot reads its own share up to a step. Behind it, each step gives the slots that have no row
    of their own the next rows of the rest, in their order; behind the last one, rows of padding.
    """

    epochs: float
    last_own: tuple[int, ...]
    """[slots] The step that has the last row of each slot's own share."""
    begin: tuple[SlotState, ...]
    """[slots] Where the share goes on behind that row: there its part of the rest begins."""
    num_rows: int
    row: int = 0
    """How many rows of the rest were given out."""
    state: SlotState = SlotState()
    """Where the next one begins; its places count the records of the rest."""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Rest":
        """Return the end of a run from its fields as JSON has them."""
        last_own, state = tuple(fields["last_own"]), SlotState.read(fields["state"])
        begin = [SlotState.read(fields["begin"][str(slot)]) for slot in range(len(last_own))]
        return replace(cls(**fields), last_own=last_own, begin=tuple(begin), state=state)

    @property
    def num_steps(self) -> int:
        """The number of steps: the last one has a row, and those before it one for each slot."""
        return -(-(sum(self.last_own) + self.num_rows) // len(self.last_own))

    def rows(self, step: int) -> np.ndarray:
        """Return which row of the rest each slot has in a step [slots]; -1: one of its own."""
        last_own = np.array(self.last_own)
        given_out, is_free = np.maximum(step - 1 - last_own, 0).sum(), last_own < step
        return np.where(is_free, given_out + np.cumsum(is_free) - 1, -1)


@dataclass
class Position:
    """Where the slots of a rank are behind a step."""

    step: int
    slots: dict[int, SlotState]
    filled: dict[int, int]
    """The positions of each slot's rows so far that held a token."""
    rest: Rest | None = None

    def to_dict(self, read_from: dict[str, Any]) -> LoaderState:
        """Return the position in the form in which it is saved."""
        rest = None if self.rest is None else asdict(self.rest)
        if rest is not None:
            rest["begin"] = {str(slot): rest["begin"][slot] for slot in self.slots}
        return {
            "step": self.step,
            "read_from": read_from,
            "slots": {str(slot): asdict(state) for slot, state in self.slots.items()},
            "filled": {str(slot): number for slot, number in self.filled.items()},
            "rest": rest,
        }


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
    epochs_by_entry: tuple[float, ...] | None = None
    """Where entries have weights: how often the documents of each were read."""
    padding: float | None = None
    """The share of the rows' positions without a token; None for an evaluation."""

    def to_dict(self) -> dict[str, Any]:
        """Return the counts in the form of a run's record."""
        return {
            "epochs": self.epochs,
            "epochs_by_entry": self.epochs_by_entry and [*self.epochs_by_entry],
            "rows": self.rows,
            "padding": self.padding,
            "documents_begun": self.begun,
            "documents_finished": self.finished,
            "documents_long": self.long,
            "documents_skipped": sum(self.skipped.values()),
            "skipped_by_reason": dict(self.skipped),
        }

    def __str__(self) -> str:
        text = f"{self.rows:,} rows"
        if self.padding is not None:
            text = f"{text}, {self.padding:.1%} padding"
        text = f"{text}; documents: {self.begun:,} begun, {self.finished:,} finished"
        if self.epochs_by_entry is not None:
            entry_epochs = ", ".join(f"{epochs:.2f}" for epochs in self.epochs_by_entry)
            text = f"by their weights {entry_epochs} epochs of the entries; {text}"
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

    Within the last rows of `training.epochs` one slot may finish a document that another one begins
    later. It counts as begun then.
    """
    streams = [*state["slots"].values(), *([state["rest"]["state"]] if state["rest"] else [])]
    slots = list(map(SlotState.read, streams))
    source, num_finished = state["read_from"], sum(slot.finished for slot in slots)
    num_documents = source.get(NUM_DOCUMENTS)  # None for a stream, and for a loop of the caller
    sizes, by_entry = source.get(NUM_BY_ENTRY), None
    if sizes:
        drawn = draws(num_finished, source[WEIGHTS])
        by_entry = tuple(number / size for number, size in zip(drawn, sizes))
    num_rows = state["step"] * len(state["slots"])
    positions = num_rows * source.get("data.sequence_length", 0)
    return Counts(
        num_rows,
        max(sum(slot.begun for slot in slots), num_finished),
        num_finished,
        dict(sum((Counter(slot.skipped) for slot in slots), Counter())),
        sum(slot.long for slot in slots),
        num_finished / num_documents if num_documents else None,
        by_entry,
        1 - sum(state["filled"].values()) / positions if positions else None,
    )


def merge_states(states: Iterable[LoaderState]) -> LoaderState:
    """Return the state of the global batch from the states of all ranks after the same step."""
    first, *others = states
    slots, filled, rest = dict(first["slots"]), dict(first["filled"]), first["rest"]
    for state in others:
        same = (state["step"], state["read_from"]) == (first["step"], first["read_from"])
        assert same, "the ranks are not at the same step of the same data"
        slots.update(state["slots"])
        filled.update(state["filled"])
        if rest is not None:
            begin = rest["begin"] | state["rest"]["begin"]
            furthest = max(rest, state["rest"], key=itemgetter("row"))
            rest = {**furthest, "begin": begin}
    return {**first, "slots": slots, "filled": filled, "rest": rest}
