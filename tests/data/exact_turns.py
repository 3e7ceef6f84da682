"""Dialogues of every kind, and the check that their targets are what the assistant says exactly.

The check knows nothing of how turns are found: it compares with the generation prompt, and with the
words of the messages.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardwise.config import Data, UserError
from shardwise.data.chat_format import ChatFormat
from shardwise.data.chats import Refused
from shardwise.data.messages import forms
from shardwise.data.record import BadDocument

SYSTEM = {"role": "system", "content": "Sysword."}
QUESTIONS = [{"role": "user", "content": f"Userword {i}?"} for i in range(3)]
ANSWERS = [{"role": "assistant", "content": f"Answer {i}."} for i in range(3)]
THOUGHT = {"reasoning_content": "Thoughtword."}
THOUGHTS = [{**answer, "reasoning_content": f"Thought {i}."} for i, answer in enumerate(ANSWERS)]
ARGUMENTS = {"place": "Callword", "exact": True}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "id": "call00000",
            "function": {"name": "look", "arguments": ARGUMENTS},
        }
    ],
}
RESULT = {"role": "tool", "content": "Toolword.", "tool_call_id": "call00000", "name": "look"}
PLACE = {"type": "string", "description": "Where."}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"place": PLACE}, "required": ["place"]},
    },
}
CASES: dict[str, list[dict[str, Any]]] = {
    "one turn": [QUESTIONS[0], ANSWERS[0]],
    "three turns": [m for pair in zip(QUESTIONS, ANSWERS) for m in pair],
    "system": [SYSTEM, QUESTIONS[0], ANSWERS[0], QUESTIONS[1], ANSWERS[1]],
    "thinking": [QUESTIONS[0], THOUGHTS[0], QUESTIONS[1], THOUGHTS[1]],
    "tools": [QUESTIONS[0], CALL, RESULT, ANSWERS[0], QUESTIONS[1], ANSWERS[1]],
    "thought and call": [QUESTIONS[0], {**CALL, **THOUGHT}, RESULT, {**ANSWERS[0], **THOUGHT}],
}
OTHERS = re.compile("Sysword|Userword|Toolword|Where|Looks")
"""Words of anybody but the assistant."""
EMPTY = re.compile(r"<think>\s*(</think>\s*)?$")
"""The beginning of thoughts, or empty ones, with which a prompt may end."""
FRAME = re.compile(
    r"\s*(<think>)?\s*(</think>)?\s*|<\|channel\|>final<\|message\|>| to=user<\|message\|>"
)
"""What a template may write around an answer without thoughts: white space, no thoughts, whom it is
for."""
END_OF_TEXT = "</s>"
MARK = re.compile(r"(<[^<>]*>)*")
"""Special tokens."""
HEADER = re.compile(r"<[^<>]*(user|assistant|system|start|begin|observation)[^<>]*>", re.IGNORECASE)
"""Special tokens that begin a turn, and end none."""


def outcome(template: str, messages: list[dict[str, Any]]) -> str:
    """Return the end mark of the last turn if the targets are right, or why there are none."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    calls = any("tool_calls" in message for message in messages)
    keys = {"tools": "tools"} if calls and "tools" in template else {}
    record = {"messages": messages, **({"tools": json.dumps([TOOL])} if keys else {})}
    try:
        chat = ChatFormat.of(tokenizer, Data(train="unused", format="chat", **keys))
        ((tokens, targets),) = chat.encode(record)
        prompts = [
            prompt_before(chat, {**record, "messages": messages[:i]})
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    except BadDocument as error:
        return "leaves calls out" if "leaves out" in str(error) else "refuses it"
    except UserError as error:
        return f"WRONG {error}"
    text = "".join(tokenizer.decode([token]) for token in tokens)
    turns = runs(tokenizer, tokens, targets)
    if problem := mistake(text, turns, messages, prompts):
        return f"WRONG {problem}: {[text[start:end] for start, end in turns]}"
    end = text[slice(*turns[-1])].rpartition(".")[2]
    return f"`{end.strip()}`" if end.strip() else "no end mark"


def prompt_before(chat: ChatFormat, record: dict[str, Any]) -> str:
    """Return what the template writes for the model to go on from, behind the last word before."""
    messages = record["messages"]
    for form in forms(chat.messages(record)):
        with contextlib.suppress(Refused):
            text = chat.with_fields(record).render(form, True)
            if messages[-1]["content"] in text:
                return behind_last_word(text)
    raise BadDocument("bad chat", "refused")


def behind_last_word(text: str) -> str:
    """Return what follows the last of the words of the user or a tool."""
    return re.split(r"Userword \d\?|Toolword\.", text)[-1]


def runs(tokenizer: Any, tokens: list[int], targets: list[bool]) -> list[tuple[int, int]]:
    """Return the first and the last character of each run of targets; a token may have several."""
    lengths = [len(tokenizer.decode([token])) for token in tokens]
    mask = "".join(" x"[target] * length for target, length in zip(targets, lengths))
    return [turn.span() for turn in re.finditer("x+", mask)]


def mistake(
    text: str, turns: list[tuple[int, int]], messages: list[dict[str, Any]], prompts: list[str]
) -> str:
    """Return what is wrong with the targets of a dialogue, or "".

    A turn begins where the generation prompt ends, has the words of its message alone, and ends
    with a mark, behind which no other mark follows.
    """
    spoken = [message for message in messages if message["role"] == "assistant"]
    if len(turns) != len(spoken):
        return f"{len(turns)} turns instead of {len(spoken)}"
    for (start, end), message, prompt in zip(turns, spoken, prompts):
        turn, header = text[start:end], behind_last_word(text[:start])
        # Earlier turns may lack the empty thoughts with which the prompt ends; and some templates
        # write no prompt behind a tool's result, but the usual header before the answer.
        is_shorter = prompt.startswith(header) and header.startswith(EMPTY.sub("", prompt))
        is_longer = header.startswith(prompt) and prompts[0].endswith(header[len(prompt) :])
        if not (is_shorter or is_longer):
            return f"it begins behind {header!r}, and the model behind {prompt!r}"
        thought = message.get("reasoning_content", "")
        if thought and (thought in text[start - len(header) : end]) != (thought in turn):
            return f"{thought!r} is written, but no target"
        word = message["content"] or "Callword"
        before, _, behind = turn.rpartition(word)
        if word not in turn or OTHERS.search(turn):
            return f"it is not {word!r} alone"
        is_call = "tool_calls" in message
        has_thought = thought and thought in before
        if not is_call and not has_thought and not FRAME.fullmatch(before):
            return f"{before!r} is no part of it"
        mark = behind.rstrip("\n")
        if not is_call and (not MARK.fullmatch(mark) or HEADER.search(mark)):
            return f"{mark!r} is no end mark"
        if not mark and not HEADER.match(text[end:].lstrip()):  # which ends a turn too
            return "it has no end"
    rest = text[turns[-1][1] :].strip()
    return f"{rest!r} follows the last turn" if rest not in ("", END_OF_TEXT) else ""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer each of whose tokens is one character of the texts tried here."""
    characters = {chr(i) for i in range(32, 127)} | set("\n\t▁｜")
    vocab = {token: i for i, token in enumerate(["<pad>", END_OF_TEXT, "<s>", *sorted(characters)])}
    backend = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=END_OF_TEXT, pad_token="<pad>"
    )
