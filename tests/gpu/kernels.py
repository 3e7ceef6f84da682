"""Which code computes the gated delta rule, and how it is chosen: transformers takes fla's where it
can import it.

It decides when a family's module is imported, and where the import fails, for whatever reason, it
takes its own torch code without a word. So a process chooses first, and what was really taken is
read back.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from unittest import mock

from torch import nn

OPTIONAL = ("fla", "causal_conv1d")
"""Packages whose kernels transformers puts in the place of its torch code."""
FUNCTIONS = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
"""The functions of a hybrid family's module that it does this with in training."""


def choose(gdn: str) -> None:
    """`torch`: make the optional packages unimportable. `fla`: import its kernels, and so say why
    if that fails.
    """
    assert not any("gated_delta" in name or ".modeling_qwen3" in name for name in sys.modules), (
        "chosen too late"
    )
    if gdn == "torch":
        sys.modules.update(dict.fromkeys(OPTIONAL))  # ty: ignore[no-matching-overload]  # None makes `import` fail
    else:
        assert gdn == "fla", gdn
        importlib.import_module("fla.ops.gated_delta_rule")


def taken(model: nn.Module) -> dict[str, str]:
    """From each of FUNCTIONS that the model's module has to the module of the code behind it."""
    module = sys.modules[type(model).__module__]
    found = {
        name: inspect.getclosurevars(getattr(module, name))
        for name in FUNCTIONS
        if hasattr(module, name)
    }
    return {
        name: variables.nonlocals["implementation"].__module__ for name, variables in found.items()
    }


def check(model: nn.Module, gdn: str) -> dict[str, str]:
    """`taken(model)`; an assert fails if the gated delta rule is not computed by what was chosen.
    """
    kernels = taken(model)
    if not kernels:  # not transformers' code; JetBlock looks for fla when it is called
        assert (find_spec("fla") is not None) == (gdn == "fla")
        return {}
    package = kernels["torch_chunk_gated_delta_rule"].partition(".")[0]
    assert package == {"fla": "fla", "torch": "transformers"}[gdn], (
        f"asked for {gdn}, but transformers took {kernels}"
    )
    return kernels


@contextmanager
def reference_code(model: nn.Module) -> Generator[None]:
    """Within it the functions of a model's module are the torch code, whatever was chosen."""
    module = sys.modules[type(model).__module__]
    plain = {
        name: inspect.unwrap(getattr(module, name)) for name in FUNCTIONS if hasattr(module, name)
    }
    with mock.patch.multiple(module, **plain) if plain else nullcontext():
        yield
