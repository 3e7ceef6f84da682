"""Import what compiling imports, some 600 modules, once: forked processes that compile then share
it."""

import importlib

for name in (
    "torch._dynamo.backends.debugging",
    "torch._dynamo.repro.after_aot",
    "torch._inductor.compile_fx",
):
    importlib.import_module(name)
