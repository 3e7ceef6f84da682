"""Where a run is in its data: saved with a checkpoint, checked and taken up again at a resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.config import RunConfig, UserError
from shardwise.data.text import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LoaderState = dict[str, Any]
"""Plain data, safe for JSON: `step` (the last one handed out), `read_from` (what the batches are a function of) and
`slots` (the fields of SlotState by slot number, which is a string)."""


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
    return state["step"], {slot: SlotState(**state["slots"][str(slot)]) for slot in slots}


def read_from(cfg: RunConfig, corpus: Corpus, num_documents: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the batches of a run are a function of, under the names that an error shows."""
    return {
        "documents to train on": num_documents,
        "places of the documents in data.train": corpus.fingerprint(),
        "training.seed": cfg.training.seed,
        "training.global_batch_size": cfg.training.global_batch_size,
        "data.sequence_length": cfg.data.sequence_length,
        "data.packing": cfg.data.packing,
        "the tokenizer": _tokenizer_fingerprint(tokenizer),
    }


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # the fast ones' whole pipeline; slow ones have none
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    special = json.dumps([tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.chat_template])
    return hashlib.blake2b((vocabulary + special).encode(), digest_size=8).hexdigest()
