"""A mixture of experts that is trained with expert parallelism, by command: what it leaves is what
plain PEFT and transformers compute, and it resumes under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoTokenizer

from shardwise.base.records.record import RunRecord
from shardwise.commands.cli import main
from shardwise.config.run_file import load_config
from shardwise.data.loader import build_loaders
from shardwise.models.save import save_model
from shardwise.training import reporter
from tests.command import run_command
from tests.models.tiny import entries, loaded_by_transformers, logits, on_meta, relative_error, tiny

STEPS, HALF = 4, 2


@pytest.fixture(scope="module")
def run_file(folder) -> Path:
    """The run file of a model with weights on disk."""
    base = tiny("tiny-qwen3_moe")
    save_model(on_meta(base), entries(base).items(), folder / "base")
    AutoTokenizer.from_pretrained(folder / "tokenizer").save_pretrained(folder / "base")
    run = {
        "model": {"path": str(folder / "base")},
        "lora": {"r": 4, "targets": "all-linear"},
        "data": {"train": str(folder / "corpus.jsonl"), "validation": 0.2, "sequence_length": 32},
        "parallel": {"data": "fsdp2", "ep": 2},
        "optimizer": {"name": "sgd", "lr": 1.0, "lr_schedule": "constant"},
        "training": {
            "output_dir": str(folder / "whole"),
            "steps": STEPS,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "eval_batches": 1,
            "save_every": HALF,
            "device": "cpu",
        },
        "measure": {"memory": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def trained(run_file) -> Path:
    """The folder of a run with the experts on two processes."""

    def often() -> None:  # in the ranks too: forks of a process that has one thread
        reporter.SHARES_EVERY = 3

    done = run_command(["train", str(run_file), "--nproc=2"], before=often)
    assert done.returncode == 0, done.stderr
    return run_file.parent / "whole"


def evaluated(model: Any, run_file: Path) -> float:
    """The loss of a model of transformers on the rows that the run evaluates."""
    cfg = load_config(run_file)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    validation = build_loaders(cfg, tokenizer, range(4)).validation
    assert validation is not None
    total, tokens = 0.0, 0
    model.eval()
    for batch in (batch for batches in validation for batch in batches):
        with torch.no_grad():
            out = model(input_ids=batch.input_ids, use_cache=False).logits
        labels = batch.labels.flatten()
        total += F.cross_entropy(out.flatten(0, 1), labels, reduction="sum").item()
        tokens += int(batch.num_target_tokens())
    return total / tokens


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_plain_peft_and_transformers_compute_what_the_run_evaluated(trained, run_file, tmp_path):
    base, adapter = run_file.parent / "base", trained / "adapter"
    first, last = (e["loss"] for e in RunRecord.read(trained / "record.json").eval)
    plain = loaded_by_transformers(base)
    assert evaluated(plain, run_file) == pytest.approx(first, rel=1e-6)
    untrained = logits(plain)
    adapted: Any = PeftModel.from_pretrained(plain, adapter)
    assert evaluated(adapted, run_file) == pytest.approx(last, rel=1e-6)
    assert main(["export", str(base), str(adapter), str(tmp_path / "merged"), "--merge"]) == 0
    merged = loaded_by_transformers(tmp_path / "merged")
    assert evaluated(merged, run_file) == pytest.approx(last, rel=1e-6)
    assert relative_error(logits(merged), logits(adapted)) < 1e-5
    assert relative_error(logits(merged), untrained) > 1e-3  # so none of this holds for any weights


def test_metrics_say_what_each_expert_was_given(trained):
    """After every third step, and the last one."""
    lines = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    steps = {line["step"]: line for line in lines if "loss" in line}
    assert [step for step in steps if "router_share" in steps[step]] == [3, STEPS]
    routing = RunRecord.read(trained / "record.json").routing
    assert routing is not None
    for step in (3, STEPS):
        share = torch.tensor(steps[step]["router_share"])
        assert share.shape == torch.tensor(routing["share"]).shape == (3, 8)
        assert torch.allclose(share.sum(1), torch.ones(3), atol=1e-3)
        busiest = (share.amax(1) / share.mean(1)).amax()
        assert float(busiest) == pytest.approx(steps[step]["router_max_over_mean"], rel=1e-3)


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        pytest.param(2, ["--parallel.ep=1"], marks=pytest.mark.slow),
        (1, ["--parallel.data=single", "--parallel.ep=1"]),
    ],
)
def test_it_resumes_under_another_ep_and_alone(trained, run_file, tmp_path, nproc, layout):
    arguments = [
        *layout,
        f"--training.resume={trained / 'checkpoints' / f'step-{HALF}'}",
        f"--training.output_dir={tmp_path / 'half'}",
    ]
    assert main(["train", str(run_file), f"--nproc={nproc}", *arguments]) == 0
    record = RunRecord.read(tmp_path / "half" / "record.json")
    expected = RunRecord.read(trained / "record.json")
    assert record.losses == pytest.approx(expected.losses, rel=1e-6)
    name = "adapter/adapter_model.safetensors"
    weights, wanted = load_file(tmp_path / "half" / name), load_file(trained / name)
    assert weights.keys() == wanted.keys()
    assert max(relative_error(weights[key], wanted[key]) for key in wanted) < 1e-5
    assert record.routing is not None
    assert expected.routing is not None
    for name, values in expected.routing["steps"].items():
        assert record.routing["steps"][name] == pytest.approx(values, abs=1e-5)
