"""The example in CUDA C++ is whole: its page names what it has, and make builds it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "cuda_lora"


def test_the_page_names_every_function_of_the_kernel_that_make_builds():
    source = (FOLDER / "lora_linear.cu").read_text(encoding="utf-8")
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`(?:, `(\w+)`)? \|", page))
    named = {name for pair in named for name in pair if name}
    defined = set(re.findall(r"^(?:__\w+__ )?(?:void|int|double) (\w+)\(", source, re.MULTILINE))
    assert named == defined - {"run", "require", "distance"}
    assert "__global__ void sum_of_products(" in source
    assert source.count("{") == source.count("}")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^cuda-lora:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert "nvcc" in recipe
    assert "examples/cuda_lora/lora_linear.cu" in recipe
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 400
