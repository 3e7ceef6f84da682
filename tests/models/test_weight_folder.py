"""Of a folder with several weight files the same are read as by transformers, or it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardwise.config import Lora, Model, UserError
from shardwise.models.adapters.writing import save_adapter
from shardwise.models.save import save_model
from shardwise.models.weight_folder import INDEX, SINGLE, unread_note
from tests.models.tiny import entries, on_meta, same, tiny, trained, with_adapters

LLAMA = tiny("tiny-llama")
NORM = "model.norm.weight"


def base(folder: Path, seed: int, shard_bytes: int = 10**9) -> None:
    save_model(on_meta(LLAMA), entries(LLAMA, seed=seed).items(), folder, shard_bytes)


def index_beside(folder: Path) -> None:
    base(folder, seed=0, shard_bytes=200_000)
    base(folder / "other", seed=1)
    (folder / "other" / SINGLE).rename(folder / SINGLE)


def pickle_beside(folder: Path) -> None:
    base(folder, seed=0)
    torch.save(entries(LLAMA, seed=1), folder / "pytorch_model.bin")


def variant_beside(folder: Path) -> None:
    base(folder, seed=0)
    save_file(entries(LLAMA, seed=1), folder / "model.fp16.safetensors", {"format": "pt"})
    save_file(entries(LLAMA, seed=2), folder / "consolidated.safetensors", {"format": "pt"})


def shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    base(folder, seed=0, shard_bytes=200_000)
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    return sorted(folder.glob("*.safetensors")), names


def rewrite(folder: Path, names: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def index_lacks_an_entry(folder: Path) -> None:
    _, names = shards(folder)
    del names[NORM]
    rewrite(folder, names)


def index_names_another_shard(folder: Path) -> None:
    files, names = shards(folder)
    names[NORM] = next(file.name for file in files if file.name != names[NORM])
    rewrite(folder, names)


def entry_in_two_shards(folder: Path) -> None:
    files, names = shards(folder)
    for file in files:
        if file.name != names[NORM]:
            more = {NORM: entries(LLAMA)[NORM] + files.index(file)}
            save_file(load_file(file) | more, file, {"format": "pt"})


def named_file(folder: Path) -> None:
    base(folder, seed=0)
    save_file(entries(LLAMA, seed=1), folder / "best.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "best.safetensors"
    (folder / "config.json").write_text(json.dumps(config))


def adapter_beside(folder: Path) -> None:
    base(folder, seed=0)
    model, _ = with_adapters(LLAMA, Lora(r=2))
    save_adapter(model, Lora(r=2), trained(model), folder, "base")


def only_a_pickle(folder: Path) -> None:
    pickle_beside(folder)
    (folder / SINGLE).unlink()


def only_a_variant(folder: Path) -> None:
    variant_beside(folder)
    (folder / SINGLE).unlink()


def distributed(folder: Path) -> None:
    base(folder, seed=0)
    (folder / SINGLE).rename(folder / "shard-00001-model-00001-of-00001.safetensors")


Write = Callable[[Path], None]
MIXTURES: dict[Write, Sequence[str]] = {
    index_beside: [INDEX, "model-00001-of"],
    pickle_beside: [],
    variant_beside: ["consolidated.safetensors", "model.fp16.safetensors"],
    index_lacks_an_entry: [],
    index_names_another_shard: [],
    entry_in_two_shards: [],
    named_file: ["best.safetensors is read", "not read: model.safetensors"],
}
"""What is beside the weights that are read, and what the note names."""


@pytest.mark.parametrize("write", MIXTURES, ids=lambda write: write.__name__)
def test_the_weights_are_those_that_transformers_takes(write, tmp_path):
    write(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert same(entries(Model(str(tmp_path))), theirs)
    note = unread_note(str(tmp_path)) or ""
    assert bool(note) == bool(MIXTURES[write])
    assert all(part in note for part in MIXTURES[write])


@pytest.mark.parametrize(
    ("write", "fragment"),
    [
        (adapter_beside, "has an adapter_config.json beside the model"),
        (only_a_pickle, r"but pytorch_model\.bin"),
        (only_a_variant, r"but consolidated\.safetensors, model\.fp16\.safetensors"),
        (distributed, "has a distributed checkpoint"),
    ],
)
def test_what_is_not_read_here_as_by_transformers_is_refused(write, fragment, tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=fragment):
        entries(Model(str(tmp_path)))


def test_transformers_adds_the_adapter_that_lies_beside_a_model(tmp_path):
    adapter_beside(tmp_path)
    names = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert any(".lora_A." in name for name in names)


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("x" * 5_000 + ".safetensors", "not there"),
        ("a\0.safetensors", "not there"),
        ("\ud800.safetensors", "not there"),
        ("/tmp/a.safetensors", "not in its folder"),
        (5, "not a safetensors index"),
        (["a"], "not a safetensors index"),
        ("", "not there"),
    ],
)
@pytest.mark.parametrize("key", ["weight_map", "transformers_weights"])
def test_an_impossible_name_is_told_in_one_short_line(name, fragment, key, tmp_path):
    base(tmp_path, seed=0)
    if key == "weight_map":
        (tmp_path / SINGLE).unlink()
        (tmp_path / INDEX).write_text(json.dumps({key: {NORM: name}}))
    else:
        config = json.loads((tmp_path / "config.json").read_text()) | {key: name}
        (tmp_path / "config.json").write_text(json.dumps(config))
        fragment = "transformers_weights"
    with pytest.raises(UserError, match=fragment) as error:
        entries(Model(str(tmp_path)))
    assert len(str(error.value)) < 500
    str(error.value).encode()
