"""Sizes in a config.json that no model has: refused by name, before transformers builds of them."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shardwise.config import UserError

MOST_LAYERS = 2048
"""Each layer takes milliseconds to build; published models have some hundred at most."""
MOST = 2**24
"""The most of any other size; the largest of published models, vocabularies, have some 100,000."""
MOST_PARAMETERS = 10**13
"""20 TB in bfloat16: some times the largest published model."""
MOST_KERNEL = 256
"""Taps of a short convolution; published models have 3 or 4."""
MOST_BYTES = 2**23
"""Size of a config.json; lists of thousands of modules take some hundred thousand."""
MOST_NUMBER = 3.4e38
"""The largest number of float32, roughly."""
DEPTH = 32
"""Levels of a config.json; transformers goes down them by recursion."""

_SIZE = re.compile(r"^(num|n)_|_(size|dim|heads|rank)$")
_LAYERS = re.compile(
    r"(^|_)layers$|^n_layer$"
)  # `vision_feature_layer` is one of them, by its place
_NOT_EMPTY = re.compile(r"_heads$|conv|state_size$|d_state$")
_KERNEL = re.compile(r"conv.*(kernel_dim|_size|_kernel|cache)$|d_conv$")
_LIMIT = re.compile(r"limit|max|cap")
"""Keys whose number may be infinite, where nothing is limited."""
_WIDTHS = ("hidden_size", "vocab_size", "head_dim", "max_position_embeddings")
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_OF_GPT2 = ("n_embd", "n_layer", "n_head", "n_positions")
_MULTIPLES = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
_ROPE = {"rope_theta": 1e15, "factor": 1e6, "partial_rotary_factor": 1.0}
"""Numbers of rotary positions, with the most that each may be."""
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
            elif value == "auto":
                continue  # the class computes it, as Jamba's rank of dt
            elif isinstance(value, str | Mapping) and (_SIZE.search(key) or "window" in key):
                raise UserError(
                    f"{path}: {key} is {str(value)[:40]!r} in config.json; give a whole number"
                )
    for key, value in _numbers(content):
        is_limit = _LIMIT.search(key) and not math.isnan(value)
        if not (abs(value) <= MOST_NUMBER or is_limit):
            raise UserError(
                f"{path}: {key} is {value} in config.json, which is no number that a model "
                "computes with; correct it"
            )


def check_bytes(path: str) -> None:
    """Raise UserError if a folder's config.json is larger than any model's."""
    file = Path(path, "config.json")
    if file.is_file() and (size := file.stat().st_size) > MOST_BYTES:
        raise UserError(
            f"{file}: {size:,} bytes, more than {MOST_BYTES:,}, which no config.json has; fetch "
            "the file again"
        )


def _numbers(content: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number with a point in a config.json, with the key that it stands under."""
    if isinstance(content, float):
        yield key, content
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield from _numbers(value, str(name))
    elif isinstance(content, list):
        for value in content:
            yield from _numbers(value, key)


def _check_size(path: str, key: str, value: int) -> None:
    least = 1 if key in _AT_LEAST_ONE or _NOT_EMPTY.search(key) else 0
    most = MOST_LAYERS if _LAYERS.search(key) else MOST_KERNEL if _KERNEL.search(key) else MOST
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
    for many, few in _MULTIPLES:
        heads, groups = size(many), size(few)
        if heads is not None and groups and heads % groups:
            raise UserError(
                f"{path}: {many} is {heads} in config.json, no multiple of {few}, {groups}"
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
        # Models without experts, or with one and no router, may say anything: Granite-4.0-H's 0.
        if chosen is not None and experts and experts > 1 and not 0 < chosen <= experts:
            raise UserError(
                f"{path}: num_experts_per_tok is {chosen} in config.json; a token goes to at least "
                f"1 of {key}, and to no more than all {experts}"
            )
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        _check_rope(path, part)


def _check_rope(path: str, part: Mapping[str, Any]) -> None:
    known = sorted({"default", *ROPE_INIT_FUNCTIONS})
    if part.get("rope_type", "default") not in known:
        raise UserError(
            f"{path}: rope_type is {part['rope_type']!r} in config.json, which transformers "
            f"does not know; it knows {', '.join(known)}"
        )
    for key, most in _ROPE.items():
        value = part.get(key)
        if value is not None and not (isinstance(value, int | float) and 0 < value <= most):
            raise UserError(
                f"{path}: {key} is {value!r:.40} in config.json; rotary positions have more than "
                f"0 and at most {most:g} there"
            )


def check_parameters(path: str, model: nn.Module) -> None:
    """Raise UserError if a model has more parameters than any group of ranks could hold, or an
    empty one.
    """
    sizes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if empty := next((name for name, shape in sizes.items() if 0 in shape), None):
        raise UserError(
            f"{path}: by its config.json {empty} is {sizes[empty]}, without any number; look for "
            "a size of 0 there"
        )
    if (count := sum(map(math.prod, sizes.values()))) > MOST_PARAMETERS:
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
