"""A strategy is one file: no other one branches on its name, and a new one needs no other."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.base.layouts import ALONE, data_parts
from shardwise.config.presets import MODELS
from shardwise.parallel.strategies import STRATEGIES
from tests.distributed import PATIENCE

SOURCE = Path(__file__).parents[2] / "src" / "shardwise"
NAMES = {ALONE, *data_parts(), "zero3"}
BRANCHES = {("config/parallel.py", "zero3"): "another name, which run files may have for fsdp2"}
"""Where a name decides something outside of the strategies' files, and why: none is to come."""


def names_in(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and inner.value in NAMES:
            yield str(inner.value)


def decided_by(tree: ast.AST) -> Iterator[str]:
    """Yield the names of strategies that are compared, looked up, or listed."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare() | ast.Tuple() | ast.List() | ast.Set() | ast.MatchValue():
                yield from names_in(node)
            case ast.Dict(keys=parts) | ast.Call(func=ast.Attribute(attr="get"), args=parts):
                yield from (name for part in parts if part for name in names_in(part))
            case ast.Subscript(slice=part):
                yield from names_in(part)


def test_no_other_file_branches_on_the_name_of_a_strategy() -> None:
    found = {
        (str(path.relative_to(SOURCE)), name)
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE / "parallel" / "strategies"
        for name in decided_by(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == BRANCHES.keys()


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
def test_such_a_branch_is_seen(text: str) -> None:
    assert [*decided_by(ast.parse(text))]


def test_each_file_has_the_strategy_of_its_name_and_loads_no_torch() -> None:
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
RUN: dict[str, Any] = {
    "model": {
        "path": str(MODELS / "tiny-llama"),
        "init": "random",
        "tokenizer": str(MODELS.parent / "starter"),
    },
    "lora": {"r": 4},
    "data": {"train": "corpus.jsonl", "sequence_length": 32, "packing": "none"},
    "parallel": {"data": "echo"},
    "training": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "output_dir": "out"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, and the library with one more file in it."""
    folder = tmp_path_factory.mktemp("echo")
    shutil.copytree(SOURCE, folder / "src" / "shardwise", ignore=lambda *_: ["__pycache__"])
    (folder / "src" / "shardwise" / "parallel" / "strategies" / "echo.py").write_text(ECHO)
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    texts = ({"text": f"row {number} of a small corpus"} for number in range(40))
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return folder


def shardwise(folder: Path, *arguments: str) -> str:
    """What a command of that library prints."""
    command = [sys.executable, "-m", "shardwise", *arguments]
    paths = os.pathsep.join([str(folder / "src"), *sys.path])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plan_tries_a_strategy_that_a_file_adds(folder: Path) -> None:
    answer = json.loads(shardwise(folder, "plan", "run.yaml", "--devices", "2xRTX4090", "--json"))
    memory = {choice["layout"]: choice["memory"] for choice in answer["simpler"]}
    assert memory["echo"] == memory["ddp"]


def test_train_runs_it_on_each_rank(folder: Path) -> None:
    shardwise(folder, "train", "run.yaml", "--nproc", "2")
    assert (folder / "out.0").exists()
    assert (folder / "out.1").exists()
    record = json.loads((folder / "out" / "record.json").read_text())
    assert record["config"]["parallel"]["data"] == "echo"


def test_prove_compares_it_with_one_process(folder: Path) -> None:
    shardwise(folder, "prove", "run.yaml", "--json", "proof.json")
    proof = json.loads((folder / "proof.json").read_text())
    assert (proof["layout"], proof["num_ranks"], proof["equal"]) == ("echo", 2, True)


def test_bench_has_it_as_a_cell(folder: Path) -> None:
    strategies = {name: {"nproc": 2, "parallel.data": name} for name in ("ddp", "echo")}
    training = {key: value for key, value in RUN["training"].items() if key != "output_dir"}
    base = {"model": RUN["model"], "lora": RUN["lora"], "data": RUN["data"], "training": training}
    sweep = {"base": base, "axes": {"strategy": strategies}, "rounds": 1}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    shardwise(folder, "bench", "sweep.yaml", "--out", "bench")
    cells = [json.loads((folder / "bench" / n / "record.json").read_text()) for n in strategies]
    assert [cell["status"] for cell in cells] == ["ok", "ok"]
    assert cells[0]["losses"] == cells[1]["losses"]
