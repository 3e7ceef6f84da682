"""From the fields of a document to its tokens, and which of the tokens are targets."""

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
"""(number, of how many): one of several equal pieces of a document's characters, from 0."""

ALL: Piece = (0, 1)
"""The whole document as one piece."""

NO_TARGET = "no target"
"""The reason to leave out a document without a target. It is no mistake, whatever `on_error` is."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles that every chat template may handle. A template can have others (`known_roles`)."""

MOST_CHARACTERS = 1_000_000
"""A chat template may write so many characters more than a hundred times those of the dialogue."""

LIST_TOKENS = ("string", "comma")
"""The tokens of a list of strings in a template, by the names of Jinja's lexer."""

_CORRECT_LINE = "correct or remove the line"
_MARK_TURNS = "mark the assistant's turns in it with {% generation %} and {% endgeneration %}"


@dataclass(frozen=True)
class Encoder:
    """Turns documents into rows, by the tokenizer, the format and the packing of a run."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    fill: int  # the token of padding
    end_of_text: int | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: Data) -> Encoder:
        """Make the encoder of a run; UserError where the tokenizer lacks what it needs."""
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        if data.packing != "none" and eos is None:
            need = f"data.packing {data.packing} joins documents with eos_token"
            raise UserError(f"{need}, which the tokenizer lacks; use none")
        fill = pad if pad is not None else eos
        if fill is None:
            raise UserError("the tokenizer has no pad_token and no eos_token to pad rows; add one")
        if data.format != "text" and not tokenizer.is_fast:
            raise UserError(
                f"data.format {data.format} needs a fast tokenizer, which knows the characters of "
                "each token; use another tokenizer"
            )
        if data.format == "chat" and not isinstance(tokenizer.chat_template, str):
            need = "data.format chat needs a tokenizer with one chat template"
            raise UserError(f"{need}; set its chat_template")
        return cls(tokenizer, data, fill, eos)

    def check(self, record: Record) -> None:
        """Render one dialogue within limits on time, memory and size.

        Call it once before dialogues are rendered without these limits. UserError where the chat
        template exceeds one; BadDocument as from `document`.
        """
        if self.data.format != "chat":
            return
        template: Any = self.tokenizer.chat_template
        messages = _messages(record, known_roles(template))
        with bounded("the tokenizer's chat template"):
            text = _rendered(lambda: self.tokenizer.apply_chat_template(messages, tokenize=False))
        if len(text) > MOST_CHARACTERS + 100 * len(str(messages)):
            raise UserError(
                f"the tokenizer's chat template writes {len(text):,} characters for one row; "
                "change it, or use another one"
            )

    def document(self, record: Record, start: SlotState, piece: Piece = ALL) -> Document:
        """Return the tokens of a document, or of a piece of a text, that begins at `start`.

        Where documents are joined, the end-of-text token follows a text or dialogue. After a text
        it is a target. With `isolated` packing the first token of a document is no target, since it
        would be predicted from the document before. BadDocument where the fields cannot be used.
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
        """Return the reason by which to count a document that has no target."""
        if self.data.format == "chat":
            roles = {message["role"] for message in record["messages"]}
            if "assistant" not in roles:
                return f"no assistant turn, only {' and '.join(sorted(roles))}"
        return NO_TARGET

    def rows(self, documents: Iterable[Document]) -> Iterator[Row]:
        """Pack these documents into rows."""
        pack = pack_none if self.data.packing == "none" else pack_joined
        return pack(documents, self.data.sequence_length, self.fill)


def text_of(record: Record, field: str) -> str:
    """Return a field of a document; BadDocument where it is no string for a tokenizer."""
    if field not in record:
        way_out = f"set data.text_field to one of the line's fields: {', '.join(record)}"
        if field in ("prompt", "completion", "messages"):
            way_out = f"its fields are {', '.join(record)}; {_CORRECT_LINE}, or set data.format"
        raise BadDocument("missing field", f"no field {field!r}; {way_out}")
    return _string(record[field], f"field {field!r}")


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        kind = type(value).__name__
        message = f"{name} is a {kind}, not a string; {_CORRECT_LINE}"
        raise BadDocument("wrong type", message)
    try:
        value.encode()  # JSON can escape half of a surrogate pair, which no tokenizer accepts
    except UnicodeEncodeError:
        message = f"{name} escapes half of a surrogate pair; {_CORRECT_LINE}"
        raise BadDocument("not UTF-8", message) from None
    return value


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """Encode a text; all tokens are targets. An empty text has no tokens, not even special ones."""
    tokens = _tokenize(tokenizer, text)["input_ids"] if text else []
    return tokens, [True] * len(tokens)


def encode_completion(tokenizer: PreTrainedTokenizerBase, record: Record) -> Encoded:
    """Encode prompt and completion as one text.

    The targets are the tokens with characters of the completion. A completion ends with the
    end-of-text token, whatever the packing. That is a target too: from it a model learns to stop.
    An empty completion has no target.
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
    """Encode a dialogue with the tokenizer's chat template; the assistant's words are targets.

    A template can mark what is generated, and then these tokens are the targets. For a template
    without marks, `_assistant_spans` finds the words. UserError where it cannot.
    """
    template: Any = tokenizer.chat_template
    messages = _messages(record, known_roles(template))
    if _marks_turns(template):
        encoded = _rendered(
            lambda: tokenizer.apply_chat_template(
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                verbose=False,
            )
        )
        return encoded["input_ids"], [mark == 1 for mark in encoded["assistant_masks"]]
    text, spans = _assistant_spans(tokenizer, messages)
    encoded = _tokenize(tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)
    targets = [
        any(start < span_end and span_start < end for span_start, span_end in spans)
        for start, end in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], targets


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Record]
) -> tuple[str, list[tuple[int, int]]]:
    """Render a dialogue, and find the characters (start, end) of each turn of the assistant.

    For each such turn the template renders the dialogue before it, with a generation prompt, and
    the dialogue up to its end. The turn is the difference, with the mark of its end but without
    white space after it.

    UserError where the template renders the beginning of a dialogue differently from the whole
    dialogue, or has no generation prompt and writes the assistant's header into the difference.
    Then it is unknown where the words begin.
    """

    def render(messages: list[Record], prompt: bool = False) -> str:
        apply = tokenizer.apply_chat_template
        return _rendered(lambda: apply(messages, tokenize=False, add_generation_prompt=prompt))

    text = render(messages)
    spans: list[tuple[int, int]] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if turn == 0:
            problem = f"the dialogue begins with the assistant; {_CORRECT_LINE}"
            raise BadDocument("bad chat", problem)
        before, after = render(messages[:turn], prompt=True), render(messages[: turn + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise UserError(
                "the tokenizer's chat template renders the beginning of a dialogue differently "
                "from the whole dialogue, so the assistant's turns cannot be found; "
                f"{_MARK_TURNS}"
            )
        added = after[len(before) :]
        header = added[: max(added.find(message["content"].strip()), 0)].strip()
        if header and before == render(messages[:turn]):
            raise UserError(
                f"the tokenizer's chat template writes {header[:40]!r} before the words of the "
                "assistant, but not with add_generation_prompt, so the model would learn to write "
                f"it; let add_generation_prompt write it, or {_MARK_TURNS}"
            )
        spans.append((len(before), len(after.rstrip())))
    return text, spans


@functools.cache
def _marks_turns(template: str) -> bool:
    """Return whether a chat template has `{% generation %}` outside of comments and raw text."""
    for token, after in itertools.pairwise(_template_tokens(template)):
        if token.type == "block_begin" and (after.type, after.value) == ("name", "generation"):
            return True
    return False


def _template_tokens(template: str) -> list[Any]:
    """Return Jinja's tokens of a chat template; UserError where it is not valid Jinja."""
    import jinja2

    try:
        return list(jinja2.Environment().lexer.tokenize(template))
    except jinja2.TemplateSyntaxError as error:
        what = f"the tokenizer's chat template is not valid Jinja ({error})"
        raise UserError(f"{what}; correct it") from None


@functools.cache
def known_roles(template: str) -> tuple[str, ...]:
    """Return ROLES, and the strings with which a chat template compares by `==` or `in` a list.

    A template writes any other role into the text as it is, and its words are never targets.
    """
    compared: list[str] = []
    before, in_list = "", False
    for token in _template_tokens(template):
        if token.type == "string" and (in_list or before == "eq"):
            compared.append(token.value)
        opens_list = before == "in" and token.type in ("lbracket", "lparen")
        in_list = opens_list or (in_list and token.type in LIST_TOKENS)
        before = token.value if token.type == "name" else token.type
    return (*ROLES, *sorted(set(compared) - set(ROLES)))


def _messages(record: Record, roles: Sequence[str]) -> list[Record]:
    """Return the messages of a dialogue; BadDocument where they cannot be used."""
    if "messages" not in record:
        text_of(record, "messages")
    messages = record["messages"]
    is_list = isinstance(messages, list) and len(messages) > 0
    if not is_list or not all(isinstance(message, dict) for message in messages):
        problem = f"field 'messages' is not a list of objects; {_CORRECT_LINE}"
        raise BadDocument("bad chat", problem)
    for number, message in enumerate(messages, 1):
        for field in ("role", "content"):
            if message.get(field) is None:
                problem = f"message {number} has no field {field!r}; {_CORRECT_LINE}"
                raise BadDocument("bad chat", problem)
            _string(message[field], f"field {field!r} of message {number}")
    if unknown := sorted({message["role"] for message in messages} - set(roles)):
        names = ", ".join(repr(role[:40]) for role in unknown[:5])
        raise BadDocument(
            "unknown role",
            f"unknown role {names}, whose words the model would never learn; "
            f"rename it to one of {', '.join(roles)}; or {_CORRECT_LINE}",
        )
    # A table has null for a field that only other rows have. A template would take it as given.
    return [{key: value for key, value in m.items() if value is not None} for m in messages]


def _rendered(render: Callable[[], Any]) -> Any:
    """Return the result of a chat template; UserError or BadDocument where it raises."""
    try:
        return render()
    except (MemoryError, OverflowError) as error:  # Jinja raises the latter for a long range
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise UserError(
            f"the tokenizer's chat template needs too much ({what}); change it, or use another one"
        ) from None
    except Exception as error:  # a template can raise anything in Jinja
        problem = f"the chat template refuses it ({error}); {_CORRECT_LINE}"
        raise BadDocument("bad chat", problem) from None


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> Any:
    options |= {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    return tokenizer(text, **options)
