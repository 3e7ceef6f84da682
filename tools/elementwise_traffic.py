"""Count how often a layer's elementwise operators move the numbers of its products.

`python tools/elementwise_traffic.py` writes src/shardwise/planner/traffic.yaml: for each family,
kind of layer and way to train, the bytes that norms, gates, convolutions, rotations and copies
between dtypes read and write in a forward and in a backward, over the bytes of what enters and
leaves the layer's products. Steps are simulated: nothing is measured, and no GPU is needed. Left
out are products, the cores that a GPU has kernels for, and what a LoRA kernel computes.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.kernels.gated_delta_rule.chunked import _GatedDeltaRule
from shardwise.kernels.kimi_delta_attention.chunked import _KimiDeltaAttention
from shardwise.kernels.lora_linear.fused import _LoraLinears
from shardwise.kernels.selective_scan.chunked import _SelectiveScan
from shardwise.kernels.short_conv import shifted
from shardwise.kernels.state_space_duality.chunked import _Mamba2Scan
from shardwise.metrics.dispatch import WITHOUT_LAUNCH
from shardwise.models.dtypes import product_dtype
from shardwise.parallel.mesh import build_mesh
from shardwise.planner.traffic import PATH
from shardwise.planner.unit_work import work_of_units
from shardwise.simulation.allocations import StorageRecorder
from shardwise.simulation.moments import Moments
from shardwise.simulation.simulate import AfterOneStep, full_batches
from shardwise.simulation.tensors import SimulatedTensors
from shardwise.training.step import forward_backward

MODELS = Path(__file__).parents[1] / "configs" / "models"
SHAPES = (
    *("llama-3.1-8b", "tiny-qwen3", "tiny-qwen3_moe", "qwen3_5-2b", "qwen3-next-80b-a3b"),
    *("olmo2-7b", "olmo-hybrid-7b", "nemotron-3-nano-30b-a3b", "lfm2-1.2b", "gpt2-large"),
    *("granite-4.0-h-tiny", "falcon-h1-1.5b", "kimi-linear-48b-a3b", "tiny-jamba"),
    *("tiny-qwen3_5_moe", "tiny-lfm2_moe", "tiny-granitemoe", "tiny-mixtral", "tiny-bamba"),
    *("tiny-glm4_moe", "deepseek-v3", "jet-nemotron-2b"),
)
"""A model of each family: a published shape where configs/models has one."""
ABOVE_THE_LOWEST: dict[str, dict[str, Any]] = {
    "kimi-linear-48b-a3b": {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 25},
    "tiny-glm4_moe": {"first_k_dense_replace": 2},
    "tiny-lfm2_moe": {"num_dense_layers": 2},
    "tiny-jamba": {"num_hidden_layers": 6},
}
"""Keys with which no kind of layer is the lowest alone, whose input needs no gradient."""
DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "float32": ("float32", "float32"),
    "mixed": ("float32", "bfloat16"),
}
"""By name in the table, the dtypes of weights and of products."""
ROWS, LENGTH = 16, 128
"""So many tokens that what is done once a step with weights, such as a cast of adapters, hardly
counts, in rows so short that attention does not either where a CPU lacks a kernel for it."""
CORES = (_GatedDeltaRule, _KimiDeltaAttention, _SelectiveScan, _Mamba2Scan)
LEFT_OUT = (
    *("mm", "addmm", "addmm_", "bmm", "baddbmm", "grouped_linear", "grouped_linear_gradients"),
    "embedding_dense_backward",
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu_backward",),
)
"""Operators that a plan prices as products or cores, beside the gradient of the embedding."""
ONLY_WRITTEN = ("copy_", "fill_", "zero_")
"""Operators whose first argument is written and not read."""
Place = tuple[int, str]


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operators read and write, by the layer and the pass they are in."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[Place | None] = Counter()
        self.place: Place | None = None
        self.is_paused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        is_left_out = space == "prim" or name in LEFT_OUT or func in WITHOUT_LAUNCH
        if not (self.is_paused or is_left_out or func.is_view):
            inputs = args[1:] if name in ONLY_WRITTEN else args
            read = {id(x): x for x in tree_leaves((inputs, kwargs)) if isinstance(x, torch.Tensor)}
            written = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            self.bytes[self.place] += sum(x.nbytes for x in [*read.values(), *written])
        return result

    @contextmanager
    def without(self, *functions: type[torch.autograd.Function]) -> Iterator[None]:
        """Leave out in this block what these functions compute."""

        def paused(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **more: Any) -> Any:
                self.is_paused = True
                try:
                    return method(*args, **more)
                finally:
                    self.is_paused = False

            return run

        with ExitStack() as stack:
            for function, name in product(functions, ("forward", "backward")):
                method = staticmethod(paused(getattr(function, name)))
                stack.enter_context(mock.patch.object(function, name, method))
            yield

    def watch(self, layers: Sequence[torch.nn.Module]) -> None:
        """Note in which layer the next operators are."""
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, n=number: self.go((n, "forward")))
            layer.register_forward_hook(lambda *_: self.go(None))
            layer.register_full_backward_pre_hook(lambda *_, n=number: self.go((n, "backward")))

    def go(self, place: Place | None) -> None:
        self.place = place


def main() -> None:
    logging.set_verbosity_error()
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    cases = list(product(SHAPES, ("lora", "full"), DTYPES))
    with get_context("fork").Pool(maxtasksperchild=1) as pool:  # a process group for each
        for case, (family, rows) in zip(cases, pool.imap(passes_of, cases, 1), strict=True):
            for key, row in rows.items():
                table.setdefault(family, {}).setdefault(key, {})[case[2]] = row
            print(*case, rows, flush=True)
    head = "# Written by tools/elementwise_traffic.py; planner/traffic.py says what it is.\n"
    text = yaml.dump(table, default_flow_style=None, width=100, sort_keys=True)
    PATH.write_text(head + text, encoding="utf-8")


def passes_of(case: tuple[str, str, str]) -> tuple[str, dict[str, list[float]]]:
    """Return the family of a model, and of each key how often forward and backward move it."""
    name, mode, dtypes = case
    with TemporaryDirectory() as folder:
        config = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
        config |= ABOVE_THE_LOWEST.get(name, {})
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        cfg = run_config(folder, mode, *DTYPES[dtypes])
        shortened(config, [f"{x.kind}, {x.feed_forward}" for x in describe(cfg, 1).spec.layers])
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return counted(cfg)


def run_config(folder: str, mode: str, weights: str, products: str) -> RunConfig:
    return RunConfig(
        model=Model(folder, init="random", dtype=weights, slow_cores="allow"),
        lora=Lora(r=16, alpha=32) if mode == "lora" else None,
        data=Data(train="unused", sequence_length=LENGTH),
        training=Training(
            output_dir="unused", precision=products, global_batch_size=ROWS, micro_batch_size=ROWS
        ),
    )


def shortened(config: dict[str, Any], kinds: Sequence[str]) -> None:
    """Leave the first layers of a config: each kind is there, beside the lowest layer."""
    number = next(n for n in range(2, len(kinds) + 1) if {*kinds[1:n]} == {*kinds[1:]})
    for key, value in config.items():
        if isinstance(value, list) and len(value) == len(kinds):
            config[key] = value[:number]
        elif key in ("num_hidden_layers", "n_layer") and value == len(kinds):
            config[key] = number


def counted(cfg: RunConfig) -> tuple[str, dict[str, list[float]]]:
    """Count in a simulated step; of layers that are alike the topmost stands for all."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    recorder, traffic = StorageRecorder(Moments().latest), Traffic()
    kernels = (*CORES, _LoraLinears)
    with ExitStack() as stack:
        stack.enter_context(recorder.watching_resizes())
        stack.enter_context(SimulatedTensors(recorder, copies_whole=False))
        stack.enter_context(traffic.without(*kernels))
        stack.enter_context(mock.patch.object(shifted, "BLOCK", LENGTH))  # at once, as on a GPU
        mesh = build_mesh(cfg, torch.device("cpu"))
        job = build(cfg, mesh, AfterOneStep())
        (part,) = job.pm.parts
        layers = [part.get_submodule(f"hf.{layer.name}") for layer in part.spec.layers]
        traffic.watch(layers)
        batches = full_batches(cfg, mesh, job)
        stack.enter_context(warnings.catch_warnings())
        # The input of the lowest layer needs no gradient; others of its kind stand for it.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        with traffic:
            forward_backward(job.pm, batches, mesh)
    facts = describe(cfg, 1)
    rows = {}
    works = work_of_units(cfg, facts.hf, facts.spec)[1:-1]
    for number, work in enumerate(works):
        moved = 2 * work.rest_forward.elements * product_dtype(cfg).itemsize
        passes = [traffic.bytes[number, direction] / moved for direction in ("forward", "backward")]
        rows[work.key] = [round(number, 2) for number in passes]
    return facts.spec.family, rows


if __name__ == "__main__":
    main()
