"""LoRA with PEFT on a model: the choice of weights, injection on meta, DoRA, values to start from.

Routed experts are one stacked parameter, [E, out, in], which PEFT adapts with factors for all
experts side by side. `auto` leaves them frozen: an adapter there has E times the parameters of one
on a linear of that size.
"""

import difflib
import math
import warnings
from collections.abc import Container, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.base.layouts import AdapterFacts
from shardwise.config import Lora, UserError
from shardwise.models.adapters.coverage import Coverage, coverage
from shardwise.models.adapters.peft_config import peft_config
from shardwise.models.names import (
    adapter_layers,
    is_adapter,
    is_lora,
    is_magnitude,
    is_wrapper,
    renamed_by_peft,
)
from shardwise.models.seeds import stable_seed
from shardwise.models.spec import ModelSpec
from shardwise.models.stored import weight_of
from shardwise.models.weights import WeightRow, adaptable, ends_with


def inject(model: PreTrainedModel, lora: Lora, spec: ModelSpec) -> Coverage:
    """Put adapters on a model on meta, in place, freeze everything else; return what is adapted.

    Targets: `auto`, every projection of attention, recurrent mixers, MLPs and shared experts;
    `attention`, the projections of softmax attention; `all-linear`, also the linears that give
    scores, and the routed experts; a list, what its names or ends of names match (experts only by a
    name with `experts` in it). Never the head, nor what is `Kind.bypassed`. Factors have
    `lora.dtype`; modules to save keep the model's.

    Raises UserError for a name that adapts nothing, and for modules to save that are tied. By
    `adapter_facts` rules have refused what else cannot be (rules/adapters.py).
    """
    weights = adaptable(model, spec)
    saved = _saved_modules(model, lora, spec)
    chosen = _chosen(weights, lora, spec, saved)
    assert chosen, "a rule refuses adapters on nothing"
    _put_adapters(model, lora, chosen, saved)
    from shardwise.models.adapters.magnitude import use_magnitudes

    layers = adapter_layers(model)
    for layer in layers.values():
        if is_wrapper(layer) and lora.experts == "shared":
            _share_factors(layer)
    paths = {weight.target for weight in chosen}
    assert layers.keys() == paths, f"PEFT adapted others: {sorted(layers.keys() ^ paths)[:5]}"
    for layer in layers.values():
        use_magnitudes(layer)
        for factor in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            factor.to(torch.float32 if lora.dtype == "float32" else model.config.dtype)
    return coverage(model, [weight for weight in weights if not _is_in(weight, saved)], paths)


def adapter_facts(
    model: PreTrainedModel, lora: Lora, spec: ModelSpec, model_type: str | None = None
) -> AdapterFacts:
    """Return the facts of the adapters that `inject` would put on a model that has none yet.

    `model_type`: that of the class that PEFT will see, where it is another one. Raises UserError as
    `inject`.
    """
    renamed = renamed_by_peft(model_type or model.config.model_type)
    weights = adaptable(model, spec)
    chosen = _chosen(weights, lora, spec, _saved_modules(model, lora, spec))
    return AdapterFacts(
        num_weights=len(chosen),
        targets_to_save=tuple(
            target
            for target in lora.names
            if not any(weight in chosen for weight in _matches(target, weights, spec))
        ),
        has_experts=any(weight.is_stack for weight in chosen),
        highest_rank=max(min(p.shape[-2:]) for p in model.parameters() if p.dim() > 1),
        renamed_by_peft=tuple(
            dict.fromkeys(w.in_layer for w in chosen if w.target.rpartition(".")[2] in renamed)
        ),
    )


def reach(
    model: PreTrainedModel, spec: ModelSpec, targets: Literal["auto", "attention", "all-linear"]
) -> list[str]:
    """Return the paths that `inject` would adapt on a model without adapters, layer by layer."""
    chosen = _choose(adaptable(model, spec), Lora(targets=targets), spec)
    return [weight.target for weight in chosen]


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


def _share_factors(layer: Any) -> None:
    """Give an adapter on a stack one pair of factors, A [R, in] and B [out, R], on meta."""
    for name, rank in layer.r.items():
        num_in, num_out = layer.lora_A[name].in_features, layer.lora_B[name].out_features
        layer.lora_A[name] = nn.Linear(num_in, rank, bias=False, device="meta")
        layer.lora_B[name] = nn.Linear(rank, num_out, bias=False, device="meta")


def _put_adapters(
    model: PreTrainedModel, lora: Lora, chosen: list[WeightRow], saved: list[str]
) -> None:
    from peft import inject_adapter_in_model

    # PEFT sees the model through a holder without a config: by `config.model_type` it would take
    # Qwen3-Next's MLPs for experts and adapt neither. Full names, so that nothing else is matched.
    holder = nn.ModuleDict({"model": model})
    linears = [weight.target for weight in chosen if not weight.is_stack]
    sizes = _sizes(lora, chosen)
    config = peft_config(
        lora,
        transposed=any(isinstance(model.get_submodule(path), Conv1D) for path in linears),
        modules=[f"model.{path}" for path in linears],
        parameters=[f"model.{weight.target}" for weight in chosen if weight.is_stack],
        saved=[f"model.{path}" for path in saved],
    )
    config.rank_pattern = {path: int(rank) for path, (rank, _) in sizes.items()}
    config.alpha_pattern = {path: alpha for path, (_, alpha) in sizes.items()}
    with warnings.catch_warnings():
        # PEFT 0.21 looks for the weights of patterns among modules only, and not among stacks.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match")
        inject_adapter_in_model(config, holder, low_cpu_mem_usage=True)


def _sizes(lora: Lora, chosen: list[WeightRow]) -> dict[str, list[int | float]]:
    """Return rank and alpha of the weights that have their own in `lora.targets`, by path."""
    sizes: dict[str, list[int | float]] = {}
    for name, size in lora.sizes.items():
        paths = [weight.target for weight in chosen if _is_match(name, weight)]
        twice = [path for path in paths if sizes.get(path, size) != size]
        if twice:
            raise UserError(
                f"lora.targets: two entries give {twice[0]} a rank and alpha; name it in one"
            )
        sizes |= dict.fromkeys(paths, size)
    return sizes


def _chosen(
    weights: list[WeightRow], lora: Lora, spec: ModelSpec, saved: list[str]
) -> list[WeightRow]:
    """Return the weights that get adapters: not those that are trained in full."""
    return [weight for weight in _choose(weights, lora, spec) if not _is_in(weight, saved)]


def _is_in(weight: WeightRow, modules: Iterable[str]) -> bool:
    return any(f"{weight.target}.".startswith(f"{module}.") for module in modules)


def _choose(weights: list[WeightRow], lora: Lora, spec: ModelSpec) -> list[WeightRow]:
    reachable = [weight for weight in weights if not weight.is_bypassed]
    match lora.targets:
        case "auto":
            return [weight for weight in reachable if weight.role not in ("score", "expert")]
        case "attention":
            chosen = [w for w in reachable if w.block and w.block.kind.is_attention]
            if not chosen:
                raise UserError(
                    f"lora.targets: this {spec.family} has no attention layer for `attention`; use "
                    "auto"
                )
            return chosen
        case "all-linear":
            return reachable
        case targets:
            wanted = {w.name for target in targets for w in _matches(target, weights, spec)}
            return [weight for weight in reachable if weight.name in wanted]


def _is_match(target: str, weight: WeightRow) -> bool:
    # Stacks of experts are matched by their module's name too, but never by a bare `down_proj`:
    # who lists the projections of an MLP means the linears.
    if not weight.is_stack:
        return ends_with(weight.target, target)
    return "experts" in target.split(".") and (
        ends_with(weight.target, target) or ends_with(weight.target.rpartition(".")[0], target)
    )


def _matches(target: str, weights: list[WeightRow], spec: ModelSpec) -> list[WeightRow]:
    matches = [weight for weight in weights if _is_match(target, weight)]
    if ends_with(spec.head, target):
        raise UserError(
            f"lora.targets: {target} is the head; train it in full with lora.modules_to_save: "
            f"[{target}]"
        )
    stacks = {_ends(w.in_layer)[0] for w in weights if w.is_stack and ends_with(w.target, target)}
    if not matches and stacks:
        raise UserError(
            f"lora.targets: {target} is a stack of routed experts of this {spec.family}; name it "
            f"{' or '.join(sorted(stacks))}, or all stacks experts"
        )
    if not matches:
        raise UserError(
            f"lora.targets: {target} is no linear of this {spec.family}; "
            f"{_near(target, [w.in_layer for w in weights if not w.is_bypassed])}"
        )
    if all(weight.is_bypassed for weight in matches):
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
        matches = [name for name in modules if ends_with(name, target)]
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


def magnitude_of(layer: Any) -> Any:
    """Return the module with the lengths of a layer of PEFT; None for plain LoRA."""
    return next(iter(layer.lora_magnitude_vector.values()), None)


def magnitude_starts(model: nn.Module, wanted: Container[str]) -> dict[str, tuple[str, Any]]:
    """Return the wanted magnitudes' names and their layers, by the weights that they start from."""
    return {
        f"{path}.base_layer.weight": (name, module)
        for path, module in model.named_modules()
        if is_lora(module)
        for adapter in module.lora_magnitude_vector
        if (name := f"{path}.lora_magnitude_vector.{adapter}.weight") in wanted
    }


def first_magnitude(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the lengths [out] at which a layer's magnitude starts: those of the rows of W.

    `weight`: W on the CPU, whole, with the values that the run computes with. B is 0 at the start.
    """
    base = layer.get_base_layer()
    values = weight.to(weight_of(base).dtype)
    rows = values.t() if isinstance(base, Conv1D) else values
    wide = torch.promote_types(values.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=wide)
