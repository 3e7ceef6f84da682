"""Where in a rendered dialogue the assistant speaks, for any chat template.

A chat template is a program. It may trim words, leave out the thinking of earlier turns, merge the
system message into the first user turn, or write something for the last turn only. So the rendered
beginning of a dialogue need not be the beginning of the rendered dialogue. Turns are found by
tracing instead. The first and the last word of each text are put between two characters that
Unicode keeps for private use, and the template renders these marked messages. If removing the marks
restores the plain rendering, they say where each message lies in it. A second rendering, in which
other words stand between the marks, must differ in these words only.
"""

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardwise.data.messages import CALLS, REASONING, Message, mapped, strings_of

Render = Callable[[Sequence[Message], bool], str]
"""(messages, whether the text ends with the generation prompt) -> text; raises Refused."""

BEGIN, END = 0xF0000, 0x100000
"""Message i is marked with the characters BEGIN + i and END + i."""
MOST_MESSAGES = 1_000
"""Most messages of a dialogue: finding turns takes time by the square of their number."""
_A_BEGIN = f"[{chr(BEGIN)}-{chr(BEGIN + MOST_MESSAGES)}]"
_AN_END = f"[{chr(END)}-{chr(END + MOST_MESSAGES)}]"
_MARK = re.compile(f"{_A_BEGIN}|{_AN_END}")
_MARKED_WORD = re.compile(f"({_A_BEGIN})([^{_A_BEGIN[1:-1]}{_AN_END[1:-1]}]*)({_AN_END})")
_TAG_OR_WORD = re.compile(r"<[^<>\s]*>|\w+")
_TAG = re.compile(r"<[^<>\s]+>")
_HEADER = re.compile(rf"\s*{_TAG.pattern}")
_HALF_TAG = re.compile(r"[^<>]*>")
_WORD = re.compile(r"\w")

NEXT: Message = {
    "role": "user",
    "content": f"{chr(BEGIN + MOST_MESSAGES)}x{chr(END + MOST_MESSAGES)}",
}
"""A message that is put after the last one, to see what ends a turn."""


class Refused(Exception):
    """The chat template does not render these messages."""


class Undecidable(Exception):
    """Nobody can tell where the assistant speaks; the text names the message and the reason."""


class LeftOut(Undecidable):
    """The chat template leaves out what a message says or calls."""


@dataclass(frozen=True)
class Turn:
    """The characters [start, end) of a rendered dialogue that one assistant message stands for.

    They begin after the header, which the generation prompt writes, and include the mark that ends
    the turn. `has_end_mark` is False where the template writes no such mark after it. `header` is
    the tag with which the next message begins, or one that would follow, and white space before.
    """

    message: int
    start: int
    end: int
    has_end_mark: bool
    header: str = ""


def find_turns(render: Render, messages: Sequence[Message]) -> tuple[str, list[Turn]]:
    """Render a dialogue, and find the characters of each message of the assistant.

    The turn of a message without words is its end mark, unless the template writes it differently.
    Undecidable if the template changes marked words, or repeats, drops or mixes messages.
    """
    if len(messages) > MOST_MESSAGES:
        raise Undecidable(f"it has more than {MOST_MESSAGES:,} messages")
    text = render(messages, False)
    if _MARK.search(text):
        raise Undecidable("it contains characters for private use, by which turns are found")
    dialogue = plain = _traced(render, messages, text)
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for number in spoken:
        if number not in plain.places:
            dialogue = _with_place(dialogue, plain, number)
    return text, [_turn(dialogue, number) for number in spoken if number in dialogue.places]


def check_written(render: Render, messages: Sequence[Message], text: str) -> None:
    """Raise LeftOut where a dialogue's text leaves out what one of its messages says or calls.

    Where no tracing succeeds, other words in the message must change the text.
    """
    with contextlib.suppress(Undecidable):
        _traced(render, messages, text)
        return
    for i, message in enumerate(messages):
        has_more = any(map(str.strip, strings_of(message, ("content", *CALLS))))
        for names, what in ((("content",) if has_more else REASONING, "says"), (CALLS, "calls")):
            fields, others = {k: v for k, v in message.items() if k in names}, [*messages]
            others[i] = {**message, **mapped(fields, lambda s: _WORD.sub("q", f"{s}x"), True)}
            is_said = any(map(str.strip, strings_of(fields)))
            if is_said and _try(render, others, False) == text:
                raise LeftOut(f"the chat template leaves out what message {i + 1} {what}")


@dataclass(frozen=True)
class _Dialogue:
    """A dialogue whose messages have been found in its text."""

    render: Render
    messages: Sequence[Message]
    marked: Sequence[Message]
    text: str
    places: Mapping[int, tuple[int, int]]
    """The characters, by message, of `text` from its first to its last marked word."""

    def gap_before(self, number: int) -> str:
        """Return the text between a message's first word and what the message before it wrote."""
        first, _ = self.places[number]
        before = [(end, i) for i, (_, end) in self.places.items() if i != number and end <= first]
        if not before:
            return self.text[:first]
        end, previous = max(before)
        return self.text[min(end + self.written_after(previous), first) : first]

    def gap_after(self, number: int) -> str:
        """Return the text between a message's last word and the message after it."""
        _, last = self.places[number]
        after = [start for i, (start, _) in self.places.items() if i != number and start >= last]
        return self.text[last : min(after, default=len(self.text))]

    def written_before(self, number: int) -> int:
        """Return how many characters before its first marked word a message has written."""
        first, _ = self.places[number]
        lengths = [0]
        for string in strings_of(self.marked[number]):
            for word in _MARKED_WORD.finditer(string):
                if self.text.startswith(word[2], first):
                    prefix = _MARK.sub("", string[: word.start()]).lstrip()
                    length = num_common(prefix[::-1], self.text[:first][::-1])
                    common = prefix[len(prefix) - length :]
                    half_tag = _HALF_TAG.match(common)  # the end of a tag, as a header has one too
                    lengths.append(length - (half_tag.end() if half_tag else 0))
        return max(lengths)

    def written_after(self, number: int) -> int:
        """Return how many characters after its last marked word a message has written."""
        _, last = self.places[number]
        lengths, complete = [0], []
        for string in strings_of(self.marked[number]):
            for word in _MARKED_WORD.finditer(string):
                if self.text.endswith(word[2], 0, last):
                    suffix = _MARK.sub("", string[word.end() :])
                    length = num_common(suffix, self.text[last:])
                    lengths.append(length)
                    if length >= len(suffix.rstrip()):
                        complete.append(length)
        # A word may stand several times in a message: only what follows the last of them is here.
        return max(complete or lengths)


# Marks around words.


def _traced(render: Render, messages: Sequence[Message], text: str) -> _Dialogue:
    """Mark the messages in a way that the template does not react to, and find them in the text."""
    problem = "the chat template treats words differently by what they are"
    for empty, first, names in itertools.product((True, False), repeat=3):
        marked = [
            mapped(message, partial(_mark, message=i, first=first, empty=empty), names)
            for i, message in enumerate(messages)
        ]
        exchanged = [mapped(message, _exchange, True) for message in marked]
        traced, other = (_try(render, m, False) for m in (marked, exchanged))
        if traced is None or other is None or _MARK.sub("", traced) != text:
            continue
        if other != _exchange(traced):
            continue
        places = _places(traced)
        problem = _mixture(marked, traced, places)
        if not problem:
            return _Dialogue(render, messages, marked, text, places)
    raise Undecidable(problem)


def _with_place(dialogue: _Dialogue, plain: _Dialogue, number: int) -> _Dialogue:
    """Place a message without words where a word would stand, if all else but space is the same."""
    word = f"{chr(BEGIN + number)}x{chr(END + number)}"
    message, after = plain.marked[number], plain.marked[number + 1 :]
    probe = message | mapped({"content": message["content"]}, lambda _: word, True)
    traced = _try(plain.render, [*plain.marked[:number], probe, *after], False) or ""
    head, found, tail = (_MARK.sub("", part) for part in traced.partition(word))
    start = len(plain.text) - len(tail)
    is_same = plain.text.endswith(tail) and plain.text[:start].rstrip() == head.rstrip()
    if not found or not is_same:
        return dialogue
    marked = [*dialogue.marked[:number], probe, *after]
    return replace(dialogue, marked=marked, places={**dialogue.places, number: (start, start)})


def _mixture(marked: Sequence[Message], traced: str, places: Mapping[int, tuple[int, int]]) -> str:
    """Return why the words of an assistant message do not stand in the text once and together.

    Undecidable where they do not stand in it at all.
    """
    for number, message in enumerate(marked):
        name = f"message {number + 1}"
        in_text = Counter(
            m[2] for m in _MARKED_WORD.finditer(traced) if ord(m[1]) == BEGIN + number
        )
        thoughts, contents, calls = (
            Counter(m[2] for s in strings for m in _MARKED_WORD.finditer(s) if m[2])
            for strings in (
                strings_of(message, names) for names in (REASONING, ("content",), CALLS)
            )
        )
        in_message = thoughts + contents + calls
        # A template may leave thoughts out, unless the message has nothing else.
        said = contents if contents or calls else thoughts
        for words, others, what in ((said, calls, "says"), (calls, thoughts + contents, "calls")):
            if words and not (in_text - others) & words:
                raise LeftOut(f"the chat template leaves out what {name} {what}")
        if message["role"] != "assistant" or number not in places:
            continue
        if Counter({word: n for word, n in in_text.items() if word}) - in_message:
            return f"the chat template writes {name} twice"
        start, end = places[number]
        for other, (other_start, other_end) in places.items():
            if other != number and other_start < end and start < other_end:
                return f"the chat template mixes {name} with message {other + 1}"
    return ""


def _mark(string: str, message: int, first: bool, empty: bool) -> str:
    """Put marks around the last word of a string, and around its first word if `first`.

    Tags such as `<think>` stay unmarked, since templates look for them. A string without words is
    marked as a whole, except for white space at its ends; one of white space only if `empty`.
    """
    words = [m.span() for m in _TAG_OR_WORD.finditer(string) if m[0][0] != "<"]
    core = string.strip()
    if not words and (core or empty):
        start = string.find(core)
        # JSON escapes quotes: such words stand otherwise in the text, and are not looked for.
        words = [(start, start + len(core) * (core.isprintable() and not {*core} & {*'"\\'}))]
    chosen = [words[0], words[-1]] if first and len(words) > 1 else words[-1:]
    for start, end in reversed(chosen):
        begin_mark, end_mark = chr(BEGIN + message), chr(END + message)
        string = f"{string[:start]}{begin_mark}{string[start:end]}{end_mark}{string[end:]}"
    return string


def _exchange(string: str) -> str:
    """Replace each marked word by another one, and remove the marks."""
    return _MARKED_WORD.sub(lambda m: f"{m[2][::-1]}q", string)


def _places(traced: str) -> dict[int, tuple[int, int]]:
    """Return by message the characters, without marks, from its first to its last marked word."""
    places: dict[int, tuple[int, int]] = {}
    for number, mark in enumerate(_MARK.finditer(traced)):
        position = mark.start() - number
        code = ord(mark[0])
        message = code - (END if code >= END else BEGIN)
        start, end = places.get(message, (position, position))
        places[message] = (start, max(end, position))
    return places


# From marked words to turns.


def _turn(dialogue: _Dialogue, number: int) -> Turn:
    """Extend the words of an assistant message to its header and to the mark of its end."""
    _, last = dialogue.places[number]
    length, has_mark = _end(dialogue, number)
    here = following = dialogue.gap_after(number)
    if number + 1 == len(dialogue.messages):
        role = "tool" if dialogue.messages[number].get("tool_calls") else "user"
        following = _tail(dialogue, [*dialogue.marked, {**NEXT, "role": role}], number) or ""
    found = following[:length] == here[:length] and _HEADER.match(following, length)
    header = found[0] if found else ""
    return Turn(number, _start(dialogue, number), last + length, has_mark, header)


def _start(dialogue: _Dialogue, number: int) -> int:
    """Return where the header before an assistant's first word ends.

    The header is the generation prompt, or the beginning of it that the template has written here:
    if the prompt ends with `<think>`, earlier turns may have only what precedes it. A match no
    longer than what other roles' headers share with the prompt does not count.
    """
    first, _ = dialogue.places[number]
    text, gap = dialogue.text, dialogue.gap_before(number)
    prompted, prompt = prompt_after(dialogue.render, dialogue.messages[:number])
    usual_prompt = prompt_after(dialogue.render, [NEXT])[1]
    is_beginning = prompted is not None and text.startswith(prompted)
    rest = text[len(prompted or "") : first] if is_beginning else ""
    # The template renders the beginning of this dialogue as the beginning of the whole.
    if is_beginning and prompt and len(rest) <= len(gap):
        return first - len(rest)
    # It does not, or writes no prompt here: look for the prompt before the words.
    prompt = prompt or usual_prompt
    length, at = _longest(prompt, gap)
    others = [
        _longest(prompt, dialogue.gap_before(other))[0]
        for other in dialogue.places
        if dialogue.messages[other]["role"] != "assistant"
    ]
    if length > max(others, default=0) and _WORD.search(prompt[:length]):
        return first - len(gap) + at + length
    # No header stands here: the turn begins with what the message itself has before its words.
    own = dialogue.written_before(number)
    is_bare = not rest[: max(len(rest) - own, 0)].strip()
    if is_beginning and len(rest) <= len(gap) and (usual_prompt or is_bare):
        return first - len(rest)
    return first - own


def prompt_after(render: Render, messages: Sequence[Message]) -> tuple[str | None, str]:
    """Return a dialogue with the generation prompt, and the prompt alone."""
    plain, prompted = (_try(render, messages, prompt) for prompt in (False, True))
    if plain is None or prompted is None or not prompted.startswith(plain):
        return prompted, ""
    return prompted, prompted[len(plain) :]


def _longest(prompt: str, gap: str) -> tuple[int, int]:
    """Return the length of the longest beginning of a prompt that a gap has, and where."""
    starts = (at for at in range(len(gap)) if prompt and gap[at] == prompt[0])
    return max(((len(_common(prompt, gap[at:])), at) for at in starts), default=(0, 0))


def _end(dialogue: _Dialogue, number: int) -> tuple[int, bool]:
    """Return how many characters after its last word a turn has, and whether a mark is in them.

    The mark is what the template writes both where the dialogue ends with this turn and where
    another message follows. Where these begin with different marks, it is the one that stands here.
    """
    here = dialogue.gap_after(number)
    own = min(dialogue.written_after(number), len(here))
    if number + 1 < len(dialogue.messages):
        at_end, followed = _tail(dialogue, dialogue.marked[: number + 1], number), here
    else:
        at_end, followed = here, _tail(dialogue, [*dialogue.marked, NEXT], number)
    if at_end is None:
        return own, False
    at_end = at_end.rstrip()
    common = at_end if followed is None else _common(at_end, followed).rstrip()
    tag = _TAG.match(here, own)
    is_last = number + 1 == len(dialogue.messages)
    if len(common) <= own < len(at_end) and tag and (is_last or _ends_others(dialogue, tag[0])):
        return tag.end(), True
    if len(common) <= own and is_last:
        return len(here), False  # an end-of-text token will follow all that stands here
    return max(len(common), own), len(common) > own


def _ends_others(dialogue: _Dialogue, tag: str) -> bool:
    """Return whether a tag ends messages of others too, and so is no header of the next one."""
    return any(
        dialogue.gap_after(other)[dialogue.written_after(other) :].startswith(tag)
        for other in dialogue.places
        if dialogue.messages[other]["role"] != "assistant"
    )


def _tail(dialogue: _Dialogue, marked: Sequence[Message], number: int) -> str | None:
    """Return the text after the last word of a message in another, marked dialogue."""
    traced = _try(dialogue.render, marked, False) or ""
    marks = [m for m in _MARKED_WORD.finditer(traced) if ord(m[1]) == BEGIN + number]
    return _MARK.split(traced[marks[-1].end() :])[0] if marks else None


def _try(render: Render, messages: Sequence[Message], prompt: bool) -> str | None:
    with contextlib.suppress(Refused):
        return render(messages, prompt)
    return None


def _common(one: str, other: str) -> str:
    """Return the common beginning of two texts, which ends within a tag only if `one` does."""
    length = num_common(one, other)
    open_tag = one.rfind("<", 0, length)
    if length < len(one) and open_tag > one.rfind(">", 0, length):
        length = open_tag
    return one[:length]


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common beginning of two texts, or lists."""
    pairs = enumerate(zip(one, other))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
