"""A stand-in for a function of mamba_ssm: its signature, and what it computes in plain torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    name: str,
    signature: str,
    computed: Callable[[dict[str, Any]], Any],
) -> list[dict[str, Any]]:
    """Pretend that mamba_ssm is installed with this function; return the arguments of its calls."""
    calls: list[dict[str, Any]] = []
    namespace: dict[str, Any] = {}
    exec(f"def {name}{signature}: pass", namespace)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(namespace[name]).bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(bound.arguments)
        return computed(bound.arguments)

    package = ModuleType("mamba_ssm")
    package.__spec__ = ModuleSpec("mamba_ssm", None)
    functions: Any = ModuleType(module)
    setattr(functions, name, stand_in)
    monkeypatch.setitem(sys.modules, "mamba_ssm", package)
    monkeypatch.setitem(sys.modules, module, functions)
    return calls
