"""Encode two answers, or one with a label, as two sides (`data.format: preference`)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.config import Data
from shardwise.data.chat_format import ChatFormat, Encoded
from shardwise.data.chats import num_common
from shardwise.data.columns import BESIDE_QUESTION, check_all_read, fields_beside, names_of, unread
from shardwise.data.completions import encode_completion, joined_text
from shardwise.data.known_forms import given_value, way_to_read
from shardwise.data.messages import SHAREGPT_ROLES, Message, from_json
from shardwise.data.packing import Document
from shardwise.data.record import CORRECT_LINE, BadDocument, Record
from shardwise.data.state import SlotState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EQUAL, NO_ANSWER = "chosen equals rejected", "no answer"
"""Reasons to leave out a pair, which are no mistakes, whatever `on_error` is."""

LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""Labels of an answer, as JSON, CSV and tables have them."""

NOTHING: Encoded = ([], [])
"""The side that a labelled answer does not have."""


@dataclass(frozen=True)
class PreferenceFormat:
    """Turns records into sides: texts as they stand, and messages by the chat template."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    chat: ChatFormat | None
    """None where the tokenizer has no chat template, which only messages need."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: Data) -> PreferenceFormat:
        """Read the chat template of a run, if there is one; UserError as from `ChatFormat.of`."""
        has_template = tokenizer.chat_template is not None or data.tools is not None
        return cls(tokenizer, data, ChatFormat.of(tokenizer, data) if has_template else None)

    def encode(self, record: Record) -> list[Encoded]:
        """Return the chosen and the rejected side of a record, each with the prompt.

        An answer with a label is one of them; the other is empty. BadDocument where the record
        cannot be used.
        """
        names = names_of(self.data, record)
        if names[-1] != "label":
            return self._sides(record, names)
        field = self.data.columns("label")[0]
        value = given_value(record, field, self.data)
        label = LABELS.get(str(value).strip().lower())
        if label is None:
            problem = f"field {field!r} is {json.dumps(value, default=str)[:40]}, not true or false"
            raise BadDocument("wrong label", f"{problem}; {CORRECT_LINE}")
        (side,) = self._sides(record, names[:-1])
        return [side, NOTHING] if label else [NOTHING, side]

    def check(self, record: Record) -> None:
        """Check the chat template on a first dialogue; see `ChatFormat.check`."""
        names = [name for name in names_of(self.data, record) if name != "label"]
        if self._is_chat(record, names):
            chat, dialogues, _ = self._dialogues(record, names)
            chat.check(dialogues[0])

    def _is_chat(self, record: Record, names: Sequence[str]) -> bool:
        columns = [column for name in names for column in self.data.columns(name)]
        return names[0] == "messages" or any(_messages(record.get(name)) for name in columns)

    def _sides(self, record: Record, names: Sequence[str]) -> list[Encoded]:
        """Return the sides of a record: what is shared, if anything is named, and each answer."""
        if self._is_chat(record, names):
            return self._of_messages(record, names)
        texts = [joined_text(record, self.data.columns(name), self.data) for name in names]
        known = [name for name in record if name not in self.data.unused]
        is_lost = names[0] != "prompt" and self.data.named <= {"unused"}
        if is_lost and (way := way_to_read(known, self.data)):
            raise BadDocument("missing field", f"no field 'prompt'; {way}")
        check_all_read(record, fields_beside(self.data, record), self.data)
        begin = len(texts[0]) if names[0] == "prompt" else num_common(*texts)
        if names[0] == "prompt":
            texts = [texts[0] + answer for answer in texts[1:]]
        sides = [encode_completion(self.tokenizer, text[:begin], text[begin:]) for text in texts]
        return sides if len(sides) == 1 else _begun_together(*sides)

    def _of_messages(self, record: Record, names: Sequence[str]) -> list[Encoded]:
        chat, dialogues, num_shared = self._dialogues(record, names)
        beside = {*BESIDE_QUESTION} & {*fields_beside(self.data, record)}
        check_all_read(record, sorted(beside), self.data)
        read = [chat.messages(dialogue) for dialogue in dialogues]
        for messages in read:
            if (role := messages[-1]["role"]) != "assistant":
                raise _bad_pair(f"a side ends with a message of {role!r}, and not with an answer")
        if num_shared is None:
            num_shared = _num_shared(read)
        else:  # a system message may come first
            num_shared += len(read[0]) - len(dialogues[0]["messages"])
        encoded = [
            chat.with_fields(dialogue).encode_turns(
                messages,
                [turn for turn in chat.trained(messages) if turn >= num_shared],
                num_shared,
            )
            for messages, dialogue in zip(read, dialogues)
        ]
        befores = {before for before, _ in encoded if before}
        if len(befores) > 1:
            raise _bad_pair("the chat template writes what both sides share in two ways")
        return [side for _, side in encoded]

    def _dialogues(
        self, record: Record, names: Sequence[str]
    ) -> tuple[ChatFormat, list[Record], int | None]:
        """Return each side as a record with `messages`, and how many of these are shared.

        None: as many as are equal, where each answer is a whole conversation.
        """
        chat = self.chat or ChatFormat.of(self.tokenizer, self.data)
        chat = replace(chat, data=self.data.as_chat())
        fields = {column for name in (*names, "label") for column in self.data.columns(name)}
        beside = {name: value for name, value in record.items() if name not in fields}
        is_shared = names[0] in ("prompt", "messages") and len(names) > 1
        shared = self._turns(record, names[0], "user") if is_shared else []
        sides = [self._turns(record, name, "assistant") for name in names[is_shared:]]
        column = self.data.columns(names[0])[0]
        is_text = is_shared and not _messages(record.get(column))
        are_whole = {is_text and _said(side[0])[0] != "assistant" for side in sides}
        if len(are_whole) > 1:
            raise _bad_pair("one side is a whole conversation, and the other is an answer")
        if True in are_whole and ("user", shared[0]["content"].strip()) not in map(_said, sides[0]):
            raise unread(column, "the messages have another prompt")
        if True in are_whole or not is_shared:
            return chat, [{**beside, "messages": side} for side in sides], None
        if all(side[: len(shared)] == shared for side in sides):
            sides = [side[len(shared) :] for side in sides]
        return chat, [{**beside, "messages": shared + side} for side in sides], len(shared)

    def _turns(self, record: Record, name: str, role: str) -> list[Any]:
        """Return the messages of some fields; a text is a message of `role`."""
        columns = self.data.columns(name)
        lists = [_messages(record.get(column)) for column in columns]
        if all(lists):
            return [message for messages in lists for message in messages]
        return [{"role": role, "content": joined_text(record, columns, self.data)}]


def _begun_together(*sides: Encoded) -> list[Encoded]:
    """Let the targets of both sides begin behind the same tokens.

    The end of a prompt may be one token with the beginning of one answer.
    """
    firsts = [targets.index(True) for _, targets in sides if any(targets)]
    begin = min([num_common(*(tokens for tokens, _ in sides)), *firsts])
    return [(t, [any(targets) and i >= begin for i in range(len(t))]) for t, targets in sides]


def _messages(value: Any) -> list[Any]:
    """Return the messages that a field has, which may be text in JSON; none of any other value."""
    value = from_json(value)
    value = [value] if isinstance(value, dict) else value
    first = from_json(value[0]) if isinstance(value, list) and value else None
    return value if isinstance(first, dict) and {"role", "from"} & first.keys() else []


def _said(message: Any) -> tuple[str, str]:
    """Return who speaks in a message, and its text if it is one."""
    message = from_json(message)
    role, content = (
        message.get(name, message.get(other))
        for name, other in (("role", "from"), ("content", "value"))
    )
    return SHAREGPT_ROLES.get(role, role), str(content).strip()


def _num_shared(read: Sequence[Sequence[Message]]) -> int:
    """Return how many messages whole conversations share.

    They are those that are equal, and of an answer with a label all but the last. Where one side is
    the beginning of the other, they end with the last one that is no answer.
    """
    num = sum(1 for _ in itertools.takewhile(lambda m: m[0] == m[-1], zip(*read)))
    shortest = min(map(len, read))
    if len(read) == 1 or num == shortest:
        num = shortest - 1
        while num and len(read) > 1 and read[0][num - 1]["role"] == "assistant":
            num -= 1
    if all(message["role"] != "user" for message in read[0][:num]):
        raise _bad_pair("both sides have no message of a user in common")
    return num


def _bad_pair(problem: str) -> BadDocument:
    return BadDocument("bad pair", f"{problem}; {CORRECT_LINE}")


def mismatched(sides: Sequence[Encoded], others: Sequence[Encoded]) -> list[Encoded]:
    """Return a side with the prompt of an answer with a label, and another document's answer."""
    (tokens, targets), (other, is_answer) = (
        next((side for side in given if side[0]), NOTHING) for given in (sides, others)
    )
    prompt, begin = tokens[: _num_prompt(targets)], _num_prompt(is_answer)
    answer = [*prompt, *other[begin:]], [*[False] * len(prompt), *is_answer[begin:]]
    return [answer if side[0] else NOTHING for side in sides]


def _num_prompt(targets: Sequence[bool]) -> int:
    """Return how many tokens stand before the first target."""
    return targets.index(True) if True in targets else len(targets)


def document_of(
    sides: Sequence[Encoded], sequence_length: int, skips: bool, start: SlotState
) -> Document:
    """Return the document of a record, which fits into a row; `skips`: a longer one is empty.

    It has no target, and so is left out, where a side has none or both are equal.
    """
    most = sequence_length + 1
    is_long = sum(len(tokens) for tokens, _ in sides) > most
    if is_long:
        sides = [NOTHING, NOTHING] if skips else _cut(sides, most)
    (chosen, _), (rejected, _) = sides
    masks = [np.array([False, *targets[1:]][: len(targets)], bool) for _, targets in sides]
    is_used = chosen != rejected and all(mask.any() for mask in masks if len(mask))
    tokens = np.array([*chosen, *rejected], np.int32)
    targets = np.concatenate(masks) & is_used
    return Document(tokens, targets, start, is_long=is_long, rejected_at=len(chosen))


def equal_sides(document: Document) -> str:
    """Return the reason to leave out a document whose sides are equal; nothing where they differ.

    Those of other formats have no sides.
    """
    chosen, rejected = np.split(document.tokens, [document.rejected_at or 0])
    if not len(chosen) or not np.array_equal(chosen, rejected):
        return ""
    return f"{EQUAL} once cut" if document.is_long else EQUAL


def _cut(sides: Sequence[Encoded], most: int) -> list[Encoded]:
    """Return sides with at most `most` tokens together, of which one may be empty.

    The prompt loses its first tokens on both sides alike, all but the last if need be. Then the
    answers lose their last ones, the longer answer first.
    """
    used = [zip(*side) for side in sides if side[0]]
    both = itertools.takewhile(lambda at: len({*at}) == 1 and not at[0][1], zip(*used))
    over, num_shared = sum(len(tokens) for tokens, _ in sides) - most, sum(1 for _ in both)
    drop = min(-(-over // len(used)), max(num_shared - 1, 0))
    lengths = [max(len(tokens) - drop, 0) for tokens, _ in sides]
    first = min(lengths[0], max(most - min(lengths), -(-most // 2)))
    ends = drop + first, drop + min(lengths[1], most - first)
    return [(tokens[drop:end], targets[drop:end]) for (tokens, targets), end in zip(sides, ends)]
