"""The kernels need only torch and Triton: this environment has no transformers."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec

import pytest

from shardwise import kernels

MODULES = [module.name for module in pkgutil.walk_packages(kernels.__path__, "shardwise.kernels.")]


def test_this_is_the_environment_for_kernels():
    assert find_spec("transformers") is None
    assert find_spec("triton") is not None


@pytest.mark.parametrize("name", MODULES)
def test_a_kernel_needs_torch_alone(name):
    import_module(name)
