"""Names and modules: from a model with adapters to the transformers model underneath."""

from __future__ import annotations

from typing import Any

from peft.utils import ModulesToSaveWrapper


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
    """Return whether a parameter is a LoRA factor, A or B."""
    return ".lora_A." in name or ".lora_B." in name


def is_factor_b(name: str) -> bool:
    """Return whether a parameter is a LoRA factor B, [out, R] of a linear or of experts."""
    return ".lora_B." in name


def is_saved_copy(name: str) -> bool:
    """Return whether a parameter is the trained copy of one that `modules_to_save` names."""
    return ".modules_to_save.default." in name


def in_use(module: Any) -> Any:
    """Return the module that computes: the copy of one that PEFT copied to train it in full."""
    return module.modules_to_save["default"] if isinstance(module, ModulesToSaveWrapper) else module
