"""The README's and the docs' commands and run files are real."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardwise.commands.cli import build_parser
from shardwise.config import Model, RunConfig
from shardwise.config.run_file import load_config, parse_config
from shardwise.lab.benchmark.sweep import read_sweep
from shardwise.models import load
from shardwise.models.save import save_model
from tests.command import run_command

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
YAML_FILES = sorted((ROOT / "configs").rglob("*.yaml"))
SWEEPS = [path for path in YAML_FILES if "axes" in yaml.safe_load(path.read_text(encoding="utf-8"))]
RUN_FILES = [path for path in YAML_FILES if path not in SWEEPS]
NUM_CELLS = {
    "cpu": 88,
    "models": 112,
    "layouts": 192,
    "experts": 16,
    "rows": 30,
    "microbatches": 12,
    "compositions": 26,
    "processes": 84,
    "seeds": 30,
    "gpu": 32,
}
"""Of the studies' sweeps, controls aside."""


def blocks(language: str, page: Path) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S
    )


def test_few_words_before_the_first_command():
    assert len(README.partition("```")[0].split()) <= 120


def test_pages_say_things_once():
    """A page costs the others its words; what tools write is not counted."""
    written = {"config.md", "compatibility.md"}
    texts = [page.read_text(encoding="utf-8") for page in PAGES if page.name not in written]
    by_hand = [text for text in texts if "This page is written by" not in text]
    block = re.compile(r"<!-- tools/.*?<!-- end -->", re.DOTALL)
    assert sum(len(block.sub("", text).split()) for text in by_hand) <= 60_000


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M)
    }
    assert {"demo", "test", "check", "parity"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.parametrize("target", ["test", "test-quick"])
def test_make_test_gives_pytest_what_it_takes(target):
    """Options of the tests' own are known only where no file of results follows one as a word of
    its own: pytest would look there for their definition."""
    lines = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    commands = [line.split("-m pytest ", 1)[1] for line in lines if "-m pytest " in line]
    assert commands
    for command in commands:
        asked = [sys.executable, "-m", "pytest", *command.split(), "--markers"]
        subprocess.run(asked, cwd=ROOT, check=True, capture_output=True)


def links(page: Path) -> set[Path]:
    """The files and folders of the project that a page leads to."""
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not [str(target) for target in links(page) if not target.exists()]


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    found = {page for page in links(index) if page.is_file()} | {
        page for folder in links(index) if folder.is_dir() for page in folder.iterdir()
    }
    assert set((ROOT / "docs").rglob("*.md")) - {index} == found


def test_every_page_opens_with_a_question():
    names = ("concepts", "decisions", "guides", "models", "reference")
    folders = [ROOT / "docs" / name for name in names]
    pages = [ROOT / "docs" / "study.md", *(page for folder in folders for page in folder.iterdir())]
    question = re.compile(r"# [^\n]+\n\n\*[A-Z][^*\n]{10,100}\?\*\n\n\S")
    pages.remove(ROOT / "docs" / "decisions" / "README.md")
    assert not [page for page in pages if not question.match(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shown_commands_parse_and_shown_run_files_hold(page, tmp_path):
    for block in blocks("yaml", page):
        content = yaml.safe_load(block)
        if "axes" in content:
            (tmp_path / "configs").symlink_to(ROOT / "configs")
            (tmp_path / "sweep.yaml").write_text(block)
            assert not [
                cell.refusal
                for cell in read_sweep(tmp_path / "sweep.yaml", tmp_path).cells
                if cell.refusal
            ]
        else:
            assert isinstance(parse_config(content, str(page)), RunConfig)
    for line in "\n".join(blocks("bash", page)).splitlines():
        _, found, arguments = line.partition("shardwise ")
        if not found:
            continue
        words = [
            word for word in arguments.split("#")[0].split() if not re.match(r"--\w+\.\w+=", word)
        ]
        args, unknown = build_parser().parse_known_args(words)
        assert not unknown, line
        if args.command == "train" and args.run.startswith("configs/"):
            load_config(
                ROOT / args.run,
                [word for word in arguments.split() if re.match(r"--\w+\.\w+=", word)],
            )


def test_readme_commands_run(tmp_path):
    """As a reader would after `make demo`, but two steps on an untrained base."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    corpus = runpy.run_path(str(ROOT / "examples" / "corpus.py"))
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        corpus["main"]()
        base = Model("configs/models/demo-hybrid", init="random")
        hf = load.build_meta(base, load.read_config(base))
        save_model(hf, load.weights(hf, base, seed=0), "runs/demo/base/model")
        for line in "\n".join(blocks("bash", ROOT / "README.md")).splitlines():
            if line.startswith(".venv/bin/shardwise "):
                arguments = line.removeprefix(".venv/bin/shardwise ").split()
                if arguments[0] == "train":
                    arguments += ["--training.steps=2", "--training.eval_batches=1"]
                done = run_command(arguments)
                assert done.returncode == 0, done.stderr
        assert json.loads(Path("runs/first/record.json").read_text())["status"] == "ok"
        assert Path("runs/merged/config.json").exists()
    finally:
        os.chdir(here)


def test_a_guide_has_the_measured_restarts():
    medians = json.loads((ROOT / "results" / "restart.json").read_text())["medians"].values()
    measured = [(round(each["seconds"]), round(each["steps_again"])) for each in medians]
    guide = (ROOT / "docs" / "guides" / "launching.md").read_text()
    table = guide.partition("| steps done again |")[2].partition("\n\n")[0]
    rows = re.findall(r"\| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    assert [(int(seconds), int(steps)) for seconds, steps in rows] == measured


def test_a_guide_has_the_measured_gain_of_moving_layers():
    rows = json.loads((ROOT / "results" / "resplit" / "gain.json").read_text())["rows"]
    guide = (ROOT / "docs" / "guides" / "splitting-a-pipeline.md").read_text()
    found = re.findall(r"(\d\.\d\d) \((\d\.\d\d)\)", guide)
    speeds = [rows[case]["speed_of_dynamic"] for case in ("slow", "wrong", "flops")]
    measured = [
        tuple(f"{speed[when][split]['median']:.2f}" for when in ("late", "whole"))
        for speed in speeds
        for split in ("balanced", "uniform")
    ]
    assert found == measured


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_committed_run_files_hold(path):
    load_config(path)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: str(path.relative_to(ROOT)))
def test_committed_sweeps_hold(path, tmp_path):
    cells = read_sweep(path, tmp_path).cells
    assert not [cell.refusal for cell in cells if cell.refusal]
    if path.stem.startswith("study"):
        num_cells = NUM_CELLS[path.stem.removeprefix("study-")]
        assert sum(not cell.plan.control for cell in cells) == num_cells


def test_each_process_of_the_committed_demo_had_one_thread():
    demo = json.loads((ROOT / "results" / "study" / "demo.json").read_text(encoding="utf-8"))
    # What stands there is that of all cells.
    assert len(demo["cells"]) == len(demo["sweep"]["cells"])
    assert demo["shared"]["environment"]["threads"] == 1


def test_the_demo_takes_another_model_and_ends_where_a_command_fails(monkeypatch, tmp_path, capsys):
    demo = runpy.run_path(str(ROOT / "examples" / "demo.py"))
    asked = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        asked.append(" ".join(command[1:]))
        return subprocess.CompletedProcess(command, 3 if "shardwise train" in asked[-1] else 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["demo.py", "my/model"])
    Path("runs/demo").mkdir(parents=True)  # what an earlier demo left
    assert demo["main"]() == 2
    assert capsys.readouterr() == (
        "",
        "error: my/model: no folder with a config.json; configs/models has some\n",
    )
    assert Path("runs/demo").is_dir()
    assert not asked

    Path("my/model").mkdir(parents=True)
    Path("my/model/config.json").touch()
    with pytest.raises(SystemExit) as end:
        demo["main"]()
    assert end.value.code == 3
    assert asked[1:] == [
        "-m shardwise train configs/demo/base.yaml --nproc=2 --model.path=my/model"
    ]
