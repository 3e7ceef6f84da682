"""A known field of a document is taken as transformers' own rendering takes it, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.config import Data
from shardwise.data.corpus import open_corpus
from shardwise.data.formats import Encoder
from shardwise.data.record import BadDocument
from shardwise.data.state import SlotState
from tests.data.templates import CHATML
from tests.data.test_corpus import datasets_cache, saved  # noqa: F401
from tests.data.test_formats import chat_tokenizer, marked
from tests.data.test_messages import encoded, jsonl, parquet

QUESTION = {"role": "user", "content": "Where?"}
MESSAGES = [QUESTION, {"role": "assistant", "content": "Here."}]
TOOL = {"name": "find", "parameters": {"default": None}}
WRAPPED = {"type": "function", "function": TOOL}
PAGES = [{"title": "A", "text": "of a"}]
WRITES_ALL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}"
    "{% endif %}{% if mood %}{{ mood }}{% endif %}" + CHATML
)
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize(
    ("fields", "messages", "given"),
    [
        ({"tools": [WRAPPED]}, MESSAGES, {"tools": [WRAPPED]}),
        ({"tools": json.dumps([WRAPPED])}, MESSAGES, {"tools": [WRAPPED]}),
        ({"functions": json.dumps([TOOL])}, MESSAGES, {"tools": [WRAPPED]}),
        ({"documents": PAGES}, MESSAGES, {"documents": PAGES}),
        ({"documents": json.dumps(PAGES), "tools": ""}, MESSAGES, {"documents": PAGES}),
        ({"chat_template_kwargs": {"mood": "glad"}}, MESSAGES, {"mood": "glad"}),
        ({"system": "Be brief."}, [SYSTEM, *MESSAGES], {}),
        ({"system_prompt": "Be brief.", "system": None}, [SYSTEM, *MESSAGES], {}),
        ({"system": [{"type": "text", "text": "Be brief."}]}, [SYSTEM, *MESSAGES], {}),
        ({"system": " ", "history": [], "images": None, "train": True}, MESSAGES, {}),
        ({"tools": [json.dumps(WRAPPED)]}, MESSAGES, {"tools": [WRAPPED]}),
    ],
)
def test_a_field_whose_meaning_is_certain_is_taken(
    tokenizer, tmp_path, fields, messages, given, is_table
):
    row = {"messages": MESSAGES, "id": 7, **fields}
    path = parquet(tmp_path / "a.parquet", [row]) if is_table else jsonl(tmp_path / "a.jsonl", row)
    text, targets = encoded(tokenizer, WRITES_ALL, path)
    chat = chat_tokenizer(tokenizer, WRITES_ALL)
    if is_table and fields.get("tools") == [WRAPPED]:  # a null of a table may be padding
        given = {"tools": [{**WRAPPED, "function": {"name": "find", "parameters": {}}}]}
    assert text == chat.apply_chat_template(messages, tokenize=False, **given)
    assert targets == ["Here.<|im_end|>"]


def test_tools_choose_the_template_as_transformers_does(tokenizer, tmp_path):
    chat = chat_tokenizer(tokenizer, None)
    chat.chat_template = {"default": CHATML, "tool_use": WRITES_ALL}
    for tools in (None, [WRAPPED]):
        record = {"messages": MESSAGES, "tools": tools}
        text = marked(chat, record).translate({ord("«"): None, ord("»"): None})
        assert text == chat.apply_chat_template(MESSAGES, tools=tools, tokenize=False)


def test_a_system_field_that_repeats_the_message(tokenizer):
    chat = chat_tokenizer(tokenizer, CHATML)
    with_both = {"messages": [SYSTEM, *MESSAGES], "system": "Be brief."}
    assert marked(chat, with_both) == marked(chat, {"messages": [SYSTEM, *MESSAGES]})
    other = {"messages": [SYSTEM, *MESSAGES], "system": "Be long."}
    with pytest.raises(BadDocument, match=r"'system' is not read; .* another system message"):
        marked(chat, other)


INSTRUCTED = {"instruction": "add", "output": "4"}
NAMES = {"prompt": "instruction", "completion": "output"}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"system": "Be brief."}, r"'system' .*\{prompt: \[system, instruction\]"),
        ({"history": [["hi", "hello"]]}, "'history' .*format: chat"),
        ({"input": "2 2"}, r"'input' .*\{prompt: \[instruction, input\]"),
        ({"context": "of sums"}, r"'context' .*\{prompt: \[instruction, context\]"),
        ({"tools": [WRAPPED]}, "'tools' .*format: chat"),
        ({"documents": PAGES}, "'documents' .*format: chat"),
        ({"image": "a.png"}, "'image' .*only text"),
    ],
)
def test_a_field_beside_an_instruction_is_refused_or_left_out_on_purpose(
    tokenizer, tmp_path, fields, part
):
    (name,) = fields
    rows = [{**INSTRUCTED, "id": 7, **fields}]
    columns = {key: [value] for key, value in rows[0].items()}
    paths = (
        jsonl(tmp_path / "a.jsonl", *rows),
        parquet(tmp_path / "a.parquet", rows),
        saved(tmp_path / "saved", columns),
    )
    for path in paths:
        for unused in ({}, {"unused": name}):
            run = Data(train=str(path), format="completion", fields={**NAMES, **unused})
            encoder = Encoder.of(tokenizer, run)
            record = open_corpus(str(path), run)[0]
            if unused:
                (document,) = encoder.documents(record, SlotState())
                assert tokenizer.decode(document.tokens) == "add4<eos>"
                continue
            with pytest.raises(BadDocument, match=rf"{part}.* \{{unused: {name}\}}"):
                encoder.documents(record, SlotState())


@pytest.mark.parametrize(
    ("fields", "keys", "part"),
    [
        ({"tools": [WRAPPED]}, {}, "'tools' is not read; the chat template does not write it"),
        ({"documents": PAGES}, {}, "'documents' is not read; the chat template does not write it"),
        ({"tools": "of iron"}, {}, "'tools' is text that is not JSON"),
        ({"history": [["hi", "hello"]]}, {}, "'history' is not read; write its turns into"),
        ({"image": "a.png"}, {}, "'image' is not read; only text"),
        (
            {"system": {"role": "system", "content": "a"}},
            {},
            "'content' of field 'system' is an object",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, {}, "has no variables for a template"),
        ({"system": "a", "system_prompt": "b"}, {}, "another system message"),
        ({"loss": False}, {}, "'loss' is not read; only messages of a chat have flags"),
        ({"weight": 0.5}, {}, "'weight' is not read; only messages of a chat have flags"),
    ],
)
def test_a_field_beside_messages_that_would_be_lost_is_refused(tokenizer, fields, keys, part):
    chat = chat_tokenizer(tokenizer, CHATML)
    with pytest.raises(BadDocument, match=part):
        marked(chat, {"messages": MESSAGES, **fields}, **keys)


ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "Here."},
    "completion": {"prompt": "Where?", "completion": "Here."},
    "chat": {"messages": MESSAGES},
}
CHANGES_TARGETS: list[dict[str, Any]] = [
    {"train": False}, {"training": 0}, {"loss": False}, {"loss": "false"}, {"weight": 0},
    {"weight": "0"}, {"weight": 0.3}, {"loss_mask": [0, 1]}, {"mask": True}, {"is_target": False},
    {"trainable": False}, {"ignore_loss": True}, {"loss_weight": 0.5}, {"train_on": "last"},
]  # fmt: skip
CHANGES_NOTHING: list[dict[str, Any]] = [
    {"train": True}, {"weight": "1"}, {"weight": 1.0}, {"loss": "true"}, {"loss": "True"},
    {"training": None}, {"weight": ""}, {"is_target": 1}, {"ignore_loss": "false"}, {"mask": None},
]  # fmt: skip


@pytest.mark.parametrize("data_format", ROWS)
def test_a_flag_of_a_whole_document_is_refused_if_it_changes_the_targets(tokenizer, data_format):
    chat, row = chat_tokenizer(tokenizer, CHATML), ROWS[data_format]
    right = marked(chat, row, data_format)
    for flag in CHANGES_TARGETS:
        (name,) = flag
        with pytest.raises(BadDocument, match=rf"'{name}' is not read.* \{{unused: {name}\}}"):
            marked(chat, {**row, **flag}, data_format)
        assert marked(chat, {**row, **flag}, data_format, fields={"unused": name}) == right
    for flag in CHANGES_NOTHING:
        assert marked(chat, {**row, **flag}, data_format) == right


def test_a_flag_in_a_column_is_read_like_one_in_a_line(tokenizer, tmp_path):
    for weight, is_refused in (("1", False), ("0", True)):
        rows = {
            "a.csv": f"text,weight\nHere.,{weight}\n",
            "a.tsv": f"text\tweight\nHere.\t{weight}\n",
        }
        parquet(tmp_path / "a.parquet", [{"text": "Here.", "weight": float(weight)}])
        for name in ("a.csv", "a.tsv", "a.parquet"):
            if name in rows:
                (tmp_path / name).write_text(rows[name])
            run = Data(train=str(tmp_path / name), format="text")
            record = open_corpus(str(tmp_path / name), run)[0]
            encoder = Encoder.of(tokenizer, run)
            if is_refused:
                with pytest.raises(BadDocument, match="'weight' is not read"):
                    encoder.documents(record, SlotState())
                continue
            (document,) = encoder.documents(record, SlotState())
            assert tokenizer.decode(document.tokens) == "Here.<eos>"


def test_tools_that_data_tools_does_not_name(tokenizer, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([WRAPPED]))
    chat = chat_tokenizer(tokenizer, WRITES_ALL)
    record = {"messages": MESSAGES, "tools": [WRAPPED], "offered": None}
    for named in (str(file), "offered"):
        with pytest.raises(BadDocument, match=r"'tools' is not read; set data\.tools: tools, or"):
            marked(chat, record, tools=named)
        marked(chat, record, tools=named, fields={"unused": "tools"})
