"""The demo's model as a user trains it, on rows that ranks share: the losses of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import pytest

from shardwise.base.records.record import RunRecord
from shardwise.config.presets import STARTER
from shardwise.lab.report.verdict import NOISE_FACTOR, spacing
from shardwise.metrics.hardware import PeakFlops
from shardwise.training import measure
from tests.command import run_command

MODEL = Path(__file__).parents[2] / "configs" / "models" / "demo-hybrid"
RUN = {
    "model": {"path": str(MODEL), "init": "random", "tokenizer": str(STARTER)},
    "lora": {"r": 8, "alpha": 16},
    "data": {"train": str(STARTER / "corpus.jsonl"), "validation": 0.1, "sequence_length": 128},
    "optimizer": {"lr": 1e-2},
    "training": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 2, "device": "cpu"},
}
RUN["training"] |= {"eval_batches": 1, "sample": "the state"}
Train = Callable[..., RunRecord]


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def train(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch
) -> Train:
    """Run `shardwise train` with some arguments, and return the record."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.yaml").write_text(json.dumps(RUN))  # JSON is YAML
    # The commands run in forks of this process, which need not measure their peak each.
    monkeypatch_module.setattr(measure, "peak_of", lambda *_: PeakFlops(1.0, "not measured"))

    def run(name: str, nproc: int, *arguments: str, memory: bool = False) -> RunRecord:
        own = (f"--training.output_dir={folder / name}", f"--measure.memory={str(memory).lower()}")
        command = ["train", str(folder / "run.yaml"), "--nproc", str(nproc), *own, *arguments]
        done = run_command(command, {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        record = RunRecord.read(folder / name / "record.json")
        kernels = ", ".join(f"{core} {kernel}" for core, kernel in record.kernels.items())
        assert f"kernels: {kernels}\n" in done.stdout
        return record

    return run


@pytest.fixture(scope="module")
def single(train: Train) -> RunRecord:
    return train("single", 1, memory=True)


@pytest.fixture(scope="module")
def bound(train: Train, single: RunRecord) -> float:
    """How far rounding alone may move a loss: ten times what the noise control shows, or one
    rounding of the loss where it shows less, as the report has it.
    """
    noise = ("--measure.reverse_microbatches=true", "--measure.nudge_weights=true")
    one_rounding = spacing(max(map(abs, single.losses)))
    return NOISE_FACTOR * max(differences(train("control", 1, *noise), single), one_rounding)


def differences(record: RunRecord, other: RunRecord) -> float:
    """Return the largest difference of two runs' losses, in training and validation."""
    pairs = [
        *zip(record.losses, other.losses, strict=True),
        *((a["loss"], b["loss"]) for a, b in zip(record.eval, other.eval, strict=True)),
    ]
    assert len(pairs) == 5
    return max(abs(a - b) for a, b in pairs)


def test_the_record_says_what_a_step_launches_and_how_often_the_host_waits(single):
    # For the number of targets, and for the numbers of the step, read at once. AdamW's counts of
    # steps lie on the host.
    assert single.host_waits_per_step == [2]
    assert min(single.launches_per_step or [0]) > 1000


@pytest.mark.parametrize(
    "sizes", [{"cp": 2}, pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_losses_are_those_of_one_process(train, single, bound, sizes):
    arguments = [f"--parallel.{axis}={size}" for axis, size in sizes.items()]
    record = train("-".join(map(str, sizes.values())), prod(sizes.values()), *arguments)
    assert 0 < bound < 1e-4 < abs(single.losses[-1] - single.losses[0])
    assert differences(record, single) <= bound
    assert record.sample == single.sample
    assert record.mesh == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | sizes
