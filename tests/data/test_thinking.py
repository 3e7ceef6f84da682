"""Blocks of thinking that are no targets: the targets by hand, for several templates."""

import pytest

from shardwise.config import Data, UserError
from shardwise.data.formats import Encoder
from tests.data.templates import CHATML
from tests.data.test_formats import chat_tokenizer, marked

LIKE_QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPEN = LIKE_QWEN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""The generation prompt writes the first tag."""
BRACKETS = LIKE_QWEN.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
USER = {"role": "user", "content": "1+1?"}
EMPTY = {"messages": [USER, {"role": "assistant", "content": "2"}]}
FULL = {"messages": [USER, {"role": "assistant", "reasoning_content": "sum", "content": "2"}]}
ASKED = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "record", "which", "answer"),
    [
        (LIKE_QWEN, EMPTY, "all", "«<think>\n\n</think>\n\n2<|im_end|>»\n"),
        (LIKE_QWEN, EMPTY, "filled", "<think>\n\n</think>\n\n«2<|im_end|>»\n"),
        (LIKE_QWEN, EMPTY, "none", "<think>\n\n</think>\n\n«2<|im_end|>»\n"),
        (LIKE_QWEN, FULL, "filled", "«<think>\nsum\n</think>\n\n2<|im_end|>»\n"),
        (LIKE_QWEN, FULL, "none", "<think>\nsum\n</think>\n\n«2<|im_end|>»\n"),
        (OPEN, EMPTY, "all", "<think>\n«\n</think>\n\n2<|im_end|>»\n"),
        (OPEN, EMPTY, "filled", "<think>\n\n</think>\n\n«2<|im_end|>»\n"),
        (OPEN, FULL, "filled", "<think>\n«sum\n</think>\n\n2<|im_end|>»\n"),
        (OPEN, FULL, "none", "<think>\nsum\n</think>\n\n«2<|im_end|>»\n"),
        (BRACKETS, FULL, "none", "[THINK]\nsum\n[/THINK]\n\n«2<|im_end|>»\n"),
    ],
)
def test_targets_without_thinking(tokenizer, template, record, which, answer):
    chat = chat_tokenizer(tokenizer, template)
    assert marked(chat, record, train_on_thinking=which) == ASKED + answer


def test_every_token_but_the_thinking(tokenizer):
    text = marked(
        chat_tokenizer(tokenizer, LIKE_QWEN), FULL, train_on="all", train_on_thinking="none"
    )
    assert text == f"«{ASKED}»<think>\nsum\n</think>\n\n«2<|im_end|>»\n"


def test_a_template_without_thinking_is_told(tokenizer):
    data = Data("unused", format="chat", train_on_thinking="none")
    with pytest.raises(UserError, match="the chat template writes no <think>; leave it out"):
        Encoder.of(chat_tokenizer(tokenizer, CHATML), data)
