"""A strategy is one file: no other one branches on its name, and a new one needs no other."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardwise.base.layouts import ALONE, data_parts
from shardwise.parallel.strategies import STRATEGIES
from tests.added import RUN, SOURCE, branches, decided_by, library_with, shardwise

NAMES = {ALONE, *data_parts(), "zero3"}
BRANCHES = {("config/parallel.py", "zero3"): "another name, which run files may have for fsdp2"}
"""Where a name decides something outside of the strategies' files, and why: none is to come."""


def test_no_other_file_branches_on_the_name_of_a_strategy():
    assert branches(NAMES, "parallel/strategies") == BRANCHES.keys()


@pytest.mark.parametrize(
    "text",
    [
        'data == "ddp"',
        'data in ("zero1", "zero2")',
        '{"fsdp2": 1}[data]',
        'formulas["fsdp1"]',
        'formulas.get("hsdp")',
        "match data:\n    case 'single': pass",
    ],
)
def test_such_a_branch_is_seen(text):
    assert [*decided_by(ast.parse(text), NAMES)]


def test_each_file_has_the_strategy_of_its_name_and_loads_no_torch():
    folder = SOURCE / "parallel" / "strategies"
    assert {path.stem for path in folder.glob("[a-z]*.py")} == STRATEGIES.keys()
    program = "import sys, shardwise.parallel.strategies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


ECHO = '''
from pathlib import Path
from shardwise.parallel.strategies.ddp import Ddp

class Echo(Ddp):
    """ddp under another name, which says where it has run."""

    name = "echo"
    order = 1.5

    def apply(self, pm, mesh, cfg, spec):
        Path(f"{cfg.training.output_dir}.{mesh.data_rank}").touch()
        return super().apply(pm, mesh, cfg, spec)
'''

BARE = """
from shardwise.parallel.strategy import Strategy

class Bare(Strategy):
    '''Works over the data axis, and leaves each rank its own gradients.'''

    name = "bare"
    order = 9
"""
LOOSE = """
from dataclasses import replace
from shardwise.parallel.strategy import Strategy

class Loose(Strategy):
    '''Says that it sums gradients, and sums none.'''

    name = "loose"
    order = 9

    def apply(self, pm, mesh, cfg, spec):
        return replace(pm, reduce_grads=(*pm.reduce_grads, lambda: None))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, and the library with more files in it."""
    folder = tmp_path_factory.mktemp("echo")
    run = RUN | {"parallel": {"data": "echo"}}
    files = {"echo": ECHO, "bare": BARE, "loose": LOOSE}
    added = {f"parallel/strategies/{name}.py": text for name, text in files.items()}
    library_with(folder, added, run)
    return folder


def test_plan_tries_a_strategy_that_a_file_adds(folder):
    answer = json.loads(shardwise(folder, "plan", "run.yaml", "--devices", "2xRTX4090", "--json"))
    memory = {choice["layout"]: choice["memory"] for choice in answer["simpler"]}
    assert memory["echo"] == memory["ddp"]


def test_train_runs_it_on_each_rank(folder):
    shardwise(folder, "train", "run.yaml", "--nproc", "2")
    assert (folder / "out.0").exists()
    assert (folder / "out.1").exists()
    record = json.loads((folder / "out" / "record.json").read_text())
    assert record["config"]["parallel"]["data"] == "echo"


def test_one_that_does_nothing_to_gradients_is_refused(folder):
    overrides = ("--parallel.data=bare", "--training.output_dir=bare")
    said = shardwise(folder, "train", "run.yaml", "--nproc=2", *overrides, code=2)
    assert "parallel.data is bare, whose `apply` does nothing to gradients" in said
    assert len(said.splitlines()) == 1


def test_one_that_sums_none_is_caught_in_the_first_step(folder):
    overrides = ("--parallel.data=loose", "--training.output_dir=loose")
    checked = ("--training.check_copies_every=1",)
    said = shardwise(folder, "train", "run.yaml", "--nproc=2", *overrides, *checked, code=1)
    assert "step 1: copies of" in said


def test_prove_compares_it_with_one_process(folder):
    shardwise(folder, "prove", "run.yaml", "--json", "proof.json")
    proof = json.loads((folder / "proof.json").read_text())
    assert (proof["layout"], proof["num_ranks"], proof["equal"]) == ("echo", 2, True)


def test_bench_has_it_as_a_cell(folder):
    strategies = {name: {"nproc": 2, "parallel.data": name} for name in ("ddp", "echo")}
    training = {key: value for key, value in RUN["training"].items() if key != "output_dir"}
    base = {"model": RUN["model"], "lora": RUN["lora"], "data": RUN["data"], "training": training}
    sweep = {"base": base, "axes": {"strategy": strategies}, "rounds": 1}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    shardwise(folder, "bench", "sweep.yaml", "--out", "bench")
    cells = [json.loads((folder / "bench" / n / "record.json").read_text()) for n in strategies]
    assert [cell["status"] for cell in cells] == ["ok", "ok"]
    assert cells[0]["losses"] == cells[1]["losses"]
