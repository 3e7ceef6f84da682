"""The reference's log-probabilities in a file: the same run, also after a resume, or one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.folder import folder_of
from shardwise.checkpoint.output_dir import REFERENCE
from shardwise.commands.library import LOOP
from shardwise.config import (
    Data,
    Lora,
    Measure,
    Model,
    Optimizer,
    Parallel,
    Preference,
    RunConfig,
    Training,
    presets,
)
from shardwise.launch import local as launch
from tests.models.tiny import CONFIGS

STARTER = Path(presets.__file__).parent / "starter"
STEPS = 4


def run_of(folder: Path, objective: Any, logprobs: Any = "precompute", **training: Any) -> Any:
    """A run of 4 steps over 7 records, of which an epoch has two steps."""
    return RunConfig(
        Model(str(CONFIGS / "tiny-qwen3_5"), init="random", tokenizer=str(STARTER)),
        Data(
            str(folder.parent / f"{objective}.jsonl"),
            format="preference",
            sequence_length=128,
            validation=0.1,
            packing="none",
        ),
        Training(
            str(folder),
            **{
                "objective": objective,
                "steps": STEPS,
                "global_batch_size": 4,
                "save_every": 1,
                "keep_last": 4,
                "device": "cpu",
                **training,
            },
        ),
        optimizer=Optimizer(lr=0.01, lr_schedule="constant"),
        preference=Preference(reference_logprobs=logprobs),
        measure=Measure(memory=False),
    )


def lines_of(cfg: RunConfig, processes: int = 1) -> list[dict[str, float]]:
    """What a run says of its steps, without its times."""
    Path(cfg.training.output_dir).mkdir(exist_ok=True)
    assert launch.start_processes(cfg, processes, LOOP) == 0
    lines = Path(cfg.training.output_dir, "metrics.jsonl").read_text().splitlines()
    times = {"seconds", "tokens_per_second", "samples_per_second"}
    return [{k: float(v) for k, v in json.loads(line).items() if k not in times} for line in lines]


@pytest.fixture
def data(tmp_path):
    """Files of pairs and of answers with a label."""
    pairs = [
        {"prompt": f"say {n} ", "chosen": "yes " * (1 + n % 3), "rejected": "no " * (1 + n % 2)}
        for n in range(8)
    ]
    labelled = [
        {"prompt": f"say {n} ", "completion": "yes " * (1 + n % 3), "label": n % 2 == 0}
        for n in range(8)
    ]
    for name, rows in (("dpo", pairs), ("kto", labelled)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.mark.parametrize("objective", ["dpo", "kto"])
@pytest.mark.parametrize("layout", [Parallel(), Parallel(cp=2), Parallel(data="fsdp2")])
def test_a_run_is_the_same_and_so_is_its_resume(data, objective, layout):
    processes = 1 if layout == Parallel() else 2
    keys = {"lora": Lora(r=2) if layout.cp == 2 else None, "parallel": layout}
    expected = lines_of(replace(run_of(data / "a", objective, "step"), **keys), processes)
    cfg = replace(run_of(data / "b", objective), **keys)
    found = lines_of(cfg, processes)
    assert len(found) == len(expected) > STEPS
    for line, other in zip(found, expected, strict=True):  # rows of later epochs have other pairs
        assert line == pytest.approx(other, rel=2e-4, abs=2e-4, nan_ok=True)
    assert found[-1]["eval_loss"] != found[0]["eval_loss"]
    file = data / "b" / REFERENCE
    before = file.read_bytes()
    num_keys = len(load_file(file)["keys"])  # of labels also with the answers that follow
    assert num_keys == 8 if objective == "dpo" else num_keys >= 8 + 7
    training = replace(cfg.training, resume=str(folder_of(data / "b", 2)))
    last = lines_of(replace(cfg, training=training), processes)[-1]
    assert last == pytest.approx(found[-1], rel=0, abs=0, nan_ok=True)
    assert file.read_bytes() == before


def again(cfg: RunConfig, step: int, **training: Any) -> RunConfig:
    """The run from the checkpoint of a step on."""
    folder = folder_of(cfg.training.output_dir, step)
    return replace(cfg, training=replace(cfg.training, resume=str(folder), **training))


def test_a_file_that_the_run_has_not_written_is_one_line(data, capfd):
    cfg = run_of(data / "a", "dpo")
    lines_of(cfg)
    lines_of(replace(cfg, training=replace(cfg.training, output_dir=str(data / "b"), seed=7)))
    file = data / "a" / REFERENCE
    whole, content = file.read_bytes(), load_file(file)
    with_nan = {"logps": content["logps"].clone(), "keys": content["keys"]}
    with_nan["logps"][3, 1] = torch.nan
    save_file(with_nan, data / "nan")
    before = sorted(path.name for path in (data / "a" / "checkpoints").iterdir())
    of_another_run = (data / "b" / REFERENCE).read_bytes()
    for other in (whole[:-20], b"", of_another_run, (data / "nan").read_bytes(), None):
        file.unlink()
        if other is not None:
            file.write_bytes(other)
        assert launch.start_processes(again(cfg, 2), 1, LOOP) == 2
        (line,) = (line for line in capfd.readouterr().err.splitlines() if "error" in line)
        assert f"{REFERENCE} is not what checkpoint" in line
        assert "put that file back, or start from scratch" in line
        # The run is as it was: no later checkpoint is set aside.
        assert sorted(path.name for path in (data / "a" / "checkpoints").iterdir()) == before
        file.touch()
    file.write_bytes(whole)
    assert launch.start_processes(again(cfg, 2), 1, LOOP) == 0


def test_a_run_with_more_steps_computes_in_each_step(data, capfd):
    """Each epoch compares an answer with another document's: the file has those of its steps."""
    cfg = run_of(data / "a", "kto")
    lines_of(cfg)
    more = again(cfg, STEPS, steps=STEPS + 2)
    assert launch.start_processes(more, 1, LOOP) == 2
    error = capfd.readouterr().err
    assert f"{REFERENCE} lacks answers of step 5" in error
    assert "or preference.reference_logprobs to step" in error
    keys = Preference(reference_logprobs="step")
    assert lines_of(replace(more, preference=keys))[-1]["step"] == STEPS + 2
    whole = run_of(data / "b", "kto", "step", steps=STEPS + 2)
    last, expected = (
        json.loads((data / name / "metrics.jsonl").read_text().splitlines()[-1])
        for name in ("a", "b" if lines_of(whole) else "")
    )
    assert float(last["eval_loss"]) == pytest.approx(float(expected["eval_loss"]), rel=1e-5)


def test_a_resume_into_another_folder_takes_the_file_with_it(data):
    cfg = run_of(data / "a", "dpo")
    whole = lines_of(cfg)
    elsewhere = again(cfg, 2, output_dir=str(data / "b"))
    assert lines_of(elsewhere)[-1] == pytest.approx(whole[-1], rel=0, abs=0)
    assert (data / "b" / REFERENCE).read_bytes() == (data / "a" / REFERENCE).read_bytes()
