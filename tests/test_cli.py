"""The command, as a shell runs it: a mistake is one line and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardwise import __version__
from shardwise.commands import cli
from shardwise.commands.library import LOOP
from shardwise.config import Model, RunConfig
from shardwise.launch import local
from shardwise.models.adapters import writing
from tests.command import run_command
from tests.distributed import PATIENCE

MODELS = Path(__file__).parents[1] / "configs" / "models"
FACTORS = "adapter/adapter_model.safetensors"
RUN = """
model: {path: no-such-model, init: random}
data: {train: no-such-corpus.jsonl}
training: {output_dir: out}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shardwise(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_command(arguments, env)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ((), "the following arguments are required: COMMAND; see shardwise --help"),
        (
            ("trian", "run.yaml"),
            "argument COMMAND: invalid choice: 'trian'; did you mean train?; see shardwise --help",
        ),
        (
            ("train", "run.yaml", "--nprocs", "2"),
            "unknown argument --nprocs; did you mean --nproc?",
        ),
        (
            ("plan", "m", "--device=4xH100"),
            "unknown argument --device=4xH100; did you mean --devices?",
        ),
        (("train",), "the following arguments are required: RUN.yaml; see shardwise train --help"),
        (("train", "none.yaml"), "none.yaml: cannot read the file (No such file or directory)"),
        (("train", "broken.yaml"), "broken.yaml: not valid YAML"),
        (("train", "list.yaml"), "list.yaml: a run file is a mapping of sections"),
        (("train", "unknown.yaml"), "unknown.yaml: unknown key training.step; did you mean steps?"),
        (
            ("train", "run.yaml", "--optimiser.lr=1"),
            "--optimiser.lr: unknown key optimiser; did you mean optimizer?",
        ),
        (("train", "run.yaml", "--training.steps=many"), "run.yaml: training.steps is 'many'"),
        (
            ("train", "run.yaml", "--training.steps", "5"),
            "unknown argument --training.steps; see shardwise --help",
        ),
        (
            ("train", "run.yaml", "--=5"),
            "unknown argument --=5; see shardwise --help (an override is written",
        ),
        (
            ("train", "run.yaml", "--lr=1"),
            "unknown argument --lr=1; lr belongs to optimizer: write optimizer.lr, as an override",
        ),
        (
            ("train", "run.yaml", "--batch-size", "8"),
            "unknown argument --batch-size; write training.global_batch_size, as an override",
        ),
        (
            ("train", "run.yaml", "--training.steps="),
            "--training.steps: no value; write null for none",
        ),
        (("train", "run.yaml", "--lora="), "--lora: no value; write null for none"),
        (
            ("train", "run.yaml", "--foo=1"),
            "unknown argument --foo=1; see shardwise --help (an override is written",
        ),
        (
            ("train", "run.yaml", "--training.steps=[1"),
            "--training.steps: the value is not valid YAML; quote it",
        ),
        (("train", "run.yaml", "--verbose"), "unknown argument --verbose; see shardwise --help"),
        (("train", "run.yaml", "more.yaml"), "unknown argument more.yaml; see shardwise --help"),
        (("train", "run.yaml", "--nproc", "0"), "--nproc is 0; give at least 1"),
        (("train", "run.yaml", "--nproc=two"), "argument --nproc: invalid int value: 'two'"),
        (
            ("train", "run.yaml", "--training.output_dir=full"),
            "training.output_dir full holds another run",
        ),
        (
            ("train", "run.yaml", "--measure.trackers=[trackio]"),
            "measure.trackers names trackio, which is not installed",
        ),
        (
            ("calibrate", "--device", "gpu"),
            "argument --device: invalid choice: 'gpu'; give cpu or ",
        ),
        (
            ("prove", "run.yaml", "--precision", "bfloat16"),
            "argument --precision: invalid choice: 'bfloat16'; give float32 or run",
        ),
        (("schema", "run.yaml"), "unknown argument run.yaml; schema takes no file"),
        (("prove", "sweep.yaml"), "sweep.yaml is a sweep; give a run file"),
        (("bench", "run.yaml", "--out=out"), "run.yaml is a run file; give a sweep"),
        (("report", "full"), "full is the folder of a run; give the folder of a bench"),
        (("train", "full"), "full is the folder of a run; give a run file"),
        (("models", "run.yaml"), "run.yaml is a run file; give the folder of a model"),
        (
            ("bench", "run.yaml"),
            "the following arguments are required: --out; see shardwise bench --help",
        ),
        (
            ("bench", "none.yaml", "--out=out"),
            "none.yaml: cannot read the file (No such file or directory)",
        ),
        (
            ("bench", "sweep.yaml", "--out", "out", "--only"),
            "argument --only: expected at least one argument",
        ),
        (
            ("bench", "run.yaml", "--out=out", "--training.steps=2"),
            "unknown argument --training.steps=2",
        ),
        (
            ("export", "--merge", "model", "adapter"),
            "the following arguments are required: OUT; see shardwise export --help",
        ),
        (
            ("export", "model", "adapter", "out"),
            "one of the arguments --merge --copy --for is required; see shardwise export --help",
        ),
        (
            ("export", "model", "adapter", "out", "--for", "gguf"),
            "argument --for: invalid choice: 'gguf'",
        ),
        (
            ("check", "none", "model"),
            "none: no adapter_config.json here; give the folder of a PEFT",
        ),
        (
            ("export", "--merge", "model", "adapter", "out", "--model.init=random"),
            "unknown argument --model.init=random",
        ),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, fragment, folder):
    (folder / "broken.yaml").write_text("model: {path: [}\n")
    (folder / "list.yaml").write_text("- model\n")
    (folder / "unknown.yaml").write_text(RUN.replace("output_dir: out", "output_dir: out, step: 5"))
    (folder / "sweep.yaml").write_text("base: run.yaml\naxes: {}\n")
    (folder / "full").mkdir()
    (folder / "full" / "metrics.jsonl").write_text("{}\n")
    done = shardwise(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {fragment}")
    assert done.stderr.count("\n") == 1


def test_a_mistake_that_only_a_started_run_finds_is_one_line_too(folder):
    done = shardwise("train", "run.yaml")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no-such-model" in done.stderr
    assert '"status": "unsupported"' in (folder / "out" / "record.json").read_text()


def test_version_and_help():
    command = [sys.executable, "-m", "shardwise", "--version"]  # here as a shell does
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == f"shardwise {__version__}\n"
    assert "train" in shardwise("--help").stdout
    assert "--section.key=value" in shardwise("train", "--help").stdout


def test_torch_is_not_imported_before_it_is_needed(folder):
    code = (
        "import sys; from shardwise.commands.cli import main;"
        "code = main(['train', 'run.yaml', '--nproc', '0']);"
        "print(code, {'torch', 'transformers', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"


@pytest.fixture
def launched(monkeypatch) -> list[tuple[RunConfig, int | None]]:
    calls: list[tuple[RunConfig, int | None]] = []

    def launch(cfg: RunConfig, nproc: int | None, train: object) -> int:
        assert train is LOOP
        calls.append((cfg, nproc))
        return 3

    monkeypatch.setattr(local, "launch", launch)
    return calls


def test_train_passes_overrides_and_processes_on(folder, launched):
    overrides = [
        "--training.sample=Once upon a = b",
        "--lora={r: 4, alpha: 8}",
        "--training.steps=7",
    ]
    assert cli.main(["train", overrides[0], "run.yaml", *overrides[1:], "--nproc=2"]) == 3
    ((cfg, nproc),) = launched
    assert (cfg.training.sample, cfg.training.steps, nproc) == ("Once upon a = b", 7, 2)
    assert cfg.lora is not None
    assert (cfg.lora.r, cfg.lora.alpha) == (4, 8)


@pytest.mark.parametrize("arguments", [["--resume", "latest-good"], ["--resume=latest-good"]])
def test_resume_sets_the_key_of_the_run_file(arguments, folder, launched):
    assert cli.main(["train", "run.yaml", *arguments]) == 3
    assert launched[0][0].training.resume == "latest-good"


def test_train_leaves_the_number_of_processes_open(folder, launched):
    assert cli.main(["train", "run.yaml"]) == 3
    assert launched[0][1] is None


def test_export_merges_an_adapter(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(
        writing,
        "merge_adapter",
        lambda *arguments, tokenizer: calls.append(arguments) or ["a note"],
    )
    assert cli.main(["export", "--merge", "base", "run/adapter", "merged"]) == 0
    assert calls == [(Model("base"), "run/adapter", "merged")]
    assert capsys.readouterr().out.startswith("note: a note\nmerged run/adapter into base: merged")


def test_models_prints_the_families_and_one_model(folder):
    done = shardwise("models", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert "qwen3_5_text gated_delta_net, dense" in " ".join(done.stdout.split())
    assert "pp-fsdp2, pp-hsdp [-cp][-ep][-tp[-sp]]" in done.stdout
    assert done.stderr == ""
    one = shardwise("models", str(MODELS / "tiny-nemotron_h"), COLUMNS="100")
    assert one.returncode == 0, one.stderr
    assert "nemotron_h, 153,304 parameters" in one.stdout
    assert "may run under" in one.stdout
    missing = shardwise("models", "./none")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    assert "is no folder here" in missing.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("train", "run.yaml", "--model.path=PATH"),
        ("train", "run.yaml", "--model.path=PATH", "--nproc=2", "--parallel.data=ddp"),
        ("train", "run.yaml", "--model.path=PATH", "--dry-run", "--devices=1xH100-80GB"),
        ("plan", "run.yaml", "--model.path=PATH", "--devices=1xH100-80GB"),
        ("data", "run.yaml", "--model.path=PATH"),
        ("prove", "run.yaml", "--model.path=PATH"),
        ("split", "run.yaml", "--model.path=PATH", "--parallel.pp=2"),
        ("plan", "PATH", "--devices=1xH100-80GB"),
        ("init", "new.yaml", "--model=PATH"),
        ("models", "PATH"),
        ("check", "adapter", "PATH"),
        ("export", "PATH", "adapter", "out", "--merge"),
        ("export", "PATH", "adapter", "out", "--for=peft"),
        ("export", "PATH", "out", "--copy=nf4"),
    ],
    ids=lambda words: " ".join(words[:1] + words[-1:]),
)
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("empty", r"(the path of the model is a folder without a|--model empty: no) config\.json"),
        (
            "./mistyped",
            "(the path of the model is no folder here|--model ./mistyped: no such folder)",
        ),
    ],
)
def test_a_model_folder_without_a_config_is_named_as_such(command, path, problem, folder):
    (folder / "empty").mkdir()
    (folder / "no-such-corpus.jsonl").write_text('{"text": "a"}\n')
    adapter = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.ones(1, 1)}, folder / FACTORS)
    done = shardwise(*(word.replace("PATH", path) for word in command))
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line.count(";")) == (2, 1)
    assert re.search(problem, line), line


@pytest.mark.parametrize(
    "name", ["/proc/x", "dangling", "n" * 400, "a\0b", "run.yaml/x", "no/folder/x", "out/../.."]
)
@pytest.mark.parametrize("command", ["plan", "init", "models", "split"])
def test_any_path_is_taken_or_refused_in_a_line(command, name, folder, capfd):
    (folder / "dangling").symlink_to("no/where")
    search = ("plan", "tiny-llama", "--devices", "1xH100-80GB", "--explain", "single", "--html")
    before = {"plan": search}.get(command, (command,))
    assert cli.main([*before, name]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert "Errno" not in line
    assert line.count(";") >= 1  # a way out
