"""The messages of a dialogue in one form, and in the forms that chat templates want."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.data.chats import REASONING, Message
from shardwise.data.record import CORRECT_LINE, BadDocument, Record, string

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""The role of each speaker that ShareGPT's form, with `from` and `value`, calls otherwise."""

MEDIA = (
    "image", "images", "image_url", "input_image", "audio", "audio_url", "input_audio", "video",
    "video_url",
)  # fmt: skip
"""Fields of a message, or of a part of its content, that hold no text."""

TEXT_PARTS = ("text", "input_text", "output_text", None)
"""Types of the parts of a content that hold text."""


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the forms in which a template may want the messages."""
    calls = any(message.get("tool_calls") for message in messages)
    for as_parts, as_text in itertools.product((False, True), (False, True)):
        if as_text and not calls:
            continue
        yield [_in_form(message, as_parts, as_text) for message in messages]


def _in_form(message: Message, as_parts: bool, as_text: bool) -> Message:
    changed = dict(message)
    if as_parts:
        changed["content"] = [{"type": "text", "text": message["content"]}]
    if as_text and message.get("tool_calls"):
        changed["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
    return changed


def _with_text_arguments(call: Message) -> Message:
    function = dict(call.get("function", {}))
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": function}


def read_message(message: Record, number: int) -> Message:
    """Return a message whose content is a text, and whose tool calls have objects as arguments."""
    # A table has null for a field that only other rows have. A template would take it as given.
    read = {key: value for key, value in message.items() if value is not None}
    if "role" not in read and isinstance(read.get("from"), str):  # in the form of ShareGPT
        speaker, words = read.pop("from"), read.pop("value", None)
        read |= {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": words}
    if read.get("role") is None:
        raise bad_chat(f"message {number} has no field 'role'")
    string(read["role"], f"field 'role' of message {number}")
    calls = read.get("tool_calls") or None
    if calls is None:
        read.pop("tool_calls", None)
    else:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise bad_chat(f"field 'tool_calls' of message {number} is not a list of objects")
        read["tool_calls"] = [_call(_without_nulls(call), number) for call in calls]
    content = read.get("content")
    if content is None:
        if calls is None and not any(read.get(name) for name in REASONING):
            raise bad_chat(f"message {number} has no field 'content'")
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    read["content"] = string(content, f"field 'content' of message {number}")
    for name in REASONING:
        if name in read:
            string(read[name], f"field {name!r} of message {number}")
    if not isinstance(read.get("train", True), bool):
        raise bad_chat(f"field 'train' of message {number} is not true or false")
    if read.get("weight", 1) not in (0, 1):
        raise bad_chat(f"field 'weight' of message {number} is not 0 or 1, all there is")
    check_text_only(read, f"message {number}", MEDIA)
    return read


def check_text_only(fields: Record, name: str, media: Sequence[str]) -> None:
    """Raise BadDocument where one of these fields holds an image or the like."""
    for key in media:
        if fields.get(key):
            raise BadDocument(
                "not text", f"{name} has {key!r}, and only text is trained on; {CORRECT_LINE}"
            )


def _part(part: Any, number: int) -> str:
    """Return the text of one part of a content; BadDocument for an image or the like."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        check_text_only(part, f"a part of message {number}", MEDIA)
    is_text = isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
    if not is_text or not isinstance(part.get("text"), str):
        kind = part.get("type", "object") if isinstance(part, dict) else type(part).__name__
        raise BadDocument(
            "not text",
            f"message {number} has a part of type {kind!r}, and only text is trained on; "
            f"{CORRECT_LINE}",
        )
    return part["text"]


def _call(call: Record, number: int) -> Message:
    """Return a tool call with an object as arguments, where its text is one in JSON."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_chat(f"a tool call of message {number} has no function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def read_tools(value: Any, name: str, error: Callable[[str], Exception]) -> list[Any] | None:
    """Return a list of tools, which may be given as text in JSON."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as problem:
            raise error(f"{name} is not JSON ({problem})") from None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise error(f"{name} is not a list of objects that describe tools")
    return _without_nulls(value) or None


def _without_nulls(value: Any) -> Any:
    """Return data without the nulls that a table has for fields that only other rows have."""
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def is_trained(message: Message) -> bool:
    """Return whether a message may be a target, by its fields `train` and `weight`."""
    return bool(message.get("train", True) and message.get("weight", 1))


def bad_chat(problem: str) -> BadDocument:
    """Return the error of a dialogue that cannot be used."""
    return BadDocument("bad chat", f"{problem}; {CORRECT_LINE}")
