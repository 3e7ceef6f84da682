"""Output that a user names: a link, a pipe and a device stay what they are, on every command."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardwise.base.safety import check_output, write_output
from shardwise.checkpoint.output_dir import claim
from shardwise.config import Data, Model, RunConfig, Training, UserError
from tests.command import run_command
from tests.report.conftest import strategies, write

PATIENCE = 60.0
"""How long a command may take, in seconds; each of these ends before it trains."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A run file, its model and its data, of which nothing was run."""
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "run.yaml"]).returncode == 0
    (tmp_path / "tiny-qwen3_5").rename("model")
    text = (tmp_path / "run.yaml").read_text().replace("tiny-qwen3_5", "model")
    (tmp_path / "run.yaml").write_text(text.replace("runs/run", "out"))
    return tmp_path


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path):
    for text in ("old, and longer", "new"):
        write_output(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_stays_and_its_file_is_written(exists, absolute, tmp_path):
    (tmp_path / "there").mkdir()
    target, link, first = tmp_path / "there" / "file", tmp_path / "link", tmp_path / "first"
    link.symlink_to(target if absolute else "there/file")
    first.symlink_to("link")
    if exists:
        target.write_text("old")
    check_output(first, "--json")
    write_output(first, "new")
    assert link.is_symlink()
    assert first.is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path / "there") == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755])
def test_a_file_keeps_its_mode(mode, tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("before")
    path.chmod(mode)
    link.symlink_to(path)
    write_output(link, "after")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("after", mode)


def test_a_file_of_two_names_is_written_under_both(tmp_path):
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_text("before, and longer")
    path.chmod(0o600)
    other.hardlink_to(path)
    write_output(path, "after")
    assert (other.read_text(), path.samefile(other)) == ("after", True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_pipe_gets_the_bytes_or_is_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output(pipe, "--json")
    with pytest.raises(UserError, match="cannot write there"):
        write_output(pipe, "nobody reads")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, "read")
    assert os.read(reader, 100) == b"read"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def device(path: Path, name: str) -> Path:
    """Make a copy of a device node, which may be written over without harm to the machine."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, Path("/dev", name).stat().st_rdev)
        path.write_bytes(b"")  # a file system may have devices that cannot be opened
    except OSError:
        pytest.skip("only root makes device nodes, where the file system has them")
    return path


def test_a_device_stays_and_its_error_is_told(tmp_path):
    null, full = device(tmp_path / "null", "null"), device(tmp_path / "full", "full")
    write_output(null, "away")
    with pytest.raises(UserError, match="No space left on device"):
        write_output(full, "no room")
    for path in (null, full):
        assert stat.S_ISCHR(path.stat().st_mode)


@pytest.mark.parametrize("name", ["", "/", "no/such/folder", "file/below", "a\0b", "x" * 400])
def test_a_path_that_cannot_be_written_gets_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for call in (lambda: check_output(name, "--json"), lambda: write_output(name, "text")):
        with pytest.raises(UserError, match="give the path of a file") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_standard_output_may_be_a_file_that_has_more(tmp_path):
    code = (
        "from shardwise.base.safety import write_output\n"
        "print('before')\n"
        "write_output('/dev/stdout', 'between\\n')\n"
        "print('after')\n"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\nbetween\nafter\n"


# ------------------------------------------------------------- pipes in folders of somebody else


def pipe(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def ends_in_a_line(arguments: Sequence[str]) -> None:
    done = run_command(arguments, patience=PATIENCE)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr


@pytest.mark.parametrize(
    ("name", "resume"),
    [(".memory", []), ("stacks-rank-0.txt", []), ("checkpoints/step-2", ["--resume", "auto"])],
)
def test_a_run_does_not_wait_for_a_pipe_in_its_folder(name, resume, folder):
    pipe(folder / "out" / name)
    ends_in_a_line(["train", "run.yaml", *resume])
    assert stat.S_ISFIFO((folder / "out" / name).stat().st_mode)


@pytest.mark.parametrize(
    "name",
    [
        *(".lock", "metrics.jsonl", "record.json", "timeline.json", "somebody's", "checkpoints"),
        *("non-finite-step-1-rank-0.json", "checkpoints/step-2.abandoned", "adapter", "model.tmp"),
    ],
)
@pytest.mark.parametrize("resume", [None, "auto", "latest"])
def test_no_name_in_an_output_folder_may_be_a_pipe(name, resume, tmp_path):
    pipe(tmp_path / name)
    for overwrite in (False, True):
        training = Training(str(tmp_path), resume=resume, overwrite=overwrite)
        with pytest.raises(UserError, match=Path(name).name):
            claim(RunConfig(Model("unused"), Data("unused"), training), clear=True)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"]
)
def test_nothing_waits_for_a_pipe_in_a_models_folder(name, folder):
    pipe(folder / "model" / name)
    ends_in_a_line(["train", "run.yaml"])
    ends_in_a_line(["plan", "model", "--devices", "1xH200"])


@pytest.mark.parametrize("name", ["adapter_config.json", "README.md"])
def test_nothing_waits_for_a_pipe_in_an_adapters_folder(name, folder):
    for other in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "adapter").mkdir(exist_ok=True)
        (folder / "adapter" / other).write_text("{}")
    pipe(folder / "adapter" / name)
    ends_in_a_line(["check", "adapter", "model"])
    ends_in_a_line(["export", "--merge", "model", "adapter", "merged"])
    ends_in_a_line(["train", "run.yaml", "--lora.path=adapter"])


@pytest.mark.parametrize("name", ["sweep.json", "ddp/record.json", "ddp/run.yaml"])
def test_a_report_does_not_wait_for_a_pipe(name, tmp_path):
    bench = write(tmp_path / "bench", *strategies())
    pipe(bench / name)
    ends_in_a_line(["report", str(bench)])


# ------------------------------------------------------------------------------------ the commands

PLAN = ("plan", "tiny-qwen3_5", "--devices", "2xH200", "--sequence", "64")
COMMANDS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "schema": lambda path: ("schema", "-o", path),
    "plan": lambda path: (*PLAN, "--html", path),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_keeps_links_and_pipes(command, tmp_path):
    target, link, pipe = tmp_path / "target", tmp_path / "link.html", tmp_path / "pipe.html"
    link.symlink_to(target)
    os.mkfifo(pipe)
    done = run_command(COMMANDS[command](str(link)))
    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert target.stat().st_size > 1000
    done = run_command(COMMANDS[command](str(pipe)))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_no_command_writes_a_named_file_in_another_way():
    source = Path(__file__).parents[1] / "src" / "shardwise"
    modules = [*(source / "commands").glob("*.py"), source / "lab" / "report" / "plan.py"]
    modules += [source / "lab" / "planner" / f"{name}.py" for name in ("split_view", "calibration")]
    for path in modules:
        if path.name == "kept.py":  # it names its files itself, below the folder of the cache
            continue
        text = path.read_text()
        for way in ("write_text(", "write_bytes(", "write_atomically(", "os.replace(", '"w"'):
            assert way not in text, (path, way)
