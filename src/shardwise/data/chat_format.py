"""From a dialogue to tokens and targets, by any chat template (`data.format: chat`)."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.config import Data, UserError
from shardwise.data import chats, columns
from shardwise.data.bounds import LATER_CPU_SECONDS, TimeLimit, bounded, time_limit
from shardwise.data.chats import LeftOut, Refused, Turn, Undecidable, check_written, find_turns
from shardwise.data.files import read_text
from shardwise.data.known_forms import given_value
from shardwise.data.messages import (
    Message,
    bad_chat,
    check_flags,
    forms,
    from_json,
    is_trained,
    read_message,
    read_objects,
    writes_text_in_quotes,
)
from shardwise.data.record import CORRECT_LINE, BadDocument, OutOfBounds, Record
from shardwise.data.templates import known_roles, marks_turns, names_in, template_tokens
from shardwise.data.thinking import thinking_blocks, without, writes_thinking
from shardwise.data.tokenizer import tokens_and_places

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CHARACTERS = 1_000_000
"""A chat template may write so many characters more than a hundred times those of the dialogue."""

BRIEF: Message = {"role": "system", "content": "Be brief."}
PLAIN: list[Message] = [
    {"role": "user", "content": "What is one and one?"},
    {"role": "assistant", "content": "Two."},
]
"""A dialogue that every chat template should write."""

Encoded = tuple[list[int], list[bool]]
"""Tokens, and whether each is a target."""


@dataclass(frozen=True)
class ChatFormat:
    """The chat template of a run, and which of the assistant's turns are trained on."""

    tokenizer: PreTrainedTokenizerBase
    data: Data
    template: str
    tool_template: str
    """The template of dialogues with tools, where the tokenizer has one of its own for them."""
    given: dict[str, Any]
    """Variables, tools and documents, which a template gets beside the messages."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: Data) -> ChatFormat:
        """Read the template and the tools of a run; UserError where there are none to read."""
        template: Any = tokenizer.chat_template
        templates = template if isinstance(template, dict) else {"default": template}
        tool_template = templates.get("tool_use", templates.get("default"))
        has_file = data.tools is not None and data.tools.endswith(".json")
        template = tool_template if has_file else templates.get("default", tool_template)
        if not isinstance(template, str):
            need = "data.format chat or preference needs a chat template, which the tokenizer lacks"
            raise UserError(f"{need}; set data.chat_template to a file with one")
        template_tokens(template)
        if data.tools is not None and "tools" not in names_in(tool_template):
            raise UserError(
                "data.tools is set, but the chat template does not write tools; leave it out"
            )
        if data.train_on_thinking != "all" and not writes_thinking(template):
            raise UserError(
                f"data.train_on_thinking is {data.train_on_thinking}, but the chat template writes "
                "no <think>; leave it out"
            )
        given = dict(data.template_arguments or {})
        for name in sorted(reserved_of(tokenizer) & given.keys()):
            raise UserError(f"data.template_arguments has {name}, which is not for a template")
        if data.tools is not None and has_file:
            text, way = read_text(data.tools, "data.tools"), "give a JSON file with a list of tools"
            name = f"data.tools: {data.tools}"
            given["tools"] = read_objects(text, name, lambda what: UserError(f"{what}; {way}"))
        return cls(tokenizer, data, template, tool_template, given)

    def check(self, record: Record) -> None:
        """Render one dialogue within limits on time, memory and size.

        Call it once before dialogues are rendered with a wider limit on time alone. UserError where
        the chat template exceeds one; BadDocument as from `encode`.
        """
        messages = self.messages(record)
        with bounded("the chat template"):
            try:
                text = self.with_fields(record).render(messages, False)
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
        messages, chat = self.messages(record), self.with_fields(record)
        trained = self.trained(messages)
        if self.data.turns == "together":
            return [chat.encode_turns(messages, trained)[1]]
        return [chat.encode_turns(messages[: turn + 1], [turn])[1] for turn in trained]

    def messages(self, record: Record) -> list[Message]:
        """Return the messages of a dialogue in one form; BadDocument where they cannot be used.

        The first one may come from a field with a system message. Where `data.fields` names several
        fields, their messages follow each other, and only those of the last field are targets.
        """
        read: list[Message] = []
        for field in self.data.columns("messages"):
            read = [{**message, "train": False} for message in read]  # only the last field's are
            read += self._list(record, field, len(read) + 1)
        known = names_in(self.template) | {*self.data.unused}
        for number, message in enumerate(read, 1):
            check_flags(message, number, known)
        roles = known_roles(self.template)
        if unknown := sorted({message["role"] for message in read} - set(roles)):
            names = ", ".join(repr(role[:40]) for role in unknown[:5])
            raise BadDocument(
                "unknown role",
                f"unknown role {names}, whose words the model would never learn; "
                f"rename it to one of {', '.join(roles)}; or {CORRECT_LINE}",
            )
        for name, value in columns.given(record, self._beside(True)).items():
            system = read_message({"role": "system", "content": value}, f"field {name!r}")
            if read[0]["role"] not in ("system", "developer"):
                read = [system, *read]
            elif read[0]["content"] != system["content"]:
                raise columns.unread(name, "the messages have another system message")
        return read

    def _list(self, record: Record, field: str, first_number: int) -> list[Message]:
        """Return the messages in one field."""
        messages = from_json(given_value(record, field, self.data))
        if isinstance(messages, list):
            messages = list(map(from_json, messages))
        is_list = isinstance(messages, list) and len(messages) > 0
        if not is_list or not all(isinstance(message, dict) for message in messages):
            raise bad_chat(f"field {field!r} is not a list of objects, nor JSON text of one")
        return [
            read_message(message, f"message {number}")
            for number, message in enumerate(messages, first_number)
        ]

    def _beside(self, are_system: bool) -> list[str]:
        names = columns.fields_beside(self.data)
        return [name for name in names if (name in columns.SYSTEM) == are_system]

    def with_fields(self, record: Record) -> ChatFormat:
        """Return the format with the variables, tools and documents of a dialogue."""
        beside, fields = columns.given(record, self._beside(False)), dict(self.given)
        name = self.data.tools
        if name is None:
            name = next((name for name in columns.TOOLS if name in beside), "tools")
            tools = beside.pop(name, None)
        elif name in record or name.endswith(".json"):
            tools = record.get(name)
        else:
            problem = f"no field {name!r} (data.tools); its fields are {', '.join(record)}"
            way_out = f"{CORRECT_LINE}, or give null for no tools"
            raise BadDocument("missing field", f"{problem}; {way_out}")
        tools = read_objects(tools, f"field {name!r}", bad_chat)
        if tools and name == "functions":
            tools = [{"type": "function", "function": tool} for tool in tools]
        documents = read_objects(beside.pop("documents", None), "field 'documents'", bad_chat)
        variables = from_json(beside.pop(columns.VARIABLES, {}))
        if not isinstance(variables, dict) or reserved_of(self.tokenizer) & variables.keys():
            raise bad_chat(f"field {columns.VARIABLES!r} has no variables for a template")
        columns.check_all_read(record, tuple(beside), self.data)
        fields |= variables
        template = self.tool_template if tools else self.template
        for name, value in (("tools", tools), ("documents", documents)):
            if value and name not in names_in(template):
                raise columns.unread(name, "the chat template does not write it")
            if value:
                fields[name] = value
        return replace(self, template=template, given=fields)

    def trained(self, messages: Sequence[Message]) -> list[int]:
        """Return the numbers of the messages that are trained on."""
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self.data.train_on == "last":
            numbers = numbers[-1:]
        return [i for i in numbers if is_trained(messages[i])]

    def encode_turns(
        self, messages: Sequence[Message], trained: Sequence[int], begin: int = 0
    ) -> tuple[str, Encoded]:
        """Return the text before turn `begin`, and tokens whose targets are the `trained` turns."""
        text, turns = self._with_next_marks(*self._turns(messages), messages)
        spans = [(turn.start, turn.end) for turn in turns if turn.message in trained]
        if self.data.train_on == "all":
            left_out = [turn for turn in turns if not is_trained(messages[turn.message])]
            starts = [0, *(turn.end for turn in left_out)]
            ends = [*(turn.start for turn in left_out), len(text.rstrip())]
            spans = list(zip(starts, ends))
        if self.data.train_on_thinking != "all":
            blocks = thinking_blocks(text, turns, self.data.train_on_thinking == "filled")
            spans = without(spans, blocks)
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
        before = next((text[: turn.start] for turn in turns if turn.message == begin), "")
        return before, (tokens, targets)

    def _with_next_marks(
        self, text: str, turns: Sequence[Turn], messages: Sequence[Message]
    ) -> tuple[str, list[Turn]]:
        """Let a turn without an end mark of its own end with the mark of the next message.

        Models such as GLM-4 stop at it. It is a special token with which no turn of the assistant
        begins. The last turn gets the mark that would follow.
        """
        added = self.tokenizer.added_tokens_decoder.values()
        special = tuple(token.content for token in added if token.special)
        ended = []
        for turn in turns:
            message, following = messages[turn.message], messages[turn.message + 1 :]
            is_ended = turn.has_end_mark and "tool_calls" not in message
            is_ended |= text[turn.start : turn.end].rstrip().endswith(special)
            is_ended |= bool(following) and following[0]["role"] == "assistant"
            mark, new = turn.header.strip(), turn
            if (
                not is_ended
                and mark in special
                and mark not in chats.prompt_after(self.render, [chats.NEXT])[1]
            ):
                text = text if following else text[: turn.end] + turn.header
                new = replace(turn, end=turn.end + len(turn.header), has_end_mark=True)
            ended.append(new)
        return text, ended

    def _turns(self, messages: Sequence[Message]) -> tuple[str, list[Turn]]:
        """Find the turns of a dialogue, in the first of its forms that the template can write.

        Templates differ in whether a call has its arguments as an object or as text, and a content
        as text or as a list of parts.
        """
        problems: list[Exception] = []
        found: list[tuple[str, list[Turn]]] = []
        in_quotes: list[tuple[str, list[Turn]]] = []
        for form in forms(messages):
            try:
                text, turns = self._turns_of_form(form)
            except (Refused, Undecidable) as problem:
                problems.append(problem)
                continue
            if writes_text_in_quotes(form, text):
                in_quotes.append((text, turns))
                continue
            found.append((text, turns))
            contents = {turn.message: messages[turn.message]["content"] for turn in turns}
            if all(contents[turn.message].strip() in text[turn.start : turn.end] for turn in turns):
                return text, turns
        if found or in_quotes:  # it changes contents, or leaves out that of a tool call
            return (found or in_quotes)[0]
        what, reason = f"the assistant's turns cannot be found: {problems[0]}", "no turns found"
        way_out = "mark them in the template with {% generation %} and {% endgeneration %}"
        if isinstance(problems[0], LeftOut):
            what, way_out = str(problems[0]), "set data.chat_template to one that writes it"
        if isinstance(problems[0], Refused):
            what, reason = f"the chat template refuses it ({problems[0]})", "bad chat"
            way_out = "set data.chat_template to another one"
        if self._fails_on_plain():
            raise BadDocument(
                "bad chat template",
                f"{what}; and a plain question with its answer too, so the mistake is in the "
                f"template; correct it, or {way_out}",
            )
        raise BadDocument(reason, f"{what}; {CORRECT_LINE}, or {way_out}")

    def _turns_of_form(self, form: Sequence[Message]) -> tuple[str, list[Turn]]:
        if marks_turns(self.template):
            return self._marked_turns(form)
        return find_turns(self.render, form)

    def _fails_on_plain(self) -> bool:
        """Return whether the template fails on a plain dialogue too, in every form."""
        for messages in (PLAIN, [BRIEF, *PLAIN]):
            for form in forms(messages):
                with contextlib.suppress(Refused, Undecidable):
                    self._turns_of_form(form)
                    return False
        return True

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a user's question up to where the assistant answers it.

        UserError where the template writes no dialogue that ends there.
        """
        problem = ""
        for form in forms([{"role": "user", "content": question}]):
            try:
                text = self.render(form, True)
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

    def _marked_turns(self, messages: Sequence[Message]) -> tuple[str, list[Turn]]:
        """Return the turns that a template with `{% generation %}` marks itself."""
        from transformers.utils.chat_template_utils import render_jinja_template

        fields: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.given}
        (text,), (marks,) = _guarded(
            lambda: render_jinja_template(
                [list(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **fields,
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
        check_written(self.render, messages, text)
        return text, turns

    def render(self, messages: Sequence[Message], prompt: bool) -> str:
        """Return what the template writes; `prompt`: for the assistant to go on from there."""
        return _guarded(
            lambda: self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.given,
            )
        )


def reserved_of(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the names that no variable of a template may have."""
    return {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", "documents"}


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
