"""Where `shardwise export` cannot write, one line says so, and nothing half done stays."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest

from shardwise.commands import cli
from shardwise.config import Lora
from shardwise.models.adapters import writing
from shardwise.models.adapters.writing import save_adapter
from shardwise.models.save import save_model
from tests.command import run_command
from tests.models.tiny import entries, on_meta, tiny, trained, with_adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export")
    llama = tiny("tiny-llama")
    save_model(on_meta(llama), entries(llama).items(), path / "base")
    model, _ = with_adapters(llama, Lora(r=2))
    save_adapter(model, Lora(r=2), trained(model), path / "adapter", "base")
    (path / "link").symlink_to(path / "nowhere" / "deep")
    return path


FORMS = (["--merge"], ["--for", "peft"], ["--copy", "int8"])


def arguments(folder: Path, out: str, form: list[str]) -> list[str]:
    adapter = [] if form[0] == "--copy" else [str(folder / "adapter")]
    return ["export", str(folder / "base"), *adapter, out, *form]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[-1])
@pytest.mark.parametrize("out", ["/proc/x", "FOLDER/link", "FOLDER/" + "x" * 400, "FOLDER/a\0b"])
def test_a_place_that_cannot_be_is_told_in_one_line(out, form, folder):
    done = run_command(arguments(folder, out.replace("FOLDER", str(folder)), form))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr) < 500


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[-1])
def test_a_file_that_may_not_be_so_large_leaves_nothing(form, folder, tmp_path):
    """As a full disk does; a run's way out, to resume, is none here."""

    def little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, 3_000))

    done = run_command(arguments(folder, str(tmp_path / "out"), form), before=little)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "File too large; make room or give another place" in done.stderr
    assert "resume" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_else_stays_where_the_disk_is_full(folder, tmp_path, monkeypatch):
    """Whatever is full: the folder of the hub's files, for example."""
    (tmp_path / "mine").touch()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "merge_adapter", full)
    done = run_command(arguments(folder, str(tmp_path), ["--merge"]))
    assert done.returncode == 1
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_what_is_written_has_the_permissions_of_any_new_file(mask, folder, tmp_path):
    for place, form in enumerate((*FORMS, ["--for", "vllm"])):
        out = tmp_path / str(place)
        done = run_command(arguments(folder, str(out), form), before=lambda: os.umask(mask))
        assert done.returncode == 0, done.stderr
        modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
        assert any(name.endswith(".safetensors") for name in modes)
        assert modes == dict.fromkeys(modes, 0o666 & ~mask)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]], ids=["merge", "copy"])
def test_a_base_without_weights_is_not_offered_random_ones(form, folder, tmp_path, capsys):
    shutil.copytree(folder / "base", tmp_path / "base", ignore=lambda *_: ["model.safetensors"])
    shutil.copytree(folder / "adapter", tmp_path / "adapter")
    assert cli.main(arguments(tmp_path, str(tmp_path / "out"), form)) == 2
    line = capsys.readouterr().err
    assert "no model.safetensors and no model.safetensors.index.json here; give the model" in line
    assert "start from random" not in line
    assert "train in full first" in line
