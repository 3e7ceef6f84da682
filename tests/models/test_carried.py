"""What is in the base's files is in what is saved: names, dtypes, and the bits of what no class
loads, such as layers that predict several tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from shardwise.assembly.build import build
from shardwise.checkpoint import export
from shardwise.checkpoint.export import save_result
from shardwise.commands import cli
from shardwise.config import Lora, Model, UserError
from shardwise.models.adapters.writing import merge_adapter, save_adapter
from shardwise.models.copy import copy_model
from shardwise.models.families import FAMILIES
from shardwise.models.load import weights
from shardwise.models.weight_folder import INDEX
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models import multimodal, quantised_folders
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
    folder: Path, family: str, others: Tensors, dtype=torch.float32, parts=1, mixed=False, **sizes
) -> Tensors:
    """Write a base by transformers in one file or several; return what is in its files."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(CONFIGS / TINY_OF[family], **sizes)
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
    entries = [entry for file in folder.glob("*.safetensors") for entry in load_file(file).items()]
    assert len(entries) == len(dict(entries)), "a key is in two files"
    return dict(entries)


def info_of(folder: Path) -> tuple[set[str], set[str]]:
    """What transformers does not find in a folder, and what it has no place for."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return loaded[1]["missing_keys"], loaded[1]["unexpected_keys"]


def check(folder: Path, before: Tensors, others: Tensors) -> None:
    """The folder has the names and dtypes of the base, and the bits of `others`."""
    after = in_files(folder)
    assert after.keys() == before.keys()
    assert {k: v.dtype for k, v in after.items()} == {k: v.dtype for k, v in before.items()}
    assert same({key: after[key] for key in others}, others)
    missing, unexpected = info_of(folder)
    assert not missing
    assert unexpected == info_of(folder.parent / "base")[1]


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
    assert all(f"{len(others)} tensors" in note and "mtp" in note for (note,) in notes)


def test_glm_and_deepseek_have_layers_past_the_last():
    """Else the test above would say nothing of them."""
    assert others_of("glm4_moe").keys() == others_of("deepseek_v3").keys() > MTP.keys()


CELLS = (
    Cell("qwen3_next", "single", "full", 1),
    Cell("glm4_moe", "fsdp2", "full", 2),
    Cell("llama", "pp", "full", 2, schedule="1f1b"),
    Cell("llama", "tp", "full", 2),
    Cell("qwen3_next", "fsdp1", "full", 2),
    Cell("qwen3_next", "cp", "full", 2),
    Cell("glm4_moe", "zero2", "full", 2),
    Cell("llama", "ddp", "full", 2, "offload-disk"),
    Cell("qwen3_moe", "ddp-ep", "full", 2),
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_training_keeps_names_and_dtypes_under_every_layout(cell, dtype, tmp_path):
    others = others_of(cell.family)
    before = write_base(tmp_path / "base", cell.family, others, getattr(torch, dtype), parts=3)
    for notes in run_ranks(cell.nproc, save, cell, tmp_path, dtype):
        (note,) = (note for note in notes if "not tuned with it" in note)
        assert f"{len(others)} tensors" in note
        assert "model/ gets them" in note
    check(tmp_path / "model", before, others)
    assert same(in_files(tmp_path / "model"), before)  # before the first step


def save(
    cell: Cell, folder: Path, dtype: str = "float32", bug: Callable[[], None] = lambda: None
) -> tuple[str, ...]:
    """Save what a run starts from; return what it says at its start."""
    bug()
    cfg = run_config(cell)
    model = Model(str(folder / "base"), dtype=dtype)  # ty: ignore[invalid-argument-type]
    cfg = replace(cfg, model=model)
    mesh, told = build_mesh(cfg, torch.device("cpu")), list[str]()
    job = build(cfg, mesh)
    save_result(job, cfg, mesh, folder, note=told.append)
    assert not told
    return job.notes


def heads_are_dropped() -> None:
    export._others = lambda *args: iter(())


def heads_are_written_into_a_file_of_their_own_too() -> None:
    inside = export.save_model

    def twice(hf, state, folder, *rest):
        *rest, others = rest
        others = list(others)
        inside(hf, state, folder, *rest, others)
        save_file(dict(others), folder / "model-mtp.safetensors", {"format": "pt"})

    export.save_model = twice


def heads_are_yielded_twice() -> None:
    inside = export._others
    export._others = lambda *args: (entry for _ in range(2) for entry in inside(*args))


@pytest.mark.parametrize(
    ("bug", "error"),
    [
        (heads_are_dropped, "assert dict_keys"),
        (heads_are_written_into_a_file_of_their_own_too, "a key is in two files"),
        (heads_are_yielded_twice, "is written twice"),
    ],
)
def test_a_planted_bug_turns_the_test_above_red(bug, error, tmp_path):
    before = write_base(tmp_path / "base", "glm4_moe", MTP | PAST)

    def save_and_check() -> None:
        run_ranks(2, save, CELLS[1], tmp_path, "float32", bug)
        check(tmp_path / "model", before, MTP | PAST)

    with pytest.raises((AssertionError, RuntimeError), match=error):
        save_and_check()


def test_lora_leaves_the_heads_and_says_so(tmp_path):
    write_base(tmp_path / "base", "glm4_moe", MTP | PAST)
    (notes,) = run_ranks(1, save, Cell("glm4_moe", "single", "lora"), tmp_path)
    (note,) = (note for note in notes if "not tuned with it" in note)
    assert "(model.layers.4, mtp)" in note
    assert "the adapter leaves them" in note


@pytest.mark.parametrize("layout", ["fsdp2", "pp"])
def test_a_multimodal_folder_keeps_its_tower_and_heads_under_a_layout(layout, tmp_path):
    multimodal.write(tmp_path / "base", "tiny-qwen3_5")
    before = multimodal.entries(tmp_path / "base")
    schedule = "1f1b" if layout == "pp" else None
    cell = Cell("qwen3_5_text", layout, "full", 2, schedule=schedule)
    notes, _ = run_ranks(2, save, cell, tmp_path)
    assert same(in_files(tmp_path / "model"), before)
    (note,) = (note for note in notes if "not tuned with it" in note)
    assert "(model.visual, mtp)" in note


def write_glm(folder: Path) -> Tensors:
    """A GLM as it is published: 46 layers, then one that predicts a second token."""
    torch.manual_seed(0)
    config: Any = AutoConfig.from_pretrained(CONFIGS / TINY_OF["glm4_moe"])
    config.hidden_size = config.intermediate_size = 16
    config.moe_intermediate_size = config.head_dim = 8
    config.n_routed_experts, config.num_experts_per_tok = 2, 1
    config.num_hidden_layers, config.first_k_dense_replace = 47, 45
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    config.num_hidden_layers = 46
    config.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    start = "model.layers.46."
    tensors |= {f"{start}{name}.weight": torch.rand(16) for name in ("enorm", "hnorm")}
    tensors[f"{start}shared_head.norm.weight"] = torch.rand(16)
    tensors[f"{start}eh_proj.weight"] = torch.rand(16, 32)
    tensors[f"{start}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{start}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def test_transformers_drafts_with_the_heads_of_what_is_saved(tmp_path):
    """MtpModel raises an error unless each of its weights is there."""
    before = write_glm(tmp_path / "base")
    run_ranks(2, save, Cell("glm4_moe", "fsdp2", "full", 2), tmp_path)
    check(tmp_path / "model", before, {k: v for k, v in before.items() if ".layers.46." in k})
    prompt, drafts = torch.arange(8)[None], []
    for folder in ("base", "model"):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        heads = MtpModel.from_pretrained(model).state_dict()
        tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, use_mtp=True)
        drafts.append((heads, tokens))
    (heads, tokens), (heads_of_base, tokens_of_base) = drafts
    assert same(heads, heads_of_base)
    assert torch.equal(tokens, tokens_of_base)


def test_transformers_computes_no_loss_of_the_heads(tmp_path):
    """The reason that the run file gives for not training them; repaired there, they could be."""
    write_glm(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    heads, ids = MtpModel.from_pretrained(model), torch.arange(8)[None]
    hidden = model.model(ids).last_hidden_state
    cache = MtpCache(config=model.config.get_mtp_config())
    with pytest.raises(TypeError, match=r"\+=: 'NoneType' and 'Tensor'"):
        heads(ids, hidden, None, ids, cache, labels=ids)
    config: Any = AutoConfig.from_pretrained(CONFIGS / TINY_OF["qwen3_next"])
    with pytest.raises(ValueError, match="without `num_mtp_layers`"):
        config.get_mtp_config()


def test_layers_past_the_last_that_the_config_does_not_have_are_one_line(tmp_path):
    write_base(tmp_path, "llama", PAST)
    with pytest.raises(UserError, match=r"num_hidden_layers of config\.json is 4") as error:
        copy_model(Model(str(tmp_path)), "int8", tmp_path / "copy")
    assert "num_nextn_predict_layers" in str(error.value)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    copy_model(Model(str(tmp_path)), "int8", tmp_path / "copy")
    assert same({key: in_files(tmp_path / "copy")[key] for key in PAST}, PAST)


def test_a_missing_shard_of_heads_is_one_line(tmp_path, capsys):
    multimodal.write(tmp_path / "base")
    base = Model(str(tmp_path / "base"))
    model, _ = with_adapters(base, Lora(r=2))
    save_adapter(model, Lora(r=2), trained(model), tmp_path / "adapter", "base")
    (tmp_path / "base" / multimodal.SHARDS[1]).unlink()
    capsys.readouterr()
    arguments = [base.path, f"{tmp_path}/adapter", f"{tmp_path}/merged", "--merge"]
    assert cli.main(["export", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{multimodal.SHARDS[1]}' is named in" in line
    assert not (tmp_path / "merged").exists()
    with pytest.raises(UserError, match=f"{multimodal.SHARDS[1]}' is named in"):
        next(weights(model, base, 0))


def test_a_base_that_is_gone_costs_no_result(tmp_path):
    write_base(tmp_path / "base", "llama", MTP)
    (told,) = run_ranks(1, save_without_base, tmp_path)
    assert "lacks what the base has beside LlamaForCausalLM" in told[0]
    assert info_of(tmp_path / "model") == (set(), set())


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
    others = {key: matrix, "mtp.norm.weight": matrix[0].clone()}
    before = write_base(tmp_path / "base", "llama", others, intermediate_size=128)  # whole blocks
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
