"""A model type that is not listed, but has the common shape: its facts are read off its modules."""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from shardwise.config import UserError
from shardwise.models.families.base import ATTENTION, Family
from shardwise.models.names import hf_name, in_use, is_adapter

_FEED_FORWARD = ("mlp", "feed_forward", "ffn", "moe")
_SCORES = ("gate", "router", "shared_expert_gate")
_RATES = ("in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj", "dt_proj")
_READ_PAST = ("out_proj", "dt_proj")
_RENAMED = ("gate_proj", "up_proj", "down_proj", "gate")


def inspect_family(model: PreTrainedModel) -> Family:
    """The family that a model on any device, with adapters or without, makes by itself.

    The common shape: an embedding, one list of decoder layers, a final norm next to it, a head, and no parameter or
    shared weight beside these, but for embeddings such as that of positions. UserError that says what is not so.

    What the modules don't show is taken with care: layers that are not softmax attention keep transformers' name of
    their type, linears that a fused kernel may read past are left without adapters, and no router has a loss.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [(path, m) for path, m in lists if not any(path.startswith(f"{other}.") for other, _ in lists)]
    if not outer:
        raise _not_standard(model, "it has no list of layers")
    layers, modules = max(outer, key=lambda found: len(found[1]))
    above, _, own = layers.rpartition(".")
    beside = [(name, type(in_use(module)).__name__) for name, module in model.get_submodule(above).named_children()]
    after = beside[[name for name, _ in beside].index(own) :]
    found = {
        "embedding of tokens": paths.get(id(model.get_input_embeddings())),
        "final norm after its layers": next(
            (f"{above}.{name}" for name, kind in after if "norm" in kind.lower()), None
        ),
        "head": paths.get(id(model.get_output_embeddings())),
    }
    for what, path in found.items():
        if path is None:
            raise _not_standard(model, f"it has no {what}")
    embed, norm, head = (str(path) for path in found.values())
    embeddings = [
        path
        for path, m in model.named_modules()
        if isinstance(m, nn.Embedding) and not f"{path}.".startswith((f"{embed}.", f"{head}."))
    ]
    positions = next((path for path in embeddings if not path.startswith(f"{layers}.")), None)
    dims = {hf_name(name): parameter.ndim for name, parameter in model.named_parameters() if not is_adapter(name)}
    known = tuple(f"{path}." for path in (embed, layers, norm, head, positions) if path)
    beyond = [name for name in dims if not name.startswith(known)]
    if beyond:
        raise _not_standard(model, f"it has {beyond[0]} beside embedding, layers, final norm and head")
    shared = [name for name in model.all_tied_weights_keys if not name.startswith(f"{head}.")]
    if shared:
        raise _not_standard(model, f"{shared[0]} is shared with another part of the model")
    for transform in get_model_conversion_mapping(model, add_legacy=False):
        if isinstance(transform, WeightConverter) and len(transform.target_patterns) > 1:
            raise _not_standard(model, "an entry of its checkpoints is made of several weights")

    types = getattr(model.config, "layer_types", None) or []
    if types and len(types) != len(modules):
        raise _not_standard(model, f"config.layer_types names {len(types)} layers, but the model has {len(modules)}")
    inside = {
        name.removeprefix(f"{layers}.").partition(".")[2]: n
        for name, n in dims.items()
        if name.startswith(f"{layers}.")
    }
    children = sorted({name.partition(".")[0] for name in inside if "norm" not in name})
    linears = sorted(name.removesuffix(".weight") for name in inside if name.endswith(".weight"))
    experts = tuple(name for name, n in inside.items() if n == 3 and re.search(r"(^|\.)experts\.\w+$", name))
    return Family(
        model.config.model_type,
        embed=embed,
        positions=positions,
        layers=layers,
        norm=norm,
        head=head,
        mixers={kind: kind for kind in ("full_attention", "sliding_attention", *types)},
        feed_forward=tuple(name for name in children if any(part in name for part in _FEED_FORWARD)),
        attention=next((name for name in reversed(children) if "attn" in name or "attention" in name), ""),
        experts=experts,
        gates=tuple(name for name in linears if _ends_with(name, _SCORES) or re.search(r"(^|\.)experts\.\d+\.", name)),
        gating=tuple(name for name in linears if _ends_with(name, (*_SCORES, *_RATES))),
        bypassed=tuple(name for name in linears if _ends_with(name, _READ_PAST)) if set(types) - set(ATTENTION) else (),
        renamed_by_peft=_RENAMED if experts else (),
    )


def unproven_note(family: str) -> str:
    """What is told of a run of a model type that is not listed."""
    return (
        f"family {family} is not proven here: its parts were found by inspection, no test shows that it trains alike "
        "under every layout, its loss is computed from whole logits, and no FLOPs are counted (mfu and hfu are null)"
    )


def _ends_with(name: str, ends: tuple[str, ...]) -> bool:
    return name.rpartition(".")[2] in ends


def _not_standard(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(
        f"model type {model.config.model_type} is not one that shardwise knows (`shardwise models` lists them), nor of "
        f"the common shape: {reason}"
    )
