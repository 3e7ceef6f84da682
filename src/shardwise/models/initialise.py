"""Initial values: a function of (seed, module path) alone, made one module at a time by the family's own rules."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.config import UserError
from shardwise.models.seeds import stable_seed


def random_weights(
    skeleton: PreTrainedModel, seed: int, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter of a model on meta, tied ones once, with the values its family starts training from.

    With `wanted`, those of these names only, and no module is drawn that has none of them.

    A value depends on (seed, path of the module that owns it): not on the other modules, the order of the calls, the
    dtype (it is drawn in float32 and rounded) or torch's global random state, which is left as it was. In memory at a
    time: one module's own parameters. UserError if the family has no rule for a parameter.
    """
    for path, module in skeleton.named_modules():
        own = {
            f"{path}.{leaf}" if path else leaf: leaf
            for leaf, _ in module.named_parameters(recurse=False)
        }
        own = {
            name: leaf for name, leaf in own.items() if name not in skeleton.all_tied_weights_keys
        }
        chosen = {name for name in own if wanted is None or name in wanted}
        if chosen:  # all of the module is drawn: a value may come after another one's
            yield from (
                pair for pair in _values_of(skeleton, path, module, own, seed) if pair[0] in chosen
            )


def nudged(value: torch.Tensor, seed: int, name: str) -> torch.Tensor:
    """Return a weight of which each element is off by one rounding to float32, up or down: x (1 +- 2^-24), rounded.

    About half of the elements move, by one unit in the last place. The signs are a function of (seed, name). What is
    stored in fewer bits stays as it is.
    """
    if value.dtype != torch.float32:
        return value
    generator = torch.Generator().manual_seed(stable_seed("nudge", seed, name))
    signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
    return (value.double() * (1 + signs * 2.0**-24)).float()


def initialise_buffers(skeleton: PreTrainedModel) -> None:
    """Give every buffer of a model on meta (rope tables) its true value on the CPU, by the family's own rules."""
    for path, module in skeleton.named_modules():
        own = [leaf for leaf, _ in module.named_buffers(recurse=False)]
        if not own:
            continue
        for leaf in own:
            on_meta = module.get_buffer(leaf)
            module._buffers[leaf] = _poisoned(on_meta, on_meta.dtype)
        _run_rules(skeleton, path, seed=0)
        for leaf in own:
            assert not _has_nan(module.get_buffer(leaf)), (
                f"{skeleton.config.model_type} has no rule for {path}.{leaf}"
            )


def _values_of(
    skeleton: PreTrainedModel, path: str, module: nn.Module, own: dict[str, str], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    on_meta = {leaf: module.get_parameter(leaf) for leaf in own.values()}
    for leaf, parameter in on_meta.items():
        module._parameters[leaf] = nn.Parameter(
            _poisoned(parameter, torch.float32), requires_grad=False
        )
    try:
        _run_rules(skeleton, path, seed)
        values = {name: module.get_parameter(leaf).detach() for name, leaf in own.items()}
    finally:
        module._parameters.update(on_meta)
    for name, value in values.items():
        if _has_nan(value):
            raise UserError(
                f"{skeleton.config.model_type} has no rule for the initial values of {name}; "
                "give a folder with weights (model.init: weights)"
            )
        yield name, value.to(on_meta[own[name]].dtype)


def _run_rules(skeleton: PreTrainedModel, path: str, seed: int) -> None:
    # A module's own rule first, then those of the modules around it, which may set its parameters too (a block its
    # router's, a mixer its output projection's). What else those rules would set is on meta, where nothing happens.
    parts = path.split(".") if path else []
    with torch.no_grad(), _seeded(stable_seed(seed, path)):
        for depth in range(len(parts), -1, -1):
            skeleton._init_weights(skeleton.get_submodule(".".join(parts[:depth])))


@contextmanager
def _seeded(seed: int) -> Generator[None, None, None]:
    # The families' rules draw from torch's global generator of the CPU; it gets its state back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _poisoned(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(
        like.shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype, device="cpu"
    )


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())
