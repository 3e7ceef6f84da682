"""The tiny models of every family, on one CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.config import Lora, Model
from shardwise.models.adapters.lora import (
    Coverage,
    adapter_weights,
    first_magnitude,
    inject,
    magnitude_starts,
)
from shardwise.models.families import FAMILIES, Family, spec_of
from shardwise.models.load import build_meta, fill, read_config, weights
from shardwise.models.names import hf_name

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
TINY_OF = {family: f"tiny-{family.replace('_text', '')}" for family in FAMILIES}
"""The tiny model of each family."""
PLAIN = tuple(TINY_OF.values())
TINY = (*PLAIN, "tiny-qwen3_5-tied")


def with_every_kind(families: Iterable[str], first: Sequence[str] = ()) -> list[str]:
    """Return families that have every kind of block of `families` between them: `first`, and those
    with a kind that the ones before lack."""
    chosen: list[str] = []
    kinds: set[str] = set()
    for family in (*first, *families):
        own = {block.kind.name for block in FAMILIES[family].blocks}
        if family in first or not own <= kinds:
            chosen.append(family)
            kinds |= own
    return list(dict.fromkeys(chosen))


EACH_KIND = tuple(TINY_OF[family] for family in with_every_kind(FAMILIES))
"""Of `PLAIN`, models that have every kind of block between them."""


def tiny(name: str, dtype: str = "float32") -> Model:
    """A tiny model with random weights."""
    folder = str(CONFIGS / name)
    return Model(folder, init="random", dtype=dtype)  # ty: ignore[invalid-argument-type]


def on_meta(model: Model) -> PreTrainedModel:
    """The model on meta."""
    return build_meta(model, read_config(model))


def entries(model: Model, seed: int = 0) -> dict[str, torch.Tensor]:
    """All of the model's weights by transformers name."""
    return dict(weights(on_meta(model), model, seed))


def with_whole_feed_forwards(family: Family) -> Family:
    """The family, of which tensor parallelism leaves the feed-forwards whole."""
    return replace(
        family,
        feed_forward={
            label: {path: replace(kind, split=None) for path, kind in blocks.items()}
            for label, blocks in family.feed_forward.items()
        },
    )


def with_adapters(
    model: Model, lora: Lora, factor_std: float = 0.05
) -> tuple[PreTrainedModel, Coverage]:
    """The model with its weights and with adapters, whose factors are all drawn at random.

    With B = 0, its usual start, an adapter does nothing and A has no gradient. Magnitudes are
    within a fifth of the lengths of rows.
    """
    built = on_meta(model)
    coverage = inject(built, lora, spec_of(built.config, built))
    generator = torch.Generator().manual_seed(1)
    factors = (
        (name, (torch.randn(value.shape, generator=generator) * factor_std).to(value.dtype))
        for name, value in adapter_weights(built, seed=0)
    )
    values = dict(weights(built, model, seed=0))
    magnitudes = (
        (name, lengths * (0.8 + 0.4 * torch.rand(lengths.shape, generator=generator)))
        for name, lengths in first_magnitudes(built, values).items()
    )
    fill(built, chain(values.items(), factors, magnitudes))
    return built, coverage


def first_magnitudes(
    built: PreTrainedModel, values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Where DoRA starts with these weights, by name; {} without it."""
    places = magnitude_starts(built, dict(built.named_parameters()))
    return {
        magnitude: first_magnitude(layer, values[hf_name(base)])
        for base, (magnitude, layer) in places.items()
    }


def loaded_by_transformers(folder: Path) -> PreTrainedModel:
    """What plain transformers makes of a folder, with nothing missing, left over or of another
    shape."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    return model


def trained(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The trainable parameters, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def tokens(rows: int = 2, length: int = 70, seed: int = 0) -> torch.Tensor:
    """Token ids [rows, length]; 70 is no multiple of the recurrent layers' chunks of 64 and 32."""
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: PreTrainedModel) -> torch.Tensor:
    """What the model says of `tokens()` in eval mode, [2, 70, 256]."""
    with torch.no_grad():
        return model.eval()(input_ids=tokens(), use_cache=False).logits


def relative_error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value."""
    return ((tensor - reference).abs().max() / reference.abs().max()).item()


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Equal names, dtypes and values, bit by bit."""
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )
