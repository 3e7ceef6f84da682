"""Choose and check what computes the gated delta rule: fla's kernels or transformers' torch code.

transformers decides when a family's module is imported: it takes fla's kernels if it can import
them, and else, for whatever reason, its own code without a message. So a process chooses first, and
what was really taken is read back.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.util import find_spec
from typing import Any

from torch import nn

OPTIONAL = ("fla", "causal_conv1d")
"""Packages whose kernels transformers puts in the place of its torch code."""
FUNCTIONS = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
"""The functions of a hybrid family's module that it does this with in training."""


def choose(gdn: str) -> None:
    """Make the optional packages unimportable (torch), or import fla's kernels, which may raise."""
    decided = [name for name in sys.modules if "gated_delta" in name or ".modeling_qwen3" in name]
    assert not decided, f"chosen too late, after the import of {decided[0]}"
    if gdn == "torch":
        for name in OPTIONAL:
            sys.modules[name] = None  # ty: ignore[invalid-assignment]  # makes `import` fail
    else:
        assert gdn == "fla", gdn
        importlib.import_module("fla.ops.gated_delta_rule")


def taken(model: nn.Module) -> dict[str, str]:
    """Return the module of the code behind each of FUNCTIONS that the model's module has."""
    modules = {}
    for name, function in _functions(model).items():
        variables = inspect.getclosurevars(function).nonlocals
        modules[name] = variables["implementation"].__module__
    return modules


def _functions(model: nn.Module) -> dict[str, Any]:
    module = sys.modules[type(model).__module__]
    return {name: getattr(module, name) for name in FUNCTIONS if hasattr(module, name)}


def check(model: nn.Module, gdn: str) -> dict[str, str]:
    """Return `taken(model)`; assert that what was chosen computes the gated delta rule."""
    kernels = taken(model)
    if not kernels:  # not transformers' code; JetBlock looks for fla when it is called
        assert (find_spec("fla") is not None) == (gdn == "fla")
        return {}
    package = kernels["torch_chunk_gated_delta_rule"].partition(".")[0]
    assert package == {"fla": "fla", "torch": "transformers"}[gdn], (
        f"asked for {gdn}, but transformers took {kernels}"
    )
    return kernels
