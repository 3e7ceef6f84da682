"""Blocks of thinking in a rendered dialogue, which may be left out of the targets."""

import re
from collections.abc import Sequence

from shardwise.data.chats import Turn

_NAME = r"(?:\w+:)?think(?:ing)?"
_OPENING, _CLOSING = (rf"(?:<{slash}{_NAME}>|\[{slash}THINK\])" for slash in ("", "/"))
_THINKING = re.compile(rf"\s*{_OPENING}?((?:(?!{_OPENING}).)*?){_CLOSING}\s*", re.DOTALL)


def writes_thinking(template: str) -> bool:
    """Return whether a chat template writes the end of a block of thinking."""
    return re.search(_CLOSING, template) is not None


def thinking_blocks(text: str, turns: Sequence[Turn], only_empty: bool) -> list[tuple[int, int]]:
    """Return the characters [start, end) of the blocks of thinking with which turns begin.

    The generation prompt may have written the opening tag of a block, before the turn begins.
    """
    found = [_THINKING.match(text, turn.start, turn.end) for turn in turns]
    return [block.span() for block in found if block and not (only_empty and block[1].strip())]


def without(
    spans: Sequence[tuple[int, int]], blocks: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return spans of characters [start, end) without those of some blocks."""
    for start, end in blocks:
        cut = [part for a, b in spans for part in ((a, min(b, start)), (max(a, end), b))]
        spans = [(a, b) for a, b in cut if a < b]
    return list(spans)
