"""The timing of Jet-Nemotron: a rehearsal goes through it, and nothing is told where tests fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import jet_nemotron


def test_a_rehearsal_times_both_modes_and_tells_no_speed_on_a_red_test(
    tmp_path, monkeypatch, capsys
):
    outcomes = iter(("ok", "failed"))
    monkeypatch.setattr(
        jet_nemotron, "run_tests", lambda *_, only: {"status": next(outcomes), "reason": only}
    )
    monkeypatch.setattr(sys, "argv", ["jet_nemotron", "--rehearse", str(tmp_path)])
    monkeypatch.chdir(tmp_path)  # it changes the folder
    assert jet_nemotron.main() == 0
    result = json.loads((tmp_path / "jet_nemotron.json").read_text())
    assert [(row["checkpointing"], row["status"]) for row in result["rows"]] == [
        ("none", "ok"),
        ("full", "ok"),
    ]
    none, full = (row["memory"]["peak_bytes"] for row in result["rows"])
    assert full < none
    assert result["complete"]
    assert "tokens/s" in capsys.readouterr().out
    result["tests"] = {"status": next(outcomes), "reason": ""}
    assert jet_nemotron.summary(result, Path("file")) == 1
    assert "tokens/s" not in capsys.readouterr().out


def test_without_a_device_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["jet_nemotron"])
    assert jet_nemotron.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_it_is_the_published_shape_on_a_device_only(device):
    model = jet_nemotron.workload_of("jet_nemotron", device).model
    assert (model["num_hidden_layers"] == 28) == (device == "cuda")
