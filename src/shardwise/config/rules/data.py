"""Rules of the section `data`: which keys go with which format and packing."""

from collections.abc import Callable

from shardwise.config import Data, Entry
from shardwise.config.rules.rule import Case, Rule

_CHATS = ("chat", "preference")
_READ_BY = {"text_field": ("text",), "fields": ("completion", *_CHATS), "tools": _CHATS}
"""The formats that read a key of an entry."""


def _without_format(case: Case) -> str | None:
    """Return what is wrong with an entry that has a key which its format does not read."""
    data = case.cfg.data
    for entry in (*data.entries("train"), *data.entries("validation")):
        if isinstance(entry, Entry):
            read_as = entry.format or data.format
            for key, formats in _READ_BY.items():
                if getattr(entry, key) is not None and read_as not in formats:
                    return f"data: {entry.path} has {key}, which format {read_as} does not use"
    return None


def _takes_long(data: Data) -> bool:
    return data.packed == "documents" or data.is_preference


def _are_preference(data: Data) -> set[bool]:
    """Return whether the entries are read as pairs: both where they differ."""
    groups = (*data.groups("train"), *data.groups("validation"))
    return {keys.format == "preference" for _, keys in groups}


def _of_data(key: str, is_used: Callable[[Data], bool], way_out: str) -> Rule:
    """Return the rule that a key of `data` has its default unless `is_used`."""
    default = getattr(Data("any"), key)
    return Rule(
        f"{key} without its format or packing",
        applies=lambda case: getattr(case.cfg.data, key) != default and not is_used(case.cfg.data),
        problem=lambda case: (
            f"data.{key} is set, which data.format {case.cfg.data.format} with packing "
            f"{case.cfg.data.packed} does not use"
        ),
        way_out=f"leave it out, or {way_out}",
        why="the key would have no effect",
    )


def _of_pairs(key: str, values: tuple[str, ...], does: str, instead: str) -> Rule:
    """Return the rule that a key of `data` has none of these values beside pairs."""
    return Rule(
        f"{key} of pairs",
        lambda case: case.cfg.data.is_preference and getattr(case.cfg.data, key) in values,
        lambda case: f"data.format preference: {key} {getattr(case.cfg.data, key)} {does}",
        way_out=f"set {key} to {instead}",
        why="two answers to one prompt are compared, each as a whole",
    )


RULES = (
    *(
        _of_data(key, lambda data: bool({*_CHATS} & data.formats), "set data.format to chat")
        for key in ("chat_template", "template_arguments", "train_on", "train_on_thinking")
    ),
    _of_data("turns", lambda data: "chat" in data.formats, "set data.format to chat"),
    _of_data("tools", lambda data: data.format in _CHATS, "set data.format to chat"),
    _of_data("fields", lambda data: data.format != "text", "set data.format to completion or chat"),
    Rule(
        "a key of an entry without its format",
        applies=lambda case: _without_format(case) is not None,
        problem=lambda case: _without_format(case) or "",
        way_out="leave it out, or give the entry another format",
        why="the key would have no effect",
    ),
    Rule(
        "separate turns of which every token is trained on",
        applies=lambda case: case.cfg.data.turns == "separate" and case.cfg.data.train_on == "all",
        problem="data.turns separate repeats earlier turns, and data.train_on all trains on each",
        way_out="set turns to together, or train_on to assistant",
        why="the first turn of n would be trained on n times",
    ),
    _of_data("long", _takes_long, "set data.packing to documents"),
    Rule(
        "pairs beside other documents",
        applies=lambda case: len(_are_preference(case.cfg.data)) > 1,
        problem="data: some entries have format preference, and others have not",
        way_out="give all of data.train and data.validation this format, or none",
        why="a loss compares two answers, or is of the tokens of one",
    ),
    _of_pairs(
        "packing", ("concat", "isolated"), "cuts documents at rows' ends", "documents or none"
    ),
    _of_pairs("long", ("split",), "makes several documents of one", "cut or skip"),
    _of_pairs("train_on", ("all",), "trains on prompts", "assistant or last"),
)
