#!/usr/bin/env bash
# torch 2.13.0: of two functions with one code object and other globals, compiled modules run the first one's result.
#
# `types.FunctionType(f.__code__, globals)` makes a function with other globals, which is how names inside a library's
# function are replaced without changing the library. Two modules of one class call two such functions. The guard that
# torch.compile makes for the function that it inlines knows it by its code, and globals of a function without a
# module's name are not guarded: the second module takes the code that was compiled for the first.
#
# Seen: eager results are 2.0 and 3.0, compiled ones 2.0 and 2.0. With a code object of its own for each function
# (`f.__code__.replace()`) they are 2.0 and 3.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/run.py" <<'PYTHON'
from types import FunctionType

import torch


def scaled(x):
    return x * factor


class Layer(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def with_factor(value, code):
    names = {key: value for key, value in globals().items() if key != "__name__"}
    return FunctionType(code, names | {"factor": value})


def results(has_own_code):
    torch._dynamo.reset()
    codes = [scaled.__code__.replace() if has_own_code else scaled.__code__ for _ in range(2)]
    layers = [Layer(with_factor(value, code)) for value, code in zip((2.0, 3.0), codes)]
    x = torch.ones(1)
    return [[run(x).item() for run in (layer, torch.compile(layer, backend="eager"))] for layer in layers]


print("torch", torch.__version__)
shared, own = results(False), results(True)
print("(eager, compiled) with one code object:", shared)
print("(eager, compiled) with one for each:", own)
assert shared == [[2.0, 2.0], [3.0, 2.0]], "the behaviour has changed"
assert own == [[2.0, 2.0], [3.0, 3.0]], "the behaviour has changed"
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
