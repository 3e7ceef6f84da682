"""How many files of src a new key, family, kind, strategy or optimizer touches, by those there."""

from __future__ import annotations

import pytest

from shardwise.config.keys import all_keys
from shardwise.models.families import FAMILIES
from shardwise.parallel.optimizers import OPTIMIZERS
from shardwise.parallel.strategies import STRATEGIES
from tests.added import files_with

KEYS = (
    *("training.check_copies_every", "training.offload_activations", "training.async_save"),
    *("optimizer.lora_b_lr_ratio", "optimizer.decay_ratio", "measure.print_seconds"),
)
BESIDE_FAMILIES = {
    "models/families/servers.py",  # what servers read of adapters, where that was looked up
    "lab/planner/measured_models.py",  # the models whose kinds of layers a calibration measures
    "models/__init__.py",  # makes jet_nemotron known to transformers
}
PLANNER = "lab/planner"
CHOSEN = {
    "adamw": {"config/training.py"},  # the default
    "ddp": {
        *(f"{PLANNER}/candidates.py", f"{PLANNER}/estimate.py"),
        *(f"{PLANNER}/measure_machine.py", f"{PLANNER}/profile.py"),
    },
    "fsdp2": {"config/parallel.py"},  # which zero3 is another name of
    "sgd": {"lab/proof/small_run.py"},  # by which every layout is proven
    "single": {"config/parallel.py", "lab/planner/candidates.py", "models/catalogue.py"},
    "zero1": {"parallel/strategies/zero2.py"},  # whose first stage it is
}
"""The files that choose one of those that there are: a new one needs none of them."""


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_named_where_it_is_declared_alone(key):
    assert files_with(key) | files_with(key.partition(".")[2]) == set()


def test_most_keys_are_named_where_they_are_declared_alone():
    named = [len(files_with(key)) for key in all_keys()]
    assert named.count(0) >= 62
    assert sum(named) <= 101


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_one_file(name):
    files = files_with(name) - BESIDE_FAMILIES
    assert len(files) == 1 or all(file.startswith(f"models/families/{name}/") for file in files)


@pytest.mark.parametrize("name", ["gated_delta_net", "jet_block", "kda", "mamba", "mamba2"])
def test_a_kind_is_one_file_and_its_kernel(name):
    """Families name their kinds, and a kind may be built on another one."""
    homes = ("models/families/", "models/kinds/", "kernels/")
    assert {file for file in files_with(name) if not file.startswith(homes)} == set()
    assert f"models/kinds/{name}.py" in files_with(name)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_one_file_and_what_it_runs(name):
    described = f"parallel/strategies/{name}.py"
    assert files_with(name) - CHOSEN.get(name, set()) - {f"parallel/{name}.py"} == {described}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_two_files_at_most(name):
    described = f"parallel/optimizers/{name}.py"
    assert files_with(name) - CHOSEN.get(name, set()) - {f"parallel/{name}.py"} == {described}
