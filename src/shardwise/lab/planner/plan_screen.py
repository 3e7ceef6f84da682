"""The answer of a plan on one screen.

It is a layout, its keys, bars of its memory and its step, alternatives, and the reasons.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from shardwise.base.words import number, percent, size
from shardwise.base.words import seconds as seconds_text
from shardwise.config import Recomputation
from shardwise.config.keys import is_searched, known_keys
from shardwise.lab.drawing.text_table import TextTable
from shardwise.lab.planner.choices import written
from shardwise.lab.planner.exact import Choice
from shardwise.lab.planner.plan_page import heading, memory_parts, reasons, time_parts, verdict
from shardwise.lab.planner.search import Answer

WIDTH = 40
"""Characters of a bar."""
MARKS = "█▓▒░"
"""One for each of the largest parts of a bar, and the last one for all others together."""
FREE = "·"
DIVIDES = {
    "tp": "each layer over {} ranks (tp)",
    "cp": "each row over {} (cp)",
    "ep": "experts over {} (ep)",
    "pp": "layers over {} stages (pp)",
}
"""The words for what each axis divides."""
NUM_INSTEAD = 3
LONGEST = 60
"""Characters of a value that is shown."""


def screen(answer: Answer) -> Iterator[str | TextTable]:
    """Yield what is said of a search in which something fits."""
    best = answer.best
    yield from heading(answer.question, answer.subject)
    yield ""
    yield f"{best.title}: {in_words(best)}"
    keys = [f"{key}={as_word(value)}" for key, value in keys_of(best).items()]
    yield f"  {'  '.join(keys) or 'the defaults of a run file'}"
    memory = {part: float(n) for part, n in memory_parts(best.memory).items()}
    limit = float(answer.limit_bytes)
    total_size = f"{size(best.memory.total)} of {size(limit)}"
    yield from bar("memory", memory, limit, total_size, lambda num_bytes: size(round(num_bytes)))
    total = best.time.total
    yield from bar("step", time_parts(best.time), total, seconds_text(total), seconds_text)
    yield f"{number(best.tokens_per_second)} tokens/s, MFU {percent(best.mfu, 1)}"
    yield instead_table(answer)
    yield from reasons(answer)
    yield (
        f"{len(answer.computed):,} layouts computed exactly, in {answer.seconds:.1f} s; --explain "
        f"{best.title} has the arithmetic of this one, --all the others"
    )


def as_word(value: object) -> str:
    """Return a value of a key as the command line takes it, unless it is a long list of layers."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= LONGEST else "(see --write)"


def in_words(choice: Choice) -> str:
    """Return what a layout divides over how many ranks, and how a rank works."""
    division = choice.candidate.division
    *first, last = division.strategy.sharded or ("rows",)
    ranks = division.num_sharing if division.strategy.sharded else division.num_data
    parts = [f"{', '.join(first)}{' and ' * bool(first)}{last} over {ranks} ranks"] * (ranks > 1)
    sizes = {axis: getattr(division, axis) for axis in DIVIDES}
    parts += [text.format(sizes[axis]) for axis, text in DIVIDES.items() if sizes[axis] > 1]
    return f"{', '.join(parts) or 'one device'}; {choice.details}"


def keys_of(choice: Choice) -> dict[str, Any]:
    """Return the searched keys of a run file that are not their defaults."""
    keys: dict[str, Any] = {}
    for name in known_keys():
        section: Any = getattr(choice.cfg, name)
        for field in fields(section) if section is not None else ():
            value, path = getattr(section, field.name), f"{name}.{field.name}"
            if is_searched(path) and value != field.default:
                keys[path] = written(value) if isinstance(value, Recomputation) else value
    return keys


def bar(
    name: str, parts: Mapping[str, float], whole: float, total: str, text: Callable[[float], str]
) -> Iterator[str]:
    """Yield a bar of the largest parts of a whole, and the line that says which they are."""
    largest = sorted((p for p in parts if parts[p] > 0), key=lambda p: parts[p], reverse=True)
    shown = largest if len(largest) <= len(MARKS) else largest[: len(MARKS) - 1]
    marked = [(part, parts[part]) for part in shown]
    if others := sum(parts[part] for part in largest[len(shown) :]):
        marked.append(("others", others))
    drawn, end = "", 0.0
    for mark, (_, value) in zip(MARKS, marked):
        end += value / whole * WIDTH
        drawn += mark * max(round(end) - len(drawn), 0)
    yield f"{name:<7}{drawn[:WIDTH]:{FREE}<{WIDTH}}  {total}"
    yield " " * 7 + "  ".join(f"{m} {part} {text(v)}" for m, (part, v) in zip(MARKS, marked))


def instead_table(answer: Answer) -> TextTable:
    """Return a table of the alternatives: the next layout, the one that needs least memory, and the
    simplest other one, each with what it costs.
    """
    best = answer.best
    others = {c.title: c for c in answer.choices[1:] if c.title != best.title}
    changed = {f"with {name}": choice for name, choice in answer.changes.items() if choice.fits}
    simple = {
        choice.title: choice
        for choice in answer.simpler.values()
        if choice.fits and choice.title != best.title
    }
    least = sorted(
        ((name, c) for name, c in {**changed, **others, **simple}.items() if _saves(c, best)),
        key=lambda named: named[1].memory.total,
    )
    picked = dict([*list(others.items())[:1], *least[:1], *simple.items(), *changed.items()])
    rows = [
        (name, size(c.memory.total), seconds_text(c.time.total), verdict(c, answer))
        for name, c in list(picked.items())[:NUM_INSTEAD]
    ]
    return TextTable(("instead", ">memory", ">step", "costs"), rows)


def _saves(choice: Choice, best: Choice) -> bool:
    """Return whether a choice computes the same in clearly less memory."""
    is_same = choice.loss_settings == best.loss_settings
    return is_same and choice.memory.total < 0.9 * best.memory.total
