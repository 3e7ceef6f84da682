"""Pairs and labelled answers: from their fields to the two sides of a document, and its row."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data
from shardwise.data.formats import Encoder
from shardwise.data.packing import Document, row_of
from shardwise.data.state import SlotState
from tests.data.templates import CHATML
from tests.data.test_formats import chat_tokenizer, mark_targets

ASKED = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": word} for word in ("good", "bad"))
HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
SIDES = (f"{HEAD}«good<|im_end|>»\n", f"{HEAD}«bad<|im_end|>»\n")


def encoder_of(tokenizer: PreTrainedTokenizerFast, **keys: Any) -> Encoder:
    return Encoder.of(tokenizer, Data("unused", format="preference", **keys))


def sides(
    tokenizer: PreTrainedTokenizerFast, record: dict[str, Any], **keys: Any
) -> tuple[str, str]:
    """The two sides of a record as text, with « and » around the runs of targets."""
    (document,) = encoder_of(tokenizer, **keys).documents(record, SlotState())
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
    # The prompt of two whole texts is what they have in common, up to a whole token of each.
    pair = {"chosen": "it is the", "rejected": "it is tall"}
    assert sides(tokenizer, pair) == ("it is «the<eos>»", "it is t«all<eos>»")
    answer = {"prompt": "2+2=", "completion": "4", "label": True}
    assert sides(tokenizer, answer) == ("2+2=«4<eos>»", "")


def test_row_numbers_are_of_sides():
    def document(tokens: list[int], rejected_at: int | None) -> Document:
        mask = np.ones(len(tokens), bool)
        return Document(np.array(tokens, np.int32), mask, SlotState(), rejected_at=rejected_at)

    row = row_of([document([5, 6, 7, 8, 9], 2), document([3, 4], 0), document([2, 2], 2)], 10, 0)
    assert row[1].tolist() == [0, 0, 1, 1, 1, 3, 3, 4, 4, -1, -1]
    row = row_of([document([5, 6], None), document([7], None)], 4, 0)
    assert row[1].tolist() == [0, 0, 1, -1, -1]
