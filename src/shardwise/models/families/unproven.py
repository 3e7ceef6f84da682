"""A model type that is not listed, but has the common shape: its facts are read off its modules."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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


def _linears(names: Iterable[str]) -> str:
    """Return a pattern of the weights of linears whose names end as those of listed kinds do."""
    return rf"(^|\.)({'|'.join(sorted({name.rpartition('.')[2] for name in names}))})\.weight$"


@dataclass(frozen=True)
class Clue:
    """Guess from the name of a parameter in its layer."""

    role: str
    pattern: str
    """Is searched for in names such as `mlp.experts.gate_up_proj` and `mlp.gate.weight`."""
    why: str


CLUES = (
    Clue("no block", "norm", "norms lie between the blocks of a layer or within them"),
    Clue("attention", r"^[^.]*(attn|attention)", "`lora.targets: attention` means its projections"),
    Clue("feed-forward", r"^[^.]*(mlp|feed_forward|ffn|moe)", "all other blocks may mix tokens"),
    Clue("experts", r"(^|\.)experts\.\w+$", "a parameter of 3 dims stacks all experts' weights"),
    Clue("gates", r"(^|\.)experts\.\d+\..*weight$", "experts are left frozen as linears too"),
    Clue(
        "gates",
        _linears(name for kind in KINDS if kind.experts for name in kind.gating),
        "routers give scores, which `lora.targets: auto` leaves frozen",
    ),
    Clue(
        "gating",
        _linears(name for kind in KINDS for name in kind.gating),
        "weight decay leaves alone what only routes tokens or sets how a state decays",
    ),
    Clue(
        "bypassed",
        _linears(name for kind in KINDS for name in kind.bypassed),
        "the fused kernel of a recurrent layer may read the weight past an adapter",
    ),
)
"""Meanings of names in an unlisted model, from what is known of listed kinds."""
_ATTENTION = tuple(dict.fromkeys(kind.name for kind in KINDS if kind.is_attention))
_TOKENWISE = tuple(dict.fromkeys(kind.name for kind in KINDS if not kind.mixes_tokens))


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
    if positions is not None and not hasattr(model.config, "max_position_embeddings"):
        raise _not_standard(model, "it learns positions, and max_position_embeddings is not set")
    dims = {
        hf_name(name): parameter.ndim
        for name, parameter in model.named_parameters()
        if not is_adapter(name)
    }
    _check_rest(model, dims, tuple(filter(None, (embed, layers, norm, head, positions))))
    _check_weights(model, head)
    types = getattr(model.config, "layer_types", None) or []
    if types and len(types) != num_layers:
        raise _not_standard(
            model, f"config.layer_types names {len(types)} layers, but the model has {num_layers}"
        )
    inside = {
        name.removeprefix(f"{layers}.").partition(".")[2]: ndim
        for name, ndim in dims.items()
        if name.startswith(f"{layers}.")
    }
    children = sorted(_children(inside.keys() - _with_role("no block", inside)))
    is_recurrent = not set(types) <= set(_ATTENTION)
    kinds = {child: _guess(child, inside, is_recurrent) for child in children}
    feed_forwards = _children(_with_role("feed-forward", inside))
    after = {child: kind for child, kind in kinds.items() if child in feed_forwards}
    mixing = {child: kind for child, kind in kinds.items() if child not in feed_forwards}
    # Of several, such as that over an encoder's output, the last by name: self_attn.
    attention = max(_children(_with_role("attention", inside)) & set(children), default="")
    return Family(
        model.config.model_type,
        embed=embed,
        positions=positions,
        layers=layers,
        norm=norm,
        head=head,
        mixers={name: _mixer(name, mixing, attention) for name in (*_ATTENTION, *types)},
        feed_forward={
            "dense": {path: replace(kind, experts=()) for path, kind in after.items()},
            "moe": after,
        },
    )


def unproven_note(family: str) -> str:
    """Return what a run of a model type that is not listed prints."""
    return (
        f"family {family} is not proven here: its parts were found by inspection, no test shows "
        "that it trains alike under every layout, its loss is computed from whole logits, and no "
        "FLOPs are counted (mfu and hfu are null)"
    )


def _with_role(role: str, names: Iterable[str]) -> list[str]:
    patterns = [clue.pattern for clue in CLUES if clue.role == role]
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def _children(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _list_of_layers(model: PreTrainedModel) -> tuple[str, int]:
    """Return the path and length of the longest list of modules that lies in no other."""
    lists = {path: m for path, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = {
        path: len(modules)
        for path, modules in lists.items()
        if not any(path.startswith(f"{other}.") for other in lists)
    }
    if not outer:
        raise _not_standard(model, "it has no list of layers")
    layers = max(outer, key=lambda path: outer[path])
    return layers, outer[layers]


def _around_layers(model: PreTrainedModel, layers: str) -> tuple[str, str, str]:
    """Return the paths of embedding, final norm and head."""
    paths = {id(module): path for path, module in model.named_modules()}
    above, _, last = layers.rpartition(".")
    beside = {
        name: type(in_use(module)).__name__
        for name, module in model.get_submodule(above).named_children()
    }
    after = list(beside)[list(beside).index(last) :]
    norms = [f"{above}.{name}" for name in after if "norm" in beside[name].lower()]
    embed = paths.get(id(model.get_input_embeddings()))
    head = paths.get(id(model.get_output_embeddings()))
    if embed is None:
        raise _not_standard(model, "it has no embedding of tokens")
    if not norms:
        raise _not_standard(model, "it has no final norm after its layers")
    if head is None:
        raise _not_standard(model, "it has no head")
    return embed, norms[0], head


def _positions(model: PreTrainedModel, embed: str, layers: str, head: str) -> str | None:
    """Return the path of an embedding outside of the layers that is not that of tokens."""
    tables = [path for path, module in model.named_modules() if isinstance(module, nn.Embedding)]
    known = (f"{embed}.", f"{head}.")
    others = [path for path in tables if not f"{path}.".startswith(known)]
    return next((path for path in others if not path.startswith(f"{layers}.")), None)


def _check_rest(model: PreTrainedModel, names: Iterable[str], known: tuple[str, ...]) -> None:
    beyond = [name for name in names if not name.startswith(tuple(f"{path}." for path in known))]
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


def _guess(child: str, dims: Mapping[str, int], is_recurrent: bool) -> Kind:
    """Return the kind of a child of a layer, by the dims of the layer's parameters."""
    names = [name for name in dims if name.startswith(f"{child}.")]

    def within(role: str) -> tuple[str, ...]:
        paths = (name.removesuffix(".weight") for name in _with_role(role, names))
        return tuple(path.removeprefix(child).removeprefix(".") for path in paths)

    return Kind(
        child,
        experts=tuple(name for name in within("experts") if dims[f"{child}.{name}"] == 3),
        gates=within("gates"),
        gating=within("gating"),
        bypassed=within("bypassed") if is_recurrent else (),
    )


def _mixer(layer_type: str, blocks: Blocks, attention: str) -> Mixer:
    """Return the mixer of layers of a type: all blocks that may mix tokens."""

    def typed(path: str, kind: Kind) -> Kind:
        return replace(
            kind,
            name=layer_type,
            mixes_tokens=layer_type not in _TOKENWISE,
            is_attention=path == attention and layer_type in _ATTENTION,
        )

    return Mixer(layer_type, tuple(Block(path, typed(path, blocks[path])) for path in blocks))


def _not_standard(model: PreTrainedModel, reason: str) -> UserError:
    return UserError(
        f"model type {model.config.model_type} is not one that shardwise knows (`shardwise models` "
        f"lists them), nor of the common shape: {reason}"
    )
