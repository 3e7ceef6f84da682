"""Encode texts, and prompts with what follows them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.config import Data
from shardwise.data.chat_format import Encoded
from shardwise.data.known_forms import given_value
from shardwise.data.record import BadDocument, Record, string
from shardwise.data.tokenizer import tokens_and_places, tokens_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def joined_text(record: Record, fields: Sequence[str], data: Data) -> str:
    """Return the texts of fields that `data.fields` names, joined by an empty line.

    Of several, those that are missing, null or empty are left out. BadDocument where none is left.
    """
    if len(fields) > 1:
        fields = [f for f in fields if str(record.get(f) or "").strip()] or fields[:1]
    return "\n\n".join(text_of(record, field, data) for field in fields)


def text_of(record: Record, field: str, data: Data, key: str = "fields") -> str:
    """Return a field of a document, which `key` of section `data` names.

    BadDocument where it is no string for a tokenizer.
    """
    value = given_value(record, field, data, key)
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        way_out = f"set data.format: chat and data.fields: {{messages: [{field}, ...]}}"
        raise BadDocument("wrong type", f"field {field!r} is a list of messages; {way_out}")
    return string(value, f"field {field!r}")


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """Encode a text; all tokens are targets. An empty text has no tokens, not even special ones."""
    tokens = tokens_of(tokenizer, text) if text else []
    return tokens, [True] * len(tokens)


def encode_completion(tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str) -> Encoded:
    """Encode prompt and completion as one text.

    The targets are the tokens from the first one with a character of the completion on. A
    completion ends with those that the tokenizer adds and with the end-of-text token, whatever the
    packing. They are targets too: from them a model learns to stop. An empty completion has none.
    """
    tokens, places = tokens_and_places(tokenizer, prompt + completion)
    is_behind, end = (stop > len(prompt) for _, stop in places), tokenizer.eos_token_id
    targets = list(itertools.accumulate(is_behind, operator.or_))
    if end is not None:
        if tokens[-1:] != [end]:
            tokens, targets = [*tokens, end], [*targets, False]
        targets[-1] = True
    return tokens, targets if completion else [False] * len(tokens)
