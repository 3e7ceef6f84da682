"""From the fields of a document to tokens, and which of them are targets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.config import Data, UserError
from shardwise.data.bounds import bounded
from shardwise.data.packing import Document, Row, pack_joined, pack_none
from shardwise.data.state import SlotState
from shardwise.data.text import BadDocument, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
"""Tokens, and whether each is a target."""

Piece = tuple[int, int]
"""One of so many equal pieces of a document's characters, counted from 0."""

WHOLE: Piece = (0, 1)

NO_TARGET = "no target"
"""Why a document is left out that has nothing to predict; it is no mistake, whatever `data.on_error` says."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of a dialogue that any chat template may write; a template can know others (`known_roles`)."""

MOST_CHARACTERS = 1_000_000
"""What a chat template may add to a dialogue; and a hundred times the dialogue."""

LIST_TOKENS = ("string", "comma")
"""What a list of strings in a template is made of, as Jinja's lexer names it."""


@dataclass(frozen=True)
class Encoder:
    """From documents to rows: the tokenizer, what is a target, and how rows are packed."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    fill: int  # token that fills up a row
    end_of_text: int | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: Data) -> Encoder:
        """An encoder for `data.format` and `data.packing`; UserError if the tokenizer lacks what they take."""
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        if data.packing != "none" and eos is None:
            raise UserError(
                f"data.packing {data.packing} joins documents by eos_token, which the tokenizer lacks; use none"
            )
        fill = pad if pad is not None else eos
        if fill is None:
            raise UserError("the tokenizer has neither pad_token nor eos_token to fill up rows with; give it one")
        if data.format != "text" and not tokenizer.is_fast:
            raise UserError(f"data.format {data.format} takes a fast tokenizer, which knows where its tokens are")
        if data.format == "chat" and not isinstance(tokenizer.chat_template, str):
            raise UserError("data.format chat takes a tokenizer with one chat template; give it a chat_template")
        return cls(tokenizer, data, fill, eos)

    def check(self, record: Record) -> None:
        """Render a dialogue once within bounds on time, memory and size, before any is read without them.

        UserError where the chat template goes beyond them; BadDocument as from `document`.
        """
        if self.data.format != "chat":
            return
        template: Any = self.tokenizer.chat_template
        messages = _messages(record, known_roles(template))
        with bounded("the tokenizer's chat template"):
            text = _rendered(lambda: self.tokenizer.apply_chat_template(messages, tokenize=False))
        if len(text) > MOST_CHARACTERS + 100 * len(str(messages)):
            raise UserError(f"the tokenizer's chat template writes {len(text):,} characters for one row; mend it")

    def document(self, record: Record, start: SlotState, piece: Piece = WHOLE) -> Document:
        """The tokens of a document, or of a piece of a text, that begins at `start`.

        After a text or a dialogue stands the end-of-text token, where documents are joined; it is a target after a
        text. With `isolated` packing the first token of a document is no target: it would be predicted from the
        document before. BadDocument where the fields cannot be used.
        """
        match self.data.format:
            case "text":
                text = text_of(record, self.data.text_field)
                begin, end = (len(text) * (piece[0] + i) // piece[1] for i in (0, 1))
                tokens, targets = encode_text(self.tokenizer, text[begin:end])
            case "completion":
                tokens, targets = encode_completion(self.tokenizer, record)
            case "chat":
                tokens, targets = encode_chat(self.tokenizer, record)
        if self.data.packing != "none" and tokens and tokens[-1] != self.end_of_text:
            tokens = [*tokens, self.end_of_text]
            targets = [*targets, self.data.format == "text"]
        mask = np.array(targets, bool)
        if self.data.packing == "isolated":
            mask[:1] = False
        return Document(np.array(tokens, np.int32), mask, start)

    def why_no_target(self, record: Record) -> str:
        """Return the reason to count for a document that was encoded and has nothing to predict."""
        if self.data.format == "chat":
            roles = {message["role"] for message in record["messages"]}
            if "assistant" not in roles:
                return f"no assistant turn, only {' and '.join(sorted(roles))}"
        return NO_TARGET

    def rows(self, documents: Iterable[Document]) -> Iterator[Row]:
        """The rows of these documents."""
        pack = pack_none if self.data.packing == "none" else pack_joined
        return pack(documents, self.data.sequence_length, self.fill)


def text_of(record: Record, field: str) -> str:
    """The string in a field of a document; BadDocument where there is none that a tokenizer takes."""
    if field not in record:
        way_out = f"set data.text_field to one of the line's fields: {', '.join(record)}"
        if field in ("prompt", "completion", "messages"):
            way_out = f"its fields are {', '.join(record)}; mend or remove the line, or set data.format"
        raise BadDocument("missing field", f"no field {field!r}; {way_out}")
    return _string(record[field], f"field {field!r}")


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadDocument("wrong type", f"{what} holds a {type(value).__name__}, not a string; mend or remove the line")
    try:
        value.encode()  # JSON can escape half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError:
        raise BadDocument("not UTF-8", f"{what} escapes half a surrogate pair; mend or remove the line") from None
    return value


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """The tokens of a text, with the special tokens that the tokenizer itself adds; none for no text."""
    tokens = _tokenize(tokenizer, text)["input_ids"] if text else []
    return tokens, [True] * len(tokens)


def encode_completion(tokenizer: PreTrainedTokenizerBase, record: Record) -> Encoded:
    """Prompt and completion as one text; a token that holds a character of the completion is a target.

    So is the end-of-text token, with which a completion ends whatever the packing: without it a model would not learn
    to stop. An empty completion has no target.
    """
    prompt, completion = text_of(record, "prompt"), text_of(record, "completion")
    encoded = _tokenize(tokenizer, prompt + completion, return_offsets_mapping=True)
    tokens, end = encoded["input_ids"], tokenizer.eos_token_id
    targets = [stop > len(prompt) for _, stop in encoded["offset_mapping"]]
    if end is not None:
        if tokens[-1:] != [end]:
            tokens, targets = [*tokens, end], [*targets, False]
        targets[-1] = True
    return tokens, targets if completion else [False] * len(tokens)


def encode_chat(tokenizer: PreTrainedTokenizerBase, record: Record) -> Encoded:
    """A dialogue as the tokenizer's chat template writes it; what the assistant says is a target.

    That is what the template itself marks as generated. One that marks nothing is asked for the beginnings of the
    dialogue: what it adds to a generation prompt for a turn of the assistant, down to the mark of the turn's end but
    without white space after it. UserError where it does not write a beginning as the beginning of the whole, and where
    it writes the assistant's header after the generation prompt: nobody could say where the words begin.
    """
    template: Any = tokenizer.chat_template
    messages = _messages(record, known_roles(template))
    if _marks_turns(template):
        options: Any = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = _rendered(lambda: tokenizer.apply_chat_template(messages, **options, verbose=False))
        return encoded["input_ids"], [mark == 1 for mark in encoded["assistant_masks"]]

    def render(messages: list[Record], prompt: bool = False) -> str:
        return _rendered(lambda: tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))

    whole, spans = render(messages), []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            if turn == 0:
                raise BadDocument("bad chat", "the dialogue begins with the assistant; mend or remove the line")
            before, after = render(messages[:turn], prompt=True), render(messages[: turn + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise UserError(
                    "the tokenizer's chat template writes the beginning of a dialogue otherwise than the whole, so the "
                    "assistant's turns cannot be found; mark them in it by {% generation %} and {% endgeneration %}"
                )
            added = after[len(before) :]
            header = added[: max(added.find(message["content"].strip()), 0)].strip()
            if header and before == render(messages[:turn]):
                raise UserError(
                    f"the tokenizer's chat template writes {header[:40]!r} before what the assistant says, and not for "
                    "add_generation_prompt, so it would be learnt; let it do so, or mark the assistant's turns by "
                    "{% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(after.rstrip())))
    encoded = _tokenize(tokenizer, whole, add_special_tokens=False, return_offsets_mapping=True)
    held = [any(start < end and begin < stop for begin, end in spans) for start, stop in encoded["offset_mapping"]]
    return encoded["input_ids"], held


@functools.cache
def _marks_turns(template: str) -> bool:
    """Whether `{% generation %}` stands in a chat template, other than in a comment or a raw text."""
    tokens = itertools.pairwise(_template_tokens(template))
    return any(a.type == "block_begin" and (b.type, b.value) == ("name", "generation") for a, b in tokens)


def _template_tokens(template: str) -> list[Any]:
    """Return Jinja's tokens of a chat template; UserError where it is not valid Jinja."""
    import jinja2

    try:
        return list(jinja2.Environment().lexer.tokenize(template))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the tokenizer's chat template is not valid Jinja ({error}); mend it") from None


@functools.cache
def known_roles(template: str) -> tuple[str, ...]:
    """Return ROLES and the strings that a chat template compares something with, by `==` or by `in` and a list.

    Any other role would be written into the text as it is, and what it says would not be learnt.
    """
    compared: list[str] = []
    before, in_list = "", False
    for token in _template_tokens(template):
        if token.type == "string" and (in_list or before == "eq"):
            compared.append(token.value)
        in_list = before == "in" if token.type in ("lbracket", "lparen") else in_list and token.type in LIST_TOKENS
        before = token.value if token.type == "name" else token.type
    return (*ROLES, *sorted(set(compared) - set(ROLES)))


def _messages(record: Record, roles: Sequence[str]) -> list[Record]:
    messages = record.get("messages")
    if "messages" not in record:
        text_of(record, "messages")
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise BadDocument("bad chat", "field 'messages' is not a list of objects; mend or remove the line")
    for number, message in enumerate(messages, 1):
        for field in ("role", "content"):
            if message.get(field) is None:
                raise BadDocument("bad chat", f"message {number} has no field {field!r}; mend or remove the line")
            _string(message[field], f"field {field!r} of message {number}")
    if unknown := sorted({message["role"] for message in messages} - set(roles)):
        names = ", ".join(repr(role[:40]) for role in unknown[:5])
        raise BadDocument(
            "unknown role",
            f"nobody knows the role {names}, so nothing of what it says would be learnt; rename it to one of "
            f"{', '.join(roles)}",
        )
    # A table has a null in each row for a field that only other rows have; a template would take it for given.
    return [{field: value for field, value in message.items() if value is not None} for message in messages]


def _rendered(render: Callable[[], Any]) -> Any:
    try:
        return render()
    except (MemoryError, OverflowError) as error:  # Jinja's sandbox raises the latter for a long range
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UserError(f"the tokenizer's chat template asks for too much ({what}); mend it") from None
    except Exception as error:  # what a template may make Jinja raise is anything
        raise BadDocument("bad chat", f"the chat template refuses it ({error}); mend or remove the line") from None


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> Any:
    return tokenizer(text, return_attention_mask=False, return_token_type_ids=False, verbose=False, **options)
