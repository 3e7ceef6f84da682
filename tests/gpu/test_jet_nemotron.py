"""The timing of Jet-Nemotron: a rehearsal, and no speed where tests fail."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.gpu import jet_nemotron
from tests.gpu.__main__ import summary
from tests.gpu.suite import Suite
from tests.gpu.workload import workload_of


@pytest.mark.slow  # test_kernels_bench.py rehearses steps and kernels
def test_a_rehearsal_times_both_modes_and_prints_no_speed_on_a_red_test(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        Suite, "tests", lambda self, gdn, only: {"status": "ok", "reason": "", "only": only}
    )
    monkeypatch.setattr(sys, "argv", ["jet_nemotron", "--rehearse", str(tmp_path)])
    monkeypatch.chdir(tmp_path)  # the program changes the folder
    assert jet_nemotron.main() == 0
    result = json.loads((tmp_path / "jet_nemotron.json").read_text())
    assert [(row["checkpointing"], row["status"]) for row in result["rows"]] == [
        ("none", "ok"),
        ("full", "ok"),
    ]
    none, full = (row["memory"]["peak_bytes"] for row in result["rows"])
    assert full < none
    assert result["complete"]
    assert result["tests"]["torch"]["only"] == "jet_nemotron"
    assert result["published"]["tokens_per_second"] == 28275
    assert "differences" not in result
    assert "tokens/s" in capsys.readouterr().out
    result["tests"]["torch"]["status"] = "failed"
    assert summary(result) == 1
    assert "tokens/s" not in capsys.readouterr().out


def test_without_a_device_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["jet_nemotron"])
    assert jet_nemotron.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_it_is_the_published_shape_on_a_device_only(device):
    model = workload_of("jet_nemotron", device).model
    assert (model["num_hidden_layers"] == 28) == (device == "cuda")
