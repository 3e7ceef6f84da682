"""Linears that a server's loader reads of a LoRA adapter, and by which names.

Facts of public releases, whose rules the tests repeat (docs/decisions/044-served-adapters.md). A
family or a linear that is not listed here was not looked up, or is not read: such an adapter is
refused rather than written with factors that would do nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from shardwise.config import UserError
from shardwise.models.spec import ModelSpec

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Factors A [R, in] and B [out, R] by the name of the linear in the text class."""

_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
_MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
_GDN = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj"))
_GDN_GATES = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")


@dataclass(frozen=True)
class Server:
    """One release of a server. Linears are named by their path in a layer."""

    name: str
    version: str
    linears: Mapping[str, tuple[str, ...]]
    """The linears on which it reads an adapter, by `model_type`."""
    fused: tuple[tuple[str, ...], ...] = ()
    """Linears that it computes as one, and of which it reads all or none."""
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Linears that it reads in parts, row block by row block: names of the parts, and the block's
    attribute that says how many rows each has."""
    listed: Mapping[str, str] = field(default_factory=dict)
    """Entries of `target_modules` for some linears or parts, by the last part of their name."""
    reads_patterns: bool = False
    """Whether it reads `rank_pattern` and `alpha_pattern`, as PEFT does."""
    for_experts: Mapping[str, str] = field(default_factory=dict)
    """Options with which it reads PEFT's adapters on stacks of experts, by `model_type`."""


VLLM = Server(
    "vllm",
    "0.33",
    linears={
        **dict.fromkeys(("llama", "qwen3"), (*_ATTENTION, *_MLP)),
        "qwen3_moe": _ATTENTION,
        "qwen3_5_text": (*_ATTENTION, *_MLP, *_GDN, *_GDN_GATES),
        "qwen3_next": (
            *(*_ATTENTION, *_MLP),
            *(f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")),
        ),
        "olmo_hybrid": (*(*_ATTENTION, *_MLP), *(f"linear_attn.{name}_proj" for name in "qkvgabo")),
        "lfm2": (
            *(*_ATTENTION[:3], "self_attn.out_proj", "conv.in_proj", "conv.out_proj"),
            *(f"feed_forward.w{i}" for i in (1, 2, 3)),
        ),
    },
    fused=(
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        tuple(f"linear_attn.{name}_proj" for name in "qkvg"),
    ),
    reads_patterns=True,
    for_experts={
        "qwen3_moe": "--enable-mixed-moe-lora-format and, on the request, is_3d_lora_weight=True"
    },
)
SGLANG = Server(
    "sglang",
    "0.5.23",
    linears={
        **dict.fromkeys(("llama", "qwen3"), (*_ATTENTION, *_MLP)),
        "qwen3_moe": _ATTENTION,
        "qwen3_5_text": (*_ATTENTION, *_MLP, *_GDN),
    },
    fused=(_ATTENTION[:3], _MLP[:2], tuple(f"linear_attn.in_proj_{part}" for part in "qkvz")),
    parts={
        "linear_attn.in_proj_qkv": {
            "linear_attn.in_proj_q": "key_dim",
            "linear_attn.in_proj_k": "key_dim",
            "linear_attn.in_proj_v": "value_dim",
        }
    },
    listed={f"in_proj_{part}": "in_proj_qkvz" for part in "qkvz"},
)
SERVERS = {server.name: server for server in (VLLM, SGLANG)}


def check_read(server: Server, paths: Iterable[str], spec: ModelSpec) -> None:
    """Raise UserError unless the server reads adapters on all these linears of the text class."""
    layers, family = [layer.name for layer in spec.layers], spec.family
    version = f"{server.name} (as of {server.version})"
    way_out = "write a whole model instead (--merge)"
    if family not in server.linears:
        known = ", ".join(server.linears)
        raise UserError(
            f"--for {server.name}: which adapters {version} reads of {family} is known only for "
            f"{known}; {way_out}"
        )
    names = {_in_layer(path, layers)[1] for path in paths}
    unread = sorted(names - set(server.linears[family]))
    if unread and family in server.for_experts and all("experts" in name for name in unread):
        way_out = f"give it what --for hf writes, with {server.for_experts[family]}, or {way_out}"
    if unread:
        raise UserError(
            f"--for {server.name}: {version} reads no adapter on {', '.join(unread)} of {family}; "
            f"{way_out}, or train without them (lora.targets)"
        )


def for_server(
    server: Server, factors: Factors, model: PreTrainedModel, spec: ModelSpec
) -> Factors:
    """Return the factors as the server reads them, by names of its loader in the text class.

    The server must read all of them (`check_read`). Every part of a split linear has a copy of A
    and its rows of B. A linear that lacks an adapter and is fused with one that has gets factors
    of zeros. Of `model`, on any device, sizes are used.
    """
    layers = [layer.name for layer in spec.layers]
    read: Factors = {}
    for path, (a, b) in factors.items():
        layer, name = _in_layer(path, layers)
        parts = server.parts.get(name)
        if parts is None:
            read[path] = (a, b)
            continue
        block = model.get_submodule(path.rpartition(".")[0])
        rows = b.split([getattr(block, size) for size in parts.values()])
        read |= {f"{layer}.{part}": (a.clone(), some) for part, some in zip(parts, rows)}
    for layer in layers:
        for group in server.fused:
            present = [f"{layer}.{name}" for name in group if f"{layer}.{name}" in read]
            for name in group if present else ():
                if f"{layer}.{name}" not in read:
                    a, b = read[present[0]]
                    rows = _num_rows(server, name, model, layer)
                    zeros = torch.zeros_like(a), b.new_zeros(rows, b.shape[1])
                    read[f"{layer}.{name}"] = zeros
    return read


def target_modules(server: Server, factors: Factors) -> list[str]:
    """Return what `target_modules` of the config must say for these factors."""
    leaves = {path.rpartition(".")[2] for path in factors}
    return sorted({server.listed.get(leaf, leaf) for leaf in leaves})


def _in_layer(path: str, layers: list[str]) -> tuple[str, str]:
    """Return a linear's layer and its name in it; "" and its path, where it is in none."""
    for layer in layers:
        if path.startswith(f"{layer}."):
            return layer, path.removeprefix(f"{layer}.")
    return "", path


def _num_rows(server: Server, name: str, model: PreTrainedModel, layer: str) -> int:
    for parts in server.parts.values():
        if name in parts:
            block = model.get_submodule(f"{layer}.{name.rpartition('.')[0]}")
            return getattr(block, parts[name])
    return model.get_parameter(f"{layer}.{name}.weight").shape[0]
