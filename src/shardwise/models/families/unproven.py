"""A model type that is not listed, but has the common shape: its facts are read off its modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from shardwise.config import UserError
from shardwise.models.families.base import Blocks, Family, Mixer
from shardwise.models.kinds import KINDS
from shardwise.models.kinds.base import Kind
from shardwise.models.names import hf_name, in_use, is_adapter
from shardwise.models.spec import Block


def _last_parts(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))


# What is known of listed kinds says what a name of an unlisted model may mean.
_ATTENTION = tuple(dict.fromkeys(kind.name for kind in KINDS if kind.is_attention))
_TOKENWISE = tuple(dict.fromkeys(kind.name for kind in KINDS if not kind.mixes_tokens))
_SCORES = _last_parts(name for kind in KINDS if kind.experts for name in kind.gating)
_GATING = _last_parts(name for kind in KINDS for name in kind.gating)
_BYPASSED = _last_parts(name for kind in KINDS for name in kind.bypassed)
_FEED_FORWARD = ("mlp", "feed_forward", "ffn", "moe")
_RENAMED = ("gate_proj", "up_proj", "down_proj", "gate")


def inspect_family(model: PreTrainedModel) -> Family:
    """Return the family that a model on any device, with adapters or without, makes by itself.

    The common shape: an embedding, one list of decoder layers, a final norm next to it, a head, and
    no parameter or shared weight beside these, except embeddings such as that of positions. Raises
    UserError that says what is not so.

    What the modules don't show is taken with care: layers that are not softmax attention keep
    transformers' name of their type, linears that a fused kernel may read past are left without
    adapters, and no router has a loss.
    """
    layers, num_layers = _list_of_layers(model)
    embed, norm, head = _around_layers(model, layers)
    positions = _positions(model, embed, layers, head)
    dims = {
        hf_name(name): parameter.ndim
        for name, parameter in model.named_parameters()
        if not is_adapter(name)
    }
    _check_rest(
        model, dims, tuple(f"{path}." for path in (embed, layers, norm, head, positions) if path)
    )
    _check_weights(model, head)
    types = getattr(model.config, "layer_types", None) or []
    if types and len(types) != num_layers:
        raise _not_standard(
            model, f"config.layer_types names {len(types)} layers, but the model has {num_layers}"
        )
    inside = {
        name.removeprefix(f"{layers}.").partition(".")[2]: n
        for name, n in dims.items()
        if name.startswith(f"{layers}.")
    }
    children = sorted({name.partition(".")[0] for name in inside if "norm" not in name})
    attention = next(
        (name for name in reversed(children) if "attn" in name or "attention" in name), ""
    )
    kinds = {
        name: _guess(name, inside, reads_past=bool(set(types) - set(_ATTENTION)))
        for name in children
    }
    after = {
        name: kind for name, kind in kinds.items() if any(part in name for part in _FEED_FORWARD)
    }
    mixing = {name: kind for name, kind in kinds.items() if name not in after}
    return Family(
        model.config.model_type,
        embed=embed,
        positions=positions,
        layers=layers,
        norm=norm,
        head=head,
        mixers={name: _mixer(name, mixing, attention) for name in (*_ATTENTION, *types)},
        feed_forward={"dense": after, "moe": after},
        renamed_by_peft=_RENAMED if any(kind.experts for kind in kinds.values()) else (),
    )


def unproven_note(family: str) -> str:
    """Return what a run of a model type that is not listed prints."""
    return (
        f"family {family} is not proven here: its parts were found by inspection, no test shows that it trains alike "
        "under every layout, its loss is computed from whole logits, and no FLOPs are counted (mfu and hfu are null)"
    )


def _list_of_layers(model: PreTrainedModel) -> tuple[str, int]:
    """Return the path and length of the longest list of modules that lies in no other."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [
        (path, m)
        for path, m in lists
        if not any(path.startswith(f"{other}.") for other, _ in lists)
    ]
    if not outer:
        raise _not_standard(model, "it has no list of layers")
    layers, modules = max(outer, key=lambda item: len(item[1]))
    return layers, len(modules)


def _around_layers(model: PreTrainedModel, layers: str) -> tuple[str, str, str]:
    """Return the paths of embedding, final norm and head."""
    paths = {id(module): path for path, module in model.named_modules()}
    above, _, last = layers.rpartition(".")
    beside = [
        (name, type(in_use(module)).__name__)
        for name, module in model.get_submodule(above).named_children()
    ]
    after = beside[[name for name, _ in beside].index(last) :]
    embed, norm, head = (
        paths.get(id(model.get_input_embeddings())),
        next((f"{above}.{name}" for name, kind in after if "norm" in kind.lower()), None),
        paths.get(id(model.get_output_embeddings())),
    )
    if embed is None:
        raise _not_standard(model, "it has no embedding of tokens")
    if norm is None:
        raise _not_standard(model, "it has no final norm after its layers")
    if head is None:
        raise _not_standard(model, "it has no head")
    return embed, norm, head


def _positions(model: PreTrainedModel, embed: str, layers: str, head: str) -> str | None:
    """Return the path of an embedding outside of the layers that is not that of tokens."""
    tables = [path for path, module in model.named_modules() if isinstance(module, nn.Embedding)]
    known = (f"{embed}.", f"{head}.")
    others = [path for path in tables if not f"{path}.".startswith(known)]
    return next((path for path in others if not path.startswith(f"{layers}.")), None)


def _check_rest(model: PreTrainedModel, names: Iterable[str], known: tuple[str, ...]) -> None:
    beyond = [name for name in names if not name.startswith(known)]
    if beyond:
        raise _not_standard(
            model, f"it has {beyond[0]} beside embedding, layers, final norm and head"
        )


def _check_weights(model: PreTrainedModel, head: str) -> None:
    shared = [name for name in model.all_tied_weights_keys if not name.startswith(f"{head}.")]
    if shared:
        raise _not_standard(model, f"{shared[0]} is shared with another part of the model")
    for transform in get_model_conversion_mapping(model, add_legacy=False):
        if isinstance(transform, WeightConverter) and len(transform.target_patterns) > 1:
            raise _not_standard(model, "an entry of its checkpoints is made of several weights")


def _guess(child: str, inside: Mapping[str, int], reads_past: bool) -> Kind:
    """Return what the names below a child of a layer let one guess; `inside`: dims of a layer's
    parameters by name.
    """
    names = [name for name in inside if name.startswith(f"{child}.")]
    linears = sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight"))

    def within(found: Iterable[str]) -> tuple[str, ...]:
        return tuple(name.removeprefix(child).removeprefix(".") for name in found)

    scores = [
        name
        for name in linears
        if _ends_with(name, _SCORES) or re.search(r"(^|\.)experts\.\d+\.", name)
    ]
    return Kind(
        child,
        experts=within(
            name for name in names if inside[name] == 3 and re.search(r"(^|\.)experts\.\w+$", name)
        ),
        gates=within(scores),
        gating=within(name for name in linears if _ends_with(name, _GATING)),
        bypassed=within(name for name in linears if _ends_with(name, _BYPASSED))
        if reads_past
        else (),
    )


def _ends_with(name: str, ends: tuple[str, ...]) -> bool:
    return name.rpartition(".")[2] in ends


def _mixer(layer_type: str, blocks: Blocks, attention: str) -> Mixer:
    """Return the mixer of layers of a type: all blocks that may mix tokens."""
    return Mixer(
        layer_type,
        tuple(
            Block(
                path,
                replace(
                    kind,
                    name=layer_type,
                    mixes_tokens=layer_type not in _TOKENWISE,
                    is_attention=path == attention and layer_type in _ATTENTION,
                ),
            )
            for path, kind in blocks.items()
        ),
    )


def _not_standard(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(
        f"model type {model.config.model_type} is not one that shardwise knows (`shardwise models` lists them), nor of "
        f"the common shape: {reason}"
    )
