"""The Dockerfile copies what there is, installs pinned versions, and gives nobody more than needed.

Its build: tests/clusters/test_image.py.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from shardwise.launch import kubernetes

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LINES = [
    line
    for line in TEXT.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
COPIED = [source for line in LINES if line.startswith("COPY ") for source in line.split()[1:-1]]


def arguments(instruction: str) -> list[str]:
    return [line.partition(" ")[2].strip() for line in LINES if line.split()[0] == instruction]


def is_sent(path: str) -> bool:
    """Whether the builder sees a path: the last line of .dockerignore that matches it decides."""
    sent = True
    for line in IGNORED:
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").replace("**/", "*")
            parts = Path(path).parts
            heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
            if any(fnmatch(head, pattern) for head in heads):
                sent = line.startswith("!")
    return sent


def test_the_linter_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_copied_paths_exist_and_are_sent():
    assert set(COPIED) >= {"src", "pyproject.toml", "constraints.txt"}
    for source in COPIED:
        assert (ROOT / source).exists(), source
        assert is_sent(source), source
    assert is_sent("src/shardwise/commands/cli.py")
    for path in ("runs/first/model", ".git/config", ".venv/bin/python", "src/a/__pycache__/b.pyc"):
        assert not is_sent(path), path


def test_what_the_package_needs_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {project["readme"], *project["license-files"]} <= set(COPIED)
    (extras,) = (line.partition("=")[2] for line in arguments("ARG") if line.startswith("EXTRAS"))
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_versions_are_those_of_the_constraints():
    installs = [line for line in arguments("RUN") if "pip install" in line]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in line for line in installs)
    assert "torch==$(sed" in installs[0]


@pytest.mark.parametrize("instruction", ["EXPOSE", "ADD", "VOLUME", "ENTRYPOINT"])
def test_nothing_is_opened_or_hidden(instruction):
    assert arguments(instruction) == []


def test_it_ends_as_an_ordinary_user_in_the_folder_of_runs():
    (user,) = [text for text in arguments("ARG") if text.startswith("RUN_AS=")]
    assert arguments("USER")[-1] == "${RUN_AS}"
    assert int(user.removeprefix("RUN_AS=")) == kubernetes.USER > 1000
    assert arguments("WORKDIR")[-1] == kubernetes.WORK
