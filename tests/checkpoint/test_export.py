"""What a run leaves is whole, or does not have its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.assembly.build import build
from shardwise.checkpoint import export
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.parity.harness import Cell, run_config


@pytest.mark.parametrize(
    ("mode", "name", "write"),
    [("full", "model", "save_model"), ("lora", "adapter", "save_adapter")],
)
def test_a_result_replaces_the_one_before_when_it_is_whole(mode, name, write, tmp_path):
    def names() -> set[str]:
        return {path.name for path in tmp_path.iterdir()}

    def body() -> Path | None:
        cfg = run_config(Cell("llama", "single", mode))
        job = build(cfg, build_mesh(cfg, torch.device("cpu")))
        save = getattr(export, write)

        def cut_off(*args, **options):
            save(*args, **options)
            raise OSError("cut off")

        setattr(export, write, cut_off)
        with pytest.raises(OSError, match="cut off"):
            export.save_result(job, cfg, build_mesh(cfg, torch.device("cpu")), tmp_path)
        assert names() == {name, f"{name}.tmp"}
        assert (tmp_path / name / "of-the-run-before").exists()
        setattr(export, write, save)
        return export.save_result(job, cfg, build_mesh(cfg, torch.device("cpu")), tmp_path)

    (tmp_path / name).mkdir()
    (tmp_path / name / "of-the-run-before").touch()
    assert run_ranks(1, body) == [tmp_path / name]
    assert names() == {name}
    assert not (tmp_path / name / "of-the-run-before").exists()
    assert len(list((tmp_path / name).glob("*.safetensors"))) == 1
