"""What a command has computed before is kept, as long as nothing changes that it depends on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.commands import cli, kept, models
from shardwise.config.presets import FAMILIES, MODELS
from tests.distributed import PATIENCE

SMALL = ["--devices", "2xRTX4090", "--sequence", "128", "--tokens-per-step", "1K"]
TIME = re.compile(r'(in |"seconds": )[\d.]+')
"""How long a search took."""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "answers"


class Command:
    """A command whose process has not imported torch yet, and counts how often it computes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.times, self.answer = folder, 0, [1, {"a": None}, 0.1]

    def ask(self, what: str = "a") -> object:
        return kept.kept(what, [str(self.folder)], self.compute)

    def compute(self) -> object:
        self.times += 1
        return self.answer


@pytest.fixture
def command(tmp_path, monkeypatch, cache) -> Command:
    monkeypatch.delitem(sys.modules, "torch")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(kept.WHOLE_BYTES + 1)
    return Command(folder)


@pytest.mark.parametrize("what", ["a link that leads nowhere", "no folder for a cache"])
def test_what_cannot_be_kept_is_computed(what, command, cache, monkeypatch):
    if what == "no folder for a cache":  # a user of a container without a home
        monkeypatch.setattr(kept, "cache_folder", lambda: (_ for _ in ()).throw(RuntimeError()))
    else:
        (command.folder / ".#notes").symlink_to("nowhere")
    assert command.ask() == command.ask() == command.answer
    assert command.times == 2
    assert not cache.exists()


def test_it_is_computed_once(command, cache):
    assert command.ask() == command.ask() == [1, {"a": None}, 0.1]
    assert command.times == 1
    command.ask("b")
    assert command.times == len([*cache.iterdir()]) == 2


def test_everything_that_it_depends_on_is_asked_again(command, tmp_path, monkeypatch):
    config, weights = command.folder / "config.json", command.folder / "model.safetensors"
    source = tmp_path / "source"
    source.mkdir()
    (source / "module.py").write_text("a = 1")
    monkeypatch.setattr(kept, "_SOURCE", source)
    installed = tmp_path / "site"
    installed.mkdir()
    monkeypatch.syspath_prepend(str(installed))

    def rewrite(path: Path, content: str) -> None:
        """In the same size, as of the same time."""
        times = path.stat()
        path.write_text(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    changes = {
        "nothing": lambda: None,
        "the config": lambda: rewrite(config, '{"a": 2}'),
        "the time of weights": lambda: os.utime(weights, ns=(1, 1)),
        "the size of weights": lambda: os.truncate(weights, kept.WHOLE_BYTES + 2),
        "a new file": lambda: (command.folder / "generation_config.json").write_text("{}"),
        "the source": lambda: rewrite(source / "module.py", "a = 2"),
        "a package": lambda: (installed / "fla_core-0.6.0.dist-info").mkdir(),
        "the visible GPUs": lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7"),
        "the version of Python": lambda: monkeypatch.setattr(sys, "version", "4.0"),
    }
    command.ask()
    for times, (name, change) in enumerate(changes.items(), 1):
        change()
        command.ask()
        assert command.times == times, name


@pytest.mark.parametrize("name", kept.LIBRARIES)
def test_a_library_of_another_version_or_place_is_another(name, command, tmp_path, monkeypatch):
    command.ask()
    package = tmp_path / "site" / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    if name in sys.modules:
        monkeypatch.delitem(sys.modules, name)
    assert kept.version_of(name) is None
    for _ in range(2):  # a source tree, whose version says nothing
        command.ask()
    assert command.times == 3
    (package.parent / f"{name}-9.8.7+cpu.dist-info").mkdir()
    assert kept.version_of(name) == "9.8.7"
    for _ in range(2):
        command.ask()
    assert command.times == 4


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-9], lambda text: text.replace("0.1", "0.2"), lambda text: "[]"]
)
def test_a_damaged_file_is_computed_again(damage, command, cache):
    command.ask()
    (file,) = cache.iterdir()
    file.write_text(damage(file.read_text()))
    assert command.ask() == command.ask() == [1, {"a": None}, 0.1]
    assert command.times == 2


def test_it_is_computed_where_it_cannot_be_kept(command, cache, monkeypatch):
    cache.parent.mkdir()
    cache.touch()  # no folder
    command.ask()
    command.ask()
    cache.unlink()
    monkeypatch.setitem(sys.modules, "torch", None)  # by somebody who may have changed it
    command.ask()
    command.ask()
    assert command.times == 4
    assert not cache.exists()


def test_what_changes_meanwhile_or_fails_is_not_kept(command, cache):
    def compute() -> None:
        (command.folder / "config.json").write_text("{}")

    kept.kept("a", [str(command.folder)], compute)
    with pytest.raises(ZeroDivisionError):
        kept.kept("a", [str(command.folder)], lambda: 1 / 0)
    kept.kept("a", ["owner/name"], lambda: 1)  # on the hub
    assert not cache.exists()


def test_the_oldest_are_deleted(command, cache, monkeypatch):
    monkeypatch.setattr(kept, "MOST_FILES", 2)
    for what in "abc":
        command.ask(what)
        for file in cache.iterdir():
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 9))
    assert len([*cache.iterdir()]) == 2
    command.ask("a")
    assert command.times == 4


def run(*arguments: str) -> tuple[str, str]:
    """What a command prints as a shell runs it, and what it has imported of what is heavy."""
    code = (
        "import sys; from shardwise.commands import cli; cli.main(sys.argv[1:]);"
        "print(*{'torch', 'transformers', 'peft'} & set(sys.modules), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    *rest, imported = done.stderr.splitlines()
    return done.stdout + "\n".join(rest), imported


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "tiny-qwen3_5", *SMALL],
        ["plan", "tiny-granitemoe", *SMALL, "--full", "--json", "--top=2"],
        ["plan", "llama-3.1-8b", "--devices=2xH100-80GB", "--explain=pp:4", "--nodes=2", "--full"],
        ["plan", "llama-3.1-405b", "--devices=1xH100-80GB", "--full", "--explain=single"],
        ["models", str(MODELS / "lfm2-1.2b")],
    ],
    ids=" ".join,
)
def test_a_kept_answer_is_that_of_another_process(arguments, cache, capsys):
    computed, imported = run(*arguments)
    assert "torch" in imported
    assert run(*arguments) == (computed, "")
    cli.main(arguments)  # computes it: this process has torch
    printed = capsys.readouterr()
    here = printed.out + printed.err.removesuffix("\n")
    assert TIME.sub("", here) == TIME.sub("", computed)
    assert len([*cache.iterdir()]) == 1


def test_the_table_of_families_needs_neither_torch_nor_a_cache(cache, monkeypatch):
    text, imported = run("models")
    assert "qwen3_5_text" in text
    assert not imported
    assert not cache.exists()


def test_the_table_of_families_is_computed_for_other_versions(tmp_path, cache, monkeypatch, capsys):
    stored = json.loads(FAMILIES.read_text(encoding="utf-8"))
    stored["versions"]["transformers"] = "5.0.0"
    (tmp_path / "families.json").write_text(json.dumps(stored))
    monkeypatch.setattr(models, "FAMILIES", tmp_path / "families.json")
    monkeypatch.setattr(models, "computed", lambda: stored["table"] | {"caption": "computed"})
    assert cli.main(["models"]) == 0
    assert "computed" in capsys.readouterr().out
