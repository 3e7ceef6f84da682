from __future__ import annotations

import json
import math
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from shardwise import config
from shardwise.commands.library import read_config
from shardwise.config import Recomputation, UserError, keys, rules
from shardwise.config.run_file import (
    MOST_BYTES,
    _PlainData,
    load_config,
    parse_config,
    without_removed,
)
from shardwise.lab.benchmark.sweep import read_sweep

RANGES = {key: keys.facts_of(key).between for key in keys.all_keys() if keys.facts_of(key).between}

SECTIONS = """
model: {path: base, init: random}
data: {train: a.txt}
training: {output_dir: out}
"""


def load(folder, text):
    (folder / "run.yaml").write_text(SECTIONS + text)
    return load_config(folder / "run.yaml", [])


def test_merge_keys(tmp_path):
    cfg = load(tmp_path, "optimizer: {lr: 0.5, eps: 0.25, betas: [0.5, 0.5]}\nlora: {r: 4}\n")
    merged = """
optimizer:
  <<: [{lr: 0.5, eps: 0.25}, {eps: 0.75, betas: [0.5, 0.5]}]  # the first of several goes before
lora: {<<: {r: 2}, r: 4}  # and its own keys before all
"""
    assert load(tmp_path, merged) == cfg


def test_a_mapping_that_was_merged_elsewhere_before_it_is_read():
    # The outer mappings are read first. Then the inner one has the merged key beside its own.
    text = "a: {b: &b {<<: {x: 1}, x: 2}}\nc: {<<: *b}\n"
    assert yaml.load(text, _PlainData) == {"a": {"b": {"x": 2}}, "c": {"x": 2}}


@pytest.mark.parametrize(
    "twice", ["lora: {r: 1, r: 2}", "lora: {<<: {r: 1, r: 2}}", "lora: {<<: {r: 1}, <<: {r: 2}}"]
)
def test_a_key_given_twice(twice, tmp_path):
    with pytest.raises(UserError, match=r"not valid YAML .*the key (r|<<) is given twice"):
        load(tmp_path, twice)


FLOW, BLOCK = (
    "[" * 3000 + "]" * 3000,
    "\n" + "".join(" " * level + "a:\n" for level in range(1, 700)),
)
LISTS = "&a0 [x, x]" + "".join(f", &a{i} [" + f"*a{i - 1}, " * 9 + "]" for i in range(1, 12))
MERGED = "&a0 {a: 1}" + "".join(
    f", &a{i} {{<<: [" + f"*a{i - 1}, " * 9 + "]}" for i in range(1, 12)
)


@pytest.mark.parametrize(
    "value", [FLOW, BLOCK, f"[{LISTS}]", f"[{MERGED}]"], ids=["flow", "block", "lists", "merged"]
)
def test_deep_or_endless_yaml_is_one_line(value, tmp_path):
    with pytest.raises(
        UserError, match=r"not valid YAML .*(20 levels deep|more than 100,000 values)"
    ):
        load(tmp_path, f"lora: {value}")
    (tmp_path / "sweep.yaml").write_text(f"base: {value}")
    with pytest.raises(UserError, match="not valid YAML"):
        read_sweep(tmp_path / "sweep.yaml", tmp_path)
    (tmp_path / "run.yaml").write_text(SECTIONS)
    with pytest.raises(UserError, match=r"^--lora.r: the value is not valid YAML; quote it"):
        load_config(tmp_path / "run.yaml", [f"--lora.r={value}"])


def test_a_list_that_holds_itself(tmp_path):
    with pytest.raises(UserError, match=r"not valid YAML .*alias"):
        load(tmp_path, "lora: {r: &a [*a]}")


@pytest.mark.parametrize(
    "number", ["1e30", "1.0e+30", "1" + "0" * 30, "0x" + "f" * 5000, "1" * 5000, "-.inf", ".nan"]
)
def test_whole_numbers_that_none_can_be(number, tmp_path):
    (tmp_path / "run.yaml").write_text(SECTIONS)
    for key in ("lora.r", "training.steps", "training.seed", "data.sequence_length"):
        with pytest.raises(UserError) as caught:
            load_config(tmp_path / "run.yaml", [f"--{key}={number}"])
        assert key in str(caught.value)
        assert len(str(caught.value)) < 300


def section_of(key: str, value: object) -> object:
    section, _, name = key.partition(".")
    needed = {"model": {"path": "a"}, "data": {"train": "a"}, "training": {"output_dir": "a"}}.get(
        section, {}
    )
    return getattr(config, section.capitalize())(**{**needed, name: value})


@pytest.mark.parametrize("key", RANGES)
def test_a_value_beyond_its_range_is_refused_with_the_bound_that_it_misses(key):
    least, most = RANGES[key]
    for value, message in {
        least - 1: f"give at least {least:,}",
        most + 1: f"give at most {most:,}",
        math.inf: f"give at most {most:,}",
        math.nan: "give a number",
        16**5000: "a number of thousands of digits; give at most",
    }.items():
        with pytest.raises(UserError) as caught:
            section_of(key, value)
        assert str(caught.value).startswith(f"{key} is ")
        assert str(caught.value).endswith(message) or message in str(caught.value)


def test_every_number_of_a_run_file_has_a_range():
    elsewhere = {  # open at an end or lists: checked where they are
        *("lora.dropout", "lora.targets", "data.validation", "parallel.split"),
        *("launch.slurm", "launch.torchrun", "launch.ray", "launch.resources"),
        *("parallel.memory_limit_gib", "parallel.speeds"),
        *("optimizer.betas", "optimizer.max_grad_norm"),
    }
    numbers = {
        f"{name}.{key}"
        for name in keys.known_keys()
        for key, hint in get_type_hints(getattr(config, name.capitalize())).items()
        if {"int", "float"} & set(re.findall(r"\w+", str(hint)))
    }
    assert numbers == set(RANGES) | elsewhere


def test_a_step_of_more_tokens_than_any_run_has():
    with pytest.raises(
        UserError, match="is 16,777,216,000 tokens in a step; give at most 1,000,000,000"
    ):
        rules.check(
            config.RunConfig(
                config.Model("a"),
                config.Data("a", sequence_length=2**24),
                config.Training("a", global_batch_size=1000),
            )
        )


@pytest.mark.parametrize("value", [True, False])
def test_a_removed_key_is_refused_by_name_and_dropped_from_what_was_stored(value, tmp_path):
    with pytest.raises(UserError, match=r"lora\.merged was removed; leave it out$"):
        load(tmp_path, f"lora: {{r: 4, merged: {str(value).lower()}}}\n")
    stored = load(tmp_path, "lora: {r: 4}\n").to_dict()
    stored["lora"]["merged"] = value
    assert ("merged" in without_removed(stored)["lora"]) == value
    assert without_removed(stored | {"lora": None})["lora"] is None


def test_a_pipe_as_run_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(UserError, match="a pipe; give the path of a YAML file"):
        load_config(tmp_path / "run.yaml")


def test_a_file_that_is_no_run_file(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"x" * (MOST_BYTES + 1))
    for path, message in {
        tmp_path / "run.yaml": "larger than",
        tmp_path: "cannot read the file",
        Path("a\0b"): "cannot read the file",
    }.items():
        with pytest.raises(UserError, match=message):
            load_config(path)


def test_an_unknown_section_of_an_override_is_not_blamed_on_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text(SECTIONS)
    with pytest.raises(UserError, match=r"^--foo: unknown key foo; known keys: model"):
        load_config(tmp_path / "run.yaml", ["--foo=1"])


def test_steps_are_a_hundred_unless_epochs_say_how_many():
    training = config.Training("out")
    assert training.num_steps == 100
    assert config.Training("out", steps=3).num_steps == 3
    assert replace(training, epochs=0.5).num_steps is None
    cfg = config.RunConfig(config.Model("m"), config.Data("d"), training)
    overridden = read_config(cfg, ["--training.epochs=0.5"], {})
    assert (overridden.training.num_steps, overridden.training.epochs) == (None, 0.5)


def test_epoch_is_a_word_in_place_of_steps(tmp_path):
    (tmp_path / "run.yaml").write_text(SECTIONS)
    overrides = ["--training.epochs=2", "--training.eval_every=epoch", "--data.validation=0.1"]
    training = load_config(tmp_path / "run.yaml", overrides).training
    assert (training.eval_every, training.save_every) == ("epoch", 0)
    with pytest.raises(
        UserError, match=r"training\.eval_every is epoch, and training\.epochs is n"
    ):
        load_config(tmp_path / "run.yaml", overrides[1:])


RECOMPUTATION = [
    ({"budget_gib": 0}, "budget_gib is 0.0; give a positive number of GiB"),
    ({"budget_gib": -1}, "budget_gib is -1.0; give a positive number of GiB"),
    ({"budget_gib": math.nan}, "budget_gib is nan; give a positive number of GiB"),
    ({"budget_gib": 1e9}, "at most 1,000,000"),
    ({"budget_gib": True}, "checkpointing.budget_gib is true; give a number or null"),
    ({"full": [True]}, "checkpointing.full.0 is true; give a whole number"),
    ({"budget_gib": "much"}, "checkpointing.budget_gib is 'much'; give a number or null"),
    ({"budget_gib": None}, "names no layer; give budget_gib"),
    ({}, "names no layer; give budget_gib"),
    ({"budget": 12}, "unknown key training.checkpointing.budget; did you mean budget_gib?"),
    ({"budget_gib": 12, "layers": []}, "unknown key training.checkpointing.layers; known keys: b"),
    ({"budget_gib": 12, "full": [0]}, "has budget_gib, which chooses the layers, and layers; leav"),
    ({"full": [0, 1], "operators": [1]}, "names layer 1 twice; leave one out"),
    ({"full": [-1]}, "names layer -1; layers are numbered from 0"),
    ("some", "is 'some'; give none, full, operators, a list of texts or a mapping"),
]


@pytest.mark.parametrize(("value", "message"), RECOMPUTATION)
def test_what_is_no_budget_and_names_no_layers(value, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse_config(with_checkpointing(value))
    assert "training.checkpointing" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_budget_and_layers_are_what_was_written():
    for value in ({"budget_gib": 12}, {"full": [0, 3], "operators": [1]}):
        cfg = parse_config(with_checkpointing(value))
        assert cfg.training.checkpointing == Recomputation(
            **{key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}
        )
        assert parse_config(json.loads(json.dumps(cfg.to_dict()))) == cfg
    assert parse_config(with_checkpointing({"budget_gib": 12})).training.budget_bytes == 12 * 2**30


def with_checkpointing(value: Any) -> dict[str, Any]:
    training = {"output_dir": "o", "checkpointing": value}
    return {"model": {"path": "m"}, "data": {"train": "d"}, "training": training}


def test_a_value_of_a_mapping_is_named_with_its_key():
    run = {"model": {"path": "m"}, "data": {"train": "d"}, "training": {"output_dir": "o"}}
    with pytest.raises(UserError, match=r"launch.environment.A is 1; give a text, in quotes$"):
        parse_config({**run, "launch": {"environment": {"A": 1}}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps=2.5", "training.steps is 2.5; give a whole number or null"),
        ("training.steps=[1]", "training.steps is [1]; give a whole number or null"),
        ("optimizer.lr=null", "optimizer.lr is null; give a number"),
        ("optimizer.betas=[0.9]", "optimizer.betas is [0.9]; give a list of two numbers"),
        ("optimizer.betas=[a, 0.9]", "optimizer.betas.0 is 'a'; give a number"),
        ("measure.memory=maybe", "measure.memory is 'maybe'; give true or false"),
        ("data.text_field=no", "data.text_field is false; give a text, in quotes"),
        ("training.output_dir=2024-01-01", "output_dir is 2024-01-01; give a text, in quotes"),
        ("data.train=3", "data.train is 3; give a text or a list of texts or mappings"),
        ("data.train=[{path: x, weight: true}]", "train.0.weight is true; give a number or null"),
        ("data.fields={prompt: [3]}", "data.fields.prompt.0 is 3; give a text, in quotes"),
        ("data.fields={3: a}", "data.fields has the key 3; give a text, in quotes"),
        ("training.eval_every=epochs", "eval_every is 'epochs'; give a whole number or epoch"),
        ("lora.targets={q: 3}", "lora.targets.q is 3; give a list of numbers or null"),
        ("parallel.memory_limit_gib=x", "is 'x'; give a number, a list of numbers or null"),
        ("measure.trackers=wandb", "give a list of tensorboard, wandb, mlflow or trackio"),
        ("launch.slurm={a: [1]}", "a is [1]; give a text, a whole number, true, false or null"),
        ("launch.resources={a: null}", "a is null; give a text, a number, true or false"),
        ("training=5", "training is 5; give a mapping"),
        ("lora=5", "lora is 5; give a mapping or null"),
    ],
)
def test_a_value_of_another_type_is_refused_by_what_its_key_may_be(override, message, tmp_path):
    (tmp_path / "run.yaml").write_text(SECTIONS)
    with pytest.raises(UserError, match=f"{re.escape(message)}$"):
        load_config(tmp_path / "run.yaml", [f"--{override}"])


@pytest.mark.parametrize("value", ["many", 2.5, ["a"], [[]], {"a": "b"}, {"a": [{}]}, True, None])
def test_no_message_is_in_the_words_of_another_library(value):
    theirs = r"[Ii]nput should|valid (integer|number|string|list)|unable to|dictionary|instance of"
    messages = [
        message
        for section in keys.known_keys()
        for key in keys.known_keys(section)
        if (message := refusal(section, key, value))
    ]
    assert len(messages) > 20
    for message in messages:
        assert not re.search(theirs, message)
        assert re.search(r"; |known keys: ", message)


def refusal(section: str, key: str, value: Any) -> str:
    run = {"model": {"path": "m"}, "data": {"train": "d"}, "training": {"output_dir": "o"}}
    run[section] = {**run.get(section, {}), key: value}
    try:
        parse_config(run)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: a\ndata: b\n", "line 1, 'model: {path: a' (a brace that is not closed)"),
        ("a: [1, 2\nb: 3\n", "line 1, 'a: [1, 2' (a bracket that is not closed)"),
        ("a: 1\nb: 'x\nc: 2\n", 'line 2, "b: \'x" (a quote that is not closed)'),
        ("a: b: c\n", "line 1, 'a: b: c' (a colon where no key can be"),
        ("a:\n\tb: 1\n", "line 2, 'b: 1' (a tab"),
        ("a: *x\n", "line 1, 'a: *x' (an alias of no anchor)"),
        ("a: @x\n", "line 1, 'a: @x' (a character that begins no value"),
        ("a: !!python/object:x {}\n", "(a tag, and tags are not read)"),
        ("a: 2024-13-01\n", "not valid YAML (a date that does not exist"),
        ("a: \0\n", "not valid YAML (a control character)"),
        (b"a: \xff\n", "not valid YAML (it is not in UTF-8)"),
        ("a: " + "9" * 5000, "not valid YAML (a number of thousands of digits)"),
    ],
)
def test_what_is_no_yaml_is_named_by_line_and_reason(text, message, tmp_path):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(UserError, match=f"{re.escape(message)}.*; correct it$"):
        load_config(tmp_path / "run.yaml")


def test_records_have_no_values_of_the_environment():
    run = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "training": {"output_dir": "o"},
        "launch": {"environment": {"HF_TOKEN": "secret"}},
    }
    cfg = parse_config(run, "run.yaml")
    assert "secret" not in repr(cfg.recorded())
    assert cfg.recorded()["launch"]["environment"].keys() == {"HF_TOKEN"}
    assert cfg.to_dict()["launch"]["environment"] == {"HF_TOKEN": "secret"}


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"environment": {"A": "x\0y"}}, r"launch\.environment has a NUL"),
        ({"environment": {"A": "x\ud800"}}, r"launch\.environment has"),
        (
            {"environment": {"A": "x" * 2**17}},
            r"launch\.environment has 'A', which .* takes 131,072",
        ),
        ({"before": ["echo \0"]}, r"launch\.before has"),
        ({"container": "a\udfff"}, r"launch\.container has"),
        ({"slurm": {"account": "a\0"}}, r"launch\.slurm has"),
    ],
)
def test_what_no_process_can_be_given_is_refused(launch, message):
    run = {"model": {"path": "m"}, "data": {"train": "d"}, "training": {"output_dir": "o"}}
    with pytest.raises(UserError, match=message):
        parse_config({**run, "launch": launch})


def test_a_backslash_before_letters_is_text():
    run = {"model": {"path": "m"}, "data": {"train": "d"}, "training": {"output_dir": "o"}}
    parse_config({**run, "launch": {"environment": {"A": r"\x00 \ud800 \\x00 é"}}})


def test_a_variable_of_the_most_bytes_reaches_a_process():
    # Linux itself says where the bound lies.
    name, value = "A", "x" * (2**17 - len("A=") - 1)
    run = {"model": {"path": "m"}, "data": {"train": "d"}, "training": {"output_dir": "o"}}
    parse_config({**run, "launch": {"environment": {name: value}}})
    assert subprocess.run(["/bin/true"], env={name: value}, check=False).returncode == 0
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/bin/true"], env={name: f"{value}x"}, check=False)


def test_an_error_is_one_printable_line_that_ends_with_its_way_out():
    quoted = "a\n\tb \x1b[31m\x00 \udcff " + "x" * 5_000
    line = str(UserError(f"data.format is {quoted}; give another"))
    assert line.isprintable()
    assert line.startswith("data.format is a b \\x1b[31m\\x00 \\udcff xxx")
    assert line.endswith("xxx; give another")
    assert len(line) < 1_300


@pytest.mark.parametrize("weight", [5e-324, 1e-300, 1e300, 0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_no_share_is_refused(weight):
    data = {"train": ["d"], "weights": [weight]}
    with pytest.raises(UserError, match=r"data\.weights is"):
        parse_config({"model": {"path": "m"}, "data": data, "training": {"output_dir": "o"}})


@pytest.mark.parametrize(
    "size", [[], [4], [4, 8, 1], [0, 8], [1.5, 8], [65_537, 8], [math.inf, 8], [4, math.nan]]
)
def test_a_rank_and_alpha_of_a_target_are_two_numbers_in_range(size):
    with pytest.raises(UserError, match=r"lora.targets: k_proj has .*; give a rank from 1 to"):
        config.Lora(targets={"q_proj": None, "k_proj": size})
    assert config.Lora(targets={"q_proj": None, "k_proj": [4, 8.0]}).sizes == {"k_proj": [4, 8.0]}


@pytest.mark.parametrize(
    ("sections", "way_out"),
    [
        ({"lr": 0.001}, "unknown key lr; lr belongs to optimizer: write optimizer.lr"),
        ({"training": {"lr": 1}}, "unknown key training.lr; lr belongs to optimizer: write optim"),
        ({"optimizer": {"learning_rate": 1}}, "optimizer.learning_rate; write optimizer.lr"),
        ({"training": {"mtp": "train"}}, "unknown key training.mtp; layers that predict "),
        ({"training": {"bf16": True}}, "training.bf16; write training.precision: bfloat16"),
        ({"data": {"path": "x"}}, "path belongs to model and lora: write model.path or lora.path"),
    ],
)
def test_a_key_of_another_section_or_library_is_named(sections, way_out):
    data = {"model": {"path": "m"}, "data": {"train": "d"}, "training": {"output_dir": "o"}}
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    with pytest.raises(UserError, match=re.escape(way_out)):
        parse_config(data)


def test_other_libraries_names_lead_to_keys_and_are_none():
    for name, way_out in keys._ALIASES.items():
        assert re.findall(r"\w+\.\w+", way_out)[0] in keys.all_keys()
        assert name not in {key.partition(".")[2] for key in keys.all_keys()}
