"""Initial values: a function of (seed, module path), made by the family's own rules."""

from collections.abc import Container, Generator, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import XIELUActivation

from shardwise.config import UserError
from shardwise.models.foreign import WAY_OUT, foreign
from shardwise.models.seeds import stable_seed


def random_weights(
    skeleton: PreTrainedModel, seed: int, wanted: Container[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, initial value) of every parameter of a model on meta, tied ones once.

    `wanted`: the names to yield; a module that has none of them is not drawn.

    A value depends on (seed, path of the module that owns it): not on the other modules, the order
    of the calls, the dtype (it is drawn in float32 and rounded) or torch's global random state,
    which is left as it was. One module's parameters are in memory at a time. UserError if the
    family has no rule for a parameter.
    """
    tied = skeleton.all_tied_weights_keys
    for path, module in skeleton.named_modules():
        names = [name for name, _ in module.named_parameters(path, recurse=False)]
        names = [name for name in names if name not in tied]
        chosen = {name for name in names if wanted is None or name in wanted}
        if chosen:  # all of the module is drawn: a value may depend on the draws before it
            for name, value in _values_of(skeleton, path, module, names, seed):
                if name in chosen:
                    yield name, value


def nudged(value: torch.Tensor, seed: int, name: str) -> torch.Tensor:
    """Return a float32 weight with one rounding error in each element: x (1 +- 2^-24), rounded.

    About half of the elements change, by one unit in the last place. The signs are a function of
    (seed, name). A weight in another dtype is returned unchanged.
    """
    if value.dtype != torch.float32:
        return value
    generator = torch.Generator().manual_seed(stable_seed("nudge", seed, name))
    signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
    return (value.double() * (1 + signs * 2.0**-24)).float()


def initialise_buffers(skeleton: PreTrainedModel) -> None:
    """Give every buffer of a model on meta (rope tables) its value, on the CPU."""
    for path, module in skeleton.named_modules():
        leaves = [leaf for leaf, _ in module.named_buffers(recurse=False)]
        if not leaves:
            continue
        for leaf in leaves:
            on_meta = module.get_buffer(leaf)
            module._buffers[leaf] = _poisoned(on_meta, on_meta.dtype)
        _run_rules(skeleton, path, seed=0)
        for leaf in leaves:
            if _has_nan(module.get_buffer(leaf)):
                raise UserError(
                    f"{skeleton.config.model_type}: transformers has no rule for the value of "
                    f"{path}.{leaf}, or makes it NaN of what stands in config.json; {WAY_OUT}"
                )


def _values_of(
    skeleton: PreTrainedModel, path: str, module: nn.Module, names: Sequence[str], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, value) of these parameters of `module`, which are on meta again afterwards."""
    on_meta = {name.rpartition(".")[2]: skeleton.get_parameter(name) for name in names}
    for leaf, parameter in on_meta.items():
        poisoned = _poisoned(parameter, torch.float32)
        module._parameters[leaf] = nn.Parameter(poisoned, requires_grad=False)
    try:
        _run_rules(skeleton, path, seed)
        values = {leaf: module.get_parameter(leaf).detach() for leaf in on_meta}
    finally:
        module._parameters.update(on_meta)
    for name, (leaf, value) in zip(names, values.items(), strict=True):
        if _has_nan(value):
            raise UserError(
                f"{skeleton.config.model_type} has no rule for the initial values of {name}; "
                "give a folder with weights (model.init: weights)"
            )
        yield name, value.to(on_meta[leaf].dtype)


def _run_rules(skeleton: PreTrainedModel, path: str, seed: int) -> None:
    # A module's own rule runs first, then those of the modules around it, which may set its
    # parameters too (a block its router's, a mixer its output projection's). Everything else that
    # those rules set is on meta, where nothing happens.
    parts = path.split(".") if path else []
    config = skeleton.config
    with (
        torch.no_grad(),
        _seeded(stable_seed(seed, path)),
        foreign(config.model_type, config, f"initialise {path or 'the model'}"),
    ):
        for depth in range(len(parts), -1, -1):
            skeleton._init_weights(skeleton.get_submodule(".".join(parts[:depth])))
        module = skeleton.get_submodule(path)
        if isinstance(module, XIELUActivation):  # No rule has what it is made with.
            for name, value in XIELUActivation(dtype=torch.float32).state_dict().items():
                getattr(module, name).copy_(value)


@contextmanager
def _seeded(seed: int) -> Generator[None, None, None]:
    # The families' rules draw from torch's global CPU generator, whose state is restored.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _poisoned(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    poison = float("nan") if dtype.is_floating_point else 0
    return torch.full(like.shape, poison, dtype=dtype, device="cpu")


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())
