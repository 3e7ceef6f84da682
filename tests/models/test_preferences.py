"""Losses of pairs against TRL's trainers, whose values preferences_by_trl.py has written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.assembly.build import build
from shardwise.assembly.state import MemoryState
from shardwise.base.batches import Batch
from shardwise.config import Data, Lora, Model, Preference, RunConfig, Training
from shardwise.data.packing import Document, row_of, to_batch
from shardwise.data.state import SlotState
from shardwise.models.load import read_config
from shardwise.parallel.mesh import build_mesh
from shardwise.training.step import forward_backward
from tests.distributed import run_ranks
from tests.models.preferences_by_trl import (
    BETA,
    CASES,
    CONFIGS,
    MODELS,
    TARGETS,
    VALUES,
    answers,
    pairs,
    summary,
    value,
)

EXPECTED = json.loads(VALUES.read_text())
LENGTH = 64
ROWS = [[[0], [1], [2], [3], [4]], [[0, 3], [2], [4, 1]]]
"""The pairs of each row: a row each, or several in one."""


def batches(case: str, rows: list[list[int]]) -> list[Batch]:
    """Return a batch of the pairs of these numbers in each row."""
    made = labelled() if case == "kto" else [document(*pair) for pair in pairs(case)]
    stacked = np.stack([row_of([made[n] for n in row], LENGTH, 0) for row in rows])
    return [to_batch(stacked, range(len(rows)), 1)]


def document(prompt: list[int], chosen: list[int], rejected: list[int]) -> Document:
    tokens = [*prompt, *chosen, *prompt, *rejected]
    is_prompt = [False] * len(prompt)
    targets = [*is_prompt, *[True] * len(chosen), *is_prompt, *[True] * len(rejected)]
    return Document(
        np.array(tokens, np.int32),
        np.array(targets),
        SlotState(),
        rejected_at=len(prompt) + len(chosen),
    )


def labelled() -> list[Document]:
    """Return answers with a label, each with the one before it to its prompt, as TRL takes them."""
    of_trl = answers("kto")

    def one(prompt: list[int], answer: list[int], is_good: bool) -> Document:
        targets = np.array([False] * len(prompt) + [True] * len(answer))
        tokens = np.array([*prompt, *answer], np.int32)
        return Document(tokens, targets, SlotState(), rejected_at=len(tokens) * is_good)

    return [
        replace(one(prompt, answer, is_good), other=one(prompt, of_trl[n - 1][1], is_good))
        for n, (prompt, answer, is_good) in enumerate(of_trl)
    ]


def run_of(name: str, folder: str) -> RunConfig:
    family, mode, case = name.split("/")
    objective: Any = case.partition("-")[0]
    return RunConfig(
        Model(folder),
        Data("unused", format="preference", sequence_length=LENGTH),
        Training("unused", global_batch_size=1, objective=objective),
        lora=Lora(r=4, alpha=8, targets=TARGETS[family]) if mode == "lora" else None,
        preference=Preference(beta=BETA, **CASES[case]),
    )


class HashedState(MemoryState):
    """Weights that are functions of their names, for the model that is built."""

    def check(self, model: Any, cfg: RunConfig, selected: Any) -> None:
        """Draw them."""
        for name, parameter in model.named_parameters():
            self.tensors[f"weights/{name}"] = value(name, parameter)


def reference_folder(family: str, folder: Path) -> str:
    """Save the reference of full training, and return its folder."""
    model = AutoModelForCausalLM.from_config(read_config(Model(str(CONFIGS / MODELS[family]))))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(value(f"reference {key}", parameter))
    model.save_pretrained(folder)
    return str(folder)


def _computed(names: list[str], folders: dict[str, str]) -> dict[tuple[str, int], Any]:
    return {
        (name, way): compute(name, folders[name.partition("/")[0]], rows)
        for name in names
        for way, rows in enumerate(ROWS)
    }


def compute(name: str, folder: str, rows: list[list[int]]) -> tuple[float, dict, dict]:
    cfg = run_of(name, folder)
    mesh = build_mesh(cfg, torch.device("cpu"))
    job = build(cfg, mesh, HashedState({}))
    microbatches = [batch.to(mesh.device) for batch in batches(name.rpartition("/")[2], rows)]
    loss, _ = forward_backward(job.pm, microbatches, mesh)
    metrics = dict(zip(job.pm.objective.names, job.pm.objective.take().tolist()))
    gradients = {key: summary(key, p.grad) for key, p in job.pm.trained().items()}
    return loss.item(), metrics, gradients


def check_equal(name: str, loss: float, metrics: dict, gradients: dict) -> None:
    """Check what was computed of the pairs against TRL's values."""
    expected = EXPECTED[name]
    assert loss == pytest.approx(expected["loss"], rel=2e-6)
    of_trl = {key: expected["metrics"][key] for key in metrics}
    # In float32 TRL's own numbers are up to 8e-6 from these, which are of float64.
    most = max(2e-6, expected["rounding of metrics"])
    assert metrics == pytest.approx(of_trl, rel=1e-6, abs=most)
    assert gradients.keys() == expected["gradients"].keys()
    most = max(2e-6, 2 * expected["rounding"])  # TRL's own in float32 are up to 4e-5 from these
    for key, numbers in expected["gradients"].items():
        assert gradients[key] == pytest.approx(numbers, rel=0, abs=most * numbers[0]), key


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """What this project makes of the same pairs."""
    folders = {
        family: reference_folder(family, tmp_path_factory.mktemp(family)) for family in MODELS
    }
    (found,) = run_ranks(1, _computed, [*EXPECTED], folders)
    return found


@pytest.mark.parametrize("way", range(len(ROWS)))
@pytest.mark.parametrize("name", EXPECTED)
def test_equals_trl(computed, name, way):
    check_equal(name, *computed[name, way])
