"""Forms in which documents are published, known by the names of their fields."""

import json
from collections.abc import Collection
from typing import Any

from shardwise.config import Data
from shardwise.data.record import CORRECT_LINE, BadDocument, Record


def _keys(format_name: str, **fields: str | list[str]) -> dict[str, Any]:
    return {"format": format_name, **({"fields": fields} if fields else {})}


# fmt: off
_ASKED = (["instruction", "input"], ["instruction"], ["question"], ["conversations"])
FITS: tuple[tuple[set[str], dict[str, Any]], ...] = (
    ({"prompt", "chosen", "rejected"}, _keys("preference")),
    *(({*asked, "chosen", "rejected"},
       _keys("preference", messages=asked if asked[1:] else asked[0])) for asked in _ASKED),
    ({"chosen", "rejected"}, _keys("preference")),
    ({"prompt", "completion", "label"}, _keys("preference", label="label")),
    ({"instruction", "input", "output", "kto_tag"},
     _keys("preference", messages=["instruction", "input"], completion="output", label="kto_tag")),
    *(({name, "kto_tag"}, _keys("preference", messages=name, label="kto_tag"))
      for name in ("messages", "conversations")),
    ({"messages"}, _keys("chat")),
    ({"conversations"}, _keys("chat", messages="conversations")),
    ({"prompt", "completion"}, _keys("completion")),
    ({"instruction", "input", "output"},
     _keys("completion", prompt=["instruction", "input"], completion="output")),
    ({"instruction", "output"}, _keys("completion", prompt="instruction", completion="output")),
    ({"question", "answer"}, _keys("completion", prompt="question", completion="answer")),
    ({"prompt", "response"}, _keys("completion", completion="response")),
    ({"text"}, _keys("text")),
)
# fmt: on
"""Fields of a document, and the keys of section `data` that read them; the first that fit."""


def keys_of_form(names: Collection[str]) -> dict[str, Any]:
    """Return the keys of section `data` that read documents with these fields; {} for none."""
    return next((keys for fields, keys in FITS if fields <= {*names}), {})


def way_to_read(names: Collection[str], data: Data) -> str | None:
    """Return the keys that read documents with these fields, as a way out of an error.

    None where no form is known, or where it is what `data` reads.
    """
    found = keys_of_form(names)
    keys = {key: value for key, value in found.items() if getattr(data, key) != value}
    if not keys:
        return None
    written = [f"data.{key}: {json.dumps(v).replace(chr(34), '')}" for key, v in keys.items()]
    return f"its fields are {', '.join(names)}: set {' and '.join(written)}"


def given_value(record: Record, field: str, data: Data, key: str = "fields") -> Any:
    """Return a field of a document, which `key` of section `data` names; BadDocument for none."""
    if field not in record:
        way_out = f"set data.{key} to name some of the line's fields: {', '.join(record)}"
        if key == "fields":
            way_out = f"{way_out}; or {CORRECT_LINE}, or set data.format"
        if way := way_to_read(record, data):
            way_out = f"{way}; or {CORRECT_LINE}"
        raise BadDocument("missing field", f"no field {field!r}; {way_out}")
    return record[field]
