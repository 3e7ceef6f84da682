"""The bytes of activations by formula, beside those that a forward and a backward keep."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input

from shardwise.base.batches import Batch
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.metrics.memory import PeakMemory
from shardwise.models.activations import UnitMemory, is_trained_below, unit_memory
from shardwise.models.adapters.lora import adapter_weights, inject
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import family_of, spec_of
from shardwise.models.kinds import KINDS
from shardwise.models.kinds.attention import Attention
from shardwise.models.load import fill, weights
from shardwise.models.patches import patch
from shardwise.models.spec import LayerSpec
from shardwise.parallel.activation_checkpoint import recompute
from tests.left_out import some_now
from tests.models.tiny import first_magnitudes, on_meta, tiny

LENGTH = 256
FAMILIES = (
    "llama", "gpt2", "qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "jamba", "nemotron_h",
    "lfm2", "jet_nemotron", "falcon_h1", "mixtral", "glm4_moe", "olmo2",
    "gemma2", "gpt_oss",
)  # fmt: skip
"""With every kind of block among their layers."""
LIKE_OTHERS = ("falcon_h1", "mixtral", "glm4_moe", "olmo2")
"""Of these, those whose kinds the others have: `make parity` measures them."""
LORA = Lora(r=8, targets="all-linear")


class Setting(NamedTuple):
    lora: Lora | None = LORA
    dtype: str = "float32"
    precision: str = "float32"
    checkpointing: Any = "none"


def config(family: str, setting: Setting, length: int = LENGTH, **options: Any) -> RunConfig:
    lora, dtype, precision, checkpointing = setting
    training = Training(
        output_dir="out",
        micro_batch_size=1,
        precision=precision,  # ty: ignore[invalid-argument-type]
        checkpointing=checkpointing,
        device="cpu",
        loss=options.pop("loss", "auto"),
    )
    model = Model(tiny(f"tiny-{family}").path, init="random", dtype=dtype)  # ty: ignore[invalid-argument-type]
    return RunConfig(model, Data("x", sequence_length=length), training, lora, Parallel(**options))


class Part:
    """A patched model on the CPU, and what its layers are called with."""

    def __init__(self, cfg: RunConfig) -> None:
        hf = on_meta(cfg.model)
        self.spec = spec_of(hf.config, hf)
        if cfg.lora:
            inject(hf, cfg.lora, self.spec)
        values = dict(weights(hf, cfg.model, seed=0))
        magnitudes = first_magnitudes(hf, values)
        fill(hf, chain(values.items(), adapter_weights(hf, seed=0), magnitudes.items()))
        self.part = CausalLM(hf, self.spec, family_of(hf), cfg)
        patch(self.part, cfg, torch.device("cpu"))
        recompute(hf, self.spec, cfg.training.checkpointing, self.part.dropout)
        self.part.train()
        self.hf, self.cfg = hf, cfg
        tokens = torch.arange(cfg.data.sequence_length)[None] % self.spec.vocab_size
        self.batch = Batch(tokens, tokens, torch.zeros_like(tokens), (0,), step=1)
        self.calls: dict[str, Any] = {}
        hooks = [
            hf.get_submodule(layer.name).register_forward_pre_hook(
                lambda _, args, kwargs, name=layer.name: self.calls.update({name: (args, kwargs)}),
                with_kwargs=True,
            )
            for layer in self.spec.layers
        ]
        with torch.no_grad():
            self.hidden = self.part.hidden_of(self.batch, {"input_ids": tokens})
        for hook in hooks:
            hook.remove()

    def measured(self, layer: LayerSpec) -> UnitMemory:
        """What one layer takes, alone, with gradients of weights that are there already."""
        module = self.hf.get_submodule(layer.name)
        args, kwargs = self.calls[layer.name]

        def forward(x: torch.Tensor) -> torch.Tensor:
            with self.part.autocast(self.batch):
                out = module(x, *args[1:], **kwargs)
            return out[0] if isinstance(out, tuple) else out

        needs_input = is_trained_below(self.hf, self.spec, layer.number + 1)
        return measured(forward, module, args[0], needs_input)


class Last(torch.autograd.Function):
    """0, whose gradient for its input is 1: made in the backward, and held by nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.shape, dtype=ctx.dtype)


def kept_bytes(memory: PeakMemory, out: torch.Tensor) -> int:
    assert memory.exit_bytes is not None
    assert memory.entry_bytes is not None
    return memory.exit_bytes - memory.entry_bytes - out.nbytes


def measured(
    forward: Any, module: torch.nn.Module, x: torch.Tensor, needs_input: bool
) -> UnitMemory:
    """What a forward takes of a copy of x, which nothing holds but what its backward reads."""
    leaf = x.detach().clone().requires_grad_(needs_input)
    for p in module.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    Last.apply(forward(leaf.clone())).backward()
    with PeakMemory(torch.device("cpu")) as memory:
        out = forward(leaf.clone())
    kept = kept_bytes(memory, out)
    loss, num_bytes = Last.apply(out), out.nbytes
    del out
    forward_bytes = memory.added_bytes() - x.nbytes
    with PeakMemory(torch.device("cpu")) as memory:
        loss.backward()
    return UnitMemory(kept, forward_bytes, memory.added_bytes() - num_bytes)


def layers_of_every_kind(part: Part) -> list[tuple[int, LayerSpec]]:
    """The highest layer of each kind: its input needs a gradient."""
    kinds = {(layer.kind, layer.feed_forward): i for i, layer in enumerate(part.spec.layers)}
    return [(i, part.spec.layers[i]) for i in kinds.values()]


def close(formula: int, counted: int, relative: float) -> bool:
    return abs(formula - counted) <= relative * counted


SETTINGS = {
    "lora": Setting(),
    "attention": Setting(Lora(r=8, targets="attention")),
    "full": Setting(None),
    "autocast": Setting(precision="bfloat16"),
    "bfloat16": Setting(None, dtype="bfloat16"),
    "recomputed": Setting(checkpointing="full"),
}


def layers_and_settings() -> Iterator[Any]:
    """Yield each family in each setting; `make test` takes one of each family in turn, and all of
    llama."""
    in_turn = ("lora", "bfloat16", "autocast", "full")
    for place, family in enumerate(FAMILIES):
        for setting in SETTINGS:
            if family == "llama" or setting in in_turn:
                is_now = family == "llama" or setting == in_turn[place % len(in_turn)]
                is_later = not is_now or family in LIKE_OTHERS
                yield pytest.param(family, setting, marks=[pytest.mark.slow] * is_later)


def left_by_half(part: Part, layer: LayerSpec) -> int:
    """The bytes that the first half of torch's backward of a layer leaves for the second."""
    module = part.hf.get_submodule(layer.name)
    args, kwargs = part.calls[layer.name]
    leaf = args[0].detach().clone().requires_grad_()
    with part.part.autocast(part.batch):
        out = module(leaf.clone(), *args[1:], **kwargs)
    trained = (p for p in module.parameters() if p.requires_grad)
    with part.part.backward_half.running("input"):
        _, groups = stage_backward_input([out], [torch.ones_like(out)], [leaf], trained)
    gradients = (x for group in groups for of_node in group["grads"] for x in of_node)
    left = {x.untyped_storage()._cdata: x.untyped_storage() for x in gradients if x is not None}
    return sum(storage.nbytes() for storage in left.values())


@pytest.mark.parametrize("setting", ["full", "mixed", "bfloat16", "lora"])
@pytest.mark.parametrize("family", ["llama", "olmo_hybrid", "lfm2", "jamba"])
def test_half_a_backward_leaves_what_its_formula_says(family, setting):
    setting = Setting(None, precision="bfloat16") if setting == "mixed" else SETTINGS[setting]
    part = Part(config(family, setting, pp=2, schedule="zbv", virtual_stages=2))
    for place, layer in layers_of_every_kind(part):
        formula = unit_memory(part.cfg, part.hf, part.spec, place + 1)
        assert formula.late == left_by_half(part, layer) > 0


@pytest.mark.parametrize(("family", "setting"), [*layers_and_settings()])
def test_a_layer_keeps_what_its_formula_says(family, setting):
    part = Part(config(family, SETTINGS[setting]))
    for place, layer in layers_of_every_kind(part):
        formula = unit_memory(part.cfg, part.hf, part.spec, place + 1)
        counted = part.measured(layer)
        assert close(formula.kept, counted.kept, 0.01), (layer.kind, formula, counted)


DORA = Lora(r=8, dora=True)
DORA_NOW = (
    *((family, Setting(DORA)) for family in ("qwen3_5", "jamba")),
    ("gpt2", Setting(DORA, precision="bfloat16")),
    ("llama", Setting(DORA, checkpointing="operators")),
)
DORA_LATER = (
    *((family, Setting(DORA)) for family in ("llama", "gpt2")),
    *((family, Setting(DORA, precision="bfloat16")) for family in ("llama", "qwen3_5")),
    ("qwen3_5", Setting(DORA, checkpointing="operators")),
)


@pytest.mark.parametrize(
    ("family", "setting"), some_now([*DORA_NOW, *DORA_LATER], DORA_NOW), ids=str
)
def test_the_most_that_is_alive_with_lengths_of_rows(family, setting):
    part = Part(config(family, setting))
    for place, layer in layers_of_every_kind(part):
        formula = unit_memory(part.cfg, part.hf, part.spec, place + 1)
        counted = part.measured(layer)
        total = formula.kept + formula.backward, counted.kept + counted.backward
        assert close(formula.kept, counted.kept, 0.01), (layer.kind, formula, counted)
        assert close(*total, 0.05), (layer.kind, formula, counted)


@pytest.mark.parametrize(
    ("family", "mode"),
    some_now(
        product(("llama", "qwen3_5", "nemotron_h", "jamba", "falcon_h1"), ("lora", "full")),
        [("llama", "lora"), ("qwen3_5", "full"), ("nemotron_h", "lora"), ("jamba", "full")],
    ),
)
def test_selective_checkpointing_keeps_the_outputs_of_products(family, mode):
    lora = LORA if mode == "lora" else None
    part = Part(config(family, Setting(lora, checkpointing="operators")))
    for place, layer in layers_of_every_kind(part):
        formula = unit_memory(part.cfg, part.hf, part.spec, place + 1)
        counted = part.measured(layer)
        total = formula.kept + formula.backward, counted.kept + counted.backward
        assert close(formula.kept, counted.kept, 0.005), (layer.kind, formula, counted)
        assert close(*total, 0.04), (layer.kind, formula, counted)


def test_selective_checkpointing_of_kda():
    part = Part(config("kimi_linear", Setting(checkpointing="operators")))
    place, layer = layers_of_every_kind(part)[0]
    assert layer.kind == "kda"
    formula = unit_memory(part.cfg, part.hf, part.spec, place + 1)
    counted = part.measured(layer)
    total = formula.kept + formula.backward, counted.kept + counted.backward
    assert close(formula.kept, counted.kept, 0.005), (formula, counted)
    assert close(*total, 0.01), (formula, counted)


@pytest.mark.parametrize(
    "family",
    some_now(
        ("llama", "qwen3_5", "lfm2", "olmo_hybrid", "jet_nemotron"),
        ("llama", "qwen3_5", "jet_nemotron"),
    ),
)
def test_the_most_that_is_alive(family):
    part = Part(config(family, SETTINGS["lora"]))
    for place, layer in layers_of_every_kind(part):
        formula = unit_memory(part.cfg, part.hf, part.spec, place + 1)
        counted = part.measured(layer)
        total = formula.kept + formula.backward, counted.kept + counted.backward
        # Of a chunk of a recurrence it is known roughly how much is alive.
        assert close(formula.forward, counted.forward, 0.02), (layer.kind, formula, counted)
        assert close(*total, 0.05), (layer.kind, formula, counted)


@pytest.mark.parametrize("length", [40, 96])
@pytest.mark.parametrize(
    "family",
    some_now(("olmo_hybrid", "kimi_linear", "jamba", "nemotron_h"), ("olmo_hybrid", "jamba")),
)
def test_rows_that_end_in_a_part_of_a_chunk(family, length):
    setting = Setting(LORA, checkpointing="operators")
    part = Part(config(family, setting, length))
    for place, layer in layers_of_every_kind(part):
        if layer.kind == "attention" or layer.mixers == ():
            continue
        formula = unit_memory(part.cfg, part.hf, part.spec, place + 1)
        counted = part.measured(layer)
        total = formula.kept + formula.backward, counted.kept + counted.backward
        assert close(formula.kept, counted.kept, 0.01), (layer.kind, formula, counted)
        assert close(*total, 0.15), (layer.kind, formula, counted)


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_the_head(loss, lora):
    cfg = config("llama", Setting(lora), loss=loss)
    part = Part(cfg)
    last = len(part.spec.layers) + 1
    formula = unit_memory(cfg, part.hf, part.spec, last)
    norm, head = part.hf.get_submodule(part.spec.norm), part.hf.get_submodule(part.spec.head)
    both = torch.nn.ModuleList([norm, head])
    labels = part.batch.labels

    def forward(x: torch.Tensor) -> torch.Tensor:
        if loss == "plain":
            logits = head(norm(x)).flatten(0, 1).float()
            return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return head(norm(x), labels=labels)

    counted = measured(forward, both, part.hidden, needs_input=True)
    assert close(formula.kept, counted.kept, 0.02), (formula, counted)
    assert close(formula.forward, counted.forward, 0.05), (formula, counted)


def test_an_embedding_keeps_nothing():
    cfg = config("llama", Setting(None))
    part = Part(cfg)
    memory = unit_memory(cfg, part.hf, part.spec, 0)
    assert memory.kept == 0
    assert memory.forward == part.hidden.nbytes
    assert memory.backward >= part.hf.get_submodule(part.spec.embed).weight.nbytes


@pytest.mark.parametrize("family", some_now(FAMILIES, {*FAMILIES} - {*LIKE_OTHERS}))
def test_ranks_of_tp_and_cp_share_what_a_layer_keeps(family):
    cfg = config(family, SETTINGS["full"])
    hf = on_meta(cfg.model)
    spec = spec_of(hf.config, hf)
    hidden = 4 * LENGTH * spec.hidden_size
    for place, layer in enumerate(spec.layers, 1):
        whole = unit_memory(cfg, hf, spec, place).kept
        tp = unit_memory(config(family, SETTINGS["full"], tp=2), hf, spec, place).kept
        sp = config(family, SETTINGS["full"], tp=2, sequence_parallel=True)
        # What blocks keep within is halved, what lies between them with sequence parallelism too.
        assert whole / 2 <= tp < whole, layer.kind
        assert unit_memory(sp, hf, spec, place).kept <= tp + hidden, layer.kind
        cp = unit_memory(config(family, SETTINGS["full"], cp=2), hf, spec, place).kept
        # Where ranks exchange heads, a rank keeps the output before and after its exchange.
        cores = [core for block in layer.mixers for core in block.kind.cores(hf.config)]
        heads = [x.num_heads * x.value_dim for x in cores if isinstance(x, Attention)]
        assert cp <= 0.51 * whole + 4 * LENGTH / 2 * sum(heads), layer.kind


def test_what_is_below_the_adapters_keeps_nothing():
    adapters = Lora(r=8, targets=["model.layers.2.self_attn.q_proj"])
    cfg = config("llama", Setting(adapters))
    hf = on_meta(cfg.model)
    spec = spec_of(hf.config, hf)
    inject(hf, adapters, spec)
    kept = [unit_memory(cfg, hf, spec, place).kept for place in range(len(spec.layers) + 2)]
    assert [num > 0 for num in kept] == [False, False, False, True, True, True]


def test_every_kind_has_a_formula():
    assert [kind.name for kind in KINDS if kind.activations is None] == []
