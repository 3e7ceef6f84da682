"""The messages of a dialogue in one form, and in the forms that chat templates want."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from shardwise.data.columns import FLAGS, MEDIA, has_effect
from shardwise.data.record import CORRECT_LINE, BadDocument, Record, string

Message = dict[str, Any]
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names under which messages have what the assistant thought."""
CALLS = ("tool_calls", "function_call")
"""The names under which a message has its calls."""
WRITTEN = (*REASONING, "content", *CALLS)
"""The fields of a message in which words of the assistant stand."""

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""The role of each speaker that ShareGPT's form, with `from` and `value`, calls otherwise."""

TEXT_PARTS = ("text", "input_text", "output_text", None)
"""Types of the parts of a content that hold text."""

_FLAG = re.compile(
    "(?<![a-z])(un|no|is|compute|ignore)?(train|loss|weight|mask|learn|target|supervis)", re.I
)
"""Parts of the names by which programs say what is a target, with true or false or otherwise."""


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the forms in which a template may want the messages, first the one that is given.

    Contents are texts or lists of parts. The arguments of calls are as given, objects or texts. A
    message has its calls in `tool_calls`, or a single one in `function_call`.
    """
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    is_single = calls and all(len(m.get("tool_calls", calls[:1])) == 1 for m in messages)
    for as_older in (False, True) if is_single else (False,):
        readers = (lambda arguments: arguments, _as_object, _as_text)
        for as_parts, reader in itertools.product((False, True), readers[: 3 if calls else 1]):
            yield [_in_form(message, as_parts, reader, as_older) for message in messages]


def _in_form(
    message: Message, as_parts: bool, reader: Callable[[Any], Any], as_older: bool
) -> Message:
    changed = dict(message)
    if as_parts:
        changed["content"] = [{"type": "text", "text": message["content"]}]
    functions = [dict(call["function"]) for call in message.get("tool_calls", ())]
    for function in functions:
        function["arguments"] = reader(function["arguments"])
    if functions and as_older:
        del changed["tool_calls"]
        changed["function_call"] = functions[0]
    elif functions:
        calls = zip(message["tool_calls"], functions)
        changed["tool_calls"] = [{**call, "function": function} for call, function in calls]
    return changed


def _as_object(arguments: Any) -> Any:
    """Return the object that a text in JSON stands for; anything else as it is."""
    parsed = from_json(arguments)
    return parsed if isinstance(parsed, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def writes_text_in_quotes(form: Sequence[Message], text: str) -> bool:
    """Return whether a template writes arguments that are text in JSON as a string in JSON.

    It wants objects, though it does not refuse the text.
    """
    calls = [call["function"] for message in form for call in message.get("tool_calls", ())]
    calls += [message["function_call"] for message in form if "function_call" in message]
    given = [call["arguments"] for call in calls]
    texts = [arguments for arguments in given if _as_object(arguments) is not arguments]
    return any(json.dumps(t, ensure_ascii=ascii) in text for t in texts for ascii in (False, True))


def read_message(message: Record, where: str) -> Message:
    """Return a message whose content is a text, and whose calls are in `tool_calls`.

    A field that is null counts as missing.
    """
    read = {key: value for key, value in message.items() if value is not None}
    if "role" not in read and isinstance(read.get("from"), str):  # in the form of ShareGPT
        speaker, words = read.pop("from"), read.pop("value", None)
        read |= {"role": SHAREGPT_ROLES.get(speaker, speaker), "content": words}
    if read.get("role") is None:
        raise bad_chat(f"{where} has no field 'role'")
    string(read["role"], f"field 'role' of {where}")
    calls = from_json(read.pop("tool_calls", None)) or []
    older = from_json(read.pop("function_call", None))
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise bad_chat(f"field 'tool_calls' of {where} is not a list of objects")
    if older and calls and [call.get("function") for call in calls] != [older]:
        raise bad_chat(f"{where} has 'tool_calls' and another 'function_call'")
    calls = calls or ([{"type": "function", "function": older}] if older else [])
    if calls:
        read["tool_calls"] = [_call(call, where) for call in calls]
    content = read.get("content")
    if not content and read.get("refusal"):
        raise bad_chat(f"field 'refusal' of {where} is not read; write it as its content")
    if content is None:
        if not calls and not any(read.get(name) for name in REASONING):
            raise bad_chat(f"{where} has no field 'content'")
        content = ""
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    read["content"] = string(content, f"field 'content' of {where}")
    for name in REASONING:
        if name in read:
            string(read[name], f"field {name!r} of {where}")
    for name in FLAGS[:-1]:
        if not isinstance(read.get(name, True), bool):
            raise bad_chat(f"field {name!r} of {where} is not true or false")
    if read.get("weight", 1) not in (0, 1):
        raise bad_chat(f"field 'weight' of {where} is not 0 or 1, all there is")
    check_text_only(read, where)
    return read


def check_text_only(fields: Record, name: str) -> None:
    """Raise BadDocument where a field holds an image or the like."""
    for key in MEDIA:
        if fields.get(key):
            raise BadDocument(
                "not text", f"{name} has {key!r}, and only text is trained on; {CORRECT_LINE}"
            )


def _part(part: Any, where: str) -> str:
    """Return the text of one part of a content; BadDocument for an image or the like."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        check_text_only(part, f"a part of {where}")
        if any(_FLAG.search(k) and has_effect(k, v) for k, v in part.items()):
            raise bad_chat(f"a part of {where} has a flag; only a message as a whole can have one")
    is_text = isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
    if not is_text or not isinstance(part.get("text"), str):
        kind = part.get("type", "object") if isinstance(part, dict) else type(part).__name__
        raise BadDocument(
            "not text",
            f"{where} has a part of type {kind!r}, and only text is trained on; {CORRECT_LINE}",
        )
    return part["text"]


def _call(call: Record, where: str) -> Message:
    """Return a tool call that has a name and arguments."""
    function = from_json(call.get("function"))
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_chat(f"a tool call of {where} has no function with a name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def mapped(message: Message, change: Callable[[str], str], names: bool) -> Message:
    """Return a message with its texts changed; those of tool calls are names and string values."""

    def changed(value: Any, key: str) -> Any:
        if isinstance(value, str):
            is_fixed = key in ("id", "type") or (key == "name" and not names)
            return value if is_fixed else change(value)
        if isinstance(value, Mapping):
            return {k: changed(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [changed(v, key) for v in value]
        return value

    return {k: changed(v, k) if k in WRITTEN else v for k, v in message.items()}


def strings_of(message: Message, names: Sequence[str] = WRITTEN) -> Iterator[str]:
    """Yield the texts of the fields of a message that have these names."""
    strings: list[str] = []

    def keep(string: str) -> str:
        strings.append(string)
        return string

    mapped({name: message[name] for name in names if name in message}, keep, True)
    yield from strings


def from_json(value: Any) -> Any:
    """Return the list or object that a text in JSON stands for; anything else as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(value)
            return parsed if isinstance(parsed, list | dict) else value
    return value


def read_objects(value: Any, name: str, error: Callable[[str], Exception]) -> list[Any] | None:
    """Return a list of objects, such as tools, which may be given as text in JSON."""
    value = from_json(value)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        raise error(f"{name} is text that is not JSON")
    value = list(map(from_json, value)) if isinstance(value, list) else None
    if value is None or not all(isinstance(item, Mapping) for item in value):
        raise error(f"{name} is not a list of objects")
    return value or None


def check_flags(message: Message, number: int, known: Container[str]) -> None:
    """Raise BadDocument where a message has a flag that is not `known` and would do nothing."""
    for name, value in message.items():
        is_flag = isinstance(value, bool) or bool(_FLAG.search(name))
        if is_flag and name not in FLAGS and name not in known:
            raise BadDocument(
                "unknown flag",
                f"field {name!r} of message {number} is no flag that is known; rename it to one of "
                f"{', '.join(FLAGS[:-1])} (true or false) or weight (1 or 0), or set data.fields: "
                f"{{unused: {name}}} to leave it out",
            )


def is_trained(message: Message) -> bool:
    """Return whether a message may be a target, by its flags."""
    return all(message.get(name, True) for name in FLAGS)


def bad_chat(problem: str) -> BadDocument:
    """Return the error of a dialogue that cannot be used."""
    return BadDocument("bad chat", f"{problem}; {CORRECT_LINE}")
