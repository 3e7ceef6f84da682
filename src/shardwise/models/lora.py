"""LoRA with PEFT: which weights get an adapter, injection on meta, a report of what is covered, first values.

Routed experts are one stacked parameter, [E, out, in], which PEFT adapts with factors for all experts side by side.
`auto` leaves them frozen: an adapter there has E times the parameters of one on a linear of that size.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import Lora, UserError
from shardwise.models.families import Family, family_of
from shardwise.models.names import hf_name, is_adapter
from shardwise.models.patches.dropout import stable_seed
from shardwise.models.spec import LayerSpec, ModelSpec


@dataclass(frozen=True)
class CoverageRow:
    """What became of the weights that an adapter could be on, over all layers of one kind."""

    kind: str
    layers: int
    weights: int  # linears, and stacks of experts
    adapted: int
    frozen: tuple[str, ...]  # those without an adapter, by their name in the layer


@dataclass(frozen=True)
class Coverage:
    """What LoRA trains: printed at the start of a run and kept in its record."""

    rows: tuple[CoverageRow, ...]
    trainable: int  # parameters
    total: int  # parameters, adapters included

    @property
    def percent(self) -> float:
        """Trainable parameters in percent of all."""
        return 100.0 * self.trainable / self.total

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for record.json."""
        return {**asdict(self), "percent": self.percent}

    def __str__(self) -> str:
        head = ("layers", "count", "weights", "adapted", "left frozen")
        body = [
            (r.kind, r.layers, r.weights, r.adapted, ", ".join(r.frozen) or "-") for r in self.rows
        ]
        table = [[str(cell) for cell in row] for row in (head, *body)]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]]
            )
            for row in table
        ]
        lines.append(
            f"trainable: {self.trainable:,} of {self.total:,} parameters ({self.percent:.2f} %)"
        )
        return "\n".join(lines)


def inject(model: PreTrainedModel, lora: Lora, spec: ModelSpec) -> Coverage:
    """Put adapters on a model on meta, in place, freeze everything else, and say what was adapted.

    Targets: `auto`, every projection of attention, recurrent mixers, MLPs and shared experts; `attention`, the
    projections of softmax attention; `all-linear`, also the linears that give scores, and the routed
    experts; a list, what its names or ends of names match (experts only by a name with `experts` in it). Never the
    head, nor what `Family.bypassed` holds. Factors have `lora.dtype`; modules to save keep the model's.
    UserError: a name that adapts nothing; dropout on experts; modules to save that are tied.
    """
    family = family_of(model)
    full = max(min(parameter.shape[-2:]) for parameter in model.parameters() if parameter.dim() > 1)
    if lora.r > full:
        raise UserError(
            f"lora.r is {lora.r}, but no weight of this model has a rank above {full}; lower lora.r"
        )
    candidates = _candidates(model, spec, family)
    saved = _saved_modules(model, lora, spec)
    chosen = [
        path
        for path in _choose(candidates, lora, spec, family)
        if not any(f"{path}.".startswith(f"{module}.") for module in saved)
    ]
    if not chosen:
        raise UserError(
            "lora.targets: all of them lie in lora.modules_to_save; leave the section out to train in full"
        )
    names = {path: _in_layer(path, layer) for path, layer in candidates.items()}
    for target in lora.targets if isinstance(lora.targets, list) else ():
        if not set(_matches(target, names, spec, family)) & set(chosen):
            raise UserError(
                f"lora.targets: {target} lies in lora.modules_to_save too; name it in one of them"
            )
    stacks = [path for path in chosen if _in_layer(path, candidates[path]) in family.experts]
    if stacks and lora.dropout > 0.0:
        raise UserError(
            f"lora.dropout is {lora.dropout}, but the adapters on routed experts have no input to drop from; "
            "set it to 0, or leave the experts out of lora.targets"
        )
    # PEFT sees the model through a holder without a config: by `config.model_type` it would take Qwen3-Next's MLPs for
    # experts and adapt neither. Full names, so that nothing else is matched.
    holder = nn.ModuleDict({"held": model})
    config = peft_config(
        lora,
        transposed=any(
            isinstance(model.get_submodule(path), Conv1D) for path in chosen if path not in stacks
        ),
        modules=[f"held.{path}" for path in chosen if path not in stacks],
        parameters=[f"held.{path}" for path in stacks],
        saved=[f"held.{path}" for path in saved],
    )
    inject_adapter_in_model(config, holder, low_cpu_mem_usage=True)
    layers = adapter_layers(model)
    assert layers.keys() == set(chosen), (
        f"PEFT adapted other weights: {sorted(layers.keys() ^ set(chosen))[:5]}"
    )
    for layer in layers.values():
        for factor in (layer.lora_A, layer.lora_B):
            factor.to(torch.float32 if lora.dtype == "float32" else model.config.dtype)
    trained = {
        path for path in candidates if any(f"{path}.".startswith(f"{module}.") for module in saved)
    }
    return _coverage(
        model, {p: layer for p, layer in candidates.items() if p not in trained}, layers.keys()
    )


def reach(
    model: PreTrainedModel, spec: ModelSpec, targets: Literal["auto", "attention", "all-linear"]
) -> list[str]:
    """What `inject` would adapt on a model without adapters, by path and in the order of the layers."""
    family = family_of(model)
    return _choose(_candidates(model, spec, family), Lora(targets=targets), spec, family)


def adapter_weights(
    model: PreTrainedModel, seed: int, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full CPU tensor) of every LoRA factor of a model: the first values, a function of (seed, name).

    With `wanted`, only the factors of these names are drawn.

    A is uniform in +-1/sqrt(fan in) (PEFT's default, Kaiming's rule with a = sqrt(5)), B is 0, so that the model starts
    as it was. Copies made for `modules_to_save` are not among them: they start from the base weights (`names.hf_name`).
    """
    for name, parameter in model.named_parameters():
        if not is_adapter(name) or (wanted is not None and name not in wanted):
            continue
        factor = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(factor, nn.Linear)
        value = torch.zeros(
            factor.out_features, factor.in_features
        )  # the parameter may be a piece of it, laid flat
        if ".lora_A." in name:
            bound = 1.0 / math.sqrt(factor.in_features)
            value.uniform_(
                -bound, bound, generator=torch.Generator().manual_seed(stable_seed(seed, name))
            )
        yield name, value.to(parameter.dtype)


def adapter_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """PEFT's layers by the transformers name of what each adapts: a linear, or a parameter that stacks experts."""
    layers: dict[str, LoraLayer] = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            layers[f"{hf_name(name)}.{module.parameter_name}"] = module
        elif isinstance(module, LoraLayer):
            layers[hf_name(name)] = module
    return layers


def peft_config(
    lora: Lora, modules: list[str], parameters: list[str], saved: list[str], transposed: bool
) -> LoraConfig:
    """PEFT's config for adapters on `modules` (linears) and `parameters`, and modules to save.

    `transposed`: the linears are transformers' Conv1D, which keep their weight as [in, out].
    """
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,  # ty: ignore[invalid-argument-type]  # annotated int, used as a number
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        fan_in_fan_out=transposed,
        target_modules=modules,
        target_parameters=parameters or None,
        modules_to_save=saved or None,
    )


def _candidates(model: PreTrainedModel, spec: ModelSpec, family: Family) -> dict[str, LayerSpec]:
    return {path: layer for layer in spec.layers for path in _adaptable(model, layer, family)}


def _adaptable(model: PreTrainedModel, layer: LayerSpec, family: Family) -> list[str]:
    module = model.get_submodule(layer.name)
    linears = [
        name for name, part in module.named_modules() if isinstance(part, (nn.Linear, Conv1D))
    ]
    parameters = {name for name, _ in module.named_parameters()}
    return [
        f"{layer.name}.{name}"
        for name in (*linears, *(name for name in family.experts if name in parameters))
    ]


def _in_layer(path: str, layer: LayerSpec) -> str:
    return path.removeprefix(f"{layer.name}.")


def _choose(
    candidates: dict[str, LayerSpec], lora: Lora, spec: ModelSpec, family: Family
) -> list[str]:
    names = {path: _in_layer(path, layer) for path, layer in candidates.items()}
    reachable = [path for path in candidates if names[path] not in family.bypassed]
    match lora.targets:
        case "auto":
            return [
                path for path in reachable if names[path] not in (*family.gates, *family.experts)
            ]
        case "attention":
            chosen = [
                path
                for path in reachable
                if names[path].startswith(
                    tuple(f"{block}." for block in candidates[path].attention)
                )
            ]
            if not chosen:
                raise UserError(
                    f"lora.targets: this {spec.family} has no attention layer for `attention`; use auto"
                )
            return chosen
        case "all-linear":
            return reachable
        case targets:
            wanted = {path for target in targets for path in _matches(target, names, spec, family)}
            return [path for path in reachable if path in wanted]


def _matches(target: str, names: dict[str, str], spec: ModelSpec, family: Family) -> list[str]:
    # Routed experts are matched by their module's name too, but never by a bare `down_proj`: who lists the projections
    # of an MLP means the linears.
    def matched(path: str) -> bool:
        if names[path] not in family.experts:
            return _ends_with(path, target)
        return "experts" in target.split(".") and (
            _ends_with(path, target) or _ends_with(path.rpartition(".")[0], target)
        )

    found = [path for path in names if matched(path)]
    if _ends_with(spec.head, target):
        raise UserError(
            f"lora.targets: {target} is the head; train it in full with lora.modules_to_save: [{target}]"
        )
    if not found:
        raise UserError(
            f"lora.targets: {target} is no linear of this {spec.family}; {_near(target, names.values())}"
        )
    if all(names[path] in family.bypassed for path in found):
        raise UserError(
            f"lora.targets: {target} of {spec.family} takes no adapter: its layer reads the weight past the adapter; "
            "leave it out"
        )
    return found


def _saved_modules(model: PreTrainedModel, lora: Lora, spec: ModelSpec) -> list[str]:
    modules = [
        n
        for n, m in model.named_modules()
        if n and not isinstance(m, (nn.ModuleList, nn.ModuleDict))
    ]
    saved: list[str] = []
    for target in lora.modules_to_save:
        found = [name for name in modules if _ends_with(name, target)]
        if not found:
            raise UserError(
                f"lora.modules_to_save: no module {target} in this {spec.family}; {_near(target, modules)}"
            )
        if spec.tied and {spec.head, spec.embed} & set(found):
            raise UserError(
                f"lora.modules_to_save: {target} is tied (embedding and head are one matrix), and a trained copy would "
                "untie it; leave it out"
            )
        saved += found
    return list(dict.fromkeys(saved))


def _ends_with(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _near(target: str, names: Iterable[str]) -> str:
    pool = sorted(
        {".".join(parts[i:]) for parts in (n.split(".") for n in names) for i in range(len(parts))}
    )
    near = difflib.get_close_matches(target, pool, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(sorted({name.rpartition('.')[2] for name in pool}))}"


def _coverage(
    model: PreTrainedModel, candidates: dict[str, LayerSpec], adapted: Iterable[str]
) -> Coverage:
    adapted = set(adapted)
    rows = []
    for kind in dict.fromkeys(layer.kind for layer in candidates.values()):
        of_kind = {path: layer for path, layer in candidates.items() if layer.kind == kind}
        frozen = [_in_layer(path, layer) for path, layer in of_kind.items() if path not in adapted]
        rows.append(
            CoverageRow(
                kind=kind,
                layers=len(set(of_kind.values())),
                weights=len(of_kind),
                adapted=sum(path in adapted for path in of_kind),
                frozen=tuple(dict.fromkeys(frozen)),
            )
        )
    named = [
        (name, p) for name, p in model.named_parameters() if ".original_module." not in name
    ]  # replaced by copies
    sizes = [(parameter.numel(), parameter.requires_grad) for _, parameter in named]
    return Coverage(
        rows=tuple(rows),
        trainable=sum(size for size, trained in sizes if trained),
        total=sum(size for size, _ in sizes),
    )
