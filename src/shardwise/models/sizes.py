"""Sizes in a config.json that no model has: refused by name, before transformers builds anything of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardwise.config import UserError

MOST_LAYERS = 2048
"""Each layer is a module that takes milliseconds to build; published models have some hundred at most."""
MOST = 2**24
"""Of any other size; the largest that published models have are vocabularies, of some hundred thousand tokens."""
MOST_PARAMETERS = 10**13
"""20 TB in bfloat16: some times the largest published model."""
DEPTH = 32
"""Levels of a config.json; transformers goes down them one call after the other."""

_SIZE = re.compile(r"^(num|n)_|_(size|dim|heads|rank)$")
_LAYERS = re.compile(r"(^|_)layers?$")
_NOT_EMPTY = re.compile(r"_heads$|conv|state_size$|d_state$")
_AT_LEAST_ONE = (
    *(
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "head_dim",
    ),
    *("n_embd", "n_layer", "n_head", "n_positions", "max_position_embeddings"),
)


def check_written(path: str, content: Mapping[str, Any]) -> None:
    """UserError if what stands in a config.json, before anything is made of it, cannot be a model's sizes."""
    if _depth(content) > DEPTH:
        raise UserError(
            f"{path}: config.json is nested more than {DEPTH} deep; fetch the file again"
        )
    for part in (content, content.get("text_config")):
        for key, value in part.items() if isinstance(part, Mapping) else ():
            if isinstance(value, int) and not isinstance(value, bool) and "window" not in key:
                least = 1 if key in _AT_LEAST_ONE or _NOT_EMPTY.search(key) else 0
                most = MOST_LAYERS if _LAYERS.search(key) else MOST
                if (
                    least or _SIZE.search(key) or _LAYERS.search(key)
                ) and not least <= value <= most:
                    raise UserError(
                        f"{path}: {key} is {value} in config.json; a model has from {least} to {most:,} there"
                    )


def check_read(path: str, config: PretrainedConfig) -> None:
    """UserError if what transformers made of a config.json does not fit together."""
    layers = getattr(config, "num_hidden_layers", 0)  # some families count the letters of a pattern
    if layers > MOST_LAYERS:
        raise UserError(
            f"{path}: config.json has {layers:,} layers; a model has at most {MOST_LAYERS:,}"
        )
    heads, shared = (
        getattr(config, "num_attention_heads", None),
        getattr(config, "num_key_value_heads", None),
    )
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
        raise UserError(
            f"{path}: num_attention_heads is {heads} in config.json, no multiple of num_key_value_heads, {shared}"
        )
    vocabulary, padding = getattr(config, "vocab_size", None), getattr(config, "pad_token_id", None)
    if (
        isinstance(vocabulary, int)
        and isinstance(padding, int)
        and not -vocabulary <= padding < vocabulary
    ):
        raise UserError(
            f"{path}: pad_token_id is {padding} in config.json, beyond vocab_size, {vocabulary}"
        )
    chosen = getattr(config, "num_experts_per_tok", None)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = getattr(config, key, None)
        if isinstance(chosen, int) and isinstance(experts, int) and 0 < experts < chosen:
            raise UserError(
                f"{path}: num_experts_per_tok is {chosen} in config.json, more than {key}, {experts}"
            )
    rope = getattr(config, "rope_parameters", None) or {}
    known = {"default", *ROPE_INIT_FUNCTIONS}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type", "default") not in known:
            raise UserError(
                f"{path}: rope_type is {part['rope_type']!r} in config.json, which transformers does not know; "
                f"it knows {', '.join(sorted(known))}"
            )


def check_parameters(path: str, count: int) -> None:
    """UserError if a model has more parameters than any group of ranks could hold."""
    if count > MOST_PARAMETERS:
        raise UserError(
            f"{path}: by its config.json the model has {count:,} parameters, more than {MOST_PARAMETERS:,}; "
            "look at the sizes there"
        )


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level and depth <= DEPTH:
        level = [
            inner
            for outer in level
            for inner in (
                outer.values()
                if isinstance(outer, Mapping)
                else outer
                if isinstance(outer, list)
                else ()
            )
            if isinstance(inner, Mapping | list)
        ]
        depth += 1
    return depth
