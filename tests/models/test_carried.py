"""What is in the base's files is in what is saved: names, dtypes, and the bits of what no class
loads, such as layers that predict several tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.assembly.build import build
from shardwise.checkpoint.export import save_result
from shardwise.commands import cli
from shardwise.config import Lora, Model
from shardwise.models.adapters.writing import merge_adapter, save_adapter
from shardwise.models.copy import copy_model
from shardwise.models.families import FAMILIES
from shardwise.models.weight_folder import INDEX
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models import quantised_folders
from tests.models.tiny import CONFIGS, TINY_OF, same, trained, with_adapters, with_every_kind
from tests.parity.harness import Cell, run_config

Tensors = dict[str, torch.Tensor]
MTP = {
    "mtp.layers.0.mlp.up_proj.weight": torch.arange(12.0).view(3, 4),
    "mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.arange(8.0).view(2, 4).bfloat16(),
    "mtp.norm.weight": torch.arange(4.0).half(),
}
PAST = {
    "model.layers.4.eh_proj.weight": torch.arange(6.0).view(2, 3),
    "model.layers.4.mlp.experts.7.up_proj.weight": torch.arange(6.0).view(2, 3).bfloat16(),
    "model.layers.4.shared_head.norm.weight": torch.arange(3.0),
}
"""Of a layer past the last of four, as GLM and DeepSeek have it."""
NUM_LAYERS = 4


def write_base(
    folder: Path, family: str, others: Tensors, dtype=torch.float32, parts=1, mixed=False
) -> Tensors:
    """Write a base by transformers in one file or several; return what is in its files."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(CONFIGS / TINY_OF[family])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file) | others
    if mixed:
        tensors |= {k: v.float() for k, v in tensors.items() if "norm" in k and k not in others}
    save_file(tensors, file, {"format": "pt"})
    if parts > 1:
        file.unlink()
        names = sorted(tensors)
        shard_of = {name: f"model-{i % parts}.safetensors" for i, name in enumerate(names)}
        for shard in set(shard_of.values()):
            own = {name: tensors[name] for name in names if shard_of[name] == shard}
            save_file(own, folder / shard, {"format": "pt"})
        index = {"metadata": {}, "weight_map": shard_of}
        (folder / INDEX).write_text(json.dumps(index))
    return tensors


def in_files(folder: Path) -> Tensors:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def missing_in(folder: Path) -> set[str]:
    """What transformers does not find in a folder."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return loaded[1]["missing_keys"]


def check(folder: Path, before: Tensors, others: Tensors) -> None:
    """The folder has the names and dtypes of the base, and the bits of `others`."""
    after = in_files(folder)
    assert after.keys() == before.keys()
    assert {k: v.dtype for k, v in after.items()} == {k: v.dtype for k, v in before.items()}
    assert same({key: after[key] for key in others}, others)


def others_of(family: str) -> Tensors:
    config = AutoConfig.from_pretrained(CONFIGS / TINY_OF[family])
    if getattr(config, "num_nextn_predict_layers", None) and config.num_hidden_layers == NUM_LAYERS:
        return MTP | PAST
    return MTP


NOW = with_every_kind(FAMILIES, first=("qwen3_next", "qwen3_5_text", "glm4_moe", "deepseek_v3"))


@pytest.mark.parametrize("family", some_now(FAMILIES, NOW))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merged_model_and_a_copy_have_names_and_dtypes_of_the_base(family, dtype, tmp_path):
    others = others_of(family)
    before = write_base(tmp_path / "base", family, others, dtype, mixed=True)
    base = Model(str(tmp_path / "base"), dtype="bfloat16")
    lora = Lora(r=2)
    model, _ = with_adapters(base, lora)
    save_adapter(model, lora, trained(model), tmp_path / "adapter", "base")
    notes = [
        merge_adapter(Model(base.path), tmp_path / "adapter", tmp_path / "merged"),
        copy_model(Model(base.path), "int8", tmp_path / "copy"),
    ]
    for out in ("merged", "copy"):
        check(tmp_path / out, before, others)
        assert not missing_in(tmp_path / out)
    assert all(f"{len(others)} tensors" in note and "mtp" in note for (note,) in notes)


def test_glm_and_deepseek_have_layers_past_the_last():
    """Else the test above would say nothing of them."""
    assert others_of("glm4_moe").keys() == others_of("deepseek_v3").keys() > MTP.keys()


CELLS = (
    Cell("qwen3_next", "single", "full", 1),
    Cell("glm4_moe", "fsdp2", "full", 2),
    Cell("llama", "pp", "full", 2, schedule="1f1b"),
    Cell("llama", "tp", "full", 2),
    Cell("llama", "ddp", "full", 2, "offload-disk"),
    Cell("qwen3_moe", "ddp-ep", "full", 2),
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_training_keeps_names_and_dtypes_under_every_layout(cell, dtype, tmp_path):
    others = others_of(cell.family)
    before = write_base(tmp_path / "base", cell.family, others, getattr(torch, dtype), parts=3)
    told = run_ranks(cell.nproc, save, cell, tmp_path, dtype)
    check(tmp_path / "model", before, others)
    assert same(in_files(tmp_path / "model"), before)  # before the first step
    assert ["untrained" in note for note in told[0]] == [True]
    assert not any(told[1:])


def save(cell: Cell, folder: Path, dtype: str) -> list[str]:
    cfg = run_config(cell)
    model = Model(str(folder / "base"), dtype=dtype)  # ty: ignore[invalid-argument-type]
    cfg = replace(cfg, model=model)
    mesh, told = build_mesh(cfg, torch.device("cpu")), list[str]()
    job = build(cfg, mesh)
    save_result(job, cfg, mesh, folder, note=told.append)
    return told


def test_a_base_that_is_gone_costs_no_result(tmp_path):
    write_base(tmp_path / "base", "llama", MTP)
    (told,) = run_ranks(1, save_without_base, tmp_path)
    assert "lacks what the base has beside LlamaForCausalLM" in told[0]
    assert not missing_in(tmp_path / "model")


def save_without_base(folder: Path) -> list[str]:
    cfg = run_config(Cell("llama", "single", "full"))
    cfg = replace(cfg, model=Model(str(folder / "base")))
    mesh, told = build_mesh(cfg, torch.device("cpu")), list[str]()
    job = build(cfg, mesh)
    (folder / "base" / "model.safetensors").unlink()
    save_result(job, cfg, mesh, folder, note=told.append)
    return told


@pytest.mark.parametrize("method", quantised_folders.METHODS)
def test_of_a_quantised_folder_plain_values_are_carried(method, tmp_path):
    """In the dtype of the copy, whose config says nothing of scales; near what was quantised."""
    key = "mtp.layers.0.mlp.up_proj.weight"
    matrix = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    before = write_base(
        tmp_path / "base", "llama", {key: matrix, "mtp.norm.weight": matrix[0].clone()}
    )
    quantised_folders.write(tmp_path / "q", tmp_path / "base", method)
    copy_model(Model(str(tmp_path / "q")), quantised_folders.BASE_OF[method], tmp_path / "copy")  # ty: ignore[invalid-argument-type]
    after = in_files(tmp_path / "copy")
    assert {k: v.dtype for k, v in after.items()} == {k: v.dtype for k, v in before.items()}
    assert torch.equal(after["mtp.norm.weight"], matrix[0])
    assert 0 < (after[key] - matrix).norm() < 0.12 * matrix.norm()


KEYS = st.lists(
    st.text("abcdefgh_.0123456789", min_size=1, max_size=20), min_size=1, max_size=4, unique=True
)
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "float8_e4m3fn")


@settings(max_examples=15, deadline=None)
@given(keys=KEYS, data=st.data())
def test_whatever_stands_beside_a_model_is_carried_bit_by_bit(keys, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    others = {}
    for key in keys:
        dtype = getattr(torch, data.draw(st.sampled_from(DTYPES)))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        others[f"mtp.{key}"] = torch.ones(shape).to(dtype)
    before = write_base(folder / "base", "llama", others, parts=data.draw(st.integers(1, 3)))
    copy_model(Model(str(folder / "base")), "int8", folder / "copy")
    check(folder / "copy", before, others)


def test_the_command_says_what_it_carries(tmp_path, capsys):
    write_base(tmp_path / "base", "glm4_moe", MTP | PAST)
    assert cli.main(["export", str(tmp_path / "base"), str(tmp_path / "out"), "--copy", "fp8"]) == 0
    note = capsys.readouterr().out.splitlines()[0]
    assert note.startswith("note: 6 tensors that Glm4MoeForCausalLM does not load (")
    assert "model.layers.4" in note
