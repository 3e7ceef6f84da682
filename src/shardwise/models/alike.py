"""The layers of a model that are alike, of which formulas need to look at the first one only."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from shardwise.config import Checkpointing, Recomputation, Way
from shardwise.models.counts import ModelCounts, count_model
from shardwise.models.spec import ModelSpec

# A search asks for many layouts of one model, of which these take most of the time. What is cached
# is not freed: these are for models on meta.
counts_of = lru_cache(maxsize=1)(count_model)


_KNOWN: WeakKeyDictionary[PreTrainedModel, dict[object, Any]] = WeakKeyDictionary()
"""Answers by model, whose shapes no longer change. None refers to it, so that it is freed."""


def known(hf: PreTrainedModel, key: object, compute: Callable[[], Any]) -> Any:
    """Return what was computed for this key of a model, or compute it."""
    found = _KNOWN.setdefault(hf, {})
    if key not in found:
        found[key] = compute()
    return found[key]


def first_alike(
    hf: PreTrainedModel, spec: ModelSpec, checkpointing: Checkpointing
) -> Mapping[str, int]:
    """Return for each layer, by its name, the place of the first one that differs in names only.

    Layers are alike if they have the same kinds of blocks, the same modules with parameters of
    the same shapes, dtypes and `requires_grad`, the same products and cores, and if as much of
    them is computed again. (A list in `checkpointing` names kinds, so it tells none of them apart.)
    """
    places = _of_one_model(hf, spec)
    if not isinstance(checkpointing, Recomputation) or checkpointing.budget_gib is not None:
        return places
    firsts: dict[tuple[int, Way], int] = {}
    return {
        layer.name: firsts.setdefault((places[layer.name], checkpointing.way_of(place)), place)
        for place, layer in enumerate(spec.layers)
    }


@lru_cache(maxsize=1)
def _of_one_model(hf: PreTrainedModel, spec: ModelSpec) -> Mapping[str, int]:
    return same_structure(hf, spec, counts_of(hf, spec))


def same_structure(hf: PreTrainedModel, spec: ModelSpec, counts: ModelCounts) -> Mapping[str, int]:
    """Return `first_alike` of a model with these counts, whatever is computed again."""
    places: dict[object, int] = {}
    alike: dict[str, int] = {}
    for place, (layer, unit) in enumerate(zip(spec.layers, counts.units[1:-1], strict=True)):
        module, prefix = hf.get_submodule(layer.name), f"{layer.name}."
        products = [replace(w, name=w.name.removeprefix(prefix)) for w in unit.weights]
        sort = (
            replace(layer, name="", number=0),
            replace(unit, name="", layer=None, weights=tuple(products)),
            tuple((name, type(part)) for name, part in module.named_modules()),
            tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()),
        )
        alike[layer.name] = places.setdefault(sort, place)
    return alike
