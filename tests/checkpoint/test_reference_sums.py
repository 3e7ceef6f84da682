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


def test_a_file_that_cannot_be_used_is_one_line(data, capfd):
    cfg = run_of(data / "a", "dpo")
    lines_of(cfg)
    file = data / "a" / REFERENCE
    whole, content = file.read_bytes(), load_file(file)
    other = {"logps": content["logps"].clone(), "keys": content["keys"]}
    other["logps"][3, 1] = torch.nan
    (some,) = {len(content["keys"])}
    again = replace(cfg, training=replace(cfg.training, resume=str(folder_of(data / "a", 2))))

    def refused() -> str:
        assert launch.start_processes(again, 1, LOOP) == 2
        (line,) = (line for line in capfd.readouterr().err.splitlines() if "error" in line)
        return line

    file.write_bytes(whole[:-20])
    assert f"{REFERENCE} is cut short or damaged" in refused()
    file.unlink()
    assert f"{REFERENCE} is missing; put it back, or start from scratch" in refused()
    save_file(content, file, {"model": "another"})
    assert f"{REFERENCE} is of another run's model" in refused()
    model = json.loads(whole[8 : whole.index(b"}") + 1].decode() + "}")["__metadata__"]
    save_file(other, file, model)
    assert f"{REFERENCE} has a number that is not finite" in refused()
    save_file({name: tensor[: some - 7] for name, tensor in content.items()}, file, model)
    assert f"{REFERENCE} lacks answers of step 3" in refused()
    file.write_bytes(whole)
    assert launch.start_processes(again, 1, LOOP) == 0
