"""Which weights are the matrices of layers."""

from __future__ import annotations

from torch import nn

from shardwise.models.expert_plan import experts_of
from shardwise.models.kinds import RATES
from shardwise.models.spec import ModelSpec


def matrices_of(hf: nn.Module, spec: ModelSpec, gating: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the parameters that are matrices, by the shapes of full ones.

    They are the weights of layers' linears, and the stacks of their experts. Convolutions, norms,
    biases, rates of decay, routers and linears that make gates and rates (`gating`) are not
    among them.
    """
    in_layers = tuple(f"{layer.name}." for layer in spec.layers)
    stacks = tuple(f"{path}." for path, _ in experts_of(hf, spec))
    names = set()
    for name, parameter in hf.named_parameters():
        module, _, leaf = name.rpartition(".")
        if not name.startswith(in_layers) or leaf in RATES or leaf.endswith("bias"):
            continue
        if any(module.endswith(f".{gate}") for gate in gating) or min(parameter.shape) == 1:
            continue
        if parameter.dim() == 2 or (parameter.dim() == 3 and name.startswith(stacks)):
            names.add(name)
    return frozenset(names)
