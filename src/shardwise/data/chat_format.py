"""From a dialogue to tokens and targets, by any chat template (`data.format: chat`)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.config import Data, UserError
from shardwise.data.bounds import LATER_CPU_SECONDS, TimeLimit, bounded, time_limit
from shardwise.data.chats import Message, Refused, Render, Turn, Undecidable, find_turns
from shardwise.data.messages import (
    bad_chat,
    check_text_only,
    forms,
    is_trained,
    read_message,
    read_tools,
)
from shardwise.data.record import CORRECT_LINE, BadDocument, OutOfBounds, Record
from shardwise.data.text import read_text
from shardwise.data.tokenizer import tokens_and_places

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles that every chat template may handle. A template can have others (`known_roles`)."""

MOST_CHARACTERS = 1_000_000
"""A chat template may write so many characters more than a hundred times those of the dialogue."""

SYSTEM: Message = {"role": "system", "content": "Be brief."}
PLAIN: list[Message] = [
    {"role": "user", "content": "What is one and one?"},
    {"role": "assistant", "content": "Two."},
]
"""A dialogue that every chat template should write."""

Encoded = tuple[list[int], list[bool]]
"""Tokens, and whether each is a target."""

LIST_TOKENS = ("string", "comma")
"""The tokens of a list of strings in a template, by the names of Jinja's lexer."""


@dataclass(frozen=True)
class ChatFormat:
    """The chat template of a run, and which of the assistant's turns are trained on."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    template: str
    tools: list[Any] | None
    """The tools of every dialogue, from the file that `data.tools` names."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: Data) -> ChatFormat:
        """Read the template and the tools of a run; UserError where there are none to read."""
        template: Any = tokenizer.chat_template
        if isinstance(template, dict):
            name = "tool_use" if data.tools and "tool_use" in template else "default"
            template = template.get(name)
        if not isinstance(template, str):
            need = "data.format chat needs a chat template, which the tokenizer lacks"
            raise UserError(f"{need}; set data.chat_template to a file with one")
        _template_tokens(template)
        if data.tools is not None and "tools" not in template:
            raise UserError(
                "data.tools is set, but the chat template does not write tools; leave it out"
            )
        options = inspect.signature(tokenizer.apply_chat_template).parameters
        if taken := sorted(
            set(data.template_arguments or {}) & {*options, "messages", "documents"}
        ):
            raise UserError(f"data.template_arguments has {taken[0]}, which is not for a template")
        tools = None
        if data.tools is not None and data.tools.endswith(".json"):
            text = read_text(data.tools, "data.tools")
            tools = read_tools(text, f"data.tools: {data.tools}", _bad_file)
        return cls(tokenizer, data, template, tools)

    def check(self, record: Record) -> None:
        """Render one dialogue within limits on time, memory and size.

        Call it once before dialogues are rendered with a wider limit on time alone. UserError where
        the chat template exceeds one; BadDocument as from `encode`.
        """
        messages = self.messages(record)
        with bounded("the chat template"):
            try:
                text = self._renderer(self._tools_of(record))(messages, False)
            except Refused:
                return  # it may take the dialogue in another form, and says so if not
        if len(text) > MOST_CHARACTERS + 100 * len(str(messages)):
            raise UserError(
                f"the chat template writes {len(text):,} characters for one row; change it, or use "
                "another one"
            )

    def encode(self, record: Record) -> list[Encoded]:
        """Return the tokens of a dialogue, and which of them are targets.

        With `data.turns: separate` there is one result for each turn that is trained on. It ends
        with this turn, and the turns before it are written as at inference.
        """
        messages = self.messages(record)
        trained = self._trained(messages)
        tools = self._tools_of(record)
        if self.data.turns == "together":
            return [self._encode(messages, trained, tools)]
        return [self._encode(messages[: turn + 1], [turn], tools) for turn in trained]

    def messages(self, record: Record) -> list[Message]:
        """Return the messages of a dialogue in one form; BadDocument where they cannot be used."""
        (field,) = self.data.columns("messages")
        if field not in record:
            names = ", ".join(record)
            way_out = f"its fields are {names}; {CORRECT_LINE}, or set data.fields or data.format"
            if "conversations" in record:
                way_out = "it has conversations: set data.fields: {messages: conversations}"
            raise BadDocument("missing field", f"no field {field!r}; {way_out}")
        check_text_only(record, "the dialogue", ("images", "videos", "audios"))
        messages = record[field]
        is_list = isinstance(messages, list) and len(messages) > 0
        if not is_list or not all(isinstance(message, dict) for message in messages):
            raise bad_chat(f"field {field!r} is not a list of objects")
        read = [read_message(message, number) for number, message in enumerate(messages, 1)]
        roles = known_roles(self.template)
        if unknown := sorted({message["role"] for message in read} - set(roles)):
            names = ", ".join(repr(role[:40]) for role in unknown[:5])
            raise BadDocument(
                "unknown role",
                f"unknown role {names}, whose words the model would never learn; "
                f"rename it to one of {', '.join(roles)}; or {CORRECT_LINE}",
            )
        return read

    def _trained(self, messages: Sequence[Message]) -> list[int]:
        """Return the numbers of the messages that are trained on."""
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.data.train_on == "last":
            numbers = numbers[-1:]
        return [i for i in numbers if is_trained(messages[i])]

    def _tools_of(self, record: Record) -> list[Any] | None:
        if self.tools is not None or self.data.tools is None:
            return self.tools
        if self.data.tools not in record:
            names = ", ".join(record)
            problem = f"no field {self.data.tools!r} (data.tools); its fields are {names}"
            raise BadDocument(
                "missing field", f"{problem}; {CORRECT_LINE}, or give null for no tools"
            )
        return read_tools(record[self.data.tools], f"field {self.data.tools!r}", bad_chat)

    def _encode(
        self, messages: Sequence[Message], trained: Sequence[int], tools: list[Any] | None
    ) -> Encoded:
        text, turns = self._turns(messages, tools)
        spans = [(turn.start, turn.end) for turn in turns if turn.message in trained]
        if self.data.train_on == "all":
            left_out = [turn for turn in turns if not is_trained(messages[turn.message])]
            starts = [0, *(turn.end for turn in left_out)]
            ends = [*(turn.start for turn in left_out), len(text.rstrip())]
            spans = list(zip(starts, ends))
        tokens, places = tokens_and_places(self.tokenizer, text, add_special_tokens=False)
        targets = [
            any(start < span_end and span_start < end for span_start, span_end in spans)
            for start, end in places
        ]
        last = turns[-1] if turns else None
        eos = self.tokenizer.eos_token_id
        ends_open = last is not None and last.message == len(messages) - 1 and not last.has_end_mark
        if ends_open and last.message in trained and eos is not None and tokens[-1:] != [eos]:
            # The template marks no end, from which the model could learn to stop.
            tokens, targets = [*tokens, eos], [*targets, True]
        return tokens, targets

    def _turns(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, list[Turn]]:
        """Find the turns of a dialogue, in the first of its forms that the template can write.

        Templates differ in whether a call has its arguments as an object or as text, and a content
        as text or as a list of parts.
        """
        problems: list[Exception] = []
        found: list[tuple[str, list[Turn]]] = []
        for form in forms(messages):
            try:
                text, turns = self._turns_of_form(form, tools)
            except (Refused, Undecidable) as problem:
                problems.append(problem)
                continue
            found.append((text, turns))
            contents = {turn.message: messages[turn.message]["content"] for turn in turns}
            if all(contents[turn.message].strip() in text[turn.start : turn.end] for turn in turns):
                return text, turns
        if found:  # the template changes contents, or leaves out that of a tool call
            return found[0]
        if isinstance(problems[0], Refused):
            problem = f"the chat template refuses it ({problems[0]})"
            if self._fails_on_plain():
                raise BadDocument(
                    "bad chat template",
                    f"{problem}, and a plain question with its answer too, so the mistake is in "
                    "the template; correct it, or set data.chat_template to another one",
                )
            raise BadDocument("bad chat", f"{problem}; {CORRECT_LINE}")
        marks = "mark them in the template with {% generation %} and {% endgeneration %}"
        if self._fails_on_plain():
            raise BadDocument(
                "bad chat template",
                f"the assistant's turns cannot be found: {problems[0]}; nor can they in a plain "
                f"question with its answer, so the template is the reason; {marks}",
            )
        raise BadDocument(
            "no turns found",
            f"the assistant's turns cannot be found: {problems[0]}; {CORRECT_LINE}, or {marks}",
        )

    def _turns_of_form(
        self, form: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, list[Turn]]:
        if _marks_turns(self.template):
            return self._marked_turns(form, tools)
        return find_turns(self._renderer(tools), form)

    def _fails_on_plain(self) -> bool:
        """Return whether the template fails on a plain dialogue too, in every form."""
        for messages in (PLAIN, [SYSTEM, *PLAIN]):
            for form in forms(messages):
                with contextlib.suppress(Refused, Undecidable):
                    self._turns_of_form(form, self.tools)
                    return False
        return True

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a user's question up to where the assistant answers it.

        UserError where the template writes no dialogue that ends there.
        """
        problem = ""
        for form in forms([{"role": "user", "content": question}]):
            try:
                text = self._renderer(self.tools)(form, True)
            except Refused as refused:
                problem = problem or str(refused)
                continue
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._fails_on_plain():
            raise UserError(
                f"the chat template refuses a plain question ({problem}); correct it, or set "
                "data.chat_template to another one"
            )
        raise UserError(
            f"training.sample: the chat template refuses a user's message alone ({problem}); "
            "leave it out"
        )

    def _marked_turns(
        self, messages: Sequence[Message], tools: list[Any] | None
    ) -> tuple[str, list[Turn]]:
        """Return the turns that a template with `{% generation %}` marks itself."""
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), (marks,) = _guarded(
            lambda: render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self._variables(),
            )
        )
        speakers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marks) != len(speakers):
            raise Undecidable(
                f"the chat template marks {len(marks)} turns of {len(speakers)} as generated"
            )
        turns = []
        for i, (start, end) in zip(speakers, marks):
            content = messages[i]["content"]
            is_open = isinstance(content, str) and text[start:end].rstrip().endswith(
                content.rstrip()
            )
            turns.append(Turn(i, start, end, has_end_mark=not (is_open and content.strip())))
        return text, turns

    def _variables(self) -> dict[str, Any]:
        return {**self.tokenizer.special_tokens_map, **(self.data.template_arguments or {})}

    def _renderer(self, tools: list[Any] | None) -> Render:
        def render(messages: Sequence[Message], prompt: bool) -> str:
            return _guarded(
                lambda: self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=self.template,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **(self.data.template_arguments or {}),
                )
            )

        return render


def _guarded(render: Callable[[], Any]) -> Any:
    """Return the result of a chat template; Refused where it raises, OutOfBounds without end."""
    try:
        with time_limit(LATER_CPU_SECONDS):
            return render()
    except TimeLimit as limit:
        if limit.cpu_seconds < LATER_CPU_SECONDS:
            raise  # the limit of `check`
        what = f"more than {LATER_CPU_SECONDS:g} s"
    except (MemoryError, OverflowError) as error:  # Jinja raises the latter for a long range
        what = f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception as error:  # a template can raise anything in Jinja
        raise Refused(str(error)) from None
    raise OutOfBounds(f"the chat template needs too much ({what}); change it, or use another one")


def _bad_file(problem: str) -> UserError:
    return UserError(f"{problem}; give a JSON file with a list of tools")


@functools.cache
def _marks_turns(template: str) -> bool:
    """Return whether a chat template has `{% generation %}` outside of comments and raw text."""
    for token, after in itertools.pairwise(_template_tokens(template)):
        if token.type == "block_begin" and (after.type, after.value) == ("name", "generation"):
            return True
    return False


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


def _template_tokens(template: str) -> list[Any]:
    """Return Jinja's tokens of a chat template; UserError where it is not valid Jinja."""
    import jinja2

    try:
        return list(jinja2.Environment().lexer.tokenize(template))
    except jinja2.TemplateSyntaxError as error:
        what = f"the chat template is not valid Jinja ({error})"
        raise UserError(f"{what}; correct it") from None
