"""Sizes in a config.json that no model has: refused by name, before transformers builds of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardwise.config import UserError

MOST_LAYERS = 2048
"""Each layer takes milliseconds to build; published models have some hundred at most."""
MOST = 2**24
"""The most of any other size; the largest of published models, vocabularies, have some 100,000."""
MOST_PARAMETERS = 10**13
"""20 TB in bfloat16: some times the largest published model."""
DEPTH = 32
"""Levels of a config.json; transformers goes down them by recursion."""

_SIZE = re.compile(r"^(num|n)_|_(size|dim|heads|rank)$")
_LAYERS = re.compile(r"(^|_)layers?$")
_NOT_EMPTY = re.compile(r"_heads$|conv|state_size$|d_state$")
_WIDTHS = ("hidden_size", "vocab_size", "head_dim", "max_position_embeddings")
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_OF_GPT2 = ("n_embd", "n_layer", "n_head", "n_positions")
_AT_LEAST_ONE = (*_WIDTHS, *_COUNTS, *_OF_GPT2)


def check_written(path: str, content: Mapping[str, Any]) -> None:
    """Check what stands in a config.json, before anything is made of it.

    Raises UserError if a number cannot be a model's size.
    """
    if _depth(content) > DEPTH:
        raise UserError(
            f"{path}: config.json is nested more than {DEPTH} deep; fetch the file again"
        )
    for part in (content, content.get("text_config")):
        for key, value in part.items() if isinstance(part, Mapping) else ():
            if type(value) is int and "window" not in key:
                _check_size(path, key, value)


def _check_size(path: str, key: str, value: int) -> None:
    least = 1 if key in _AT_LEAST_ONE or _NOT_EMPTY.search(key) else 0
    most = MOST_LAYERS if _LAYERS.search(key) else MOST
    is_size = least or _SIZE.search(key) or _LAYERS.search(key)
    if is_size and not least <= value <= most:
        raise UserError(
            f"{path}: {key} is {value} in config.json; a model has from {least} to {most:,} there"
        )


def check_read(path: str, config: PretrainedConfig) -> None:
    """Check what transformers made of a config.json.

    Raises UserError if two sizes do not fit together.
    """

    def size(key: str) -> int | None:
        value = getattr(config, key, None)
        return value if isinstance(value, int) else None

    layers = size("num_hidden_layers") or 0  # some families count the letters of a pattern
    if layers > MOST_LAYERS:
        raise UserError(
            f"{path}: config.json has {layers:,} layers; a model has at most {MOST_LAYERS:,}"
        )
    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    if heads is not None and kv_heads and heads % kv_heads:
        raise UserError(
            f"{path}: num_attention_heads is {heads} in config.json, no multiple of "
            f"num_key_value_heads, {kv_heads}"
        )
    vocabulary, padding = size("vocab_size"), size("pad_token_id")
    has_both = vocabulary is not None and padding is not None
    if has_both and not -vocabulary <= padding < vocabulary:
        raise UserError(
            f"{path}: pad_token_id is {padding} in config.json, beyond vocab_size, {vocabulary}"
        )
    chosen = size("num_experts_per_tok")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = size(key)
        if chosen is not None and experts is not None and 0 < experts < chosen:
            raise UserError(
                f"{path}: num_experts_per_tok is {chosen} in config.json, more than {key}, "
                f"{experts}"
            )
    rope = getattr(config, "rope_parameters", None) or {}
    known = {"default", *ROPE_INIT_FUNCTIONS}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type", "default") not in known:
            raise UserError(
                f"{path}: rope_type is {part['rope_type']!r} in config.json, which transformers "
                f"does not know; it knows {', '.join(sorted(known))}"
            )


def check_parameters(path: str, count: int) -> None:
    """Raise UserError if a model has more parameters than any group of ranks could hold."""
    if count > MOST_PARAMETERS:
        raise UserError(
            f"{path}: by its config.json the model has {count:,} parameters, more than "
            f"{MOST_PARAMETERS:,}; look at the sizes there"
        )


def _depth(value: Any) -> int:
    """Return how deep mappings and lists lie in one another, up to DEPTH + 1."""
    level, depth = [value], 0
    while level and depth <= DEPTH:
        inner = [_values(outer) for outer in level]
        level = [part for parts in inner for part in parts if isinstance(part, Mapping | list)]
        depth += 1
    return depth


def _values(outer: Mapping[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, Mapping) else outer
