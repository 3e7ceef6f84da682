"""Count how often a layer's elementwise operators move the numbers of its products.

`python -m tools.elementwise_traffic` writes src/shardwise/lab/planner/traffic.yaml: for each
family, kind of layer (and the embedding, and head and loss) and way to train, the bytes that norms,
gates, convolutions, rotations and copies between dtypes read and write for a token in a forward and
in a backward, over the bytes of what enters and leaves the layer's products. Steps are simulated:
nothing is measured, and no GPU is needed. Left out are products, the cores that a GPU has kernels
for, what a LoRA kernel computes, and what is done once a step with weights, however many tokens
there are.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import yaml
from tests.oracles.allocations import StorageRecorder
from tests.oracles.moments import Moments
from tests.oracles.simulate import AfterOneStep, full_batches
from tests.oracles.tensors import SimulatedTensors
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.kernels.gated_delta_rule.chunked import _GatedDeltaRule
from shardwise.kernels.kimi_delta_attention.chunked import _KimiDeltaAttention
from shardwise.kernels.linear_cross_entropy import chunked
from shardwise.kernels.lora_linear.fused import _LoraLinears
from shardwise.kernels.selective_scan.chunked import _SelectiveScan
from shardwise.kernels.short_conv import shifted
from shardwise.kernels.state_space_duality.chunked import _Mamba2Scan
from shardwise.lab.planner.traffic import PATH
from shardwise.lab.planner.unit_work import work_of_units
from shardwise.metrics.dispatch import WITHOUT_LAUNCH
from shardwise.models.dtypes import product_dtype
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward

MODELS = Path(__file__).parents[1] / "configs" / "models"
SHAPES = (
    *("llama-3.1-8b", "qwen3", "qwen3_moe", "qwen3_5-2b", "qwen3-next-80b-a3b", "olmo2-7b"),
    *("olmo-hybrid-7b", "nemotron_h", "nemotron-3-nano-30b-a3b", "lfm2-1.2b", "gpt2-large"),
    *("granite-4.0-h-tiny", "falcon-h1-1.5b", "kimi-linear-48b-a3b", "jamba", "qwen3_5_moe_text"),
    *("lfm2_moe", "granitemoe", "mixtral", "bamba", "glm4_moe", "deepseek-v3", "jet-nemotron-2b"),
)
"""A model of each family: of configs/models, or the one that transformers' defaults describe. Of
two models of a family the later one counts where both have a kind of layer."""
CHANGED: dict[str, dict[str, Any]] = {
    "kimi-linear-48b-a3b": {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 25},
    "glm4_moe": {"first_k_dense_replace": 2},
    "lfm2_moe": {
        "num_hidden_layers": 5,
        "num_dense_layers": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    },
    "qwen3": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 4096,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"mlp_only_layers": [1]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
}
"""Keys with which each kind of layer is there, and none is the lowest alone, whose input needs no
gradient."""
DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "float32": ("float32", "float32"),
    "mixed": ("float32", "bfloat16"),
}
"""By name in the table, the dtypes of weights and of products."""
ROWS, LENGTH = (8, 16), 128
"""What more rows take is what tokens take. They are so short that attention hardly counts where a
CPU lacks a kernel for it."""
OTHER_LOSSES = ("llama-3.1-8b", ("chunked", "plain"))
"""A model whose head stands for those of all where the loss is not Triton's."""
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
MODES = ("lora", "full")
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

    def watch(self, part: Any) -> None:
        """Note in which unit the next operators are: what is in no layer belongs to the head."""
        layers = [part.get_submodule(f"hf.{layer.name}") for layer in part.spec.layers]
        head = len(layers) + 1
        self.place = head, "forward"
        for place, unit in enumerate([part.get_submodule(f"hf.{part.spec.embed}"), *layers]):
            unit.register_forward_pre_hook(lambda *_, n=place: self.go((n, "forward")))
            unit.register_forward_hook(lambda *_: self.go((head, "forward")))
            # Gradients come to the head first, then to the layers from the top.
            unit.register_full_backward_pre_hook(lambda *_, n=place: self.go((n, "backward")))
        part.register_full_backward_pre_hook(lambda *_: self.go((head, "backward")))

    def go(self, place: Place | None) -> None:
        self.place = place


def main() -> None:
    logging.set_verbosity_error()
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    shapes = [*product(SHAPES, ("triton",)), *((OTHER_LOSSES[0], x) for x in OTHER_LOSSES[1])]
    cases = [(*shape, mode, dtypes) for shape in shapes for mode in MODES for dtypes in DTYPES]
    with get_context("fork").Pool(maxtasksperchild=1) as pool:  # a process group for each
        for case, (family, rows) in zip(cases, pool.imap(passes_of, cases, 1), strict=True):
            for key, row in rows.items():
                table.setdefault(family, {}).setdefault(key, {})[case[3]] = row
            print(*case, rows, flush=True)
    head = "# Written by tools/elementwise_traffic.py; planner/traffic.py says what it is.\n"
    text = yaml.dump(table, default_flow_style=None, width=100, sort_keys=True)
    PATH.write_text(head + text, encoding="utf-8")


def passes_of(case: tuple[str, str, str, str]) -> tuple[str, dict[str, list[float]]]:
    """Return the family of a model, and of each key how often forward and backward move it."""
    name, loss, mode, dtypes = case
    with TemporaryDirectory() as folder:
        config = published(name) | CHANGED.get(name, {})
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        cfg = run_config(folder, loss, mode, *DTYPES[dtypes])
        shortened(config, [f"{x.kind}, {x.feed_forward}" for x in describe(cfg, 1).spec.layers])
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return counted(cfg, loss)


def published(name: str) -> dict[str, Any]:
    """Return the config of a model of configs/models or, by its type, of transformers."""
    path = MODELS / name / "config.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    config = AutoConfig.for_model(name)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    return config.to_dict() | {"architectures": [architecture]}


def run_config(folder: str, loss: Any, mode: str, weights: str, products: str) -> RunConfig:
    return RunConfig(
        model=Model(folder, init="random", dtype=weights, slow_cores="allow"),
        lora=Lora(r=16, alpha=32) if mode == "lora" else None,
        data=Data(train="unused", sequence_length=LENGTH),
        training=Training(
            output_dir="unused",
            precision=products,
            loss="chunked" if loss == "triton" else loss,
            global_batch_size=ROWS[0],
            micro_batch_size=ROWS[0],
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


def counted(cfg: RunConfig, loss: str) -> tuple[str, dict[str, list[float]]]:
    """Count in two simulated steps; of layers that are alike the topmost stands for all."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    runs = [with_rows(cfg, number) for number in ROWS]
    recorder, traffics = StorageRecorder(Moments().latest), []
    kernels = (*CORES, _LoraLinears)
    with ExitStack() as stack:
        stack.enter_context(recorder.watching_resizes())
        stack.enter_context(SimulatedTensors(recorder, copies_whole=False))
        stack.enter_context(mock.patch.object(shifted, "BLOCK", LENGTH))  # at once, as on a GPU
        # As many logits at once as on a GPU, which Triton's kernel reads and writes once.
        stack.enter_context(mock.patch.object(chunked, "CPU_ROWS", sys.maxsize))
        stack.enter_context(mock.patch.object(chunked, "_add_product"))  # one product there
        if loss == "triton":
            kernel = (written_once, False)
            stack.enter_context(mock.patch.object(chunked, "_softmax_of", return_value=kernel))
        stack.enter_context(warnings.catch_warnings())
        # The input of the lowest layer needs no gradient; others of its kind stand for it.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        mesh = build_mesh(cfg, torch.device("cpu"))
        for run in runs:
            job = build(run, mesh, AfterOneStep())
            (part,) = job.pm.parts
            traffic = Traffic()
            traffic.watch(part)
            with traffic.without(*kernels), traffic:
                forward_backward(job.pm, full_batches(run, mesh, job), mesh)
            traffics.append(traffic.bytes)
    facts = describe(cfg, 1)
    rows = {}
    works = [work_of_units(run, facts.hf, facts.spec) for run in runs]
    for place, (fewer, more) in enumerate(zip(*works, strict=True)):
        elements = more.rest_forward.elements - fewer.rest_forward.elements
        moved = 2 * elements * product_dtype(cfg).itemsize
        key = more.key
        if key.startswith("head, "):
            key = f"{key}, {loss}"
        rows[key] = [
            round((traffics[1][place, way] - traffics[0][place, way]) / moved, 2)
            for way in ("forward", "backward")
        ]
    return facts.spec.family, rows


def written_once(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    """Read and write a chunk of logits, as the softmax of Triton does."""
    return logits.mul_(0.5).new_zeros(())


def with_rows(cfg: RunConfig, number: int) -> RunConfig:
    training = replace(cfg.training, global_batch_size=number, micro_batch_size=number)
    return replace(cfg, training=training)


if __name__ == "__main__":
    main()
