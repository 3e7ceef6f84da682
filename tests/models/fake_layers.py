"""Layers of any size on fake tensors: what a forward keeps and needs, and its products."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from shardwise.base.batches import Batch
from shardwise.config import RunConfig
from shardwise.kernels.attention import capped
from shardwise.kernels.grouped_linear import loop
from shardwise.models.activations import is_trained_below
from shardwise.models.adapters.lora import inject
from shardwise.models.causal_lm import CausalLM
from shardwise.models.dtypes import hidden_dtype
from shardwise.models.families import family_of, spec_of
from shardwise.models.load import build_meta, read_config
from shardwise.models.patches import patch
from shardwise.models.spec import LayerSpec, ModelSpec
from tests.models.counted_operators import KERNELS, CountedOperators


class Real(NamedTuple):
    """What one layer does."""

    place: int
    layer: LayerSpec
    kept: int
    """Bytes alive after a forward, beside what was there before and the output."""
    forward: int
    """The most bytes alive at once in a forward, beside what was there before."""
    flops: int
    """Of products with weights, in a forward."""
    forward_moves: list[int]
    """Bytes that each operator moves in a forward."""
    backward_moves: list[int]


class Watch(TorchDispatchMode):
    """Follows the storages that operators make, and products with parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights = {p.untyped_storage()._cdata for p in module.parameters()}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.before: dict[int, StorageWeakRef] = {}
        self.flops = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if not _is_alive(self.made.get(storage._cdata)):
                    self.before[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if not _is_alive((self.before.get(storage._cdata), 0)):
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._count(func, args)
        self.peak = max(self.peak, self.alive())
        return out

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        if func is torch.ops.shardwise.grouped_linear.default:
            self.flops += 2 * len(args[0]) * prod(args[1].shape[1:])
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            if right.untyped_storage()._cdata in self.weights:
                self.flops += 2 * left.numel() * right.shape[1]

    def kept(self, out: torch.Tensor) -> int:
        """The bytes that are alive, without the output's."""
        self.made.pop(out.untyped_storage()._cdata)
        gc.collect()
        return self.alive()

    def alive(self) -> int:
        """The bytes of storages that are there."""
        return sum(num_bytes for ref, num_bytes in self.made.values() if not ref.expired())


def _is_alive(entry: Any) -> bool:
    return entry is not None and entry[0] is not None and not entry[0].expired()


class Ready(NamedTuple):
    """A layer that can run on fake tensors."""

    place: int
    layer: LayerSpec
    module: nn.Module
    leaf: torch.Tensor
    """Hidden states. They require a gradient if the backward goes on below the layer."""
    forward: Callable[[], torch.Tensor]
    """Return the output for a copy of the hidden states."""


def real_layers(cfg: RunConfig) -> tuple[PreTrainedModel, ModelSpec, list[Real]]:
    """The model on meta, and what the highest layer of each kind does with one row of tokens."""
    with ready_layers(cfg, torch.device("cpu")) as (hf, spec, layers):
        return hf, spec, [_real(ready) for ready in layers]


@contextmanager
def ready_layers(
    cfg: RunConfig, device: torch.device, is_patched: bool = True
) -> Iterator[tuple[PreTrainedModel, ModelSpec, list[Ready]]]:
    """The model on meta, its fields, and the highest layer of each kind, ready in the context.

    `device`: the one that layers are patched for; they run on a CPU. `is_patched`: False leaves
    them to transformers and PEFT.
    """
    hf = build_meta(cfg.model, read_config(cfg.model))
    spec = spec_of(hf.config, hf)
    if cfg.lora:
        inject(hf, cfg.lora, spec)
    places = {(layer.kind, layer.feed_forward): i for i, layer in enumerate(spec.layers)}
    chosen = [spec.layers[i] for i in places.values()]
    # An even share is of no account: what is kept depends on the number of all rows.
    with pytest.MonkeyPatch.context() as changed, FakeTensorMode(allow_non_fake_inputs=True):
        for operator in ("forward", "backward"):  # and what it does
            changed.setattr(capped, operator, getattr(capped, operator)._init_fn)
        changed.setattr(loop, "_counts", lambda ends, rows: [rows] + [0] * (len(ends) - 1))
        for path in (spec.embed, *(layer.name for layer in chosen)):
            _make(hf.get_submodule(path))
        part = CausalLM(hf, spec, family_of(hf), cfg)
        if is_patched:
            patch(part, cfg, device)
        part.train()
        tokens = torch.zeros(1, cfg.data.sequence_length, dtype=torch.int64)
        batch = Batch(tokens, tokens, torch.zeros_like(tokens), (0,), step=1)
        with _passed_through(part) as calls, torch.no_grad():
            part.hidden_of(batch, {"input_ids": tokens})
        yield (hf, spec, [_ready(part, batch, i, calls) for i in places.values()])


def _make(module: nn.Module) -> None:
    """Put fake tensors on the CPU in the place of what is on meta."""
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None and p.is_meta:
                owner._parameters[name] = nn.Parameter(
                    torch.empty_like(p, device="cpu"), p.requires_grad
                )


@contextmanager
def _passed_through(part: CausalLM) -> Iterator[dict[str, Any]]:
    """Let layers return their input, and note what they are called with."""
    calls: dict[str, Any] = {}
    num_outputs = part.family.cut.layer_outputs
    with pytest.MonkeyPatch.context() as changed:
        for layer in part.spec.layers:

            def forward(x: torch.Tensor, *args: Any, _name: str = layer.name, **kwargs: Any) -> Any:
                calls[_name] = x, args, kwargs
                return x if num_outputs is None else (x, *[None] * (num_outputs - 1))

            changed.setattr(part.hf.get_submodule(layer.name), "forward", forward)
        changed.setattr(part.hf.get_submodule(part.spec.norm), "forward", lambda x: x)
        yield calls


def head_moves(
    cfg: RunConfig, loss_of: Callable[..., torch.Tensor]
) -> tuple[PreTrainedModel, ModelSpec, tuple[list[int], list[int]]]:
    """The model on meta, and what the operators of its final norm, head and loss move.

    `loss_of`: of the norm, the head, hidden states and rows.
    """
    hf = build_meta(cfg.model, read_config(cfg.model))
    spec = spec_of(hf.config, hf)
    if cfg.lora:
        inject(hf, cfg.lora, spec)
    with FakeTensorMode(allow_non_fake_inputs=True):
        norm, head = (hf.get_submodule(path) for path in (spec.norm, spec.head))
        _make(norm)
        _make(head)
        part = CausalLM(hf, spec, family_of(hf), cfg)
        patch(part, cfg, torch.device("cpu")).train()
        length = cfg.data.sequence_length
        tokens = torch.zeros(1, length, dtype=torch.int64)
        batch = Batch(tokens, tokens, torch.zeros_like(tokens), (0,), step=1)
        x = torch.empty(1, length, spec.hidden_size, dtype=hidden_dtype(cfg))
        leaf = x.requires_grad_(is_trained_below(hf, spec, len(spec.layers) + 1))
        rows = torch.arange(length)

        def forward() -> torch.Tensor:
            with part.autocast(batch):
                return loss_of(norm, head, leaf.clone(), tokens, rows)

        in_forward, in_backward = passes(nn.ModuleList([norm, head]), leaf, forward)
        return hf, spec, (in_forward.moves, in_backward.moves)


def _ready(part: CausalLM, batch: Batch, place: int, calls: dict[str, Any]) -> Ready:
    layer = part.spec.layers[place]
    module, (x, args, kwargs) = part.hf.get_submodule(layer.name), calls[layer.name]
    leaf = torch.empty_like(x).requires_grad_(is_trained_below(part.hf, part.spec, place + 1))

    def forward() -> torch.Tensor:
        with part.autocast(batch):
            out = module(leaf.clone(), *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    return Ready(place, layer, module, leaf, forward)


def _real(ready: Ready) -> Real:
    ready.forward()  # what the first call makes for all
    with Watch(ready.module) as watch:
        out = ready.forward()
    kept, peak = watch.kept(out), watch.peak - ready.leaf.nbytes
    del out
    moves = [each.moves for each in passes(ready.module, ready.leaf, ready.forward)]
    return Real(ready.place, ready.layer, kept, peak, watch.flops, *moves)


def passes(
    module: nn.Module,
    leaf: torch.Tensor,
    forward: Callable[[], torch.Tensor],
    as_one: Iterable[Any] = KERNELS,
) -> tuple[CountedOperators, CountedOperators]:
    """The operators of a forward and of a backward, without the copy of the leaf."""
    in_forward = CountedOperators(as_one)
    with in_forward:
        out = forward()
    del in_forward.launches[0]
    gradient = torch.empty_like(out)
    in_backward = CountedOperators(as_one, in_forward.where)
    with in_backward:
        torch.autograd.backward(out, gradient)
    for p in (leaf, *module.parameters()):
        p.grad = None
    return in_forward, in_backward
