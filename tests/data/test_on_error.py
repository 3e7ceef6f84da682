import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, RunConfig, UserError
from shardwise.data import chat_format
from shardwise.data.corpus import open_corpus
from shardwise.data.formats import LONGER_ROWS, Encoder
from shardwise.data.loader import build_loaders
from shardwise.data.slots import read_documents
from shardwise.data.state import Counts, SlotState, counts, merge_states
from tests.data.conftest import without_end
from tests.data.templates import CHATML
from tests.data.test_formats import chat_tokenizer
from tests.data.test_loader import over_ranks, predicted, rows_of
from tests.data.test_text import write

MakeConfig = Callable[..., RunConfig]

BAD = [
    ('{"text": "a"', "not JSON", "not JSON .*; "),
    ('["a"]', "not JSON", "a list in JSON, not an object; "),
    (
        '{"content": "a", "id": 1}',
        "missing field",
        r"no field 'text'; .*data\.text_field .*content, id",
    ),
    ('{"text": null}', "wrong type", "field 'text' .*null, not text"),
    (r'{"text": "\ud800"}', "not UTF-8", "field 'text' .*surrogate pair; "),
    (b'{"text": "\xff"}', "not UTF-8", r"not UTF-8 \(byte 11\); .*iconv"),
]


def as_bytes(line: str | bytes) -> bytes:
    return line.encode() if isinstance(line, str) else line


@pytest.mark.parametrize(("line", "reason", "problem"), BAD)
def test_bad_line_is_named_by_file_and_line_or_left_out(tmp_path, tokenizer, line, reason, problem):
    path = write(
        tmp_path / "a.jsonl", b'{"text": "aa"}\n\n' + as_bytes(line) + b'\n{"text": "bb"}\n'
    )
    fail, skip = (Data(train=str(path), on_error=on_error) for on_error in ("fail", "skip"))
    corpus = open_corpus(str(path), fail)
    assert read_documents(corpus, 0, Encoder.of(tokenizer, fail), SlotState())[0]
    with pytest.raises(
        UserError, match=f"^{path}:3: {problem}"
    ):  # the blank line 2 counts as a line
        read_documents(corpus, 1, Encoder.of(tokenizer, fail), SlotState())
    left_out = ([], {reason: 1})
    assert read_documents(corpus, 1, Encoder.of(tokenizer, skip), SlotState()) == left_out
    assert read_documents(corpus, 2, Encoder.of(tokenizer, skip), SlotState())[0]


def test_text_file_that_is_not_utf8(tmp_path, tokenizer):
    path = write(tmp_path / "a.txt", b"gr\xfc\xdfe")
    data = Data(train=str(path))
    with pytest.raises(UserError, match=rf"^{path}: not UTF-8 \(byte 3\); .*iconv"):
        read_documents(open_corpus(str(path), data), 0, Encoder.of(tokenizer, data), SlotState())


def read(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerFast, num_ranks: int, num_steps: int
) -> tuple[list[list[int]], Counts]:
    """What is predicted in each slot over these steps, and what was read for it."""
    ranks = [
        build_loaders(cfg, tokenizer, slots)
        for slots in over_ranks(cfg.training.global_batch_size, num_ranks)
    ]
    slots: list[list[int]] = [[] for _ in range(cfg.training.global_batch_size)]
    for loaders in ranks:
        for _ in range(num_steps):
            for row in rows_of(next(loaders.train)):
                slots[row[1]] += predicted([row])
    state = merge_states(loaders.state() for loaders in ranks)
    for loaders in ranks:
        loaders.train.close()
    return slots, counts(json.loads(json.dumps(state)))


@pytest.mark.parametrize(
    ("num_ranks", "workers"), [(1, 0), (2, 0), (4, 0), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_left_out_lines_move_no_other_and_are_counted(
    tmp_path, tokenizer, run_config, num_ranks, workers
):
    tokenizer = without_end(tokenizer)
    # 40 documents of two tokens, one row each: a slot reads its ten in ten steps. Of every seventh
    # nothing can be used; the same corpus with an empty text in its place gives the same rows.
    lines = [as_bytes(json.dumps({"text": chr(48 + i) * 2})) for i in range(40)]
    with_bad = [as_bytes(BAD[i // 7][0]) if i % 7 == 3 else line for i, line in enumerate(lines)]
    with_empty = [b'{"text": ""}' if i % 7 == 3 else line for i, line in enumerate(lines)]
    keys: dict[str, Any] = {"packing": "none", "sequence_length": 1, "global_batch_size": 4}
    bad = str(write(tmp_path / "bad.jsonl", b"\n".join(with_bad)))
    empty = str(write(tmp_path / "empty.jsonl", b"\n".join(with_empty)))
    slots, read_bad = read(
        run_config(bad, on_error="skip", workers=workers, **keys), tokenizer, num_ranks, 30
    )
    expected, read_empty = read(run_config(empty, **keys), tokenizer, 1, 30)
    assert slots == expected
    # 34 of 40 can be used, so 120 rows are three epochs and a part of the fourth.
    assert (read_bad.rows, read_empty.rows) == (120, 120)
    assert read_empty.finished == read_bad.finished == read_bad.begun
    assert read_empty.skipped == {"no target": sum(read_bad.skipped.values())}
    assert set(read_bad.skipped) == {"not JSON", "missing field", "wrong type", "not UTF-8"}
    assert read_bad.finished - sum(read_bad.skipped.values()) == 120


def test_counts_of_one_epoch(tmp_path, tokenizer, run_config):
    tokenizer = without_end(tokenizer)
    lines = [as_bytes(line) for line, _, _ in BAD] + [b'{"text": "ab"}'] * 4
    path = str(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    validation = str(write(tmp_path / "b.jsonl", b"\n".join(lines)))
    cfg = run_config(
        path,
        on_error="skip",
        packing="none",
        sequence_length=1,
        global_batch_size=1,
        validation=validation,
    )
    loaders = build_loaders(cfg, tokenizer, range(1))
    by_reason = {"not JSON": 2, "missing field": 1, "wrong type": 1, "not UTF-8": 2}
    assert loaders.validation is not None
    for _ in range(2):  # the second time counts alone
        assert len(list(loaders.validation)) == 4
        assert loaders.validation.read == Counts(4, 10, 10, by_reason)
    assert loaders.validation.read.to_dict() == {
        "epochs": None, "epochs_by_entry": None, "rows": 4, "padding": None,
        "documents_begun": 10, "documents_finished": 10,
        "documents_long": 0, "documents_skipped": 6,
        "skipped_by_reason": by_reason,
    }  # fmt: skip
    for _ in range(5):  # four rows an epoch: the fifth is of the second one
        next(loaders.train)
    read_now = counts(loaders.state())
    assert (read_now.rows, read_now.finished >= 11) == (5, True)
    assert all(read_now.skipped[reason] >= count for reason, count in by_reason.items())
    assert str(Counts(2000, 1235, 1234, {"not JSON": 2, "no target": 1})) == (
        "2,000 rows; documents: 1,235 begun, 1,234 finished, 3 left out (1 no target, 2 not JSON)"
    )


def test_counts_of_an_evaluation_that_is_cut(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, run_config: MakeConfig
) -> None:
    # 4 letters and an end-of-text token: a row of 4 has but the first 4 as inputs, and the second
    # row begins with the fifth; the bad line before the third document is read only for a third
    # row.
    path = str(
        write(
            tmp_path / "a.jsonl",
            '{"text": "abcd"}\nbad\n{"text": "abcd"}\nbad\n{"text": "abcd"}\nbad',
        )
    )
    keys: dict[str, Any] = {
        "on_error": "skip",
        "sequence_length": 4,
        "global_batch_size": 1,
        "validation": path,
    }
    train = str(write(tmp_path / "b.jsonl", '{"text": "abcd"}'))
    for batches, expected in {
        1: Counts(1, 1, 0, {}),
        2: Counts(2, 3, 2, {"not JSON": 1}),
        3: Counts(3, 5, 4, {"not JSON": 2}),
        0: Counts(4, 6, 6, {"not JSON": 3}),
    }.items():
        validation = build_loaders(
            run_config(train, eval_batches=batches, **keys), tokenizer, range(1)
        ).validation
        assert validation is not None
        assert len(list(validation)) == expected.rows
        assert validation.read == expected, batches


def chat_file(path: Path, *dialogues: str) -> str:
    """A file of dialogues, each written as its roles."""
    messages = [[{"role": role, "content": role} for role in roles.split()] for roles in dialogues]
    return str(write(path, "".join(json.dumps({"messages": m}) + "\n" for m in messages)))


def test_role_that_nobody_knows_is_named_with_its_place(tmp_path, tokenizer, run_config):
    chat = chat_tokenizer(tokenizer, CHATML)
    path = chat_file(tmp_path / "a.jsonl", "user assistant", "user bot", "user Assistant human bot")
    keys: dict[str, Any] = {"format": "chat", "global_batch_size": 1}
    cfg = run_config(path, **keys)
    corpus, encoder = open_corpus(path, cfg.data), Encoder.of(chat, cfg.data)
    assert read_documents(corpus, 0, encoder, SlotState())[0]
    with pytest.raises(
        UserError, match=rf"^{path}:2: .* role 'bot', .* system, developer, user, assistant, tool"
    ):
        read_documents(corpus, 1, encoder, SlotState())
    with pytest.raises(UserError, match=rf"^{path}:3: .* role 'Assistant', 'bot', 'human', "):
        read_documents(corpus, 2, encoder, SlotState())
    skip = Encoder.of(chat, run_config(path, on_error="skip", **keys).data)
    assert read_documents(corpus, 1, skip, SlotState()) == ([], {"unknown role": 1})


def test_dialogues_without_the_assistant_are_counted_by_the_roles_they_have(
    tmp_path, tokenizer, run_config
):
    chat = chat_tokenizer(tokenizer, CHATML)
    path = chat_file(tmp_path / "a.jsonl", *["user system"] * 6, *["user"] * 2)
    held_out = chat_file(tmp_path / "b.jsonl", "user")
    cfg = run_config(path, format="chat", global_batch_size=8, validation=held_out)
    loaders = build_loaders(cfg, chat, range(8))
    with pytest.raises(
        UserError, match=r"8 documents; .* 109 .* \d+ no assistant turn, only system and user"
    ):
        next(loaders.train)
    assert loaders.validation is not None
    with pytest.raises(UserError, match=r"left out: 1 no assistant turn, only user"):
        next(iter(loaders.validation))


@pytest.mark.parametrize(("on_error", "line"), [("fail", 1), ("skip", 3)])
def test_a_template_is_tried_before_a_run_begins(tmp_path, tokenizer, run_config, on_error, line):
    chat = chat_tokenizer(tokenizer, "{% for i in range(10**9) %}{% endfor %}")
    path = chat_file(tmp_path / "a.jsonl", "user bot", "", "user assistant")
    cfg = run_config(path, format="chat", global_batch_size=2, on_error=on_error)
    with pytest.raises(UserError, match="role 'bot'" if line == 1 else "template needs too much"):
        build_loaders(cfg, chat, range(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_template_without_end_in_a_later_dialogue_names_its_place(
    tmp_path, tokenizer, run_config, monkeypatch, workers
):
    loop = "{% for i in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}"
    if workers:  # a worker has the limit of the library, so this takes too much at once
        loop = "{% for i in range(999999) %}{% endfor %}"
    monkeypatch.setattr(chat_format, "LATER_CPU_SECONDS", 0.3)
    template = "{% if messages[0].role == 'system' %}" + loop + "{% endif %}" + CHATML
    roles = ["user assistant"] * 3 + ["system assistant"]
    path = chat_file(tmp_path / "a.jsonl", *roles)
    keys = {"format": "chat", "packing": "none", "on_error": "skip", "workers": workers}
    cfg = run_config(path, global_batch_size=1, **keys)
    loaders = build_loaders(cfg, chat_tokenizer(tokenizer, template), range(1))
    with pytest.raises(UserError, match=rf"^{path}:4: the chat template needs too much \("):
        list(islice(loaders.train, 4))
    loaders.train.close()


def test_nothing_but_bad_lines(tmp_path, tokenizer, run_config):
    path = str(write(tmp_path / "a.jsonl", "bad\n" * 3))
    cfg = run_config(path, on_error="skip", global_batch_size=1)
    with pytest.raises(UserError, match=r"3 documents; .* 104 .*: 104 not JSON; "):
        next(build_loaders(cfg, tokenizer, range(1)).train)


def test_prompts_longer_than_a_row_name_the_key_that_holds_them(tmp_path, tokenizer, run_config):
    row = json.dumps({"prompt": "x" * 50, "completion": "y"}) + "\n"
    path = str(write(tmp_path / "a.jsonl", row * 3))
    cfg = run_config(path, format="completion", sequence_length=20, global_batch_size=1)
    message = r"longer than a row of data\.sequence_length; raise data\.sequence_length"
    with pytest.raises(UserError, match=message):
        next(build_loaders(cfg, tokenizer, range(1)).train)
    texts = write(tmp_path / "b.jsonl", json.dumps({"prompt": "x", "completion": "y"}))
    held_out = {"validation": [path], "format": "completion", "sequence_length": 20}
    loaders = build_loaders(run_config(str(texts), **held_out), tokenizer, range(8))
    assert loaders.validation is not None
    with pytest.raises(UserError, match=rf"^data\.validation: .*{LONGER_ROWS}"):
        list(loaders.validation)
