"""Loops of one's own, around transformers models and other modules: equal to one process under
every layout, resumed as if undisturbed, and with one line for each wrong use."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from examples import own_loop, own_module
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import shardwise
from shardwise.base.records.record import RunRecord
from shardwise.commands.library import CALLERS_KEYS, read_config
from shardwise.config import RunConfig, UserError
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.parity.harness import TOLERANCE

ROOT = Path(__file__).parents[2]
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "single": ({}, 1),
    "ddp": ({"data": "ddp"}, 2),
    "zero1": ({"data": "zero1"}, 2),
    "zero2": ({"data": "zero2"}, 2),
    "fsdp1": ({"data": "fsdp1"}, 2),
    "fsdp2": ({"data": "fsdp2"}, 2),
    "hsdp": ({"data": "fsdp2", "dp_replicate": 2}, 4),
    "pp": ({"pp": 2}, 2),
    "pp-looped": ({"pp": 2, "schedule": "interleaved-1f1b"}, 2),
    "tp": ({"tp": 2}, 2),
    "pp-fsdp2": ({"pp": 2, "data": "fsdp2"}, 4),
    "fsdp2-tp": ({"tp": 2, "data": "fsdp2"}, 4),
}
OF_EXAMPLE = {own_loop: ("pp",), own_module: ("ddp", "zero2", "fsdp1", "fsdp2", "pp-looped", "tp")}
"""What `make test` runs; the rest is `slow`."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Callable[..., tuple[RunRecord, dict[str, torch.Tensor]]]:
    """Return the record and the saved weights of an example under a layout."""

    @cache
    def run_once(example: Any, layout: str) -> tuple[RunRecord, dict[str, torch.Tensor]]:
        folder = tmp_path_factory.mktemp("run") / layout
        parallel, nproc = LAYOUTS[layout]
        measure = {"memory": layout == "single"}
        run_example(example, folder, nproc, parallel=parallel, measure=measure)
        return outcome_in(folder)

    return run_once


def outcome_in(folder: Path) -> tuple[RunRecord, dict[str, torch.Tensor]]:
    record = RunRecord.read(folder / "record.json")
    return record, load_file(folder / "model" / "model.safetensors")


def run_example(
    example: Any, folder: Path, nproc: int | None = None, main: Any = None, **sections: Any
) -> None:
    """Run an example with SGD, whose steps are no larger than its gradients, and without a
    measurement of memory.

    Several ranks are forks of this process, whatever threads it has; the launcher would spawn them.
    """
    plain = {"optimizer": {"name": "sgd", "lr": 0.05}, "measure": {"memory": False}}
    config = {**example.CONFIG, **plain, **sections}
    training = {**example.CONFIG["training"], **sections.get("training", {})}
    config["training"] = {**training, "output_dir": str(folder), "device": "cpu"}
    if "model" in config:
        config["model"] = {**config["model"], "path": str(ROOT / config["model"]["path"])}
    main = main or example.main
    if nproc is None or nproc == 1:
        shardwise.run(main, config)
        return
    folder.mkdir(exist_ok=True)
    run_ranks(nproc, on_rank, main, read_config(config, (), CALLERS_KEYS))


def on_rank(main: Any, cfg: RunConfig) -> None:
    main(cfg, build_mesh(cfg, torch.device("cpu")))


def differences(
    one: tuple[RunRecord, dict[str, torch.Tensor]], other: tuple[RunRecord, dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Return the largest relative differences of losses, norms and saved weights."""
    (record, weights), (expected, expected_weights) = one, other
    assert weights.keys() == expected_weights.keys()
    losses = [*record.losses, *(row["loss"] for row in record.eval)]
    expected_losses = [*expected.losses, *(row["loss"] for row in expected.eval)]
    return {
        "loss": max(abs(a / b - 1) for a, b in zip(losses, expected_losses, strict=True)),
        "norm": max(
            abs(a / b - 1) for a, b in zip(record.grad_norms, expected.grad_norms, strict=True)
        ),
        "saved": max(
            float((weights[name] - weight).abs().max() / weight.abs().max())
            for name, weight in expected_weights.items()
        ),
    }


CELLS = [
    pytest.param(
        example,
        layout,
        id=f"{example.__name__.rpartition('.')[2]}-{layout}",
        marks=() if layout in layouts else pytest.mark.slow,
    )
    for example, layouts in OF_EXAMPLE.items()
    for layout in LAYOUTS
    if layout != "single"
]


@pytest.mark.parametrize(("example", "layout"), CELLS)
def test_a_layout_equals_one_process(example, layout, outcome):
    errors = differences(outcome(example, layout), outcome(example, "single"))
    assert all(error <= TOLERANCE[kind] for kind, error in errors.items()), errors


def test_recomputed_layers_draw_the_same_masks(outcome, tmp_path):
    run_example(own_module, tmp_path, training={"checkpointing": "full"})
    assert differences(outcome_in(tmp_path), outcome(own_module, "single"))["loss"] == 0


def test_what_a_loop_leaves(outcome):
    record, weights = outcome(own_module, "single")
    config = own_module.CONFIG["training"]
    assert (record.status, len(record.losses)) == ("ok", config["steps"])
    assert [row["step"] for row in record.eval] == [2, 4, 6]
    assert record.losses[-1] < record.losses[0]
    assert record.peak_memory_bytes is not None
    assert weights.keys() == dict(own_module.Classifier().named_parameters()).keys()
    record, _ = outcome(own_loop, "single")
    rows = Path(record.config["training"]["output_dir"], "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(row) for row in rows if "perplexity" in row and "eval" not in row]
    assert [math.log(row["perplexity"]) for row in logged] == pytest.approx(record.losses)


@pytest.mark.parametrize(
    ("layout", "largest"), some_now([("single", 0.0), ("fsdp2", 1e-6)], [("fsdp2", 1e-6)])
)
def test_a_resumed_loop_equals_an_undisturbed_one(layout, largest, tmp_path):
    run_example(own_module, tmp_path / "all", training={"save_every": 3, "keep_last": 2})
    parallel, nproc = LAYOUTS[layout]
    checkpoint = str(tmp_path / "all" / "checkpoints" / "step-3")
    folder = tmp_path / "resumed"
    run_example(own_module, folder, nproc, parallel=parallel, training={"resume": checkpoint})
    (record, weights), (expected, expected_weights) = (
        outcome_in(folder),
        outcome_in(tmp_path / "all"),
    )
    assert record.resumed_from is not None
    assert record.losses == pytest.approx(expected.losses, rel=largest, abs=0)
    for name, weight in expected_weights.items():
        assert (weights[name] - weight).abs().max() <= 10 * largest, name


def test_a_step_that_was_saved_is_not_saved_again(tmp_path):
    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, own_module.Classifier()) as run:
            for step in run.steps():
                run.step(run.microbatches(step, rows(step)))
                if step != 1:
                    run.save()

    training = {"steps": 4, "save_every": 2, "keep_last": 9}
    run_example(own_module, tmp_path, main=main, training=training)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-2", "step-3", "step-4"]


def test_shardwise_train_refuses_the_rows_of_another_loop(tmp_path):
    training = {"save_every": 2, "steps": 2}
    run_example(own_loop, tmp_path / "own", training=training)
    checkpoint = tmp_path / "own" / "checkpoints" / "step-2"
    loader = json.loads((checkpoint / "checkpoint.json").read_text())["loader"]
    assert loader["read_from"] == {"the rows": "those of a loop of the caller"}
    assert loader["slots"].keys() == {str(slot) for slot in range(8)}


# ------------------------------------------------------------------------------------- wrong uses


class Unnamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Misnamed(Unnamed):
    def layer_names(self):
        return ["layers.0"]


class Nested(Unnamed):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2))

    def layer_names(self):
        return ["layer", "layer.0"]


class NoSum(Unnamed):
    def layer_names(self):
        return ["layer"]

    def forward(self, batch):
        return self.layer(batch["points"][:, :2])


class BatchNormed(NoSum):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)


class Frozen(NoSum):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


def with_module(make: Callable[[], nn.Module]) -> Callable[..., None]:
    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, make()) as run:
            for step in run.steps():
                run.step(run.microbatches(step, own_module.points(step, run.slots)))

    return main


def with_steps(step: Callable[[Any, int], object]) -> Callable[..., None]:
    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, own_module.Classifier()) as run:
            for number in run.steps():
                step(run, number)

    return main


def rows(step: int = 1, slots: range = range(16), **changed: torch.Tensor) -> dict[str, Any]:
    return own_module.points(step, slots) | changed


def no_targets(run: Any, number: int) -> None:
    run.step(run.microbatches(number, rows(labels=torch.full((16,), -100))))


def no_count(run: Any, number: int) -> None:
    run.microbatches(number, {"points": torch.zeros(16, 8)})


def not_a_number(run: Any, number: int) -> None:
    run.step(run.microbatches(number, rows(points=torch.full((16, 8), math.nan))))


def reserved_name(run: Any, number: int) -> None:
    run.step(run.microbatches(number, rows()))
    run.log(loss=1.0)


def no_log_number(run: Any, number: int) -> None:
    run.step(run.microbatches(number, rows()))
    run.log(a="x")


def saved_before(run: Any, number: int) -> None:
    batches = run.microbatches(number, rows())
    run.step(batches)
    run.save()
    run.evaluate([batches])


def a_step_late(run: Any, number: int) -> None:
    batches = run.microbatches(number, rows())
    if number == 2:
        run.evaluate([batches])
    run.step(batches)


def twice(run: Any, number: int) -> None:
    for _ in range(2):
        run.step(run.microbatches(run.done + 1, rows()))


def finished(run: Any, number: int) -> None:
    run.step(run.microbatches(number, rows(number)))
    if number == 1:
        run.finish()


USES: dict[str, Callable[[Any], object]] = {
    "steps": lambda run: next(run.steps()),
    "step": lambda run: run.step(run.microbatches(run.done + 1, rows())),
    "evaluate": lambda run: run.evaluate([run.microbatches(0, rows())]),
    "log": lambda run: run.log(mine=1.0),
    "save": lambda run: run.save(),
    "finish": lambda run: run.finish(),
}


def after_finish(use: Callable[[Any], object]) -> Callable[..., None]:
    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, own_module.Classifier()) as run:
            for step in run.steps():
                run.step(run.microbatches(step, rows(step)))
            run.finish()
            use(run)

    return main


def outside(use: Callable[[Any], object]) -> Callable[..., None]:
    return lambda cfg, mesh: use(shardwise.prepare(cfg, mesh, own_module.Classifier()))


def prepared_twice(cfg: RunConfig, mesh: Any) -> None:
    for _ in range(2):
        with_module(own_module.Classifier)(cfg, mesh)


def over_epochs(cfg: RunConfig, mesh: Any) -> None:
    training = replace(cfg.training, steps=None, epochs=2.0)
    data = replace(cfg.data, train="corpus.jsonl")  # a rule refuses it without
    with_module(own_module.Classifier)(replace(cfg, training=training, data=data), mesh)


class NoList(Unnamed):
    def layer_names(self):
        return None


class NoPaths(Unnamed):
    def layer_names(self):
        return [None]


def with_run(use: Callable[[Any], object]) -> Callable[..., None]:
    return with_steps(lambda run, number: use(run))


def log(run: Any, **values: Any) -> None:
    run.step(run.microbatches(1, rows()))
    run.log(**values)


WRONG = {
    "layers that are no list": (with_module(NoList), r"layer_names\(\) returns None"),
    "layers without names": (with_module(NoPaths), r"layer_names\(\) returns \[None\]"),
    "a config that is a mapping": (lambda cfg, mesh: shardwise.prepare({}, None), "give RunConfig"),
    "no mesh": (lambda cfg, mesh: shardwise.prepare(cfg, None), "None as mesh; give Mesh"),
    "a module that is a class": (with_module(lambda: NoSum), "give .*Module"),
    "no rows": (with_run(lambda run: run.microbatches(1, None)), "None as rows"),
    "no step number": (with_run(lambda run: run.microbatches("1", rows())), "'1' as step"),
    "targets in words": (
        with_run(lambda run: run.microbatches(1, rows(), targets=["one"] * 16)),
        "'one' as targets",
    ),
    "targets that are a number": (
        with_run(lambda run: run.microbatches(1, rows(), targets=16)),
        "16 as targets",
    ),
    "no micro-batches": (with_run(lambda run: run.step(None)), "None as microbatches"),
    "micro-batches of none": (with_run(lambda run: run.step([None])), "None as a micro-batch"),
    "an evaluation of nothing": (with_run(lambda run: run.evaluate(None)), "None as batches"),
    "of numbers": (with_run(lambda run: run.evaluate([5])), "5 as microbatches"),
    "of a word": (with_run(lambda run: run.evaluate("rows")), "'rows' as batches"),
    "of an empty batch": (with_run(lambda run: run.evaluate([[]])), "without micro-batches"),
    "of no batches": (with_run(lambda run: run.evaluate([])), "has no target"),
    "of flat micro-batches": (
        with_run(lambda run: run.evaluate(run.microbatches(1, rows()))),
        "as microbatches; give Sequence",
    ),
    "of rows": (with_run(lambda run: run.evaluate([[rows()]])), "as a micro-batch"),
    "a tokenizer's name": (with_run(lambda run: run.finish("gpt2")), "'gpt2' as tokenizer"),
    "a log of a huge number": (with_run(lambda run: log(run, a=10**400)), "a is no number"),
    "a log of None": (with_run(lambda run: log(run, a=None)), "a is no number"),
    "no layers named": (with_module(Unnamed), "does not name its layers"),
    "a layer that is none": (with_module(Misnamed), "'layers.0', which is no module"),
    "a layer in another": (with_module(Nested), "layer.0, which lies in it"),
    "nothing to train": (with_module(Frozen), "requires a gradient"),
    "a batch norm": (with_module(BatchNormed), "batch norm"),
    "no summed loss": (with_module(NoSum), r"float32 of \[4, 2\]"),
    "on meta": (with_module(lambda: own_module.Classifier().to("meta")), "on meta"),
    "epochs": (over_epochs, "set training.steps instead"),
    "no module": (lambda cfg, mesh: shardwise.prepare(cfg, mesh), "there is no model"),
    "no target": (with_steps(no_targets), "has no target"),
    "no number of targets": (with_steps(no_count), "number of targets is not known"),
    "rows of others": (
        with_steps(lambda run, number: run.microbatches(number, rows(slots=range(8)))),
        "this rank reads 16 rows, 0 to 15",
    ),
    "targets of others": (
        with_steps(lambda run, number: run.microbatches(number, rows(), targets=[1] * 32)),
        "`targets` has 32 numbers, but this rank reads 16 rows, 0 to 15",
    ),
    "another step's rows": (
        with_steps(lambda run, number: run.step(run.microbatches(number + 1, rows()))),
        "of step 2",
    ),
    "no step": (with_steps(lambda run, number: None), "did not call `step` in step 1"),
    "two steps": (with_steps(twice), "was called for step 2"),
    "not finite": (with_steps(not_a_number), "loss nan"),
    "a list": (
        with_steps(lambda run, number: run.microbatches(number, rows(points=[1.0] * 16))),
        "points is a list",
    ),
    "a log of no number": (with_steps(no_log_number), "a is no number"),
    "evaluated after the save": (with_steps(saved_before), "step 1 is over or saved already"),
    "evaluated in the next step": (with_steps(a_step_late), "step 1 is over or saved already"),
    "a name of the run": (with_steps(reserved_name), "loss is written by the run"),
    "finished in the loop": (with_steps(finished), "`steps` was called outside of the run"),
    "prepared twice": (prepared_twice, "`prepare` was called twice"),
    **{
        f"{name} after finish": (after_finish(use), f"`{name}` was called outside of the run")
        for name, use in USES.items()
    },
    **{
        f"{name} without a context": (outside(use), f"`{name}` was called outside of the run")
        for name, use in USES.items()
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_gets_one_line(name, tmp_path):
    main, message = WRONG[name]
    with pytest.raises(UserError, match=message) as caught:
        run_example(own_module, tmp_path, main=main, training={"keep_best": True})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("input_ids", lambda ids: ids.float(), "input_ids is of torch.float32"),
        ("input_ids", lambda ids: ids + 1_000_000, "input_ids has a token id"),
        ("labels", lambda ids: torch.full_like(ids, -1), "labels has a token id"),
    ],
)
def test_wrong_tokens_get_one_line(name, change, message, tmp_path):
    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh) as run:
            tokens = own_loop.random_rows(1, run.slots, cfg.data.sequence_length)
            run.microbatches(1, {**tokens, name: change(tokens[name])})

    with pytest.raises(UserError, match=message) as caught:
        run_example(own_loop, tmp_path, main=main)
    assert "\n" not in str(caught.value)


def test_a_loop_that_ends_early_says_so_and_saves_the_step_that_it_was_in(tmp_path, capfd):
    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, own_module.Classifier()) as run:
            for step in run.steps():
                run.step(run.microbatches(step, rows(step)))
                if step == 2:
                    break
            run.finish()

    run_example(own_module, tmp_path, main=main, training={"steps": 4, "save_every": 3})
    saved = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert saved == ["step-2"]  # not as the step before, with this one's weights
    note = "ended after step 2 of 4"
    assert RunRecord.read(tmp_path / "record.json").notes == [note]
    assert note in capfd.readouterr().out


def test_tensorboard_has_each_step_once_after_a_resume_from_an_earlier_one(tmp_path):
    training = {"steps": 3, "save_every": 1, "keep_last": 3}
    options = {"measure": {"memory": False, "trackers": ["tensorboard"]}}
    for resume in (None, str(tmp_path / "checkpoints" / "step-1")):
        run_example(own_module, tmp_path, training=training | {"resume": resume}, **options)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3]


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_folder_that_goes_in_mid_run_is_told(is_replaced, tmp_path, capfd):
    folder = tmp_path / "run"

    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, own_module.Classifier()) as run:
            for step in run.steps():
                run.step(run.microbatches(step, rows(step)))
                if step == 1:
                    folder.rename(tmp_path / "elsewhere")
                    if is_replaced:
                        folder.mkdir()
            run.finish()

    options = {"training": {"steps": 2}}
    if is_replaced:  # the weights are saved all the same
        run_example(own_module, folder, main=main, **options)
        (note,) = RunRecord.read(folder / "record.json").notes
        assert "metrics.jsonl is not in training.output_dir any more" in note
        assert (folder / "model").is_dir()
        return
    with pytest.raises(shardwise.RunFailed, match="was the folder moved or removed"):
        run_example(own_module, folder, main=main, **options)
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_an_evaluation_after_the_loop_may_be_the_best(tmp_path):
    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, own_module.Classifier()) as run:
            for step in run.steps():
                run.step(run.microbatches(step, rows(step)))
            run.evaluate([run.microbatches(0, rows())])
            run.finish()

    training = {"steps": 2, "keep_best": True}
    run_example(own_module, tmp_path, main=main, training=training)
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-2"


def test_patience_ends_a_loop_that_evaluates(tmp_path):
    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, own_module.Classifier()) as run:
            for step in run.steps():
                run.step(run.microbatches(step, rows(step)))
                # Labels that the steps unlearn: the loss rises.
                wrong = (rows()["labels"] + 1) % own_module.CLASSES
                run.evaluate([run.microbatches(0, rows(labels=wrong))])
            run.finish()

    torch.manual_seed(0)
    run_example(own_module, tmp_path, main=main, training={"steps": 40, "patience": 2})
    record = RunRecord.read(tmp_path / "record.json")
    assert record.stopped_early is not None
    assert (len(record.losses), record.notes) == (record.stopped_early["step"], [])


def other_values(cfg, mesh):
    torch.manual_seed(dist.get_rank())
    shardwise.prepare(cfg, mesh, own_module.Classifier())


def test_ranks_with_other_initial_values_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"UserError: .* other initial values on another rank"):
        run_example(own_module, tmp_path, 2, other_values, parallel={"data": "ddp"})


class Forgetful(own_module.Classifier):
    """Its stages lack a layer."""

    def cut(self, layers, first, last):
        return super().cut(layers[:1], first, last)


class Reshaped(own_module.Classifier):
    """It says that other hidden states are passed on."""

    def passed_on(self, batch):
        return torch.empty(1, device="meta")


@pytest.mark.parametrize(
    ("module", "message"), [(Forgetful, "0 times"), (Reshaped, "`passed_on` says float32 of")]
)
def test_stages_that_are_not_the_module_are_refused(module, message, tmp_path):
    with pytest.raises(RuntimeError, match=f"UserError: .*{message}"):
        run_example(own_module, tmp_path, 2, with_module(module), parallel={"pp": 2})


class Regression(nn.Module):
    """A module whose weights have shapes that look like vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Conv1d(4, 4, 3, groups=4, padding=1)  # [4, 1, 3]
        self.norm = nn.LayerNorm(24)
        self.last = nn.Linear(24, 1)

    def forward(self, batch):
        hidden = self.norm(self.mixed(batch["points"].view(-1, 4, 6)).flatten(1))
        return ((self.last(hidden)[:, 0] - batch["values"]) ** 2).sum()

    def layer_names(self):
        return ["mixed", "last"]


def regression_rows(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    points = torch.randn(8, 24, generator=generator)
    return {"points": points, "values": points[:, 0]}


def test_a_module_decays_as_by_plain_adamw(tmp_path):
    torch.manual_seed(3)
    module = Regression()
    plain = copy.deepcopy(module)
    matrices = [p for p in plain.parameters() if p.dim() > 1]
    vectors = [p for p in plain.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.5)
    for step in range(1, 4):
        adamw.zero_grad()
        (plain(regression_rows(step)) / 8).backward()
        adamw.step()

    def main(cfg, mesh):
        with shardwise.prepare(cfg, mesh, module) as run:
            for step in run.steps():
                rows = {
                    name: value[list(run.slots)] for name, value in regression_rows(step).items()
                }
                run.step(run.microbatches(step, rows, [1] * len(run.slots)))
            run.finish()

    optimizer = {"lr": 0.05, "weight_decay": 0.5, "lr_schedule": "constant", "max_grad_norm": None}
    training = {"output_dir": str(tmp_path), "steps": 3, "global_batch_size": 8, "device": "cpu"}
    shardwise.run(main, {"optimizer": optimizer, "training": {**training, "micro_batch_size": 8}})
    saved = load_file(tmp_path / "model" / "model.safetensors")
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(saved[name], expected, rtol=1e-5, atol=1e-6)
