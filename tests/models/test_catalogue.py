"""The tables of `shardwise models`: every fact in them comes from a model, and nothing of it is cut
off."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from tools.compatibility import families

from shardwise.commands.models import drawn
from shardwise.config import Lora, Model
from shardwise.config.presets import FAMILIES as SHIPPED
from shardwise.models.adapters.lora import inject
from shardwise.models.catalogue import _braced, every_kind, families_table, layer_facts, model_table
from shardwise.models.families import FAMILIES, spec_of
from shardwise.models.load import build_meta
from shardwise.models.names import adapter_layers
from tests.models.tiny import CONFIGS, PLAIN, on_meta, tiny
from tests.models.unproven import write_config


def printed(table: dict, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(drawn(**table))
    return console.export_text()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_example_of_a_family_has_every_kind_of_layer(name):
    config = every_kind(FAMILIES[name])
    kinds = {row.kind for row in layer_facts(build_meta(Model(name, init="random"), config))}
    known = {mixer.name for mixer in FAMILIES[name].mixers.values()}
    # A config without layer_types has the same attention in all layers.
    assert kinds == (known if getattr(config, "layer_types", None) else {"full_attention"})


@pytest.mark.parametrize("targets", [pytest.param("auto", marks=pytest.mark.slow), "all-linear"])
@pytest.mark.parametrize("name", PLAIN)
def test_what_is_said_to_be_reached_is_what_injection_adapts(name, targets):
    rows = layer_facts(on_meta(tiny(name)))
    model = on_meta(tiny(name))
    spec = spec_of(model.config, model)
    inject(model, Lora(targets=targets), spec)  # ty: ignore[invalid-argument-type]
    said = [
        name
        for row in rows
        for name in (*row.auto, *(row.all_linear if targets == "all-linear" else ()))
    ]
    adapted = [re.sub(r".*\.\d+\.\w+\.", "", path) for path in adapter_layers(model)]
    assert sorted(name.removesuffix(" (3-D)") for name in said) == sorted(adapted)
    assert sum(row.parameters for row in rows) == sum(
        p.numel()
        for layer in spec.layers
        for p in on_meta(tiny(name)).get_submodule(layer.name).parameters()
    )


@pytest.mark.parametrize("width", [100, 120])
def test_all_families_fit_into_a_terminal(width):
    text = printed(families_table(), width)
    assert "…" not in text
    for name, family in FAMILIES.items():
        assert f" {name} " in text
        assert all(
            f".{stack.rpartition('.')[2]}" in text or "experts.{" in text
            for stack in family.named("experts")
        )
    assert "experts.{gate_up,down}_proj (3-D)" in text
    assert "experts) single, pp -cp" in " ".join(text.split())


def test_the_table_of_the_package_is_what_is_computed():
    """Written by `python -m tools.compatibility`."""
    text = SHIPPED.read_text(encoding="utf-8")
    assert text == families()
    assert json.loads(text)["table"] == families_table()


def test_one_model_layer_by_layer():
    text = printed(model_table(Model(str(CONFIGS / "tiny-qwen3_next"))), 100)
    rows = [line.split() for line in text.splitlines() if re.match(r" [\d-]+ ", line)]
    # Layer 1 has an MLP, layer 3 attention.
    assert [row[:3] for row in rows] == [
        ["0", "gated_delta_net,", "moe"],
        ["1", "gated_delta_net,", "dense"],
        ["2", "gated_delta_net,", "moe"],
        ["3", "full_attention,", "moe"],
    ]
    assert re.search(r"qwen3_next, [\d,]+ parameters, of which a token meets [\d,]+ ", text, re.M)
    alike = printed(model_table(Model(str(CONFIGS / "tiny-llama"))), 100)
    assert "a token meets" not in alike
    # q 64*128, k and v 64*64, o 128*64, gate, up, down 64*172 each, two norms of 64.
    parameters = 2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 172 + 2 * 64
    assert re.search(rf"^ 0-3 .* yes +{parameters:,}", alike, re.M)
    assert "tied embeddings" in printed(model_table(Model(str(CONFIGS / "tiny-gpt2"))), 100)
    assert "not proven" not in alike
    assert "pp-fsdp2, pp-hsdp [-cp][-tp[-sp]]" in alike


def test_a_family_is_shown_as_transformers_makes_it_unless_a_folder_has_its_name(
    tmp_path: Path, monkeypatch
) -> None:
    # Llama's defaults: 32 layers.
    assert re.search(
        r"^ 0-31 +full_attention, dense", printed(model_table(Model("llama")), 100), re.M
    )
    (tmp_path / "llama").symlink_to(CONFIGS / "tiny-llama")
    monkeypatch.chdir(tmp_path)
    assert re.search(
        r"^ 0-3 +full_attention, dense", printed(model_table(Model("llama")), 100), re.M
    )


def test_a_model_of_no_listed_family_says_so(tmp_path):
    text = printed(model_table(Model(str(write_config("ministral", tmp_path)))), 120)
    assert "family ministral is not proven here" in text
    assert "may run under single" in " ".join(text.split())
    assert re.search(
        r"^ 0 +sliding_attention, dense +\{q,k,v,o,gate,up,down\}_proj +no", text, re.M
    )


def test_a_model_that_no_layout_trains_says_why(tmp_path):
    config = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    text = printed(model_table(Model(str(tmp_path), init="random")), 200)
    assert "may run under no layout: attention_dropout is 0.1" in text


def test_names_that_differ_in_one_part_are_one():
    names = [
        "q_proj",
        "v_proj",
        "w1",
        "in_proj_a",
        "in_proj_b",
        "in_proj",
        "c.up_proj (3-D)",
        "c.down_proj (3-D)",
    ]
    assert _braced(names) == "{q,v,in}_proj w1 in_proj_{a,b} c.{up,down}_proj (3-D)"
    assert _braced(["gate", "gate", "e.x"]) == "gate e.x"
