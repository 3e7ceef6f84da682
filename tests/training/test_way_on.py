"""The last line of a run that ends early says how it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.base.process.ending import Ending, RunError, explain
from shardwise.config import UserError
from shardwise.data.record import BadDocument
from shardwise.training.way_on import after_document, after_save
from tests.checkpoint.test_checkpointer import make_checkpoints
from tests.checkpoint.test_output_dir import config


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


KILLED = Ending(1, "rank 0 was killed", "error: rank 0 was killed")


@pytest.mark.parametrize(
    ("ending", "has_saved"),
    [
        (KILLED, False),
        (explain(RunError("the disk is away")), False),
        (explain(raised(ZeroDivisionError("x"))), False),
        (explain(UserError("step 7: the loss is not finite")), True),
        (explain(MemoryError("no memory")), False),
    ],
)
def test_an_ending_after_a_checkpoint_says_how_to_resume(ending, has_saved, tmp_path):
    cfg = config(tmp_path)
    assert after_save(cfg, ending, has_saved) == ending
    make_checkpoints(tmp_path, "step-60", "step-70")
    for text in (after_save(cfg, ending, has_saved).text, after_save(cfg, ending, True).reason):
        assert text.endswith("step 70 is saved: resume with --resume latest")


@pytest.mark.parametrize(
    "ending", [explain(UserError("no such key")), explain(RunError("a; --resume auto"))]
)
def test_an_ending_that_knows_better_is_left_alone(ending, tmp_path):
    make_checkpoints(tmp_path, "step-70")
    assert after_save(config(tmp_path), ending, has_saved=False) == ending


def test_after_the_results_there_is_nothing_to_resume(tmp_path):
    make_checkpoints(tmp_path, "step-70")
    (tmp_path / "adapter").mkdir()
    assert after_save(config(tmp_path), KILLED, has_saved=True) == KILLED


def of_document() -> BaseException:
    """Raise as the data do: the place in front, and the cause hidden."""
    try:
        try:
            raise BadDocument("not JSON", "not JSON; correct or remove the line")
        except BadDocument as error:
            raise UserError(f"a.jsonl:3: {error}") from None
    except UserError as error:
        return error


def test_a_bad_document_says_that_such_may_be_left_out(tmp_path):
    cfg, error = config(tmp_path), of_document()
    line = after_document(cfg, explain(error), error).text
    start = "error: a.jsonl:3: not JSON; correct or remove the line, or leave such documents out: "
    assert line == start + "set data.on_error: skip"
    make_checkpoints(tmp_path, "step-7")
    line = after_document(cfg, explain(error), error).reason
    assert line.endswith("out: --resume latest --data.on_error=skip")
    skipping = replace(cfg, data=replace(cfg.data, on_error="skip"))
    other = UserError("data.train: no such file")
    for of, problem in ((skipping, error), (cfg, other)):
        assert after_document(of, explain(problem), problem) == explain(problem)


def test_a_bad_document_of_a_worker_is_known_by_who_raises_it(tmp_path, monkeypatch):
    from shardwise.data import loader

    parts = iter([UserError("a.parquet: row 3: field 'text' is a list; correct the line")])
    monkeypatch.setattr(loader, "items", lambda *_: parts)
    position = loader.Position(0, {0: loader.SlotState()}, {0: 0})
    stream = type("Stream", (), {"encoder": None})()
    lengths = loader.RowLengths(8, None, False)
    with pytest.raises(UserError) as caught:
        next(loader._train_batches(lambda _: stream, position, 1, 1, lengths))
    line = after_document(config(Path(tmp_path)), explain(caught.value), caught.value).text
    assert line.endswith("; correct the line, or leave such documents out: set data.on_error: skip")
