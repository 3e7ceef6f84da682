"""Where a run begins in its data, and everything that its batches depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.config import Data, RunConfig, UserError
from shardwise.config.keys import all_keys, facts_of, flat
from shardwise.data.corpus import Corpus
from shardwise.data.files import read_text
from shardwise.data.order import Order
from shardwise.data.state import (
    NUM_BY_ENTRY,
    NUM_DOCUMENTS,
    WEIGHTS,
    LoaderState,
    Position,
    Rest,
    SlotState,
    counts,
)
from shardwise.data.streaming import Streamed, StreamOrder, StreamPass

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def starts(
    state: LoaderState | None, read_from: dict[str, Any], slots: range, order: Order | StreamOrder
) -> Position:
    """Return the last step of a state, and where each slot continues.

    Without a state it is step 0 and the beginning of the data. UserError for the state of a run
    with other data, and for one that is within the last rows of other `training.epochs`.
    """
    if state is None:
        return Position(0, {slot: SlotState() for slot in slots}, dict.fromkeys(slots, 0))
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
    rest = None if state["rest"] is None else Rest.read(state["rest"])
    position = {slot: SlotState.read(state["slots"][str(slot)]) for slot in slots}
    if rest is not None and rest.epochs != order.epochs:
        if 0 < rest.row < rest.num_rows:
            raise UserError(
                f"training.epochs: after step {state['step']} the checkpoint is within the last "
                f"rows of {rest.epochs:g} epochs, whose documents all slots share; keep "
                f"{rest.epochs:g}, or resume after step {min(rest.last_own)} or {rest.num_steps}"
            )
        if rest.row:
            position = _after(rest, state, order, slots)
        rest = None
    filled = {slot: state["filled"].get(str(slot), 0) for slot in slots}
    return Position(state["step"], position, filled, rest)


def _after(
    rest: Rest, state: LoaderState, order: Order | StreamOrder, slots: range
) -> dict[int, SlotState]:
    """Return where slots go on behind the end of a run: each behind its own share of its epochs.

    Slot 0 keeps the counts of all.
    """
    read = counts(state)
    assert isinstance(order, Order), "a stream has no epochs"
    number = replace(order, epochs=rest.epochs).num_read
    ends = {slot: SlotState(len(range(slot, number, len(rest.begin)))) for slot in slots}
    if 0 in ends:
        ends[0] = replace(ends[0], long=read.long, skipped=read.skipped)
    return ends


def read_from(
    cfg: RunConfig,
    corpus: Corpus | Streamed,
    validation: Corpus | StreamPass | None,
    order: Order | StreamOrder,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return everything that batches and evaluations depend on, by its name in error messages."""
    held_out, weights = None if validation is corpus else validation, cfg.data.shares
    groups = [keys for _, keys in (*cfg.data.groups("train"), *cfg.data.groups("validation"))]
    read, values = [replace(keys, tools=_tools(keys)) for keys in groups], flat(cfg.to_dict())
    return {
        NUM_DOCUMENTS: order.num_documents,
        NUM_BY_ENTRY: order.sizes,
        "the text of data.train": corpus.fingerprint(),
        "the text of data.validation": None if held_out is None else held_out.fingerprint(),
        **{key: values[key] for key in all_keys() if facts_of(key).rows},
        "data.packing": cfg.data.packed,
        **{
            f"data.{name}": _of_all(read, name)
            for name in ("format", "fields", "text_field", "tools")
        },
        WEIGHTS: None if weights is None else list(weights),
        "the order of the documents": order.method,
        "the tokenizer": _tokenizer_fingerprint(tokenizer),
    }


def _of_all(groups: Sequence[Data], name: str) -> Any:
    """Return a key by which groups of entries are read: one value, or a list where they differ."""
    values = [getattr(keys, name) for keys in groups]
    return values if any(value != values[0] for value in values) else values[0]


def _tools(data: Data) -> str | None:
    """Return the name of the field with the tools, or the content of the file with them."""
    tools = data.tools
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
