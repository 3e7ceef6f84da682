"""The rulebook: every rule is reached, says a way out, and gives everybody who asks the same
answer."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from examples.own_module import Classifier

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.assembly.own import describe_own, own_facts
from shardwise.base.layouts import (
    Facts,
    axis_sizes,
    layout_names,
    layout_of,
    parallel_of,
    shortened,
)
from shardwise.config import CALLERS, Entry, Lora, Model, Recomputation, RunConfig, UserError, rules
from shardwise.config.keys import known_keys
from shardwise.config.rules.rule import Case
from shardwise.config.run_file import parse_config
from shardwise.lab.benchmark import sweep
from shardwise.lab.planner.split_view import plan
from shardwise.models import load
from shardwise.models.adapters import lora
from shardwise.models.adapters.peft_config import contradicted, section_of
from shardwise.models.adapters.writing import save_adapter
from shardwise.models.catalogue import model_table
from shardwise.models.facts import facts_of
from shardwise.models.families import FAMILIES, family_of, spec_of
from shardwise.models.own import OwnModel
from tests.left_out import some_now
from tests.models.tiny import tiny, trained, with_adapters
from tests.models.unproven import UNPROVEN, write_config

ROOT = Path(__file__).parents[1]
BFLOAT16 = {"dtype": "bfloat16"}
FLOAT32_SUMS = {"accumulation": "float32"}
COPIES = {"cast": "weights", "precision": "bfloat16"}
FP8 = {"matmul": "fp8_tensorwise"}
GRAPHED = {"compile": "reduce-overhead"}
LORA = {"r": 4}
PIPELINE = {"pp": 2}
EXPERTS = {"r": 4, "targets": ["experts"]}
ADAPTER = "an adapter of rank 4"

Sections = dict[str, dict[str, Any]]


class Plain(torch.nn.Sequential):
    """A module that names its layers, and no more."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(2, 2))

    def layer_names(self) -> list[str]:
        return ["0"]


class Tied(Classifier):
    """A module with one weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks["block1"].norm.weight = self.blocks["block0"].norm.weight


PAIRS: Sections = {"data": {"format": "preference"}, "training": {"objective": "dpo"}}
EXAMPLES: dict[str, tuple[str, Sections, int]] = {
    **{
        f"{key} without its format or packing": ("llama", {"data": {key: value}}, 1)
        for key, value in {
            "chat_template": "chat.jinja",
            "template_arguments": {"enable_thinking": False},
            "tools": "tools",
            "train_on": "last",
            "train_on_thinking": "none",
            "turns": "separate",
            "fields": {"prompt": "question"},
            "long": "split",
        }.items()
    },
    "a key of an entry without its format": (
        "llama",
        {"data": {"train": [Entry("a", format="text", tools="tools")]}},
        1,
    ),
    "pairs beside other documents": (
        "llama",
        {"data": {"format": "preference", "validation": [Entry("a", format="chat")]}},
        1,
    ),
    **{
        f"{key} of pairs": ("llama", {"data": {"format": "preference", key: value}}, 1)
        for key, value in {"packing": "isolated", "long": "split", "train_on": "all"}.items()
    },
    "separate turns of which every token is trained on": (
        "llama",
        {"data": {"format": "chat", "turns": "separate", "train_on": "all"}},
        1,
    ),
    "pairs without an objective for them": ("llama", {"data": {"format": "preference"}}, 1),
    "an objective of pairs without pairs": ("llama", {"training": {"objective": "dpo"}}, 1),
    **{
        f"preference.{key} without its objective": ("llama", {"preference": {key: value}}, 1)
        for key, value in {
            "beta": 0.2,
            "loss": "ipo",
            "label_smoothing": 0.1,
            "margin": 0.5,
            "sft_weight": 0.5,
            "reference": "start",
            "undesirable_weight": 0.5,
            "reference_logprobs": "precompute",
        }.items()
    },
    "answers with a label from a stream": (
        "llama",
        {
            "training": {"objective": "kto"},
            "data": {**PAIRS["data"], "streaming": True, "train": "name/of-a-data-set"},
        },
        1,
    ),
    "label smoothing of a loss that has none": (
        "llama",
        {**PAIRS, "preference": {"loss": "ipo", "label_smoothing": 0.1}},
        1,
    ),
    "a base as reference without adapters": (
        "llama",
        {**PAIRS, "preference": {"reference": "base"}},
        1,
    ),
    "a base as reference beside modules that are trained in full": (
        "llama",
        {**PAIRS, "preference": {"reference": "base"}, "lora": {"modules_to_save": ["lm_head"]}},
        1,
    ),
    "copies to compare": (
        "llama",
        {"parallel": {"data": "fsdp2"}, "training": {"check_copies_every": 5}},
        2,
    ),
    "schedule without its strategy": ("llama", {"parallel": {"schedule": "zbv"}}, 1),
    "virtual_stages without its strategy": ("llama", {"parallel": {"virtual_stages": 2}}, 1),
    "split without its strategy": ("llama", {"parallel": {"split": "uniform"}}, 1),
    "speeds without its strategy": ("llama", {"parallel": {"speeds": [1.0]}}, 1),
    "speeds of other ranks": ("llama", {"parallel": {"pp": 2, "speeds": [1.0]}}, 2),
    "memory_limit_gib of other ranks": (
        "llama",
        {"parallel": {"pp": 2, "memory_limit_gib": [1.0, 1.0, 1.0]}},
        2,
    ),
    "a dynamic split with training.compile": (
        "llama",
        {"parallel": {**PIPELINE, "split": "dynamic"}, "training": {"compile": "inductor"}},
        2,
    ),
    "a dynamic split with training.checkpointing": (
        "llama",
        {
            "parallel": {**PIPELINE, "split": "dynamic"},
            "training": {"checkpointing": Recomputation(1.0)},
        },
        2,
    ),
    "a dynamic split with parallel.offload": (
        "llama",
        {"parallel": {**PIPELINE, "split": "dynamic", "offload": "disk"}},
        2,
    ),
    "memory_limit_gib without its strategy": ("llama", {"parallel": {"memory_limit_gib": 1.0}}, 1),
    "sequence_parallel without its strategy": (
        "llama",
        {"parallel": {"sequence_parallel": True}},
        1,
    ),
    "dp_replicate without its strategy": (
        "llama",
        {"parallel": {"data": "ddp", "dp_replicate": 2}},
        2,
    ),
    "reshard_after_forward without its strategy": (
        "llama",
        {"parallel": {"reshard_after_forward": False}},
        1,
    ),
    "offload without its strategy": ("llama", {"parallel": {"data": "ddp", "offload": "all"}}, 2),
    "offload_folder without offload to disk": (
        "llama",
        {"parallel": {"offload_folder": "/scratch"}},
        1,
    ),
    "offload to disk with offload of activations": (
        "llama",
        {"parallel": {"offload": "disk"}, "training": {"offload_activations": True}},
        1,
    ),
    "offload to disk with compile": (
        "llama",
        {"parallel": {"offload": "disk"}, "training": {"compile": "inductor"}},
        1,
    ),
    "offload to disk with weights of another dtype than products": (
        "llama",
        {"parallel": {"offload": "disk"}, "training": {"precision": "bfloat16"}},
        1,
    ),
    "offload to disk with checkpoints in memory": (
        "llama",
        {"parallel": {"offload": "disk"}, "training": {"memory_checkpoint_every": 1}},
        1,
    ),
    "offload to disk with async_save": (
        "llama",
        {"parallel": {"offload": "disk"}, "training": {"async_save": True}},
        1,
    ),
    "fsdp1_wrap without its strategy": ("llama", {"parallel": {"fsdp1_wrap": "naive"}}, 1),
    "a key that a loop of the caller does not read": (
        "llama",
        {"data": {"train": CALLERS}, "training": {"eval_every": 5}},
        1,
    ),
    "steps with epochs": ("llama", {"training": {"steps": 3, "epochs": 1.0}}, 1),
    "a key by epoch without epochs": ("llama", {"training": {"save_every": "epoch"}}, 1),
    "epochs of a stream": (
        "llama",
        {"data": {"streaming": True}, "training": {"steps": None, "epochs": 1.0}},
        1,
    ),
    "a share of a stream": ("llama", {"data": {"streaming": True, "validation": 0.1}}, 1),
    "evaluations without validation": ("llama", {"training": {"eval_every": 5}}, 1),
    "patience without evaluations": (
        "llama",
        {"training": {"patience": 2}, "data": {"validation": 0.1}},
        1,
    ),
    "two lengths of the warm-up": (
        "llama",
        {"optimizer": {"warmup_steps": 5, "warmup_ratio": 0.1}},
        1,
    ),
    "decay_ratio without wsd": ("llama", {"optimizer": {"decay_ratio": 0.2}}, 1),
    "min_lr_ratio with a constant learning rate": (
        "llama",
        {"optimizer": {"min_lr_ratio": 0.1, "lr_schedule": "constant"}},
        1,
    ),
    "tokens in a step": (
        "llama",
        {"data": {"sequence_length": 16_777_216}, "training": {"global_batch_size": 64}},
        1,
    ),
    "compile with isolated documents": (
        "llama",
        {"data": {"packing": "isolated"}, "training": {"compile": "inductor"}},
        1,
    ),
    "layers as CUDA graphs with weights that are gathered": (
        "llama",
        {"parallel": {"data": "fsdp2"}, "training": GRAPHED},
        2,
    ),
    "layers as CUDA graphs with ranks that compute a row together": (
        "llama",
        {"parallel": {"pp": 2}, "training": GRAPHED},
        2,
    ),
    "layers as CUDA graphs with checkpointing or offload_activations": (
        "llama",
        {"training": {**GRAPHED, "checkpointing": "full"}},
        1,
    ),
    "layers as CUDA graphs with routed experts": (
        "qwen3_moe",
        {"training": {**GRAPHED, "micro_batch_size": 16}},
        1,
    ),
    "layers as CUDA graphs with several micro-batches in a step": (
        "llama",
        {"training": {**GRAPHED, "global_batch_size": 4}},
        1,
    ),
    "compile with checkpointing of operators": (
        "llama",
        {"training": {"compile": "inductor", "checkpointing": "operators"}},
        1,
    ),
    "offload of activations with checkpointing of operators": (
        "llama",
        {"training": {"offload_activations": True, "checkpointing": "operators"}},
        1,
    ),
    "a budget with offload of activations": (
        "llama",
        {"training": {"offload_activations": True, "checkpointing": Recomputation(1.0)}},
        1,
    ),
    "a budget with offload to disk": (
        "llama",
        {"parallel": {"offload": "disk"}, "training": {"checkpointing": Recomputation(1.0)}},
        1,
    ),
    "a budget with a memory limit": (
        "llama",
        {
            "parallel": {"pp": 2, "memory_limit_gib": 1.0},
            "training": {"checkpointing": Recomputation(1.0)},
        },
        2,
    ),
    "fsdp1 with tp": ("llama", {"parallel": {"data": "fsdp1", "tp": 2}}, 4),
    "zero2 with tp": ("llama", {"parallel": {"data": "zero2", "tp": 2}}, 4),
    "zero2 or fsdp1 in a pipeline": ("llama", {"parallel": {"data": "zero2", "pp": 2}}, 4),
    "fsdp1 naive with adapters of another dtype": (
        "llama",
        {"parallel": {"data": "fsdp1", "fsdp1_wrap": "naive"}, "lora": LORA, "model": BFLOAT16},
        2,
    ),
    "tp with training.compile": (
        "llama",
        {"parallel": {"tp": 2}, "training": {"compile": "inductor"}},
        2,
    ),
    "tp with a memory limit": (
        "llama",
        {"parallel": {"tp": 2, "pp": 2, "memory_limit_gib": 8.0}},
        4,
    ),
    "sequence length over sp": (
        "llama",
        {"parallel": {"tp": 2, "sequence_parallel": True}, "data": {"sequence_length": 31}},
        2,
    ),
    "sequence length over cp": (
        "llama",
        {"parallel": {"cp": 2}, "data": {"sequence_length": 31}},
        2,
    ),
    "cp_attention without its strategy": ("llama", {"parallel": {"cp_attention": "ring"}}, 1),
    "offload with a memory limit": (
        "llama",
        {"parallel": {**PIPELINE, "offload": "optimizer", "memory_limit_gib": 1.0}},
        2,
    ),
    "stages per rank": ("llama", {"parallel": {**PIPELINE, "virtual_stages": 2}}, 2),
    "halved backwards with fsdp2 that reshards": (
        "llama",
        {"parallel": {**PIPELINE, "schedule": "zbv", "data": "fsdp2"}},
        4,
    ),
    "halved backwards with checkpointing": (
        "llama",
        {"parallel": {**PIPELINE, "schedule": "zbv"}, "training": {"checkpointing": "full"}},
        2,
    ),
    "halved backwards with compile": (
        "llama",
        {"parallel": {**PIPELINE, "schedule": "zbv"}, "training": {"compile": "aot_eager"}},
        2,
    ),
    "pp with float16 products of bfloat16 weights": (
        "llama",
        {"parallel": PIPELINE, "model": BFLOAT16, "training": {"precision": "float16"}},
        2,
    ),
    "pp, cp and tp divide the ranks": ("llama", {"parallel": {"tp": 2}}, 3),
    "single on several ranks": ("llama", {}, 2),
    "dp_replicate divides the ranks": (
        "llama",
        {"parallel": {"data": "fsdp2", "dp_replicate": 3}},
        4,
    ),
    "fsdp1 on one rank": ("llama", {"parallel": {"data": "fsdp1"}}, 1),
    "the global batch over the ranks": ("llama", {"parallel": {"data": "ddp"}}, 3),
    "micro-batches of a schedule": (
        "llama",
        {"parallel": PIPELINE, "training": {"global_batch_size": 1}},
        2,
    ),
    "equal rounds of micro-batches": (
        "llama",
        {
            "parallel": {**PIPELINE, "schedule": "interleaved-1f1b"},
            "training": {"global_batch_size": 5},
        },
        2,
    ),
    "a family that is not listed, with pp, cp, ep or tp": ("ministral", {"parallel": {"tp": 2}}, 2),
    "a loss on logits of a family that is not listed": (
        "ministral",
        {"training": {"loss": "chunked"}},
        1,
    ),
    "a kernel for an attention that takes none": (
        "vaultgemma",
        {"model": {"attention": "math"}},
        1,
    ),
    "model.attention where attention is the project's own": (
        "gemma2",
        {"model": {"attention": "eager"}},
        1,
    ),
    "isolated documents with eager attention": (
        "llama",
        {"model": {"attention": "eager"}, "data": {"packing": "isolated"}},
        1,
    ),
    "kinds of layers to recompute": ("llama", {"training": {"checkpointing": ["mamba2"]}}, 1),
    "a budget of a model whose layers are not known": (
        "ministral",
        {"training": {"checkpointing": Recomputation(1.0)}},
        1,
    ),
    "layers to recompute": (
        "llama",
        {"training": {"checkpointing": Recomputation(full=(0,), operators=(99,))}},
        1,
    ),
    "learned positions": ("gpt2", {"data": {"sequence_length": 4096}}, 1),
    "noise that no seed reaches": ("attention-dropout", {}, 1),
    "tokens that see those after them": ("of-embeddings", {}, 1),
    "isolated documents with added positions": ("gpt2", {"data": {"packing": "isolated"}}, 1),
    "isolated documents in kinds without proof": (
        "ministral",
        {"data": {"packing": "isolated"}},
        1,
    ),
    "router loss without routers": ("llama", {"model": {"router_aux_loss_coef": 0.01}}, 1),
    "a rank that no weight has": ("llama", {"lora": {"r": 65}}, 1),
    "adapters on nothing": (
        "llama",
        {"lora": {"r": 4, "targets": ["q_proj"], "modules_to_save": ["self_attn"]}},
        1,
    ),
    "a target in modules_to_save": (
        "llama",
        {"lora": {"r": 4, "targets": ["q_proj", "up_proj"], "modules_to_save": ["self_attn"]}},
        1,
    ),
    "shared adapters without experts": ("qwen3_moe", {"lora": {"r": 4, "experts": "shared"}}, 1),
    "shared adapters on experts that PEFT folds": (
        "llama4_text",
        {"lora": {**EXPERTS, "experts": "shared"}},
        1,
    ),
    "dropout on adapters of experts": ("qwen3_moe", {"lora": {**EXPERTS, "dropout": 0.1}}, 1),
    "a key that the adapter of lora.path contradicts": (
        "llama",
        {"lora": {"path": ADAPTER, "r": 5}},
        1,
    ),
    "dropout under DoRA": ("llama", {"lora": {**LORA, "dora": True, "dropout": 0.1}}, 1),
    "DoRA computed by PEFT": ("llama", {"lora": {**LORA, "dora": True, "kernel": "peft"}}, 1),
    "DoRA with products in 8 bits": ("llama", {"lora": {**LORA, "dora": True}, "training": FP8}, 1),
    "DoRA on experts": ("granitemoehybrid", {"lora": {**EXPERTS, "dora": True}}, 1),
    "DoRA on linears that PEFT takes for experts": (
        "qwen3_next",
        {"lora": {**LORA, "dora": True}},
        1,
    ),
    "LoRA kernel without plain adapters": (
        "qwen3_moe",
        {"lora": {**EXPERTS, "kernel": "torch"}},
        1,
    ),
    "fsdp1 with adapters on experts that PEFT folds": (
        "llama4_text",
        {"parallel": {"data": "fsdp1"}, "lora": EXPERTS},
        2,
    ),
    "tp with whole layers in modules_to_save": (
        "llama",
        {
            "parallel": {"tp": 2},
            "lora": {"r": 4, "targets": ["o_proj"], "modules_to_save": ["layers.0"]},
        },
        2,
    ),
    "sizes over tp": ("llama", {"parallel": {"tp": 3}}, 3),
    "capacity of experts with cp": (
        "qwen3_moe",
        {"model": {"expert_capacity": 1.5}, "parallel": {"cp": 2}},
        2,
    ),
    "capacity without experts": ("llama", {"model": {"expert_capacity": 1.5}}, 1),
    "biases of routers with LoRA": (
        "nemotron_h",
        {"model": {"router_bias_rate": 0.001}, "lora": {"r": 4}},
        1,
    ),
    "biases of routers without any": ("qwen3_moe", {"model": {"router_bias_rate": 0.001}}, 1),
    "ep with fsdp1": ("qwen3_moe", {"parallel": {"data": "fsdp1", "ep": 2}}, 2),
    "ep divides the data ranks": ("qwen3_moe", {"parallel": {"ep": 2}}, 1),
    "ep on a model without experts": ("llama", {"parallel": {"data": "ddp", "ep": 2}}, 2),
    "ep divides the experts": (
        "qwen3_moe",
        {"parallel": {"data": "ddp", "ep": 16}, "training": {"global_batch_size": 16}},
        16,
    ),
    "ulysses over heads": ("llama", {"parallel": {"cp": 16, "cp_attention": "ulysses"}}, 16),
    "sequence length over pairs of chunks": (
        "llama",
        {"parallel": {"cp": 2, "cp_attention": "ring"}, "data": {"sequence_length": 30}},
        2,
    ),
    "fewer tokens on a rank of cp than a convolution reads": (
        "qwen3_5",
        {"parallel": {"cp": 16}},
        16,
    ),
    "an optimizer of matrices with LoRA": (
        "llama",
        {"optimizer": {"name": "muon"}, "lora": LORA},
        1,
    ),
    "an optimizer of matrices under a layout that is not proven": (
        "llama",
        {"optimizer": {"name": "muon"}, "parallel": {"data": "zero1"}},
        2,
    ),
    "an optimizer of matrices with offload": (
        "llama",
        {"optimizer": {"name": "muon"}, "parallel": {"data": "fsdp2", "offload": "optimizer"}},
        2,
    ),
    "8-bit AdamW under fsdp1": (
        "llama",
        {"optimizer": {"name": "adamw8bit"}, "parallel": {"data": "fsdp1"}},
        2,
    ),
    "8-bit AdamW with offload": (
        "llama",
        {"optimizer": {"name": "adamw8bit"}, "parallel": {"data": "fsdp2", "offload": "optimizer"}},
        2,
    ),
    "nothing for 8-bit AdamW": ("llama", {"optimizer": {"name": "adamw8bit"}}, 1),
    "blocks of 8-bit AdamW": (
        "of-blocks",
        {"optimizer": {"name": "adamw8bit"}, "parallel": {"tp": 2}},
        2,
    ),
    "lora_b_lr_ratio without LoRA": ("llama", {"optimizer": {"lora_b_lr_ratio": 16.0}}, 1),
    "full training of a quantised base": ("llama", {"model": {"base": "int8"}}, 1),
    "a quantised base under fsdp1": (
        "llama",
        {"model": {"base": "int8"}, "lora": LORA, "parallel": {"data": "fsdp1"}},
        2,
    ),
    "a quantised base of a family that is not listed": (
        "ministral",
        {"model": {"base": "int8"}, "lora": LORA},
        1,
    ),
    "blocks of a quantised base": ("llama", {"model": {"base": "nf4"}, "lora": LORA}, 1),
    "copies of weights in the dtype that they have": (
        "llama",
        {"training": {"cast": "weights"}},
        1,
    ),
    "copies of frozen weights": ("llama", {"lora": LORA, "training": COPIES}, 1),
    "copies of flat weights": ("llama", {"parallel": {"data": "fsdp1"}, "training": COPIES}, 2),
    "products in 8 bits of a stored base": (
        "llama",
        {"model": {"base": "int8"}, "lora": LORA, "training": FP8},
        1,
    ),
    "products in 8 bits with a kernel for others": (
        "llama",
        {"lora": {**LORA, "kernel": "triton"}, "training": FP8},
        1,
    ),
    "compiled products in 8 bits under cp": (
        "llama",
        {"parallel": {"cp": 2}, "training": {**FP8, "compile": "inductor"}},
        2,
    ),
    "products in 8 bits with checkpointing of operators": (
        "llama",
        {"training": {**FP8, "checkpointing": "operators"}},
        1,
    ),
    "products in 8 bits of a family that is not listed": ("ministral", {"training": FP8}, 1),
    "no linear for products in 8 bits": ("narrow", {"training": FP8}, 1),
    "float32 sums in a pipeline whose stages add up": (
        "llama",
        {"parallel": {**PIPELINE, "data": "fsdp2"}, "model": BFLOAT16, "training": FLOAT32_SUMS},
        4,
    ),
    "float32 sums with tp": (
        "llama",
        {"parallel": {"tp": 2}, "model": BFLOAT16, "training": FLOAT32_SUMS},
        2,
    ),
    "float32 sums with fsdp1": (
        "llama",
        {"parallel": {"data": "fsdp1"}, "model": BFLOAT16, "training": FLOAT32_SUMS},
        2,
    ),
    "tied weights on one rank, sharded": (
        "gpt2",
        {
            "parallel": {
                **PIPELINE,
                "schedule": "zbv",
                "data": "fsdp2",
                "reshard_after_forward": False,
            }
        },
        4,
    ),
    "more stages than layers": ("llama", {"parallel": {"pp": 5}}, 5),
    "a split of another model": ("llama", {"parallel": {**PIPELINE, "split": [1, 2]}}, 2),
    "an empty stage": ("llama", {"parallel": {"pp": 3, "split": [2, 0, 2]}}, 3),
}
"""By rule, a run that it forbids: tiny model, sections of the run file, number of processes."""
OWN: dict[str, tuple[type[torch.nn.Module], Sections, int]] = {
    "an own module with a key of transformers models": (Classifier, {"lora": LORA}, 1),
    "an own module in a pipeline, without stages": (Plain, {"parallel": PIPELINE}, 2),
    "an own module in a pipeline, with tied weights": (Tied, {"parallel": PIPELINE}, 2),
    "copies of weights of a family that is not listed": (Classifier, {"training": COPIES}, 1),
    "an own module under tp, without cuts": (Plain, {"parallel": {"tp": 2}}, 2),
}
"""By rule, a module of the caller, sections of its run, and a number of processes."""
OLD_TORCH = {
    "compile on an old torch": {"training": {"compile": "aot_eager"}},
    "pp on an old torch": {"parallel": PIPELINE},
    "ep on an old torch": {"parallel": {"data": "ddp", "ep": 2}},
}
"""Rules that the installed torch does not break."""


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """Return the folder of a tiny model by its name."""

    @cache
    def find(name: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        if name == ADAPTER:
            section = Lora(r=4, targets="attention")
            model, _ = with_adapters(tiny("tiny-llama"), section)
            save_adapter(model, section, trained(model), folder, "base")
            return str(folder)
        if name in UNPROVEN:
            return str(write_config(name, folder))
        changed = {
            "attention-dropout": ("llama", {"attention_dropout": 0.1}),
            "of-embeddings": ("llama", {"is_causal": False}),
            "llama4_text": ("qwen3_moe", LLAMA4),
            "of-blocks": ("llama", {"hidden_size": 256, "intermediate_size": 256}),
            "narrow": ("llama", {"hidden_size": 72, "head_dim": 16, "intermediate_size": 72}),
        }
        if name not in changed:
            return str(ROOT / "configs" / "models" / f"tiny-{name.removesuffix('_text')}")
        base, keys = changed[name]
        content = json.loads(
            (ROOT / "configs" / "models" / f"tiny-{base}" / "config.json").read_text()
        )
        (folder / "config.json").write_text(json.dumps({**content, **keys}))
        return str(folder)

    return find


LLAMA4 = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}
"""Its experts have a forward of their own."""


def run_of(model: str, sections: Sections) -> RunConfig:
    """A run of a model in a folder; `parse_config` would refuse what a rule on the run file alone
    forbids."""
    usual: Sections = {
        "model": {"path": model, "init": "random"},
        "data": {"train": "unused", "sequence_length": 32},
        "training": {"output_dir": "unused", "device": "cpu", "global_batch_size": 16},
    }
    merged = {name: usual.get(name, {}) | sections.get(name, {}) for name in {**usual, **sections}}
    return RunConfig(**{name: _section(HINTS[name])(**values) for name, values in merged.items()})


HINTS = get_type_hints(RunConfig)


def _section(hint: Any) -> Any:
    return Lora if hint is not None and Lora in get_args(hint) else hint


def names() -> set[str]:
    return {rule.name for group in rules.RULES.values() for rule in group}


def test_every_rule_has_an_example_and_a_name_of_its_own():
    assert names() == {*EXAMPLES, *OWN, *OLD_TORCH}
    assert len(names()) == sum(map(len, rules.RULES.values()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_forbids_its_example_before_a_rank_starts(name, folder_of):
    model, sections, num_ranks = EXAMPLES[name]
    cfg = run_of(folder_of(model), sections)
    if cfg.lora is not None and cfg.lora.path == ADAPTER:
        cfg = replace(cfg, lora=replace(cfg.lora, path=folder_of(ADAPTER)))
    messages = dict(rules.refusals(cfg, facts_of_run(cfg, num_ranks)))
    assert name in messages
    assert "\n" not in messages[name]
    assert refusal(cfg, num_ranks) in messages.values()


@pytest.mark.parametrize("name", OWN)
def test_a_rule_forbids_an_own_module(name):
    module, sections, num_ranks = OWN[name]
    training = {"global_batch_size": 16, **sections.get("training", {})}
    usual: Sections = {"model": {"path": CALLERS}, "training": training}
    cfg = run_of(CALLERS, {**sections, **usual})
    cfg = replace(cfg, model=Model(CALLERS))
    with pytest.raises(UserError) as caught:
        describe_own(OwnModel.of(module()), cfg, num_ranks)
    (rule,) = (rule for rule in rules.RULES["model"] if rule.name == name)
    facts = Facts(num_ranks, own_facts(OwnModel.of(module())))
    assert str(caught.value) == rule.message(Case(cfg, facts))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"dtype": "bfloat16"}, "parallel": {"pp": 2}},
        {"model": {"path": "llama"}, "parallel": {"pp": 2}},
        {"training": {"compile": "inductor"}, "parallel": {"pp": 2}},
        {"parallel": {"data": "fsdp2", "offload": "all"}},
        {"parallel": {"cp": 2}},
        {"parallel": {"tp": 2, "sequence_parallel": True}},
        {"parallel": {"pp": 2, "schedule": "zbv"}},
        {"parallel": {"pp": 2, "memory_limit_gib": 1.0}},
        {"parallel": {"pp": 2, "split": "dynamic"}},
    ],
    ids=str,
)
def test_keys_that_no_own_module_has(sections):
    cfg = run_of(CALLERS, {**sections, "model": {"init": "weights", **sections.get("model", {})}})
    with pytest.raises(UserError, match=r"(model|training|parallel)\.\w+.* is for transformers"):
        describe_own(OwnModel.of(Classifier()), cfg, 2)


def facts_of_run(cfg: RunConfig, num_ranks: int) -> Facts:
    """All that may be asked of a run: nothing of its model where rules forbid its adapters."""
    hf_config = load.read_config(cfg.model)
    hf = load.build_meta(cfg.model, hf_config)
    spec, facts = spec_of(hf_config, hf), Facts(num_ranks)
    if cfg.lora:
        section = section_of(cfg.lora, cfg.model, hf)
        adapters = lora.adapter_facts(hf, section, spec)
        adapters = replace(adapters, contradicted=contradicted(cfg.lora, section))
        facts = replace(facts, adapters=adapters)
        if any(rules.refusals(replace(cfg, lora=section), facts)):
            return facts
        lora.inject(hf, section, spec)
    return replace(facts, model=facts_of(hf, spec, family_of(hf)))


@pytest.mark.parametrize("name", OLD_TORCH)
def test_an_old_torch_is_refused(name, folder_of):
    cfg = run_of(folder_of("llama"), OLD_TORCH[name])
    for torch_version, is_refused in (((2, 12), True), ((2, 13), False), ((3, 0), False)):
        asked = Facts(num_ranks=2, torch_version=torch_version)
        assert (name in dict(rules.refusals(cfg, asked))) == is_refused


def test_reasons_lead_to_tests_that_exist():
    for group in rules.RULES.values():
        for rule in group:
            for path, _, test in re.findall(r"(tests/[\w/]+\.py)(::(\w+))?", rule.why):
                assert f"def {test}" in (ROOT / path).read_text(), rule.name


def test_a_run_file_is_refused_when_it_is_read():
    with pytest.raises(UserError, match=r"^config: parallel.sequence_parallel is True, which is"):
        parse_config(
            {
                "model": {"path": "m"},
                "data": {"train": "d"},
                "training": {"output_dir": "o"},
                "parallel": {"sequence_parallel": True},
            }
        )


# ------------------------------------------------------------ everybody gets the same answer


def refusal(cfg: RunConfig, num_ranks: int) -> str | None:
    """What the launcher, `split`, `bench` and `build` say of a run; they must not differ.

    `bench` reads no model: it leaves what models and adapters forbid to the cell's own processes.
    """
    without_model = next((message for _, message in rules.refusals(cfg, Facts(num_ranks))), "")
    cell: Any = SimpleNamespace(id="cell", nproc=num_ranks)
    assert sweep._resolve(cell, cfg.to_dict(), Path("out")).refusal == without_model
    message = refusal_by_description(cfg, num_ranks)
    assert not without_model or message == without_model
    return message


def refusal_by_description(cfg: RunConfig, num_ranks: int) -> str | None:
    mesh: Any = SimpleNamespace(
        dense=SimpleNamespace(size=lambda: num_ranks), device=torch.device("cpu")
    )
    try:
        describe(cfg, num_ranks)
    except UserError as error:
        message = str(error)
    else:
        describe(cfg, num_ranks, torch.device("cpu"))
        if cfg.parallel.pp > 1:
            plan(cfg, num_ranks)
        return None
    asked = [lambda: build(cfg, mesh), lambda: describe(cfg, num_ranks, torch.device("cpu"))]
    if cfg.parallel.pp > 1:
        asked.append(lambda: plan(cfg, num_ranks))
    for ask in asked:
        with pytest.raises(UserError) as caught:
            ask()
        assert str(caught.value) == message
    return message


@pytest.mark.parametrize(
    "model",
    some_now(("llama", "qwen3_next", "ministral", "attention-dropout", "gpt2"), ("qwen3_next",)),
)
def test_models_shows_the_layouts_that_train_takes(model, folder_of):
    caption = model_table(Model(folder_of(model), init="random"))["caption"]
    shown = caption.partition("may run under")[2].partition("\nnote")[0]
    taken, refused = [], {}
    for name in layout_names():
        cfg = run_of(folder_of(model), {"parallel": asdict(parallel_of(name))})
        refused[name] = refusal_by_description(cfg, rules._ranks_of(name))
        taken += [name] * (refused[name] is None)
    lines = "".join(f"\n  {line}" for line in shortened(taken))
    assert shown == (lines or f" no layout: {refused['single']}")


def choices() -> dict[str, list[Any]]:
    """The values of each key of the run file that is an enumeration or a switch, and some of the
    numbers."""
    found: dict[str, list[Any]] = {}
    for section in known_keys():
        cls: Any = _section(get_type_hints(RunConfig)[section])
        for key, hint in get_type_hints(cls).items():
            if hint is bool:
                found[f"{section}.{key}"] = [False, True]
            for part in (hint, *get_args(hint)):
                if get_origin(part) is Literal and f"{section}.{key}" not in LEFT_OUT:
                    found[f"{section}.{key}"] = list(get_args(part))
    return {
        **{key: values for key, values in found.items() if key not in LEFT_OUT},
        "parallel.pp": [1, 2],
        "parallel.cp": [1, 2, 3],
        "parallel.tp": [1, 2, 3],
        "parallel.dp_replicate": [1, 2],
        "parallel.memory_limit_gib": [None, 1.0],
        "model.router_aux_loss_coef": [0.0, 0.01],
        "model.expert_capacity": [None, 1.5],
        "lora": [None, "lora"],
        "family": [*FAMILIES, "ministral"],
        "copies": [1, 2],
    }


LEFT_OUT = {
    *("model.init", "model.trust_remote_code", "model.slow_cores"),
    *("data.on_error", "optimizer.name", "training.eval_every", "training.save_every"),
    *(
        "training.device",
        "training.overwrite",
        "training.async_save",
        "measure.memory",
        "measure.reverse_microbatches",
    ),
    # The format says whether the objective is one of pairs.
    *("training.objective", "preference.loss", "preference.reference"),
    *("measure.trackers", "lora.rslora", "measure.nudge_weights", "lora.targets", "data.train"),
}
"""Keys that no rule asks about, or only beside a number that is not varied here, and lists."""


def covering(
    domains: dict[str, list[Any]], may_run: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any]]:
    """Yield draws of one value for each key: every pair of values of two keys that `may_run` allows
    comes up in one."""
    draw = random.Random(0)
    every = sorted((key, i) for key, values in domains.items() for i in range(len(values)))
    number = {value: n for n, value in enumerate(every)}
    left: list[set[int]] = [set() for _ in every]  # of each value: values to pair it with
    for a, b in itertools.combinations(domains, 2):
        for i, j in itertools.product(range(len(domains[a])), range(len(domains[b]))):
            left[number[a, i]].add(number[b, j])
    while any(left):
        one = next(n for n, others in enumerate(left) if others)
        other = min(left[one])
        best: dict[str, Any] = {}
        covered, most = {one: {other}}, 0
        for _ in range(TRIES):
            chosen = {key: draw.randrange(len(values)) for key, values in domains.items()}
            chosen |= dict((every[one], every[other]))
            drawn_values = {number[value] for value in chosen.items()}
            pairs = {n: left[n] & drawn_values for n in drawn_values}
            num_pairs = sum(map(len, pairs.values()))
            values = {key: domains[key][i] for key, i in chosen.items()}
            if num_pairs > most and may_run(values):
                best, covered, most = values, pairs, num_pairs
        for n, others in covered.items():
            left[n] -= others
        if best:
            yield best


TRIES = 30


PIPELINE_KEYS = ("schedule", "virtual_stages", "split", "memory_limit_gib")
FSDP2_KEYS = ("dp_replicate", "reshard_after_forward")


def drawn(values: dict[str, Any], folder_of: Any) -> tuple[RunConfig, int]:
    sections: Sections = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name and value is not None:
            sections.setdefault(section, {})[name] = value
    if sections.get("data", {}).get("format") == "preference":
        sections.setdefault("training", {})["objective"] = "dpo"
    adapters, parallel = sections.pop("lora", {}), sections["parallel"]
    if values["lora"]:
        sections["lora"] = {"r": 4, **adapters}
    needs = {
        "pp": PIPELINE_KEYS,
        "cp": ("cp_attention",),
        "tp": ("sequence_parallel",),
        "fsdp2": FSDP2_KEYS,
        "fsdp1": ("fsdp1_wrap",),
    }
    is_used = {axis: parallel[axis] > 1 for axis in ("pp", "cp", "tp")} | {parallel["data"]: True}
    for strategy, keys in needs.items():
        for key in keys:
            if not is_used.get(strategy):  # else hardly a draw would come to the rules on models
                parallel.pop(key, None)
    if not values["lora"]:  # likewise
        sections["model"].pop("base", None)
    if parallel["offload"] == "disk":  # likewise
        for key in ("precision", "matmul", "compile", "offload_activations"):
            sections["training"].pop(key, None)
    # Of a stream no share can be held out; else no draw with one would come to another rule.
    sections["data"] |= {"validation": "held-out" if sections["data"]["streaming"] else 0.1}
    cfg = run_of(folder_of(values["family"]), sections)
    return cfg, cfg.parallel.ranks_of_a_model * cfg.parallel.dp_replicate * values["copies"]


@pytest.mark.slow  # most draws are refused by the run file alone, as examples of rules are
def test_every_pair_of_choices_has_one_answer(folder_of):
    """Pairwise over the run file's enumerations, the families and the sizes of axes."""
    answers = Counter(
        refusal(*drawn(values, folder_of)) for values in covering(choices(), lambda values: True)
    )
    assert len(answers) > 20


def test_every_pair_that_the_run_file_allows_has_one_answer(folder_of):
    """The same among runs that only the model can forbid, for else hardly a draw comes to the rules
    on models."""

    def may_run(values: dict[str, Any]) -> bool:
        cfg, num_ranks = drawn(values, folder_of)
        return not any(rules.refusals(cfg, Facts(num_ranks)))

    answers = Counter(refusal(*drawn(values, folder_of)) for values in covering(choices(), may_run))
    assert answers[None] > 20
    assert len(answers) > 10


# ------------------------------------------------------------ names and sizes


@pytest.mark.parametrize("name", layout_names())
def test_a_layout_is_named_by_its_parts(name):
    assert layout_of(parallel_of(name)) == name


def _with_tails(base: str, pattern: str) -> list[str]:
    """The layouts of one base: `[...]` may be left out, and may hold another one."""
    names = [base]
    for part in re.findall(r"\[-tp\[-sp\]\]|-tp\[-sp\]|\[-\w+\]|-\w+", pattern):
        ends = {"[-tp[-sp]]": ("", "-tp", "-tp-sp"), "-tp[-sp]": ("-tp", "-tp-sp")}
        default = ("", part[1:-1]) if part.startswith("[") else (part,)
        names = [f"{name}{end}" for name in names for end in ends.get(part, default)]
    return [name.removeprefix("single-") for name in names]


def test_shortened_layouts_are_all_of_them():
    offered = rules.offered_layouts()
    named = []
    for line in shortened(offered):
        bases, pattern = re.fullmatch(r"((?:[\w-]+, )*[\w-]+)(.*)", line).groups()
        named += [name for base in bases.split(", ") for name in _with_tails(base, pattern)]
    assert sorted(named) == sorted(offered)


def test_what_is_offered_is_what_no_rule_refuses():
    offered = rules.offered_layouts()
    assert len(offered) == 2 * 32 + 56  # each with and without `cp`, and those with `ep`
    assert {"single", "pp-fsdp2-tp-sp", "hsdp"} <= set(offered)
    assert not {"fsdp1-tp", "zero2-tp-sp", "pp-zero2", "pp-fsdp1-tp"} & set(offered)


def test_what_pp_cp_and_tp_leave_goes_to_data(folder_of):
    cfg = run_of(folder_of("llama"), {"parallel": {"data": "fsdp2", "dp_replicate": 2, "pp": 2}})
    assert axis_sizes(cfg, 8) == {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 1}
    cfg = run_of(folder_of("llama"), {"parallel": {"data": "ddp", "cp": 2, "tp": 2}})
    assert axis_sizes(cfg, 8) == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2}
