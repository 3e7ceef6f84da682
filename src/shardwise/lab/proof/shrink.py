"""Make a small model of the same structure from the config of a large one.

What a layout depends on stays: the family, each kind of layer in its order, the numbers of heads
and groups, ties, biases, and whether a size can be shared by so many ranks. What only costs time
becomes small: sizes of heads and states, widths, the vocabulary, the numbers of experts and layers.
Sizes are found by the words in their keys (`head_dim`, `intermediate_size`), since families differ
in their keys but hardly in these words.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from shardwise.config import Model, UserError
from shardwise.models import load
from shardwise.models.families import family_of, spec_of
from shardwise.models.spec import ModelSpec

LEAST_HIDDEN, LEAST_WIDTH, LEAST_HEAD, LEAST_VOCABULARY = 64, 48, 8, 256
"""The smallest model width, other widths, size of a head, and vocabulary."""
MOST_CHOSEN = 4
"""The most experts of a token."""
LONGEST_PERIOD = 8
"""A pattern of layers that repeats after at most so many is kept in one piece."""
_HEAD_SIZE = re.compile(r"head_dim$|_d_head$|_lora_rank$")
_SHARED = {
    r"intermediate_size$|latent_size$|^n_inner$": LEAST_WIDTH,
    r"^vocab_size$": LEAST_VOCABULARY,
}
"""Sizes that ranks may share, by words in their keys, and the smallest that each becomes."""
_OTHERS = {
    r"state_size$|_d_state$|dt_rank$": LEAST_HEAD,
    r"(^|_)chunk_size$|window(_size)?$": 16,  # less than a row, so that they have an effect
}
"""The same of sizes that no ranks share."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
_GROUPS = ("n_group", "num_expert_group")
_NOT_BUILT = (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError, StrictDataclassError)

Alike = Callable[[int, int], bool]
"""Returns whether the same numbers of ranks can share two sizes."""


@dataclass(frozen=True)
class Small:
    """A small model."""

    config: PretrainedConfig
    layers: tuple[int, ...]
    """The layers of the large model that its layers stand for, in order."""
    pattern: re.Pattern[str]
    """Finds the number of a layer in the name of a module: see `_layer_pattern`."""
    changes: Mapping[str, tuple[Any, Any]]
    """The old and the new value of each number in config.json that changed."""
    num_parameters: tuple[int, int]
    """The parameters of the large and of the small model."""

    def named(self, modules: Sequence[str]) -> list[str]:
        """Return names of modules as this model has them, without those of layers that it lacks."""
        names = []
        for name in modules:
            match = self.pattern.match(name)
            if match is None:
                names.append(name)
            elif (number := int(match[2])) in self.layers:
                names.append(f"{match[1]}{self.layers.index(number)}{match[3]}")
        return names


def shrink(
    model: Model, spec: ModelSpec, names: Sequence[str], least_layers: int, tp: Sequence[int]
) -> Small:
    """Return a small model of the same structure as `model`, whose layers are those of `spec`.

    `names`: modules that the run names, whose layers are then distinguished; `least_layers`: the
    fewest layers that the layout takes; `tp`: the numbers of tensor-parallel ranks that matter.
    Raises UserError where the config cannot be made smaller by its words.
    """
    config = load.read_config(model)
    shares = {*range(2, 9), *(unit * ranks for unit in (1, 4, 8) for ranks in tp if ranks > 1)}

    def alike(small: int, size: int) -> bool:
        return all((small % n == 0) == (size % n == 0) for n in shares)

    built = load.build_meta(model, config)
    pattern = _layer_pattern(family_of(built).layers)
    signatures = [
        (layer.kind, layer.feed_forward, _named_in(names, pattern, i))
        for i, layer in enumerate(spec.layers)
    ]
    narrow = _narrow(config, alike)
    for layers in _choices(signatures, max(least_layers, 2)):
        try:
            small = type(config).from_dict(_with_layers(config, narrow, layers))
            hf = load.build_meta(model, small)
            kinds = [(layer.kind, layer.feed_forward) for layer in spec_of(small, hf).layers]
        except _NOT_BUILT:  # UserError is a ValueError
            continue
        if kinds == [signatures[i][:2] for i in layers]:
            changes = _changes(config.to_dict(), small.to_dict())
            sizes = (built.num_parameters(), hf.num_parameters())
            return Small(small, tuple(layers), pattern, changes, sizes)
    raise UserError(
        f"{model.path}: no smaller model of type {config.model_type} has the same kinds of layers; "
        "prove the layout with a small model of your own"
    )


def _layer_pattern(path: str) -> re.Pattern[str]:
    """Return what finds the number of a layer in the name of a module, by the path of all layers.

    Its groups are what stands before the number, the number, and what stands behind it.
    """
    return re.compile(rf"^(.*\b{re.escape(path.rpartition('.')[2])}\.)(\d+)((?:\..*)?)$")


def _named_in(names: Sequence[str], pattern: re.Pattern[str], layer: int) -> frozenset[str]:
    """Return the parts behind the layer's number of the names that name a layer."""
    matches = [match for name in names if (match := pattern.match(name))]
    return frozenset(match[3] for match in matches if int(match[2]) == layer)


def _choices(signatures: Sequence[Any], least: int) -> Iterator[list[int]]:
    """Yield numbers of layers that together have all signatures, the best choice first.

    These are one period of the pattern, the first layer of each signature, and, for a model whose
    config gives the kinds by a formula, the first layers of all.
    """
    total = len(signatures)
    least = min(least, total)
    first = {signature: i for i, signature in reversed([*enumerate(signatures)])}
    period = next(
        p for p in range(1, total + 1) if all(a == b for a, b in zip(signatures, signatures[p:]))
    )
    if period <= LONGEST_PERIOD:
        yield [*range(max(period, least))]
    others = [i for i in range(total) if i not in first.values()]
    yield sorted([*first.values(), *others[: max(0, least - len(first))]])
    yield [*range(max(max(first.values()) + 1, least))]


def _with_layers(
    config: PretrainedConfig, narrow: Mapping[str, Any], layers: Sequence[int]
) -> dict[str, Any]:
    """Return a config's content with these of its layers."""
    total = config.num_hidden_layers
    content = dict(narrow)
    number = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if number in content:
        content[number] = len(layers)
    for key, value in narrow.items():
        if not isinstance(value, list) or "mtp" in key:
            continue
        if key.endswith(("_only_layers", "_idxs")):  # numbers of layers
            content[key] = [layers.index(i) for i in value if i in layers]
        elif "layer" in key and len(value) == total:  # an entry for each layer
            content[key] = [value[i] for i in layers]
    return content


def _narrow(config: PretrainedConfig, alike: Alike) -> dict[str, Any]:
    """Return a config's content with small sizes, and all of its layers.

    Sizes of heads are divided by one number, so that they keep their ratios: the largest that the
    config's own checks accept.
    """
    bound = _width(config, alike)
    content = config.to_dict()
    content |= bound | _experts(content, alike)
    content = _each(content, lambda key, value: _by_key(key, value, alike))
    last = content["vocab_size"] - 1
    content = _each(content, lambda k, v: min(v, last) if k.endswith("_token_id") else v)

    def is_free(key: str) -> bool:
        return _HEAD_SIZE.search(key) is not None and key not in bound

    sizes = [size for key, size in _numbers(content) if is_free(key)]
    common = gcd(*sizes) or 1  # 1 where there are none
    for divisor in (n for n in range(common, 0, -1) if common % n == 0):
        if not all(_is_head(size // divisor, size) for size in sizes):
            continue
        small = _each(
            content, lambda key, value, by=divisor: value // by if is_free(key) else value
        )
        if small.get("mamba_d_ssm"):
            small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
        try:
            type(config).from_dict(small)
        except _NOT_BUILT:
            continue
        return small
    return content


def _is_head(small: int, size: int) -> bool:
    """Return whether a head may be so small: its rotated quarter is made of pairs."""
    return small >= min(size, LEAST_HEAD) and small % gcd(size, LEAST_HEAD) == 0


def _width(config: PretrainedConfig, alike: Alike) -> dict[str, int]:
    """Return a small width of the model, with the sizes of heads that are bound to it.

    Where all heads of attention, or those of Mamba2, are as wide as the model (or a multiple of
    it), they stay so.
    """
    hidden, num_heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // num_heads
    is_bound = num_heads * head_dim == hidden
    unit = num_heads * gcd(head_dim, LEAST_HEAD) if is_bound else 1
    num_mamba, expand = getattr(config, "mamba_n_heads", None), getattr(config, "mamba_expand", 0)
    is_mamba_bound = num_mamba and num_mamba * config.mamba_d_head == expand * hidden
    if is_mamba_bound:
        unit = lcm(unit, num_mamba // gcd(num_mamba, expand))
    small = _smallest(hidden, LEAST_HIDDEN, alike, unit)
    sizes = {config.attribute_map.get("hidden_size", "hidden_size"): small}
    if is_bound and getattr(config, "head_dim", None):
        sizes["head_dim"] = small // num_heads
    if is_mamba_bound:
        sizes["mamba_d_head"] = expand * small // num_mamba
    return sizes


def _experts(content: Mapping[str, Any], alike: Alike) -> dict[str, int]:
    """Return fewer experts in as many groups, at least twice as many as a token chooses."""
    sizes = {}
    for key in (key for key in _EXPERTS if content.get(key)):
        chosen = next((name for name in _CHOSEN if content.get(name)), "")
        num_chosen = min(content.get(chosen, 1), MOST_CHOSEN)
        num_groups = next((content[name] for name in _GROUPS if content.get(name)), 1)
        least = max(2 * num_chosen, 2 * num_groups)
        sizes[key] = _smallest(content[key], least, alike, num_groups)
        sizes |= {chosen: num_chosen} if chosen else {}
    return sizes


def _by_key(key: str, value: int, alike: Alike) -> int:
    for words, least in _SHARED.items():
        if re.search(words, key):
            return _smallest(value, least, alike)
    return min([value, *(least for words, least in _OTHERS.items() if re.search(words, key))])


def _smallest(size: int, least: int, alike: Alike, unit: int = 1) -> int:
    """Return the smallest multiple of `unit` that may stand for a size; the size if none may."""
    smaller = (n for n in range(least, size) if n % unit == 0 and alike(n, size))
    return next(smaller, size)


def _numbers(content: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the keys and values of all positive whole numbers, those of inner mappings too."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif type(value) is int and value > 0:
            yield key, value


def _each(content: Mapping[str, Any], change: Callable[[str, int], int]) -> dict[str, Any]:
    """Return the content with each positive whole number changed, those of inner mappings too."""

    def changed(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _each(value, change)
        if isinstance(value, list) and key.endswith("_token_id"):
            return [change(key, entry) for entry in value]
        return change(key, value) if type(value) is int and value > 0 else value

    return {key: changed(key, value) for key, value in content.items()}


def _changes(large: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    old, new = dict(_numbers(large)), dict(_numbers(small))
    sizes = {key: (value, new[key]) for key, value in old.items() if key in new}
    return {
        key: pair
        for key, pair in sizes.items()
        if pair[0] != pair[1] and not key.endswith("_token_id")
    }
