"""An optimizer is one file: no other one branches on its name, and a new one needs no other."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.parallel.optimizers import OPTIMIZERS
from tests.added import RUN, SOURCE, branches, decided_by, library_with, shardwise

FOLDER = "parallel/optimizers"


def test_no_other_file_branches_on_the_name_of_an_optimizer():
    assert branches(OPTIMIZERS, FOLDER) == set()
    assert [*decided_by(ast.parse('cfg.optimizer.name == "muon"'), OPTIMIZERS)]


def test_each_file_has_the_optimizer_of_its_name_and_loads_no_torch():
    assert {path.stem for path in (SOURCE / FOLDER).glob("[a-z]*.py")} == OPTIMIZERS.keys()
    program = "import sys, shardwise.parallel.optimizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


SIGNS = '''
from shardwise.parallel.update_rule import UpdateRule

class SignUpdate(UpdateRule):
    """The sign of the momentum."""

    name = "signs"
    whole_states = ("momentum_buffer",)

    def make(self, groups, cfg, precision):
        import torch
        from shardwise.parallel.place import local

        class Signs(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        states = self.state[parameter]
                        momentum = states.setdefault("momentum_buffer", torch.zeros_like(parameter))
                        momentum.lerp_(parameter.grad, 0.1)
                        local(parameter).sub_(local(momentum).sign(), alpha=group["lr"])

        return Signs(groups, lr=cfg.lr)

    def states(self, parameter, is_selected):
        states = super().states(parameter, is_selected)
        return {name: states[name] for name in self.whole_states}

    def state_bytes(self, numel, itemsize, is_selected):
        return numel * itemsize

    def update_bytes(self, cfg, numels, is_gloo):
        return max(numel * weight.itemsize for weight, numel in numels.items())
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, and the library with one more file in it."""
    folder = tmp_path_factory.mktemp("signs")
    run = RUN | {"optimizer": {"name": "signs", "lr": 0.5, "lr_schedule": "constant"}}
    library_with(folder, {f"{FOLDER}/signs.py": SIGNS}, run)
    return folder


def test_plan_knows_the_states_of_an_optimizer_that_a_file_adds(folder):
    options = ("--devices", "2xRTX4090", "--json")
    signs = json.loads(shardwise(folder, "plan", "run.yaml", *options))
    adamw = json.loads(shardwise(folder, "plan", "run.yaml", *options, "--optimizer.name=adamw"))
    states = [
        next(c["memory"]["optimizer"] for c in answer["simpler"] if c["layout"] == "ddp")
        for answer in (signs, adamw)
    ]
    assert 0 < 2 * states[0] < states[1]  # adamw counts steps, too


def test_train_updates_by_it_and_saves_its_states(folder):
    options = ("--parallel.data=fsdp2", "--training.save_every=1")
    shardwise(folder, "train", "run.yaml", "--nproc", "2", *options)
    steps = [folder / "out" / "checkpoints" / f"step-{step}" for step in (1, 2)]
    before, after = (load_file(step / "tensors-0.safetensors") for step in steps)
    weights = [key for key in after if key.startswith("weights/")]
    states = {key.rpartition("/")[2] for key in after if key.startswith("optimizer/")}
    assert states == {"momentum_buffer"}
    moved = torch.cat([(after[key] - before[key]).abs().flatten() for key in weights])
    assert moved.min() >= 0.5 - 1e-6
    assert moved.max() <= 0.5 + 1e-6
