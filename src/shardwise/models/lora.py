"""LoRA with PEFT: the choice of weights, injection on meta, what is covered, values to start from.

Routed experts are one stacked parameter, [E, out, in], which PEFT adapts with factors for all
experts side by side. `auto` leaves them frozen: an adapter there has E times the parameters of one
on a linear of that size.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.base.layouts import AdapterFacts
from shardwise.config import Lora, UserError
from shardwise.models.coverage import Coverage, CoverageRow
from shardwise.models.dora import use_magnitudes
from shardwise.models.families import Family, family_of
from shardwise.models.names import hf_name, is_adapter, is_magnitude, renamed_by_peft
from shardwise.models.seeds import stable_seed
from shardwise.models.spec import LayerSpec, ModelSpec


@dataclass(frozen=True)
class _Weight:
    """Weight that may have an adapter: a linear of a layer, or a stack of experts."""

    path: str
    name: str  # in its layer
    layer: LayerSpec
    is_stack: bool

    def is_in(self, modules: Iterable[str]) -> bool:
        """Return whether it lies in one of these modules."""
        return any(f"{self.path}.".startswith(f"{module}.") for module in modules)


def inject(model: PreTrainedModel, lora: Lora, spec: ModelSpec) -> Coverage:
    """Put adapters on a model on meta, in place, freeze everything else; return what is adapted.

    Targets: `auto`, every projection of attention, recurrent mixers, MLPs and shared experts;
    `attention`, the projections of softmax attention; `all-linear`, also the linears that give
    scores, and the routed experts; a list, what its names or ends of names match (experts only by a
    name with `experts` in it). Never the head, nor what `Family.bypassed` holds. Factors have
    `lora.dtype`; modules to save keep the model's.

    Raises UserError for a name that adapts nothing, and for modules to save that are tied. By
    `adapter_facts` rules have refused what else cannot be (rules/adapters.py).
    """
    weights = _adaptable(model, spec, family_of(model))
    saved = _saved_modules(model, lora, spec)
    chosen = _chosen(weights, lora, spec, family_of(model), saved)
    assert chosen, "a rule refuses adapters on nothing"
    _put_adapters(model, lora, chosen, saved)
    layers = adapter_layers(model)
    for layer in layers.values():
        if isinstance(layer, ParamWrapper) and lora.experts == "shared":
            _share_factors(layer)
    paths = {weight.path for weight in chosen}
    assert layers.keys() == paths, f"PEFT adapted others: {sorted(layers.keys() ^ paths)[:5]}"
    for layer in layers.values():
        use_magnitudes(layer)
        for factor in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            factor.to(torch.float32 if lora.dtype == "float32" else model.config.dtype)
    return _coverage(model, [weight for weight in weights if not weight.is_in(saved)], paths)


def adapter_facts(
    model: PreTrainedModel, lora: Lora, spec: ModelSpec, model_type: str | None = None
) -> AdapterFacts:
    """Return the facts of the adapters that `inject` would put on a model that has none yet.

    `model_type`: that of the class that PEFT will see, where it is another one. Raises UserError as
    `inject`.
    """
    renamed = renamed_by_peft(model_type or model.config.model_type)
    family = family_of(model)
    weights = _adaptable(model, spec, family)
    chosen = _chosen(weights, lora, spec, family, _saved_modules(model, lora, spec))
    return AdapterFacts(
        num_weights=len(chosen),
        targets_to_save=tuple(
            target
            for target in lora.names
            if not set(_matches(target, weights, spec, family)) & set(chosen)
        ),
        has_experts=any(weight.is_stack for weight in chosen),
        highest_rank=max(min(p.shape[-2:]) for p in model.parameters() if p.dim() > 1),
        renamed_by_peft=tuple(
            dict.fromkeys(w.name for w in chosen if w.name.rpartition(".")[2] in renamed)
        ),
    )


def reach(
    model: PreTrainedModel, spec: ModelSpec, targets: Literal["auto", "attention", "all-linear"]
) -> list[str]:
    """Return the paths that `inject` would adapt on a model without adapters, layer by layer."""
    family = family_of(model)
    chosen = _choose(_adaptable(model, spec, family), Lora(targets=targets), spec, family)
    return [weight.path for weight in chosen]


def coverage(model: PreTrainedModel, spec: ModelSpec, adapted: set[str]) -> Coverage:
    """Return what adapters on these paths cover of a model without adapters."""
    return _coverage(model, _adaptable(model, spec, family_of(model)), adapted)


def adapter_weights(
    model: nn.Module, seed: int, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor) of every LoRA factor of a model: its value before training.

    With `wanted`, only the factors of these names are drawn.

    The values are a function of (seed, name). A is uniform in +-1/sqrt(fan in) (PEFT's default,
    Kaiming's rule with a = sqrt(5)), B is 0, so that the model starts as it was. Copies made for
    `modules_to_save` are not among them, nor magnitudes: they start from the base weights.
    """
    for name, parameter in model.named_parameters():
        is_factor = is_adapter(name) and not is_magnitude(name)
        if not is_factor or (wanted is not None and name not in wanted):
            continue
        factor = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(factor, nn.Linear)
        # The parameter itself may be a rank's share, laid flat.
        value = torch.zeros(factor.out_features, factor.in_features)
        if ".lora_A." in name:
            bound = 1.0 / math.sqrt(factor.in_features)
            generator = torch.Generator().manual_seed(stable_seed(seed, name))
            value.uniform_(-bound, bound, generator=generator)
        yield name, value.to(parameter.dtype)


def adapter_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return PEFT's layers by the transformers name of the linear or stack that each adapts."""
    layers: dict[str, LoraLayer] = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            layers[f"{hf_name(name)}.{module.parameter_name}"] = module
        elif isinstance(module, LoraLayer):
            layers[hf_name(name)] = module
    return layers


def num_sharing(layer: nn.Module | None) -> int:
    """Return how many experts have the factors of an adapter in common: 1, or all of a stack."""
    if not isinstance(layer, ParamWrapper):
        return 1
    (name,) = layer.lora_A
    factor: Any = layer.lora_A[name]  # A [E R, in], or [R, in]
    return layer.num_experts * layer.r[name] // factor.out_features


def _share_factors(layer: Any) -> None:
    """Give an adapter on a stack one pair of factors, A [R, in] and B [out, R], on meta."""
    for name, rank in layer.r.items():
        num_in, num_out = layer.lora_A[name].in_features, layer.lora_B[name].out_features
        layer.lora_A[name] = nn.Linear(num_in, rank, bias=False, device="meta")
        layer.lora_B[name] = nn.Linear(rank, num_out, bias=False, device="meta")


def peft_config(
    lora: Lora, modules: list[str], parameters: list[str], saved: list[str], transposed: bool
) -> LoraConfig:
    """Return PEFT's config for adapters on `modules` (linears) and `parameters` (stacks).

    `transposed`: the linears are transformers' Conv1D, which keep their weight as [in, out].
    """
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,  # ty: ignore[invalid-argument-type]  # used as any number
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        fan_in_fan_out=transposed,
        target_modules=modules,
        target_parameters=parameters or None,
        modules_to_save=saved or None,
    )


def _put_adapters(
    model: PreTrainedModel, lora: Lora, chosen: list[_Weight], saved: list[str]
) -> None:
    # PEFT sees the model through a holder without a config: by `config.model_type` it would take
    # Qwen3-Next's MLPs for experts and adapt neither. Full names, so that nothing else is matched.
    holder = nn.ModuleDict({"model": model})
    linears = [weight.path for weight in chosen if not weight.is_stack]
    sizes = _sizes(lora, chosen)
    config = peft_config(
        lora,
        transposed=any(isinstance(model.get_submodule(path), Conv1D) for path in linears),
        modules=[f"model.{path}" for path in linears],
        parameters=[f"model.{weight.path}" for weight in chosen if weight.is_stack],
        saved=[f"model.{path}" for path in saved],
    )
    config.rank_pattern = {path: int(rank) for path, (rank, _) in sizes.items()}
    config.alpha_pattern = {path: alpha for path, (_, alpha) in sizes.items()}
    with warnings.catch_warnings():
        # PEFT 0.21 looks for the weights of patterns among modules only, and not among stacks.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
        inject_adapter_in_model(config, holder, low_cpu_mem_usage=True)


def _sizes(lora: Lora, chosen: list[_Weight]) -> dict[str, list[int | float]]:
    """Return rank and alpha of the weights that have their own in `lora.targets`, by path."""
    sizes: dict[str, list[int | float]] = {}
    for name, size in lora.sizes.items():
        paths = [weight.path for weight in chosen if _is_match(name, weight)]
        twice = [path for path in paths if sizes.get(path, size) != size]
        if twice:
            raise UserError(
                f"lora.targets: two entries give {twice[0]} a rank and alpha; name it in one"
            )
        sizes |= dict.fromkeys(paths, size)
    return sizes


def _adaptable(model: PreTrainedModel, spec: ModelSpec, family: Family) -> list[_Weight]:
    weights = []
    for layer in spec.layers:
        module = model.get_submodule(layer.name)
        for name, part in module.named_modules():
            if isinstance(part, (nn.Linear, Conv1D)):
                weights.append(_Weight(f"{layer.name}.{name}", name, layer, is_stack=False))
        parameters = {name for name, _ in module.named_parameters()}
        for name in family.experts:
            if name in parameters:
                weights.append(_Weight(f"{layer.name}.{name}", name, layer, is_stack=True))
    return weights


def _chosen(
    weights: list[_Weight], lora: Lora, spec: ModelSpec, family: Family, saved: list[str]
) -> list[_Weight]:
    """Return the weights that get adapters: not those that are trained in full."""
    return [weight for weight in _choose(weights, lora, spec, family) if not weight.is_in(saved)]


def _choose(weights: list[_Weight], lora: Lora, spec: ModelSpec, family: Family) -> list[_Weight]:
    reachable = [weight for weight in weights if weight.name not in family.bypassed]
    match lora.targets:
        case "auto":
            return [
                weight
                for weight in reachable
                if not weight.is_stack and weight.name not in family.gates
            ]
        case "attention":
            chosen = [
                weight
                for weight in reachable
                if weight.name.startswith(tuple(f"{path}." for path in weight.layer.attention))
            ]
            if not chosen:
                raise UserError(
                    f"lora.targets: this {spec.family} has no attention layer for `attention`; use "
                    "auto"
                )
            return chosen
        case "all-linear":
            return reachable
        case targets:
            wanted = {
                weight for target in targets for weight in _matches(target, weights, spec, family)
            }
            return [weight for weight in reachable if weight in wanted]


def _is_match(target: str, weight: _Weight) -> bool:
    # Stacks of experts are matched by their module's name too, but never by a bare `down_proj`:
    # who lists the projections of an MLP means the linears.
    if not weight.is_stack:
        return _ends_with(weight.path, target)
    return "experts" in target.split(".") and (
        _ends_with(weight.path, target) or _ends_with(weight.path.rpartition(".")[0], target)
    )


def _matches(target: str, weights: list[_Weight], spec: ModelSpec, family: Family) -> list[_Weight]:
    matches = [weight for weight in weights if _is_match(target, weight)]
    if _ends_with(spec.head, target):
        raise UserError(
            f"lora.targets: {target} is the head; train it in full with lora.modules_to_save: "
            f"[{target}]"
        )
    stacks = {_ends(weight.name)[0] for weight in weights if _is_of_stack(weight, target)}
    if not matches and stacks:
        raise UserError(
            f"lora.targets: {target} is a stack of routed experts of this {spec.family}; name it "
            f"{' or '.join(sorted(stacks))}, or all stacks experts"
        )
    if not matches:
        raise UserError(
            f"lora.targets: {target} is no linear of this {spec.family}; "
            f"{_near(target, [w.name for w in weights if w.name not in family.bypassed])}"
        )
    if all(weight.name in family.bypassed for weight in matches):
        raise UserError(
            f"lora.targets: {target} of {spec.family} takes no adapter: its layer reads the weight "
            "past the adapter; leave it out"
        )
    return matches


def _saved_modules(model: PreTrainedModel, lora: Lora, spec: ModelSpec) -> list[str]:
    modules = [
        name
        for name, module in model.named_modules()
        if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ]
    saved: list[str] = []
    for target in lora.modules_to_save:
        matches = [name for name in modules if _ends_with(name, target)]
        if not matches:
            raise UserError(
                f"lora.modules_to_save: no module {target} in this {spec.family}; "
                f"{_near(target, modules)}"
            )
        if spec.tied and {spec.head, spec.embed} & set(matches):
            raise UserError(
                f"lora.modules_to_save: {target} is tied (embedding and head are one matrix), and "
                "a trained copy would untie it; leave it out"
            )
        saved += matches
    return list(dict.fromkeys(saved))


def _ends_with(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _is_of_stack(weight: _Weight, target: str) -> bool:
    return weight.is_stack and _ends_with(weight.path, target)


def _near(target: str, names: Iterable[str]) -> str:
    ends = [_ends(name) for name in names]
    pool = sorted({end for one in ends for end in one})
    near = difflib.get_close_matches(target, pool, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(sorted({shortest for shortest, *_ in ends}))}"


def _ends(name: str) -> list[str]:
    """Return the ends of a name that a list may give, from the shortest: `experts.down_proj`."""
    parts = name.split(".")
    shortest = 2 if parts[-2:-1] == ["experts"] else 1
    return [".".join(parts[-length:]) for length in range(shortest, len(parts) + 1)]


def _coverage(model: PreTrainedModel, weights: list[_Weight], adapted: set[str]) -> Coverage:
    rows = []
    for kind in dict.fromkeys(weight.layer.kind for weight in weights):
        same_kind = [weight for weight in weights if weight.layer.kind == kind]
        frozen = [weight.name for weight in same_kind if weight.path not in adapted]
        rows.append(
            CoverageRow(
                kind=kind,
                layers=len({weight.layer.name for weight in same_kind}),
                weights=len(same_kind),
                adapted=len(same_kind) - len(frozen),
                frozen=tuple(dict.fromkeys(frozen)),
            )
        )
    # A copy in `modules_to_save` replaces its original, which does not count.
    parameters = [p for name, p in model.named_parameters() if ".original_module." not in name]
    return Coverage(
        rows=tuple(rows),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        total=sum(parameter.numel() for parameter in parameters),
    )
