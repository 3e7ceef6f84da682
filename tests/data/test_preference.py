"""Pairs and labelled answers: from their fields to the two sides of a document, and its row."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, UserError
from shardwise.data.columns import check_all_read, fields_beside
from shardwise.data.corpus import open_corpus
from shardwise.data.detect import keys_for
from shardwise.data.formats import TOO_LONG, Encoder
from shardwise.data.packing import Document, row_of, to_batch
from shardwise.data.preference import EQUAL, NO_ANSWER, document_of, equal_sides
from shardwise.data.record import BadDocument
from shardwise.data.slots import read_documents
from shardwise.data.state import SlotState
from tests.data.templates import CHATML, LAST_TURN_DIFFERS
from tests.data.test_corpus import datasets_cache  # noqa: F401
from tests.data.test_formats import chat_tokenizer, mark_targets
from tests.data.test_messages import jsonl, parquet

ASKED = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": word} for word in ("good", "bad"))
HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
SIDES = (f"{HEAD}«good<|im_end|>»\n", f"{HEAD}«bad<|im_end|>»\n")


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def encoder_of(tokenizer: PreTrainedTokenizerFast, **keys: Any) -> Encoder:
    """Of pairs and labelled answers, as an objective would read them that compares both."""
    encoder = Encoder.of(tokenizer, Data("unused", format="preference", **keys))
    return replace(encoder, reads_labels=True)


def one_document(
    tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], **keys: Any
) -> Document:
    """The only document of a pair, or of an answer with a label."""
    encoder = encoder_of(tokenizer, **keys)
    try:
        (document,) = replace(encoder, reads_labels=False).documents(record, SlotState())
    except BadDocument as error:
        if error.reason != "answer with a label":
            raise
        (document,) = encoder.documents(record, SlotState())
    return document


def sides(
    tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], **keys: Any
) -> tuple[str, str]:
    """The two sides of a record as text, with « and » around the runs of targets."""
    document = one_document(tokenizer, record, **keys)
    at = document.rejected_at
    assert at is not None
    one, other = (
        Document(document.tokens[part], document.targets[part], document.start)
        for part in (slice(0, at), slice(at, None))
    )
    return mark_targets(tokenizer, one), mark_targets(tokenizer, other)


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, None),
        ({"prompt": json.dumps([ASKED]), "chosen": "good", "rejected": json.dumps([BAD])}, None),
        ({"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, None),
        ({"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]}, None),
        # as in HuggingFaceH4/ultrafeedback_binarized
        (
            {
                "prompt": "hi",
                "chosen": [ASKED, GOOD],
                "rejected": [ASKED, BAD],
                "messages": [ASKED, GOOD],
                "score_chosen": 6.0,
            },
            None,
        ),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, None),
        # as in LLaMA-Factory
        (
            {
                "conversations": [{"from": "human", "value": "hi"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            {"messages": "conversations"},
        ),
        (
            {"instruction": "hi", "input": "", "chosen": "good", "rejected": "bad"},
            {"messages": ["instruction", "input"]},
        ),
        # axolotl's chatml.intel
        (
            {"system": "", "question": "hi", "chosen": "good", "rejected": "bad"},
            {"messages": "question"},
        ),
        (
            {"q": [ASKED], "yes": [GOOD], "no": [BAD]},
            {"prompt": "q", "chosen": "yes", "rejected": "no"},
        ),
    ],
)
def test_published_forms_of_a_pair_give_the_same_sides(tokenizer, record, fields):
    assert sides(chat_tokenizer(tokenizer, CHATML), record, fields=fields) == SIDES


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ({"prompt": [ASKED], "completion": [GOOD]}, {}),
        ({"question": "hi", "completion": "good"}, {"messages": "question"}),
        ({"messages": [ASKED, GOOD]}, {}),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}]},
            {"messages": "conversations"},
        ),
        (
            {"instruction": "hi", "input": "", "output": "good"},
            {"messages": ["instruction", "input"], "completion": "output"},
        ),
    ],
)
@pytest.mark.parametrize(
    ("label", "at"), [(True, 0), (1, 0), ("True", 0), ("1", 0), (False, 1), (0, 1), ("false", 1)]
)
def test_an_answer_with_a_label_is_one_side(tokenizer, record, fields, label, at):
    tokenizer = chat_tokenizer(tokenizer, CHATML)
    found = sides(tokenizer, record | {"kto_tag": label}, fields=fields | {"label": "kto_tag"})
    assert (found[at], found[1 - at]) == (SIDES[0], "")


def test_texts_stand_as_they_are(tokenizer):
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    assert sides(tokenizer, pair) == ("2+2=«4<eos>»", "2+2=«5<eos>»")
    answer = {"prompt": "2+2=", "completion": "4", "label": True}
    assert sides(tokenizer, answer) == ("2+2=«4<eos>»", "")
    # Nothing precedes the first token of a side.
    pair = {"prompt": "", "chosen": "ab", "rejected": "cd"}
    assert sides(tokenizer, pair) == ("a«b<eos>»", "c«d<eos>»")


def test_row_numbers_are_of_sides():
    def document(tokens: list[int], rejected_at: int | None) -> Document:
        mask = np.ones(len(tokens), bool)
        return Document(np.array(tokens, np.int32), mask, SlotState(), rejected_at=rejected_at)

    row = row_of([document([5, 6, 7, 8, 9], 2), document([3, 4], 0), document([2, 2], 2)], 10, 0)
    assert row[1].tolist() == [0, 0, 1, 1, 1, 3, 3, 4, 4, -1, -1]
    row = row_of([document([5, 6], None), document([7], None)], 4, 0)
    assert row[1].tolist() == [0, 0, 1, -1, -1]


# The tokens of both sides, and the first target of each; all behind it are targets. They are what
# DPOTrainer of TRL 1.16.0 gives for these records, with `max_length=None`, this tokenizer, and
# ChatML as its chat template (transformers 5.24.0, 2026-12-01).
TRL: list[tuple[dict[str, Any], tuple[list[int], list[int]], int]] = [
    (
        {"prompt": "2+2=", "chosen": "4", "rejected": "five"},
        ([19, 12, 19, 30, 21, 1], [19, 12, 19, 30, 71, 74, 87, 70, 1]),
        4,
    ),
    (  # "the" takes a letter of the prompt, so both sides begin before it
        {"prompt": "so t", "chosen": "he end", "rejected": "all"},
        ([84, 80, 222, 259, 222, 70, 79, 69, 1], [84, 80, 222, 85, 66, 77, 77, 1]),
        3,
    ),
    (
        {"chosen": "it is the", "rejected": "it is tall"},
        ([74, 85, 222, 74, 84, 222, 259, 1], [74, 85, 222, 74, 84, 222, 85, 66, 77, 77, 1]),
        6,
    ),
]


@pytest.mark.parametrize(("record", "tokens", "begin"), TRL)
def test_texts_have_the_tokens_and_targets_of_trl(tokenizer, record, tokens, begin):
    document = one_document(tokenizer, record)
    assert document.rejected_at == len(tokens[0])
    assert document.tokens.tolist() == [*tokens[0], *tokens[1]]
    targets = [n >= begin for side in tokens for n in range(len(side))]
    assert document.targets.tolist() == targets


END = "<|im_end|>"
BOTH = ("good", "bad")

# The same of TRL for messages, as text with its targets between « and »; and ours: all tokens are
# the same, and no target is what the user says, or the line feed behind the end of a turn.
TRL_MESSAGES = [
    (
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        [f"{HEAD}«{word}{END}\n»" for word in BOTH],
        [f"{HEAD}«{word}{END}»\n" for word in BOTH],
    ),
    (
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        [f"{HEAD}«{word}{END}\n»" for word in BOTH],
        [f"{HEAD}«{word}{END}»\n" for word in BOTH],
    ),
    (
        {"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]},
        [f"{HEAD}good{END}\n{HEAD}«{word}{END}\n»" for word in BOTH],
        [f"{HEAD}good{END}\n{HEAD}«{word}{END}»\n" for word in BOTH],
    ),
    (
        {"prompt": [ASKED], "chosen": [GOOD, ASKED, GOOD], "rejected": [BAD, ASKED, BAD]},
        [f"{HEAD}«{word}{END}\n{HEAD}{word}{END}\n»" for word in BOTH],
        [f"{HEAD}«{word}{END}»\n{HEAD}«{word}{END}»\n" for word in BOTH],
    ),
]


@pytest.mark.parametrize(("record", "of_trl", "ours"), TRL_MESSAGES)
def test_messages_have_the_tokens_of_trl_and_as_targets_what_the_model_writes(
    tokenizer, record, of_trl, ours
):
    marks = str.maketrans("", "", "«»")
    assert [text.translate(marks) for text in ours] == [text.translate(marks) for text in of_trl]
    assert [*sides(chat_tokenizer(tokenizer, CHATML), record)] == ours


def test_targets_are_all_turns_behind_what_is_shared_or_the_last_one(tokenizer):
    tokenizer = chat_tokenizer(tokenizer, CHATML)
    record = {"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, BAD, ASKED, BAD]}
    chosen, rejected = sides(tokenizer, record)
    assert (chosen.count("«good<|im_end|>»"), rejected.count("«bad<|im_end|>»")) == (2, 2)
    chosen, rejected = sides(tokenizer, record, train_on="last")
    assert chosen == f"{HEAD}good<|im_end|>\n{HEAD}«good<|im_end|>»\n"
    # Where one conversation is the beginning of the other, both have an answer.
    record = {"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]}
    assert [side.count("«") for side in sides(tokenizer, record)] == [1, 2]
    # A message can be left out, as in a chat.
    record = {
        "prompt": [ASKED],
        "chosen": [GOOD | {"train": False}, ASKED, GOOD],
        "rejected": [BAD],
    }
    assert [side.count("«") for side in sides(tokenizer, record)] == [1, 1]


def test_what_stands_beside_messages_is_read_as_in_chats(tokenizer):
    template = "{% for t in tools %}{{ t.function.name }};{% endfor %}{{ mood }}" + CHATML
    tools = [{"type": "function", "function": {"name": "add"}}]
    record = {
        "prompt": [ASKED],
        "chosen": [GOOD],
        "rejected": [BAD],
        "system": "be brief",
        "tools": json.dumps(tools),
        "chat_template_kwargs": {"mood": "glad"},
    }
    start = "add;glad<|im_start|>system\nbe brief<|im_end|>\n"
    found = sides(chat_tokenizer(tokenizer, template), record)
    assert found == (start + SIDES[0], start + SIDES[1])
    offered = {**record, "offered": record["tools"], "tools": None}
    found = sides(chat_tokenizer(tokenizer, template), offered, tools="offered")
    assert found == (start + SIDES[0], start + SIDES[1])
    continued = record | {"prompt": [ASKED, GOOD], "chosen": [BAD], "rejected": [GOOD]}
    found = sides(chat_tokenizer(tokenizer, template), continued)
    assert [side.count("«") for side in found] == [1, 1]
    plain = {"question": "hi", "chosen": "good", "rejected": "bad", "system": "be brief"}
    found = sides(chat_tokenizer(tokenizer, CHATML), plain, fields={"messages": "question"})
    assert found[0] == "<|im_start|>system\nbe brief<|im_end|>\n" + SIDES[0]


def test_empty_thinking_can_be_left_out_of_the_targets(tokenizer):
    template = CHATML.replace(
        "{{ message.content }}",
        "{% if message.role == 'assistant' %}<think></think>{% endif %}{{ message.content }}",
    )
    record = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
    found = sides(chat_tokenizer(tokenizer, template), record, train_on_thinking="filled")
    assert found[0] == f"{HEAD}<think></think>«good<|im_end|>»\n"


BAD_RECORDS = [
    (
        {"instruction": "hi", "context": "so", "chosen": "good", "rejected": "bad"},
        "missing field",
        r"no field 'prompt'; .*data\.fields: {messages: instruction}",
    ),
    ({"prompt": "p", "chosen": "c"}, "missing field", "no field 'rejected'; .*prompt, chosen"),
    (
        {"chosen": "c", "prompt": "p", "rejected": None},
        "wrong type",
        "'rejected' is null, not text",
    ),
    ({"prompt": 3, "chosen": "c", "rejected": "r"}, "wrong type", "'prompt' is a number"),
    ({"prompt": "p", "chosen": ["c"], "rejected": "r"}, "wrong type", "'chosen' is a list"),
    ({"prompt": "p", "completion": "c"}, "missing field", "set data.format: completion"),
    (
        {"prompt": "p", "completion": "c", "label": None},
        "wrong label",
        "is null, not true or false",
    ),
    (
        {"prompt": "p", "completion": "c", "label": 2},
        "wrong label",
        "is 2, not true or false; corr",
    ),
    ({"prompt": "p", "completion": "c", "label": "good"}, "wrong label", 'is "good", not true'),
    ({"completion": "c", "label": 1}, "missing field", "no field 'prompt'"),
    (
        {"question": "p", "chosen": "c", "rejected": "r"},
        "missing field",
        r"no field 'prompt'; .*data\.fields: {messages: question}",
    ),
    (
        {"system": "s", "prompt": "p", "chosen": "c", "rejected": "r"},
        "unread field",
        r"'system' .*{messages: \[prompt\]}, for a chat template, or .*{unused: system}",
    ),
    (
        {"prompt": [ASKED], "chosen": [GOOD, ASKED], "rejected": [BAD]},
        "bad pair",
        "ends with a .*'user'",
    ),
    ({"messages": [ASKED], "label": True}, "bad pair", "ends with a message of 'user'"),
    ({"chosen": [GOOD], "rejected": [BAD]}, "bad pair", "no message of a user in common"),
    (
        {"chosen": [ASKED, GOOD], "rejected": [turn("user", "no"), BAD]},
        "bad pair",
        "no message of a user in common; correct or remove the line",
    ),
    (
        {"prompt": "hi", "chosen": [ASKED, GOOD], "rejected": [BAD]},
        "bad pair",
        "whole conversation",
    ),
    (
        {"prompt": "so", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        "unread field",
        "'prompt' is not read; the messages have another prompt, or .*unused: prompt",
    ),
    (
        {"prompt": [{"role": 1}], "chosen": "c", "rejected": "r"},
        "wrong type",
        "'role' of message 1",
    ),
    (
        {"prompt": [ASKED], "chosen": [{"role": "cat", "content": "c"}], "rejected": "r"},
        "unknown role",
        "'cat'",
    ),
    (
        {"prompt": [ASKED], "chosen": [GOOD, 3], "rejected": "r"},
        "bad chat",
        "not a list of objects",
    ),
    (
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "images": ["x.png"]},
        "unread field",
        "only text is trained on",
    ),
    ({"prompt": "p", "chosen": "c", "rejected": "r", "weight": 0}, "unread field", "'weight'"),
]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": "instruction"},
            r"'input' is not read; .*{messages: \[instruction, input\]},",
        ),
        ({"prompt": "instruction"}, r"'input' is not read; .*{prompt: \[instruction, input\]},"),
        ({"unused": ["input"]}, r"no field 'prompt'; .*data\.fields: {messages: instruction}"),
        ({"messages": ["instruction", "input"]}, ""),
        ({"messages": "instruction", "unused": "input"}, ""),
        ({"prompt": ["instruction", "input"]}, ""),
        ({"unused": ["instruction", "input"]}, ""),
    ],
)
def test_no_known_field_is_lost(tokenizer, fields, message):
    record = {"instruction": "add", "input": "2", "chosen": "a 4", "rejected": "a 5"}
    encoder = encoder_of(chat_tokenizer(tokenizer, CHATML), fields=fields)
    if message:
        with pytest.raises(BadDocument, match=message):
            encoder.documents(record, SlotState())
    else:
        assert all(document.has_target() for document in encoder.documents(record, SlotState()))


@pytest.mark.parametrize(("record", "reason", "message"), BAD_RECORDS)
def test_what_cannot_be_used_is_one_line_with_a_way_out(
    tokenizer, tmp_path, record, reason, message
):
    tokenizer = chat_tokenizer(tokenizer, CHATML)
    path = str(jsonl(tmp_path / "a.jsonl", record))
    for on_error in ("fail", "skip"):
        data = Data(path, format="preference", on_error=on_error)
        encoder, corpus = (
            replace(Encoder.of(tokenizer, data), reads_labels=True),
            open_corpus(path, data),
        )
        with pytest.raises(BadDocument, match=message) as caught:
            encoder.documents(record, SlotState())
        assert caught.value.reason == reason
        assert "\n" not in str(caught.value)
        if on_error == "skip":
            assert read_documents(corpus, 0, encoder, SlotState()) == ([], {reason: 1})
            continue
        with pytest.raises(UserError, match=f"{path}:1: .*{message}"):
            read_documents(corpus, 0, encoder, SlotState())


def test_a_template_that_writes_what_is_shared_in_two_ways(tokenizer):
    # The turn of the assistant that both share is the last but one of one side.
    record = {"prompt": [ASKED, GOOD, ASKED], "chosen": [BAD], "rejected": [BAD, ASKED, GOOD]}
    template = "{{ messages | length }}" + CHATML
    with pytest.raises(BadDocument, match="what both sides share in two ways; correct or remove"):
        sides(chat_tokenizer(tokenizer, template), record)
    # Thinking that is written for the last turn alone is of the answer, and is no such case.
    record = {"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]}
    chosen, _ = sides(chat_tokenizer(tokenizer, LAST_TURN_DIFFERS), record)
    assert chosen.endswith("«<think></think>good<|im_end|>»\n")


def test_messages_need_a_template_and_texts_do_not(tokenizer):
    assert sides(tokenizer, {"prompt": "p", "chosen": "c", "rejected": "r"})[0] == "p«c<eos>»"
    with pytest.raises(UserError, match=r"needs a chat template.*data\.chat_template") as caught:
        sides(tokenizer, {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]})
    assert not isinstance(caught.value, BadDocument)  # which on_error would skip


def test_cells_of_csv_and_parquet(tokenizer, tmp_path, datasets_cache):  # noqa: F811
    tokenizer = chat_tokenizer(tokenizer, CHATML)
    (tmp_path / "a.csv").write_text(
        "prompt,completion,label,note\np,c,True,x\np,c,0,x\np,c,maybe,x\n"
    )
    rows = [{"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "score": 1.0}]
    path = parquet(tmp_path / "a.parquet", rows)
    data = Data("unused", format="preference", on_error="skip")
    encoder = replace(Encoder.of(tokenizer, data), reads_labels=True)
    corpus = open_corpus(str(tmp_path / "a.csv"), data)
    found = [read_documents(corpus, number, encoder, SlotState()) for number in range(3)]
    assert [[document.rejected_at for document in documents] for documents, _ in found] == [
        [3],
        [0],
        [],
    ]
    assert found[2][1] == {"wrong label": 1}
    corpus = open_corpus(str(path), data)
    assert sides(tokenizer, corpus[0]) == SIDES
    with pytest.raises(UserError, match=r"no column 'rejected'.*data\.format: completion"):
        open_corpus(
            str(parquet(tmp_path / "b.parquet", [{"prompt": "p", "completion": "c"}])),
            Data("unused", format="preference", fields={"chosen": "completion"}),
        )


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        ({"prompt": "p", "chosen": "c", "rejected": "r", "messages": []}, None),
        ({"question": "p", "chosen": "c", "rejected": "r"}, {"messages": "question"}),
        ({"conversations": [], "chosen": {}, "rejected": {}}, {"messages": "conversations"}),
        (
            {"instruction": "p", "input": "", "chosen": "c", "rejected": "r"},
            {"messages": ["instruction", "input"]},
        ),
        ({"chosen": [], "rejected": []}, None),
        ({"prompt": "p", "completion": "c", "label": True}, {"label": "label"}),
        (
            {"instruction": "p", "input": "", "output": "c", "kto_tag": True},
            {"messages": ["instruction", "input"], "completion": "output", "label": "kto_tag"},
        ),
        ({"conversations": [], "kto_tag": True}, {"messages": "conversations", "label": "kto_tag"}),
    ],
)
def test_known_forms_are_recognised(tmp_path, record, fields):
    found = keys_for([str(jsonl(tmp_path / "a.jsonl", record))], "--data")
    assert found == {"format": "preference"} | ({"fields": fields} if fields else {})


def test_an_answer_with_a_label_is_refused_where_no_objective_compares_it(tokenizer):
    encoder = Encoder.of(tokenizer, Data("unused", format="preference"))
    record = {"prompt": "p", "completion": "c", "label": True}
    with pytest.raises(BadDocument, match=r"no pair; set training\.objective: kto") as caught:
        encoder.documents(record, SlotState())
    assert caught.value.reason == "answer with a label"
    assert encoder.documents({"prompt": "p", "chosen": "", "rejected": ""}, SlotState())


# Rows: what is cut, and what is left out.

PAIR = {"prompt": "a long prompt", "chosen": "yes it is", "rejected": "no"}  # 23 + 16 tokens


@pytest.mark.parametrize(
    ("sequence_length", "expected"),
    [
        (38, ("a long prompt«yes it is<eos>»", "a long prompt«no<eos>»")),
        (37, (" long prompt«yes it is<eos>»", " long prompt«no<eos>»")),
        (20, ("ompt«yes it is<eos>»", "ompt«no<eos>»")),
        (14, ("t«yes it is<eos>»", "t«no<eos>»")),
        (13, ("t«yes it is»", "t«no<eos>»")),  # the longer answer loses its end
        (8, ("t«yes »", "t«no<eos>»")),
        (6, ("t«yes»", "t«no»")),
        (3, ("t«y»", "t«n»")),
    ],
)
def test_a_long_pair_loses_the_beginning_of_its_prompt_first(tokenizer, sequence_length, expected):
    assert sides(tokenizer, PAIR, sequence_length=sequence_length) == expected
    if sequence_length > 6:  # of two equally long answers the chosen one keeps a token more
        swapped = PAIR | {"chosen": PAIR["rejected"], "rejected": PAIR["chosen"]}
        assert sides(tokenizer, swapped, sequence_length=sequence_length) == expected[::-1]


def test_a_long_answer_with_a_label_loses_the_beginning_of_its_prompt_first(tokenizer):
    for length, expected in (
        (21, " long prompt«yes it is<eos>»"),
        (9, "t«yes it is»"),
        (1, "t«y»"),
    ):
        for label in (True, False):
            record = {"prompt": "a long prompt", "completion": "yes it is", "label": label}
            found = sides(tokenizer, record, sequence_length=length)
            assert found == ((expected, "") if label else ("", expected))


def test_what_is_left_out_is_counted_by_its_reason(tokenizer):
    chat = chat_tokenizer(tokenizer, CHATML)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (PAIR | {"rejected": "yes it is"}, {}, EQUAL),
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [GOOD]}, {}, EQUAL),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]}, {}, EQUAL),
        ({"chosen": "yes", "rejected": "yes"}, {}, EQUAL),
        (PAIR | {"rejected": "yes it was"}, {"sequence_length": 9}, f"{EQUAL} once cut"),
        (PAIR, {"long": "skip", "sequence_length": 37}, TOO_LONG),
        (PAIR, {"sequence_length": 2}, TOO_LONG),  # a side would have no answer
        (PAIR | {"chosen": ""}, {}, NO_ANSWER),
        ({"prompt": "p", "completion": "", "label": True}, {}, NO_ANSWER),
        (
            {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD | {"train": False}]},
            {},
            NO_ANSWER,
        ),
    ]
    for record, keys, reason in cases:
        encoder = replace(encoder_of(chat, **keys), reads_labels="label" in record)
        documents = encoder.documents(record, SlotState())
        assert encoder.left_out(record, documents) == {reason: 1}, record
        assert not any(document.has_target() for document in documents)
    for keys in ({}, {"sequence_length": 10}):
        encoder = replace(encoder_of(chat, **keys), reads_labels=False)
        (document,) = encoder.documents(PAIR, SlotState())
        assert (document.has_target(), document.is_long) == (True, bool(keys))
        assert encoder.left_out(PAIR, [document]) == {}


def test_a_pair_is_two_answers_with_a_label_where_the_objective_reads_labels(tokenizer):
    encoder = encoder_of(tokenizer)
    good, bad = encoder.documents(PAIR, SlotState())
    assert [mark_targets(tokenizer, document) for document in (good, bad)] == [
        "a long prompt«yes it is<eos>»",
        "a long prompt«no<eos>»",
    ]
    assert (good.rejected_at, bad.rejected_at) == (len(good.tokens), 0)
    documents = encoder.documents(PAIR | {"rejected": ""}, SlotState())
    assert encoder.left_out(PAIR, documents) == {NO_ANSWER: 1}  # of two answers, the empty one


def test_an_answer_with_a_label_has_the_next_documents_answer_too(tokenizer, tmp_path):
    records = [
        {"prompt": "a", "completion": "yes", "label": True},
        {"prompt": "bc", "completion": "no", "label": False},
        {"prompt": "d", "completion": "", "label": True},
        {"prompt": "e", "chosen": "x", "rejected": "y"},
    ]
    path = str(jsonl(tmp_path / "a.jsonl", *records))
    encoder = encoder_of(tokenizer)
    corpus = open_corpus(path, encoder.data)

    def other(number: int, following: int) -> list[str]:
        documents, _ = read_documents(corpus, number, encoder, SlotState(), following)
        assert all(document.other is not None for document in documents)
        others = [document.other for document in documents if document.other is not None]
        for document, one in zip(documents, others):
            sizes = len(document.tokens), len(one.tokens)
            assert (one.rejected_at == 0) == (document.rejected_at == 0)
            assert len(document) == max(sizes)
        return [mark_targets(tokenizer, one) for one in others]

    assert other(0, 1) == ["a«no<eos>»"]
    assert other(1, 0) == ["bc«yes<eos>»"]
    assert other(1, 2) == ["bc"]  # there is no answer, and nothing to compare with
    assert other(0, 3) == ["a«x<eos>»"]
    assert other(0, 0) == ["a"]  # its own answer says nothing of others
    assert other(3, 0) == ["e«yes<eos>»"] * 2
    rows = [read_documents(corpus, n, encoder, SlotState(), m)[0] for n, m in ((0, 1), (3, 0))]
    row = row_of([document for documents in rows for document in documents], 20, 0)
    assert row.shape == (6, 21)
    assert row[1].tolist() == [0] * 5 + [2] * 3 + [5] * 3 + [-1] * 10
    assert row[4].tolist() == [0] * 4 + [2] * 5 + [5] * 5 + [-1] * 7
    batch = to_batch(row[None], [0], 1)
    assert batch.mismatched is not None
    assert batch.mismatched.document_ids.tolist() == [row[4, :-1].tolist()]
    assert (batch.most_pairs, batch.mismatched.most_pairs) == (3, 3)


@st.composite
def long_pairs(draw: st.DrawFn) -> list[tuple[list[int], list[bool]]]:
    """A prompt and two answers, which may begin alike, be alike or be empty."""
    prompt = draw(st.lists(st.integers(2, 9), min_size=1, max_size=9))
    answers = st.lists(st.integers(2, 3), max_size=9)
    return [
        ([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
        for answer in (draw(answers), draw(answers))
    ]


@given(pair=long_pairs(), sequence_length=st.integers(1, 24), is_single=st.booleans())
def test_sides_fit_share_their_prompt_and_differ_or_are_left_out(pair, sequence_length, is_single):
    if is_single:
        pair = [pair[0], ([], [])]
    document = document_of(pair, sequence_length, False, SlotState())
    at, whole = document.rejected_at, sum(len(tokens) for tokens, _ in pair)
    assert at is not None
    assert len(document) <= sequence_length + 1
    assert document.is_long == (whole > sequence_length + 1)
    if not document.is_long:
        assert document.tokens.tolist() == [*pair[0][0], *pair[1][0]]
    kept = np.split(document.tokens, [at])
    masks = np.split(document.targets, [at])
    if not document.has_target():
        has_answers = all(any(targets[1:]) for tokens, targets in pair if tokens)
        is_equal = pair[0] == pair[1]
        assert is_equal or not has_answers or document.is_long
        return
    assert equal_sides(document) == ""
    prompts = []
    for (tokens, targets), part, mask in zip(pair, kept, masks, strict=True):
        if not tokens:
            assert len(part) == 0
            continue
        # A part of the side, whose targets are those of the side, but never its first token.
        begin = targets.index(True) - int(np.flatnonzero(mask)[0])
        assert part.tolist() == tokens[begin : begin + len(part)]
        assert mask.tolist() == [False, *targets[begin + 1 : begin + len(part)]]
        prompts.append(part[: int(np.flatnonzero(mask)[0])].tolist())
        if begin:  # nothing more than needed was dropped
            assert len(document) >= sequence_length or len(prompts[-1]) == 1
    assert len({*map(tuple, prompts)}) == 1
    assert len(prompts[0]) >= 1


@pytest.mark.parametrize("label", [False, 0, "false"])
def test_a_completion_that_is_labelled_as_bad_is_not_learnt(label):
    names = fields_beside(Data("any", format="completion"))
    record = {"prompt": "a", "completion": "b", "label": label}
    with pytest.raises(BadDocument, match="field 'label' is not read"):
        check_all_read(record, names, Data("any", format="completion"))
    check_all_read(record | {"label": True}, names, Data("any", format="completion"))
