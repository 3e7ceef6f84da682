"""The kernels need only torch and Triton: they are imported where transformers and PEFT are not."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib.util import find_spec

from shardwise import kernels

MODULES = [module.name for module in pkgutil.walk_packages(kernels.__path__, "shardwise.kernels.")]
IMPORT_ALONE = """
import sys
from importlib import import_module

sys.modules |= {"transformers": None, "peft": None}  # what None stands for cannot be imported
for name in sys.argv[1:]:
    import_module(name)
"""


def test_this_is_the_environment_for_kernels():
    assert find_spec("triton") is not None


def test_kernels_need_torch_alone():
    assert MODULES
    subprocess.run([sys.executable, "-c", IMPORT_ALONE, *MODULES], check=True)
