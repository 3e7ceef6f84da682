"""The JSON schema takes the run files that shardwise takes, and refuses what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.commands import cli
from shardwise.config import UserError
from shardwise.config.keys import all_keys, facts_of, known_keys
from shardwise.config.run_file import json_schema, parse_config

ROOT = Path(__file__).parents[2]
RUN_FILES = [
    path
    for path in sorted((ROOT / "configs").rglob("*.yaml"))
    if "axes" not in yaml.safe_load(path.read_text(encoding="utf-8"))
]
RUN = {
    "model": {"path": "model"},
    "data": {"train": "corpus.jsonl"},
    "training": {"output_dir": "out"},
}
WORDS = {
    *("$ref", "$schema", "$defs", "title", "description", "default", "anyOf", "type", "enum"),
    *("minimum", "maximum", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems"),
}
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value fits, by the words of JSON schema that the one of run files has."""
    assert schema.keys() <= WORDS
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(fits(value, kind, root) for kind in schema["anyOf"])
    kind = schema.get("type")
    if kind is None:
        return True  # any value
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if kind == "object":
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        named = all(
            fits(item, properties[key], root) if key in properties else bool(others)
            for key, item in value.items()
        )
        return named and set(schema.get("required", ())) <= value.keys()
    if kind == "array":
        items = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        return len(items) == len(value) and all(map(fits, value, items, [root] * len(value)))
    if kind in ("integer", "number"):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return value in schema.get("enum", [value])


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_committed_run_files_fit(path):
    schema = json_schema()
    assert fits(yaml.safe_load(path.read_text(encoding="utf-8")), schema, schema)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("model", {}),
        ("model", {"path": "model", "paht": "model"}),
        ("model", {"path": "model", "init": "zeros"}),
        ("data", {"train": 5}),
        ("training", {"output_dir": "out", "steps": 0}),
        ("training", {"output_dir": "out", "steps": "many"}),
        ("training", {"output_dir": "out", "async_save": 2}),
        ("optimizer", {"betas": [0.9]}),
        ("parallel", {"virtual_stages": 0}),
        ("trainnig", {"steps": 5}),
    ],
    ids=str,
)
def test_a_wrong_run_file_does_not_fit(section, keys):
    schema = json_schema()
    assert fits(RUN, schema, schema)
    wrong = RUN | {section: keys}
    assert not fits(wrong, schema, schema)
    with pytest.raises(UserError):
        parse_config(wrong)


def test_every_key_has_a_description_and_every_number_its_range():
    schema = json_schema()["$defs"]
    # Beside the sections there are the mappings that keys may be.
    assert {name.lower() for name in schema} == {*known_keys(), "recomputation", "entry"}
    layers = schema.pop("Recomputation")["properties"]
    assert list(layers) == known_keys("training", "checkpointing")
    entry = schema.pop("Entry")["properties"]
    assert list(entry) == known_keys("data", "train")
    assert all(types["description"] for types in (*layers.values(), *entry.values()))
    for section in known_keys():
        properties = schema[section.capitalize()]["properties"]
        assert list(properties) == known_keys(section)
        assert all(types["description"] for types in properties.values())
    limits = {
        f"{section.lower()}.{key}": (kind["minimum"], kind["maximum"])
        for section, content in schema.items()
        for key, types in content["properties"].items()
        for kind in types.get("anyOf", [types])
        if "minimum" in kind
    }
    assert limits == {
        key: facts_of(key).between for key in all_keys() if facts_of(key).between is not None
    }


def test_the_command_prints_the_schema_or_replaces_a_file(tmp_path, capsys):
    file = tmp_path / "schema.json"
    file.write_text("an older one")
    assert cli.main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == json_schema()
    assert cli.main(["schema", "-o", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == printed
    assert cli.main(["schema", "-o", str(tmp_path / "none" / "schema.json")]) == 2
    error = capsys.readouterr().err
    assert "give the path of a file" in error
    assert error.count("\n") == 1
