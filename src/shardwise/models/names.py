"""Names and modules: from a model with adapters to the transformers model underneath."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer, ParamWrapper
    from peft.utils import ModulesToSaveWrapper
    from typing_extensions import TypeIs

    from shardwise.models.adapters.magnitude import Magnitude


def hf_name(name: str) -> str:
    """Return the transformers name of a base parameter or buffer that PEFT's wrappers have renamed.

    `a.q_proj.base_layer.weight` -> `a.q_proj.weight`. Both copies that `modules_to_save` makes of a
    module get the module's name. Wrappers of other libraries must be stripped before.
    """
    assert not is_adapter(name), f"{name} has no counterpart in the transformers model"
    for part in (".base_layer", ".original_module", ".modules_to_save.default"):
        name = name.replace(part, "")
    return name


def is_adapter(name: str) -> bool:
    """Return whether a parameter is one of LoRA: a factor, A or B, or a magnitude of DoRA."""
    return ".lora_A." in name or ".lora_B." in name or is_magnitude(name)


def is_magnitude(name: str) -> bool:
    """Return whether a parameter holds the lengths of a matrix's rows, [out], under DoRA."""
    return ".lora_magnitude_vector." in name


def is_factor_b(name: str) -> bool:
    """Return whether a parameter is a LoRA factor B, [out, R] of a linear or of experts."""
    return ".lora_B." in name


def renamed_by_peft(model_type: str) -> Collection[str]:
    """Return last parts of names that PEFT takes for those of routed experts in a model type."""
    from peft.utils.transformers_weight_conversion import (
        _MODEL_TO_CONVERSION_PATTERN,
        _MOE_TARGET_MODULE_MAPPING,
    )

    return _MOE_TARGET_MODULE_MAPPING.get(_MODEL_TO_CONVERSION_PATTERN.get(model_type, ""), {})


def is_saved_copy(name: str) -> bool:
    """Return whether a parameter is the trained copy of one that `modules_to_save` names."""
    return ".modules_to_save.default." in name


def is_lora(module: object) -> TypeIs[LoraLayer]:
    """Return whether a module is a layer of PEFT's: of a linear or, as a ParamWrapper, a stack."""
    return _is_of(module, "peft.tuners.lora", "LoraLayer")


def is_wrapper(module: object) -> TypeIs[ParamWrapper]:
    """Return whether a module is PEFT's layer on a stack of experts, or on another parameter."""
    return _is_of(module, "peft.tuners.lora", "ParamWrapper")


def is_copied(module: object) -> TypeIs[ModulesToSaveWrapper]:
    """Return whether a module is the pair of one and of the copy that is trained in full."""
    return _is_of(module, "peft.utils", "ModulesToSaveWrapper")


def is_lengths(module: object) -> TypeIs[Magnitude]:
    """Return whether a module holds the lengths of a matrix's rows, under DoRA."""
    return _is_of(module, "shardwise.models.adapters.magnitude", "Magnitude")


def _is_of(module: object, file: str, name: str) -> bool:
    """Return whether a module is of the class of a file, which a run without adapters does not
    import: it takes 0.2 seconds.
    """
    imported = sys.modules.get(file)
    return imported is not None and isinstance(module, getattr(imported, name))


def in_use(module: Any) -> Any:
    """Return the module that computes: the copy of one that PEFT copied to train it in full."""
    return module.modules_to_save["default"] if is_copied(module) else module


def adapter_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return PEFT's layers by the transformers name of the linear or stack that each adapts."""
    layers: dict[str, LoraLayer] = {}
    for name, module in model.named_modules():
        if is_wrapper(module):
            layers[f"{hf_name(name)}.{module.parameter_name}"] = module
        elif is_lora(module):
            layers[hf_name(name)] = module
    return layers


def num_sharing(layer: nn.Module | None) -> int:
    """Return how many experts have the factors of an adapter in common: 1, or all of a stack."""
    if not is_wrapper(layer):
        return 1
    (name,) = layer.lora_A
    factor: Any = layer.lora_A[name]  # A [E R, in], or [R, in]
    return layer.num_experts * layer.r[name] // factor.out_features
