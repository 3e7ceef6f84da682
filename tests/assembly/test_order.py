"""ORDER replaces the same forwards in the stages of a profile, or of a caller's module, as in the
model of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from examples import own_module
from torch import nn

from shardwise.assembly import order
from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.assembly.own import describe_own, own_state
from shardwise.base.interfaces import Part
from shardwise.commands.library import CALLERS_KEYS, read_config
from shardwise.config import Lora, Parallel, RunConfig
from shardwise.lab.planner.bench import make_bench
from shardwise.models.names import is_adapter
from shardwise.models.own import OwnModel
from shardwise.models.patches import cores
from shardwise.models.stage import Stage
from shardwise.parallel.mesh import build_mesh
from tests.assembly.test_costs import config, tiny
from tests.distributed import run_ranks

Replaced = dict[str, list[str]]
"""Path of a module -> its class, the functions that its forward runs, its hooks, other settings."""


def run_file(
    model: str, adapters: Lora | None = None, training: dict[str, Any] | None = None, **others: Any
) -> RunConfig:
    """Return a run file; `others` are keys of `model`, and `packing` of `data`."""
    cfg = config(tiny(model), adapters, training)
    data = replace(cfg.data, packing=others.pop("packing", "concat"))
    return replace(cfg, data=data, model=replace(cfg.model, **others))


CASES = {
    "dense, lora by torch": run_file("llama", Lora(kernel="torch"), packing="isolated"),
    "dense, stored base": run_file("llama", Lora(), base="int8"),
    "dense, in full": run_file(
        "llama", attention="math", training={"loss": "plain", "offload_activations": True}
    ),
    "dense, dropouts of its own": run_file("gpt2", Lora(kernel="torch", dropout=0.1)),
    "hybrid, lora by peft": run_file(
        "qwen3_5", Lora(kernel="peft", dropout=0.1), packing="isolated"
    ),
    "hybrid, operators": run_file("qwen3_5", Lora(), {"checkpointing": "operators"}),
    "hybrid, kinds": run_file("nemotron_h", Lora(dropout=0.1), {"checkpointing": ["mamba2"]}),
    "hybrid, gates": run_file("kimi_linear", Lora(kernel="torch")),
    "dense, xIELU": run_file("apertus"),
    "experts, router loss": run_file(
        "qwen3_moe", None, {"checkpointing": "full"}, router_aux_loss_coef=0.01
    ),
    "experts, hybrid": run_file(
        "qwen3_next", Lora(dropout=0.1), packing="isolated", router_aux_loss_coef=0.01
    ),
}
SHOWN_BY = {
    "dropout masks by row": "hybrid, lora by peft",
    "cores": "hybrid, operators",
    "attention kernel": "dense, in full",
    "finite forget gates": "hybrid, gates",
    "smooth xIELU": "dense, xIELU",
    "norms and gated MLPs": "dense, in full",
    "isolated documents": "dense, lora by torch",
    "quantised base": "dense, stored base",
    "routed experts": "experts, router loss",
    "router loss": "experts, router loss",
    "loss in the head": "hybrid, operators",
    "LoRA kernel": "dense, lora by torch",
    "activation checkpointing": "hybrid, kinds",
    "activation offload": "dense, in full",
}
"""A case in which a row of ORDER does something, for each row that is no strategy of `parallel`.

A compiled forward does not show what it runs."""


def replaced(parts: Iterable[Part]) -> Replaced:
    """Return what is replaced in each module of a model, or of the stages that have its modules."""
    modules: Replaced = {}
    for part in parts:
        for path, module in part.hf.named_modules():
            # What stands for the modules of other stages.
            is_absent = type(module) in (nn.Module, nn.Identity) or (
                type(module).__module__ == Stage.__module__
            )
            if not is_absent:
                modules[path] = list(_traits(module))
        if not part.spec.is_own:
            modules[""].append(f"router loss: {part.router_loss is not None}")
    return modules


def _traits(module: nn.Module) -> Iterator[str]:
    yield type(module).__qualname__
    if "forward" in vars(module):
        yield from functions_in(vars(module)["forward"])
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        yield f"hook {hook.__qualname__}"


def functions_in(value: Any, seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """Yield the names of a function and of those that it closes over, and the constants in them."""
    if id(value) in seen:
        return
    seen |= {id(value)}
    if isinstance(value, str | int | float | None):
        yield repr(value)
    elif isinstance(value, partial):
        for inner in (value.func, *value.args, *value.keywords.values()):
            yield from functions_in(inner, seen)
    elif isinstance(value, MethodType):
        yield value.__func__.__qualname__
        yield from cores_of(value.__func__, seen)
    elif isinstance(value, FunctionType):
        yield value.__qualname__
        yield from cores_of(value, seen)
        for cell in value.__closure__ or ():
            yield from functions_in(cell.cell_contents, seen)


def cores_of(function: FunctionType, seen: frozenset[int]) -> Iterator[str]:
    """Yield the names of what a function finds in its module instead of a function."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if getattr(value, "__module__", "") == cores.__name__:
            yield from functions_in(value, seen)


def of_run_and_profile(cfg: RunConfig, left_out: str = "") -> tuple[Replaced, Replaced]:
    """Return what is replaced in a run on one process and in a profile, which lacks one row."""
    one_process = replace(cfg, parallel=Parallel())
    mesh = build_mesh(one_process, torch.device("cpu"))
    facts = describe(cfg, cfg.parallel.pp)
    run = replaced(build(one_process, mesh).pm.parts)
    rows = order.BEFORE_LOADING
    order.BEFORE_LOADING = tuple(row for row in rows if row.name != left_out)  # ends with the rank
    places = list(range(len(facts.spec.layers) + 2))
    parts = [stage.submod for stage in make_bench(cfg, mesh, facts, places).stages]
    return run, replaced(parts)


@pytest.mark.parametrize("name", CASES)
def test_a_profile_and_a_run_replace_the_same_functions_of_the_same_modules(name):
    ((run, profile),) = run_ranks(1, of_run_and_profile, CASES[name])
    assert profile == run


@pytest.mark.parametrize("row", SHOWN_BY)
def test_a_row_of_the_order_that_a_profile_leaves_out_is_seen(row):
    ((run, profile),) = run_ranks(1, of_run_and_profile, CASES[SHOWN_BY[row]], row)
    assert profile != run


def of_own_module_and_stages(left_out: str = "") -> tuple[Replaced, Replaced]:
    """Return what is replaced in a caller's module and in its two stages, which lack one row."""
    cfg = read_config(own_module.CONFIG, ["--training.checkpointing=full"], CALLERS_KEYS)
    mesh = build_mesh(cfg, torch.device("cpu"))
    complete, own = (OwnModel.of(own_module.Classifier()) for _ in range(2))
    describing = partial(describe_own, complete)
    pm = build(cfg, mesh, own_state(cfg, complete), describe=describing).pm
    boundaries = [0, 1 + own_module.DEPTH // 2, own_module.DEPTH + 2]
    stages = replace(pm, parts=describe_own(own, cfg, 1).parts(cfg, boundaries, range(2)))
    for row in order.BEFORE_LOADING:
        if row.is_requested(cfg) and row.name != left_out:
            stages = row.apply(stages, mesh, cfg, own.spec)
    return replaced(pm.parts), replaced(stages.parts)


def test_stages_of_an_own_module_have_what_the_module_has():
    ((complete, stages),) = run_ranks(1, of_own_module_and_stages)
    assert stages == complete


@pytest.mark.parametrize("row", ["dropout masks by row", "activation checkpointing"])
def test_a_row_of_the_order_that_stages_of_an_own_module_lack_is_seen(row):
    ((complete, stages),) = run_ranks(1, of_own_module_and_stages, row)
    assert stages != complete


def test_lora_is_a_row_of_the_order(monkeypatch):
    cfg = CASES["hybrid, operators"]
    assert describe(cfg, cfg.parallel.pp).coverage is not None
    monkeypatch.setattr(order, "ON_THE_WHOLE", ())
    without = describe(cfg, cfg.parallel.pp)
    assert without.coverage is None
    assert not any(is_adapter(name) for name, _ in without.hf.named_parameters())


def test_every_row_of_the_order_is_shown():
    strategies = {"context", "tensor", "expert", "fsdp1", "fsdp2", "embeddings with a gradient"}
    # The latter: tests/models/test_casting.py.
    strategies |= {"FP8 scales", "disk", "copies of weights"}
    # The latter two: test_float8.py and test_rotary.py of tests/models/patches.
    hidden = {"compile", "FP8 products", "rotary positions by document"}
    assert {row.name for row in order.BEFORE_LOADING} == {*SHOWN_BY, *strategies, *hidden}


def around(function: Callable[[], None], name: str) -> Callable[[], None]:
    def inner() -> None:
        print(name)
        function()

    return inner


def test_functions_are_told_apart_by_what_they_close_over():
    def one() -> None: ...

    names = list(functions_in(around(partial(one), "math")))
    assert [name.rpartition(".")[2] for name in names] == ["inner", "one", "'math'"]
    assert names != list(functions_in(around(around(one, "math"), "math")))
