import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, RunConfig, UserError
from shardwise.data.corpus import open_corpus
from shardwise.data.formats import Encoder
from shardwise.data.loader import build_loaders, read_document
from shardwise.data.packing import Document
from shardwise.data.state import Counts, SlotState, counts, merge_states
from tests.data.test_loader import over_ranks, predicted, rows_of
from tests.data.test_text import write

MakeConfig = Callable[..., RunConfig]

BAD = [
    ('{"text": "a"', "not JSON", "not JSON .*; mend or remove the line"),
    ('["a"]', "not JSON", "a JSON list, not an object; mend or remove the line"),
    (
        '{"content": "a", "id": 1}',
        "missing field",
        "no field 'text'; set data.text_field to one of the line's fields: content, id",
    ),
    ('{"text": null}', "wrong type", "field 'text' holds a NoneType, not a string; mend or remove the line"),
    (r'{"text": "\ud800"}', "not UTF-8", "field 'text' escapes half a surrogate pair; mend or remove the line"),
    (b'{"text": "\xff"}', "not UTF-8", r"not UTF-8 \(byte 11\); convert the file, for example with iconv"),
]


def as_bytes(line: str | bytes) -> bytes:
    return line.encode() if isinstance(line, str) else line


@pytest.mark.parametrize(("line", "reason", "problem"), BAD)
def test_bad_line_is_named_by_file_and_line_or_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, line: str | bytes, reason: str, problem: str
) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "aa"}\n\n' + as_bytes(line) + b'\n{"text": "bb"}\n')
    fail, skip = (Data(train=str(path), on_error=on_error) for on_error in ("fail", "skip"))
    corpus = open_corpus(str(path), fail)
    assert isinstance(read_document(corpus, 0, Encoder.of(tokenizer, fail), SlotState()), Document)
    with pytest.raises(UserError, match=f"^{path}:3: {problem}$"):  # the blank line 2 counts as a line
        read_document(corpus, 1, Encoder.of(tokenizer, fail), SlotState())
    assert read_document(corpus, 1, Encoder.of(tokenizer, skip), SlotState()) == reason
    assert isinstance(read_document(corpus, 2, Encoder.of(tokenizer, skip), SlotState()), Document)


def test_text_file_that_is_not_utf8(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.txt", b"gr\xfc\xdfe")
    data = Data(train=str(path))
    with pytest.raises(UserError, match=rf"^{path}: not UTF-8 \(byte 3\); convert the file, for example with iconv$"):
        read_document(open_corpus(str(path), data), 0, Encoder.of(tokenizer, data), SlotState())


def read(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerFast, num_ranks: int, num_steps: int
) -> tuple[list[list[int]], Counts]:
    """What is predicted in each slot over these steps, and what was read for it."""
    ranks = [build_loaders(cfg, tokenizer, slots) for slots in over_ranks(cfg.training.global_batch_size, num_ranks)]
    slots: list[list[int]] = [[] for _ in range(cfg.training.global_batch_size)]
    for loaders in ranks:
        for _ in range(num_steps):
            for row in rows_of(next(loaders.train)):
                slots[row[1]] += predicted([row])
    state = merge_states(loaders.state() for loaders in ranks)
    for loaders in ranks:
        loaders.train.close()
    return slots, counts(json.loads(json.dumps(state)))


@pytest.mark.parametrize(("num_ranks", "workers"), [(1, 0), (2, 0), (4, 0), (1, 2)])
def test_left_out_lines_move_no_other_and_are_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, run_config: MakeConfig, num_ranks: int, workers: int
) -> None:
    # 40 documents of two tokens, one row each: a slot reads its ten in ten steps. Of every seventh nothing can be used;
    # the same corpus with an empty text in its place gives the same rows.
    lines = [as_bytes(json.dumps({"text": chr(48 + i) * 2})) for i in range(40)]
    with_bad = [as_bytes(BAD[i // 7][0]) if i % 7 == 3 else line for i, line in enumerate(lines)]
    with_empty = [b'{"text": ""}' if i % 7 == 3 else line for i, line in enumerate(lines)]
    keys: dict[str, Any] = {"packing": "none", "sequence_length": 1, "global_batch_size": 4}
    bad = str(write(tmp_path / "bad.jsonl", b"\n".join(with_bad)))
    empty = str(write(tmp_path / "empty.jsonl", b"\n".join(with_empty)))
    slots, read_bad = read(run_config(bad, on_error="skip", workers=workers, **keys), tokenizer, num_ranks, 30)
    expected, read_empty = read(run_config(empty, **keys), tokenizer, 1, 30)
    assert slots == expected
    # 34 of 40 can be used, so 120 rows are three epochs and a part of the fourth.
    assert read_empty.documents == read_bad.documents
    assert read_empty.skipped == {"no target": sum(read_bad.skipped.values())}
    assert set(read_bad.skipped) == {"not JSON", "missing field", "wrong type", "not UTF-8"}
    assert read_bad.documents - sum(read_bad.skipped.values()) == 120


def test_counts_of_one_epoch(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, run_config: MakeConfig) -> None:
    lines = [as_bytes(line) for line, _, _ in BAD] + [b'{"text": "ab"}'] * 4
    path = str(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    validation = str(write(tmp_path / "b.jsonl", b"\n".join(lines)))
    cfg = run_config(
        path, on_error="skip", packing="none", sequence_length=1, global_batch_size=1, validation=validation
    )
    loaders = build_loaders(cfg, tokenizer, range(1))
    by_reason = {"not JSON": 2, "missing field": 1, "wrong type": 1, "not UTF-8": 2}
    assert loaders.validation is not None
    for _ in range(2):  # the second time counts alone
        assert len(list(loaders.validation)) == 4
        assert loaders.validation.read == Counts(10, by_reason)
    assert loaders.validation.read.to_dict() == {"documents": 10, "skipped": 6, "by_reason": by_reason}
    for _ in range(5):  # four rows an epoch: the fifth is of the second one
        next(loaders.train)
    read_now = counts(loaders.state())
    assert read_now.documents >= 11
    assert all(read_now.skipped[reason] >= count for reason, count in by_reason.items())
    assert str(Counts(1234, {"not JSON": 2, "no target": 1})) == (
        "1,234 documents read, 3 left out (1 no target, 2 not JSON)"
    )
    assert str(Counts(5, {})) == "5 documents read"


def test_nothing_but_bad_lines(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, run_config: MakeConfig) -> None:
    path = str(write(tmp_path / "a.jsonl", "bad\n" * 3))
    cfg = run_config(path, on_error="skip", global_batch_size=1)
    with pytest.raises(
        UserError, match=r"^data\.train: 3 documents are too few .* \(left out: 104 not JSON\); give more"
    ):
        next(build_loaders(cfg, tokenizer, range(1)).train)
