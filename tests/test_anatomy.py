"""The example that a reader of the code begins with makes the run that `train` makes."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from examples import anatomy
from safetensors.torch import load_file

from shardwise.lab.instruments import INSTRUMENTS
from shardwise.parallel.mesh import build_mesh
from shardwise.training.loop import train
from tests.distributed import run_ranks


def both(folder: Path) -> tuple[str, list[float], list[float]]:
    """Return what the example prints, its losses, and those of the training loop."""
    printed = StringIO()
    with redirect_stdout(printed):
        losses = anatomy.main(folder / "anatomy")
    cfg = anatomy.config(folder / "train")
    (folder / "train").mkdir()
    record = train(cfg, build_mesh(cfg, torch.device("cpu")), INSTRUMENTS)
    assert record is not None
    return printed.getvalue(), losses, list(record.losses)


def test_the_stages_one_by_one_are_a_run(tmp_path):
    [(printed, losses, expected)] = run_ranks(1, both, tmp_path)
    assert losses == expected
    assert len(set(losses)) == len(losses) == 3
    ours, theirs = (
        load_file(tmp_path / run / "adapter" / "adapter_model.safetensors")
        for run in ("anatomy", "train")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert re.findall(r"^(\d+)\. ", printed, re.MULTILINE) == [str(n) for n in range(1, 11)]
    assert "3 gated_delta_net, 1 full_attention" in printed
    assert f"step 3: loss {losses[-1]:.3f}" in printed


def test_it_can_be_read_at_one_sitting():
    assert len(Path(anatomy.__file__).read_text(encoding="utf-8").splitlines()) <= 175


def test_what_readme_names_can_be_read_in_an_hour():
    """A fast reader has some 1,500 lines of code in an hour, comments and blank lines included."""
    root = Path(__file__).parents[1]
    section = (root / "README.md").read_text(encoding="utf-8").partition("## Read the code")[2]
    listed, _, _ = section.partition("\n![")
    files = [root / path for path in re.findall(r"\]\(([^)]+)\)", listed)]
    assert files[0] == Path(anatomy.__file__)
    assert all(path.is_file() for path in files)
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 1600
