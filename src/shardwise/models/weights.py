"""The table of weights: one row for each parameter of a model, on any device.

Which weights take adapters, decay, have moments or values in few bits, multiply in 8 bits or are
sharded by `tp` and `ep` are filters of this table. Names of kinds decide only here, by `Kind`.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.models.kinds import RATES
from shardwise.models.names import hf_name, is_adapter, is_saved_copy, is_wrapper, num_sharing
from shardwise.models.spec import Block, LayerSpec, ModelSpec
from shardwise.models.stored import Stored, is_turned
from shardwise.models.tensor_cuts import unwrapped

LINEARS = (nn.Linear, Conv1D)
Role = Literal["ends", "projection", "gating", "score", "expert", "rate", "bias", "other"]


@dataclass(frozen=True)
class WeightRow:
    """A parameter of a model: a weight, a tensor that it is stored in, or part of its adapter."""

    name: str
    """Name of the parameter in the model."""
    path: str
    """Name that transformers gives the weight that it is, or belongs to."""
    part: str
    """`lora_A`, `lora_B` or `lora_magnitude_vector` of an adapter, `codes` or another tensor of
    `Stored`; empty: it is the weight."""
    is_original: bool
    """Whether a copy that PEFT trains in full computes in its place."""
    is_saved_copy: bool
    """Whether it is of such a copy."""
    owner: type[nn.Module]
    """Class of transformers' module that has the weight."""
    is_turned: bool
    """Whether that module has its matrices as [..., in, out]."""
    layer: LayerSpec | None
    block: Block | None
    """The mixer or feed-forward of `layer` that it lies in."""
    role: Role
    """Role of the parameter in the model:

    - `ends`: a table of the embedding or the head;
    - `projection`: a matrix of a linear in a layer;
    - `gating`: a linear or router that only routes tokens or sets a rate (`Kind.gating`); of those,
      `score`: a linear that weighs what an expert gives (`Kind.gates`);
    - `expert`: the weights of routed experts, as one stack [E, out, in] or as linears;
    - `rate`: how fast a state decays (`Kind.rates`);
    - `bias`;
    - `other`: norms, convolutions, vectors.
    """
    is_bypassed: bool
    """Whether its layer reads it past the module (`Kind.bypassed`)."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    num_sharing: int
    """How many experts have it in common, if it is a factor of an adapter on experts."""

    @property
    def is_adapter(self) -> bool:
        """Whether it is a factor of an adapter, or its magnitude."""
        return self.part.startswith("lora_")

    @property
    def is_linear(self) -> bool:
        """Whether it is, or belongs to, the matrix of a linear."""
        return issubclass(self.owner, LINEARS) and self.path.endswith(".weight")

    @property
    def is_stack(self) -> bool:
        """Whether it is, or belongs to, a stack of experts."""
        return self.role == "expert" and not self.is_linear

    @property
    def is_of_stack(self) -> bool:
        """Whether it is, or belongs to, a stack of experts or the bias of one, [E, out]."""
        return self.layer is not None and self.in_layer.removesuffix("_bias") in self.layer.experts

    @property
    def takes_few_bits(self) -> bool:
        """Whether it may be stored, or its linear multiply, in few bits.

        Routers and other gates may not, as small errors there choose other experts, nor what a
        layer reads past its module.
        """
        is_matrix = self.role == "projection" and self.owner in LINEARS
        return not self.part and not self.is_bypassed and (is_matrix or self.is_stack)

    @property
    def target(self) -> str:
        """Path of what an adapter on it is put on: its linear, or the stack."""
        return self.path.removesuffix(".weight")

    @property
    def in_layer(self) -> str:
        """`target` within its layer, such as `self_attn.q_proj`."""
        return "" if self.layer is None else self.target.removeprefix(f"{self.layer.name}.")


def weights_of(
    model: nn.Module, spec: ModelSpec | None = None, within: str = ""
) -> Iterator[WeightRow]:
    """Yield the rows of a model, in the order of its parameters.

    Without a spec, of a part of a model, of which neither layers nor kinds are known. `within`: the
    path of the only module whose rows are asked for.
    """
    layers = {} if spec is None else {layer.name: layer for layer in spec.layers}
    ends = () if spec is None else tuple(f"{path}." for path in (spec.embed, spec.head) if path)
    for name, parameter in model.get_submodule(within).named_parameters(prefix=within):
        owner, path, part, num_experts = _place(model, name)
        layer = layers.get(_first_in(layers, path))
        blocks = {} if layer is None else {f"{layer.name}.{b.path}": b for b in layer.blocks}
        block_path = _first_in(blocks, path)
        block = blocks.get(block_path)
        inside = path.removeprefix(block_path).removesuffix(".weight").removeprefix(".")
        is_matrix = parameter.dim() == 2 or isinstance(owner, LINEARS)
        role = _role(path, inside, block, is_matrix and layer is not None)
        yield WeightRow(
            name=name,
            path=path,
            part=part,
            is_original=".original_module." in name,
            is_saved_copy=is_saved_copy(name),
            owner=type(owner),
            is_turned=is_turned(owner),
            layer=layer,
            block=block,
            role="ends" if path.startswith(ends) else role,
            is_bypassed=block is not None and inside in block.kind.bypassed,
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            is_trained=parameter.requires_grad,
            num_sharing=num_experts,
        )


def adaptable(model: nn.Module, spec: ModelSpec) -> list[WeightRow]:
    """Return the rows that may have an adapter: of each layer linears, then stacks of experts."""
    rows = [row for row in weights_of(model, spec) if row.layer and (row.is_linear or row.is_stack)]
    return sorted(rows, key=lambda row: (row.layer.number if row.layer else 0, row.is_stack))


def matrices_of(model: nn.Module, spec: ModelSpec) -> frozenset[str]:
    """Return the names of the weights of layers' linears and stacks of experts, by full shapes.

    Routers and what makes gates and rates are not among them.
    """
    rows = (row for row in weights_of(model, spec) if row.role in ("projection", "expert"))
    return frozenset(row.name for row in rows if min(row.shape) > 1)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str, str, int]:
    """Return transformers' module of a weight, the weight's name, `part` and `num_sharing`."""
    path, _, leaf = name.rpartition(".")
    if is_adapter(name):
        path, _, inside = name.partition(".lora_")
        layer = model.get_submodule(path)
        weight = layer.parameter_name if is_wrapper(layer) else "weight"
        part = f"lora_{inside.partition('.')[0]}"
        return unwrapped(layer), f"{hf_name(path)}.{weight}", part, num_sharing(layer)
    module = model.get_submodule(path)
    if isinstance(module, Stored):
        return model.get_submodule(path.rpartition(".")[0]), hf_name(path), leaf, 1
    return module, hf_name(name), "", 1


def _role(path: str, inside: str, block: Block | None, is_matrix: bool) -> Role:
    """Return the role of a weight that is no table, by its path and by its path in its block."""
    leaf = path.rpartition(".")[2]
    if leaf in RATES:
        return "rate"
    if leaf.endswith("bias"):
        return "bias"
    if block is not None and inside in block.kind.gating:
        return "score" if inside in block.kind.gates else "gating"
    if block is not None and inside in block.kind.experts:
        return "expert"
    if not is_matrix:
        return "other"
    return "expert" if block is not None and inside in block.kind.gates else "projection"


def _first_in(paths: Container[str], name: str) -> str:
    """Return the shortest beginning of a name that is one of the paths; empty if none is."""
    return next((p for p in accumulate(name.split("."), "{}.{}".format) if p in paths), "")


def ends_with(path: str, target: str) -> bool:
    """Return whether a target of LoRA, an end of a name or a whole one, means this path."""
    return path == target or path.endswith(f".{target}")
