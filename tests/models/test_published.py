"""Folders that are quantised already: their values, what a run stores of them, and bad ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardwise.assembly.build import build
from shardwise.assembly.describe import describe
from shardwise.commands import cli
from shardwise.config import Lora, Model, UserError
from shardwise.kernels.quantised import dequantise
from shardwise.models.adapters.writing import save_adapter
from shardwise.models.copy import copy_model
from shardwise.models.load import load_whole, read_config, weights
from shardwise.models.quantise import read_back
from shardwise.models.quantised_entry import STATE, QuantisedEntry
from shardwise.models.stored import stored_in
from shardwise.parallel.mesh import build_mesh
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.quantised_folders import BASE_OF, GPTQ, METHODS, bitsandbytes, mxfp4, write
from tests.models.tiny import (
    CONFIGS,
    loaded_by_transformers,
    logits,
    on_meta,
    same,
    trained,
    with_adapters,
)
from tests.parity.harness import (
    DEEP,
    TOLERANCE,
    Cell,
    Outcome,
    compare,
    microbatches,
    run,
    run_config,
    verdict,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return plain_folder(tmp_path_factory.mktemp("plain") / "model", "wide-qwen3_5")


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return plain_folder(tmp_path_factory.mktemp("experts") / "model", "wide-lfm2_moe")


def plain_folder(folder: Path, name: str) -> Path:
    """Write a model with whole blocks of 128 in half of each matrix."""
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads")
    config = json.loads((DEEP / name / "config.json").read_text())
    for size in (*sizes, "num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads"):
        if size in config:
            config[size] *= 2
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return plain_of(folder)


def plain_of(folder: Path) -> Path:
    """Write random weights beside a config."""
    model = Model(str(folder), init="random")
    load_whole(model, read_config(model)).save_pretrained(folder)
    return folder


def values_of(folder: Path | str, dtype: str = "float32") -> dict[str, torch.Tensor]:
    model = Model(str(folder), dtype=dtype)  # ty: ignore[invalid-argument-type]
    return dict(weights(on_meta(model), model, 0))


@pytest.mark.parametrize("method", METHODS)
def test_values_are_near_those_that_were_quantised(method, plain, tmp_path):
    write(tmp_path / "q", plain, method)
    before, after = values_of(plain), values_of(tmp_path / "q")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > 20
    # Half of the widest gap.
    most = {"nf4": 0.17, "mxfp4": 0.2, "nvfp4": 0.18, "int4": 0.1}.get(BASE_OF[method], 0.07)
    for name in changed:
        error = (before[name] - after[name]).abs().max() / before[name].abs().max()
        assert error < most, name


def left_in_full(folder: Path, plain: Path, method: str, names: dict[str, list[str]]) -> str:
    """Write a folder of which one matrix is in full, and whose config names it so; return it."""
    write(folder, plain, method)
    before, after = (load_file(x / "model.safetensors") for x in (plain, folder))
    key = max(k for k in before if re.search(r"layers\.\d+\.\S+\.w2\.weight|down_proj\.weight", k))
    module = key.removesuffix(".weight")
    rest = {k: v for k, v in after.items() if not k.startswith(f"{module}.")}
    save_file(rest | {key: before[key]}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {
        name: [each.replace("THE_MODULE", module) for each in given]
        for name, given in names.items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    return key


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("nf4", {"llm_int8_skip_modules": ["THE_MODULE"]}),
        ("fp8", {"ignored_layers": ["THE_MODULE"]}),
        ("awq", {"modules_to_not_convert": ["THE_MODULE"]}),
        ("modelopt", {"ignore": ["model.language_THE_MODULE"]}),
        ("compressed-tensors", {"ignore": ["re:.*THE_MODULE"]}),
        ("nvfp4", {"ignore": ["THE_MODULE"]}),
        *((method, {}) for method in ("nf4", "fp8", "awq", "gptq", "modelopt", "nvfp4")),
    ],
)
def test_what_a_folder_has_in_full_is_never_rounded(method, names, plain, tmp_path):
    key = left_in_full(tmp_path / "q", plain, method, names)
    model = Model(str(tmp_path / "q"), dtype="float32")
    read = read_back(on_meta(model), model, 0, BASE_OF[method])  # ty: ignore[invalid-argument-type]
    if names:
        assert torch.equal(dict(read)[key], values_of(plain)[key])
    else:
        with pytest.raises(UserError, match="is in full in a folder whose quantization_config"):
            dict(read)


@pytest.mark.parametrize("value", [["re:(("], [3], 5, "lm_head"])
def test_names_that_are_no_list_of_names_are_refused(value, plain, tmp_path):
    write(tmp_path / "q", plain, "nvfp4")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"]["ignore"] = value
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"ignore of quantization_config is .* give a list of"):
        read_config(Model(str(tmp_path / "q")))


STORED = (
    ("nf4", "float32", "plain"),
    ("nf4 nested", "bfloat16", "experts"),
    ("fp8", "bfloat16", "experts"),
    ("compressed-tensors", "float32", "plain"),
    ("torchao int8", "bfloat16", "plain"),
    ("torchao fp8", "float32", "experts"),
    ("mxfp4", "bfloat16", "experts"),
    ("nvfp4", "bfloat16", "experts"),
    ("modelopt", "float32", "plain"),
    ("gptq", "float32", "experts"),
    ("gptq desc_act", "bfloat16", "plain"),
    ("awq", "bfloat16", "experts"),
)
"""What `make test` stores: each method once, in one dtype and of one model."""


@pytest.mark.parametrize(
    ("method", "dtype", "source"),
    some_now(product(METHODS, ("float32", "bfloat16"), ("plain", "experts")), STORED),
)
def test_a_run_stores_a_folder_without_loss(method, dtype, source, tmp_path, request):
    write(tmp_path / "q", request.getfixturevalue(source), method)
    expected = values_of(tmp_path / "q")
    stored, num_bytes = run_ranks(1, stored_by_a_run, str(tmp_path / "q"), method, dtype)[0]
    assert len(stored) > 15
    for name, values in stored.items():
        assert torch.equal(values, expected[name]), name
    assert num_bytes < 1.07 * sum(values.numel() for values in stored.values())


def stored_by_a_run(folder: str, method: str, dtype: str) -> tuple[dict[str, torch.Tensor], int]:
    family = json.loads(Path(folder, "config.json").read_text())["model_type"]
    cfg = run_config(Cell(family, "single", "lora", 1, BASE_OF[method]))
    cfg = replace(cfg, model=Model(folder, base=BASE_OF[method], dtype=dtype))
    job = build(cfg, build_mesh(cfg, CPU))
    assert not job.notes
    stored = stored_in(job.pm.parts[0].hf)
    values = {
        name.replace(".base_layer", ""): part.matrix.to(torch.float32)
        for name, part in stored.items()
    }
    return values, sum(t.nbytes for part in stored.values() for t in part.parameters())


LAYOUTS = (("fsdp2", 2, ""), ("tp", 2, ""), ("pp", 2, "1f1b"))


@pytest.mark.slow  # cells of parity train on bases that a run stores itself
@pytest.mark.parametrize(
    ("method", "source"),
    [
        *(("nf4 nested", source) for source in ("plain", "experts")),
        *(("fp8", source) for source in ("plain", "experts")),
        *(("torchao int8", source) for source in ("plain", "experts")),
        *((method, s) for method in ("mxfp4", "nvfp4", "gptq") for s in ("plain", "experts")),
        *((method, "plain") for method in ("gptq desc_act", "awq", "modelopt")),
    ],
)
def test_layouts_train_on_a_folder_as_one_process_on_its_copy(method, source, tmp_path, request):
    """Neither shards nor ranks of tp may part a folder's blocks from their scales."""
    folder, copy = tmp_path / "q", tmp_path / "copy"
    write(folder, request.getfixturevalue(source), method)
    layouts = (*LAYOUTS, ("ddp-ep", 2, "") if source == "experts" else ("fsdp2-tp", 4, ""))
    if "desc_act" in method:
        layouts = tuple(layout for layout in layouts if "tp" not in layout[0].split("-"))
    check_layouts(folder, BASE_OF[method], copy, layouts)


def check_layouts(folder: Path, base: str, copy: Path, layouts: Iterable[tuple[Any, ...]]) -> None:
    copy_model(Model(str(folder)), base, copy)  # ty: ignore[invalid-argument-type]
    family = read_config(Model(str(folder))).model_type
    expected = run_ranks(1, train, Cell(family, "single", "lora", 1), copy, "none")[0]
    for layout, num_ranks, schedule in layouts:
        cell = Cell(family, layout, "lora", num_ranks, schedule=schedule)
        outcomes = run_ranks(num_ranks, train, cell, folder, base)
        errors = compare(outcomes, expected)
        assert not verdict(errors, TOLERANCE), (layout, errors)


def train(cell: Cell, folder: Path, base: str) -> Outcome:
    cfg = run_config(cell)
    cfg = replace(cfg, model=replace(cfg.model, path=str(folder), init="weights", base=base))
    return run(cfg, lambda mesh, step: microbatches(cfg, mesh, step))


@pytest.mark.parametrize(
    ("source", "num_ranks", "fragment"),
    [
        ("plain", 2, r"inputs of .* in an order of their own \(desc_act\); use int8.* parallel.tp"),
        ("experts", 1, r"experts of .* have an order of inputs each \(desc_act\); use int8"),
    ],
)
def test_inputs_in_an_order_of_their_own_are_not_cut(
    source, num_ranks, fragment, tmp_path, request
):
    write(tmp_path / "q", request.getfixturevalue(source), "gptq desc_act")
    family = read_config(Model(str(tmp_path / "q"))).model_type
    cfg = run_config(Cell(family, "tp" if num_ranks > 1 else "single", "lora", num_ranks))
    cfg = replace(cfg, model=Model(str(tmp_path / "q"), base="int4"))
    with pytest.raises(UserError, match=fragment):
        describe(cfg, num_ranks)


def test_fp8_in_blocks_has_the_values_that_transformers_reads(plain, tmp_path):
    write(tmp_path / "q", plain, "fp8")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    assert_same(theirs.state_dict(), values_of(tmp_path / "q"))


SINKS = "model.layers.*.self_attn"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> Path:
    """A folder as gpt-oss is published: experts in blocks and scales, all else in bfloat16."""
    plain = tmp_path_factory.mktemp("plain")
    config = json.loads((CONFIGS / "tiny-gpt_oss" / "config.json").read_text())
    config |= {"intermediate_size": 192}  # 3 blocks on each of 2 ranks
    (plain / "config.json").write_text(json.dumps(config))
    plain_of(plain)
    folder = tmp_path_factory.mktemp("mxfp4")
    tensors: Tensors = {}
    for key, value in load_file(plain / "model.safetensors").items():
        if re.search(r"experts\.(gate_up|down)_proj$", key):
            packed = mxfp4(key, value.mT.float(), {})
            tensors |= {name.replace(".weight", ""): t for name, t in packed.items()}
        else:
            tensors[key] = value.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    section = {"quant_method": "mxfp4", "modules_to_not_convert": [SINKS, "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return folder


def test_gpt_oss_has_the_values_that_transformers_reads(gpt_oss):
    theirs = AutoModelForCausalLM.from_pretrained(gpt_oss, dtype=torch.bfloat16)
    ours = values_of(gpt_oss, "bfloat16")
    assert_same(theirs.state_dict(), ours)
    assert len(ours["model.layers.0.mlp.experts.gate_up_proj"].unique()) > 15


@pytest.mark.slow  # a cell of parity trains on stacks of experts that a run stores itself
def test_layouts_train_on_gpt_oss_as_published(gpt_oss, tmp_path):
    layouts = [("tp", 2, ""), ("ddp-ep", 2, ""), ("fsdp2", 2, ""), ("pp", 2, "1f1b")]
    check_layouts(gpt_oss, "mxfp4", tmp_path / "copy", layouts)


def swapped(codes: torch.Tensor) -> torch.Tensor:
    return codes >> 4 | codes << 4


@pytest.mark.parametrize(
    "bug",
    [
        lambda t: {**t, "codes": swapped(t["codes"])},
        lambda t: {**t, "scales": t["scales"].roll(1, -1)},
    ],
    ids=["nibbles swapped", "scales off by one block"],
)
def test_a_bug_in_reading_mxfp4_gives_other_values(bug, gpt_oss, monkeypatch):
    right, read = values_of(gpt_oss), QuantisedEntry._tensors
    monkeypatch.setattr(QuantisedEntry, "_tensors", lambda self, files: bug(read(self, files)))
    theirs = AutoModelForCausalLM.from_pretrained(gpt_oss, dtype=torch.bfloat16).state_dict()
    for name, values in values_of(gpt_oss).items():
        is_stack = ".experts." in name and not name.endswith("bias")
        assert torch.equal(values.bfloat16(), theirs[name]) == (not is_stack), name
        assert torch.equal(right[name].bfloat16(), theirs[name]), name


@pytest.mark.parametrize("is_nested", [False, True])
def test_nf4_has_the_values_that_bitsandbytes_reads(is_nested, plain, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="writes the folder")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=is_nested
    )
    save_quantised(plain, tmp_path / "q", config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    state = {
        name: bitsandbytes.functional.dequantize_4bit(p.data, p.quant_state)
        if isinstance(p, bitsandbytes.nn.Params4bit)
        else p.data
        for name, p in theirs.named_parameters()
    }
    assert sum(isinstance(p, bitsandbytes.nn.Params4bit) for p in theirs.parameters()) > 20
    assert_same(state, values_of(tmp_path / "q"))
    assert_stored_as_it_is(tmp_path / "q", "nf4")


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_torchao_has_the_values_that_it_reads(name, plain, tmp_path):
    pytest.importorskip("torchao", reason="writes the folder")
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    kind = Int8WeightOnlyConfig(version=2) if name == "int8" else Float8WeightOnlyConfig()
    save_quantised(plain, tmp_path / "q", TorchAoConfig(kind))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    state = {
        name: p.dequantize()
        if hasattr(p, "dequantize") and type(p) is not torch.nn.Parameter
        else p
        for name, p in theirs.named_parameters()
    }
    assert_same(state, values_of(tmp_path / "q"))
    assert_stored_as_it_is(tmp_path / "q", f"torchao {name}")


def save_quantised(plain: Path, folder: Path, config: object) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(folder)


def assert_same(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    assert ours.keys() <= theirs.keys()
    for name, values in ours.items():
        assert torch.equal(theirs[name].bfloat16(), values.bfloat16()), name


def assert_stored_as_it_is(folder: Path, method: str) -> None:
    expected = values_of(folder)
    stored, _ = run_ranks(1, stored_by_a_run, str(folder), method, "bfloat16")[0]
    assert all(torch.equal(values, expected[name]) for name, values in stored.items())


@pytest.mark.parametrize("method", ["nf4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_copy_is_what_a_run_computes_and_is_plain(method, plain, tmp_path):
    write(tmp_path / "q", plain, method)
    copy_model(Model(str(tmp_path / "q")), BASE_OF[method], tmp_path / "copy")
    assert "quantization_config" not in (tmp_path / "copy" / "config.json").read_text()
    copied = loaded_by_transformers(tmp_path / "copy").state_dict()
    assert all(torch.equal(copied[n], v) for n, v in values_of(tmp_path / "q").items())


def ragged(folder: Path) -> Path:
    """A model of 96 columns, which are no whole blocks of 64."""
    config = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text())
    config |= {"hidden_size": 96, "intermediate_size": 128, "head_dim": 24}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = Model(str(folder), init="random")
    load_whole(model, read_config(model)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [64, 32])
def test_a_copy_of_ragged_or_other_blocks_has_the_folders_values(size, tmp_path, monkeypatch):
    """By hand: each value is its level times the largest of its block of the flattened matrix."""
    plain = ragged(tmp_path / "plain")
    monkeypatch.setitem(METHODS, "other", (METHODS["nf4"][0], bitsandbytes(False, size)))
    write(tmp_path / "q", plain, "other")
    assert copy_model(Model(str(tmp_path / "q")), "nf4", tmp_path / "copy") == []
    copied = load_file(tmp_path / "copy" / "model.safetensors")
    before = load_file(plain / "model.safetensors")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    for key in (key for key in before if f"{key}.absmax" in stored):
        pairs = stored[key].flatten()
        codes = torch.stack([pairs >> 4, pairs & 15], -1).flatten()
        values = stored[f"{key}.quant_map"][codes.int()]
        values *= stored[f"{key}.absmax"].repeat_interleave(size)[: values.numel()]
        assert torch.equal(copied[key].flatten(), values), key
        error = (copied[key] - before[key]).norm() / before[key].norm()
        assert error < 0.1, key  # rounded twice it is above


@pytest.mark.parametrize("fmt", ["nf4", "int8", "fp8"])
def test_a_copy_is_refused_where_a_run_is(fmt, tmp_path):
    model = Model(str(ragged(tmp_path / "plain")))
    cfg = run_config(Cell("llama", "single", "lora", 1))
    cfg = replace(cfg, model=replace(cfg.model, path=model.path, init="weights", base=fmt))
    if fmt == "nf4":
        with pytest.raises(UserError, match="96 columns"):
            describe(cfg, 1)
        with pytest.raises(UserError, match="has 96 columns, which are no whole blocks of 64"):
            copy_model(model, fmt, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
    else:
        describe(cfg, 1)
        copy_model(model, fmt, tmp_path / "copy")


def test_blocks_that_no_run_keeps_are_not_rounded_once_more(plain, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "other", (METHODS["nf4"][0], bitsandbytes(False, 32)))
    write(tmp_path / "q", plain, "other")
    with pytest.raises(RuntimeError, match="in blocks that no run stores"):
        run_ranks(1, stored_by_a_run, str(tmp_path / "q"), "nf4", "float32")


def test_a_copy_in_another_format_says_that_it_rounds_once_more(plain, tmp_path):
    write(tmp_path / "q", plain, "nf4")
    (note,) = copy_model(Model(str(tmp_path / "q")), "int8", tmp_path / "copy")
    assert "in nf4, and here rounded once more to int8" in note


@pytest.mark.parametrize("base", [pytest.param("none", marks=pytest.mark.slow), "nf4"])
def test_an_adapter_is_merged_into_the_values_of_the_folder(base, plain, tmp_path, capsys):
    write(tmp_path / "q", plain, "nf4")
    model = Model(str(tmp_path / "q"))
    adapted, _ = with_adapters(model, Lora(r=4))
    save_adapter(adapted, Lora(r=4), trained(adapted), tmp_path / "adapter", model.path)
    arguments = ["export", model.path, str(tmp_path / "adapter"), str(tmp_path / "out")]
    assert cli.main([*arguments, "--merge", "--base", base]) == 0
    assert "quantised (bitsandbytes); the merged model is in float32" in capsys.readouterr().out
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    merged = logits(loaded_by_transformers(tmp_path / "out"))
    torch.testing.assert_close(merged, logits(adapted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("base", "fragment"),
    [
        ("none", "take the memory of float32; model.base: nf4"),
        ("int8", "once more as int8; model.base: nf4"),
        ("nf4", None),
    ],
)
def test_a_note_says_where_a_folder_is_not_stored_as_it_is(base, fragment, plain, tmp_path):
    write(tmp_path / "q", plain, "nf4")
    cfg = run_config(Cell("qwen3_5_text", "single", "lora", 1))
    cfg = replace(cfg, model=Model(str(tmp_path / "q"), base=base))
    notes = describe(cfg, 1).notes
    assert [fragment in note for note in notes] == ([True] if fragment else [])


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "gptq", "bits": 4},
        GPTQ | {"bits": 8},
        GPTQ | {"group_size": 48},
        GPTQ | {"dynamic": {"+:a": {"bits": 8}}},
        METHODS["awq"][0] | {"version": "gemv"},
        {"quant_method": "quark"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        METHODS["nvfp4"][0] | {"config_groups": {"a": {"weights": {"num_bits": 4}}}},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "fp8"},
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
        {"quant_method": "compressed-tensors", "config_groups": 3},
        METHODS["compressed-tensors"][0] | {"transform_config": {"config_groups": {"R1": {}}}},
        METHODS["compressed-tensors"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"quant_method": ["fp8"]},
        {},
    ],
)
def test_other_methods_are_refused_by_the_config(section, plain, tmp_path):
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = section
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not section:
        read_config(Model(str(tmp_path)))
        return
    with pytest.raises(UserError, match=r"weights are quantised .* plain weights"):
        read_config(Model(str(tmp_path)))


Tensors = dict[str, torch.Tensor]
Q = "model.layers.3.self_attn.q_proj.weight"


def without(key: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(key)


def cut(key: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: tensors[key][:-1].contiguous()})


def to(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: change(tensors[key])})


def one_more_dim(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return to(key, lambda t: t[:, None])


def nan_code(key: str) -> Callable[[dict[str, torch.Tensor]], None]:
    """The bits 0x7f are e4m3's NaN."""

    def damaged(codes: torch.Tensor) -> torch.Tensor:
        bits = codes.view(torch.uint8).clone()
        bits[3, 5] = 0x7F
        return bits.view(torch.float8_e4m3fn)

    return to(key, damaged)


def state(**changed: object) -> Callable[[Tensors], object]:
    def change(old: torch.Tensor) -> torch.Tensor:
        new = json.dumps(json.loads(bytes(old.tolist())) | changed)
        return torch.tensor([*new.encode()], dtype=torch.uint8)

    return to(Q + STATE, change)


OF_Q = Q.removesuffix(".weight")
OWNER = Q.removesuffix("weight") + "_weight"


@pytest.mark.parametrize(
    ("method", "damage", "fragment", "is_early"),
    [
        ("fp8", without(f"{Q}_scale_inv"), f"{Q}: F8_E4M3, but no scales", True),
        ("fp8", cut(f"{Q}_scale_inv"), f"{Q}_scale_inv: shape", True),
        ("fp8", without(Q), f"{Q}: not in the files", True),
        ("nf4", without(f"{Q}.absmax"), f"{Q}.absmax: not in the files", True),
        ("nf4", without(Q + STATE), f"{Q}: U8, but no scales", True),
        ("nf4", cut(f"{Q}.absmax"), f"{Q}.absmax: .* values", False),
        ("nf4", cut(Q + STATE), "bitsandbytes__nf4: cannot be read", False),
        ("nf4", cut(f"{Q}.quant_map"), r"quant_map: \[15\] values", False),
        ("nf4", to(f"{Q}.quant_map", lambda t: t * 0.9), "quant_map: not nf4's levels", False),
        ("nf4", to(f"{Q}.absmax", torch.Tensor.int), "absmax: I32 holds no scales", True),
        ("nf4", state(shape=[-256, -128]), "bitsandbytes__nf4: cannot be read", False),
        ("nf4", one_more_dim(f"{Q}.absmax"), f"{Q}.absmax: .* values", False),
        ("nf4", one_more_dim(f"{Q}.quant_map"), r"quant_map: \[16, 1\] values", False),
        ("nf4 nested", one_more_dim(f"{Q}.absmax"), f"{Q}.absmax: .* values", False),
        ("nf4 nested", one_more_dim(f"{Q}.nested_absmax"), "nested_absmax: .* values", False),
        ("nf4 nested", one_more_dim(f"{Q}.nested_quant_map"), "nested_quant_map: .*", False),
        ("nf4", state(quant_type="fp4"), "bitsandbytes__nf4: cannot be read", False),
        ("nf4", to(f"{Q}.absmax", lambda t: t * torch.nan), "not all finite", False),
        ("nf4", to(f"{Q}.absmax", lambda t: t / 0), "not all finite", False),
        ("fp8", nan_code(Q), "not all finite", False),
        ("fp8", to(f"{Q}_scale_inv", lambda t: t / 0), "not all finite", False),
        ("compressed-tensors", nan_code(Q), "not all finite", False),
        ("torchao fp8", nan_code(f"{OWNER}_qdata"), "not all finite", False),
        ("nf4", state(blocksize=64.0), "bitsandbytes__nf4: cannot be read", False),
        ("nf4 nested", state(nested_blocksize="a"), "bitsandbytes__nf4: cannot be read", False),
        ("fp8", to(f"{Q}_scale_inv", torch.Tensor.int), "_scale_inv: I32 holds no scales", True),
        ("torchao int8", to(f"{OWNER}_zero_point", lambda t: t + 3), "not zero", False),
        ("nf4 nested", without(f"{Q}.nested_quant_map"), "nested_quant_map: not in", True),
        ("nf4 nested", without(f"{Q}.nested_absmax"), "nested|values", False),
        ("torchao int8", without(Q.replace("weight", "_weight_scale")), "_scale: not in", True),
        ("compressed-tensors", cut(f"{Q}_scale"), f"{Q}_scale: shape", True),
        ("mxfp4", without(f"{Q}_scales"), f"{Q}_scales: not in the files", True),
        ("mxfp4", without(f"{Q}_blocks"), f"{Q}_scales: U8, but no scales", True),
        ("mxfp4", cut(f"{Q}_scales"), f"{Q}_scales: shape", True),
        ("mxfp4", to(f"{Q}_blocks", lambda t: t.view(*t.shape[:-2], -1, 8)), "whole blocks", True),
        ("mxfp4", to(f"{Q}_blocks", torch.Tensor.int), "_blocks: I32, not U8", True),
        ("mxfp4", to(f"{Q}_scales", lambda t: t.fill_(255)), "not all finite", False),
        ("nvfp4", without(f"{Q}_global_scale"), f"{Q}_global_scale: not in the files", True),
        ("nvfp4", without(f"{Q}_packed"), f"{Q}: not in the files", True),
        ("nvfp4", cut(f"{Q}_scale"), f"{Q}_scale: shape", True),
        ("nvfp4", to(f"{Q}_global_scale", lambda t: t * 0), "not all finite", False),
        ("nvfp4", to(f"{Q}_global_scale", lambda t: t.repeat(2)), "not one number", True),
        ("gptq", without(f"{OF_Q}.qzeros"), f"{OF_Q}.qzeros: not in the files", True),
        ("gptq", without(f"{OF_Q}.scales"), f"{OF_Q}.scales: not in the files", True),
        ("gptq", cut(f"{OF_Q}.scales"), "scales: F16 .* in whole groups", True),
        ("gptq", to(f"{OF_Q}.scales", torch.Tensor.float), "scales: F32 .* needs F16", True),
        ("gptq", to(f"{OF_Q}.scales", lambda t: t * torch.nan), "not all finite", False),
        ("gptq", to(f"{OF_Q}.g_idx", lambda t: t.flip(0)), "set desc_act to true", False),
        ("gptq desc_act", to(f"{OF_Q}.g_idx", lambda t: t + 9), "no groups as quant", False),
        ("gptq desc_act", without(f"{OF_Q}.g_idx"), "g_idx: not in the files", True),
        ("awq", cut(f"{OF_Q}.qweight"), "in whole groups", True),
        ("awq", to(f"{OF_Q}.scales", lambda t: t / 0), "not all finite", False),
        ("modelopt", nan_code(f"{Q}_scale"), "not all finite", False),
        ("modelopt", without(f"{Q}_scale_2"), f"{Q}: U8, but no scales of modelopt", True),
        ("modelopt", to(f"{Q}_scale_2", lambda t: t * torch.nan), "not all finite", False),
    ],
)
def test_a_damaged_folder_is_refused(method, damage, fragment, is_early, plain, tmp_path):
    write(tmp_path / "q", plain, method)
    file = tmp_path / "q" / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=fragment):
        read_config(Model(str(tmp_path / "q"))) if is_early else values_of(tmp_path / "q")


@pytest.mark.parametrize("header", [b"[]", b'{"a": 3}', b'{"a": {}}', b"[" * 100_000])
def test_a_damaged_header_is_refused(header, plain, tmp_path):
    folder = with_index(plain, tmp_path / "q", without=())
    (folder / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="not a whole safetensors file"):
        read_config(Model(str(folder)))


def test_codes_that_the_index_does_not_name_are_read_with_their_file(plain, tmp_path):
    """As by transformers, which takes all that is in an index's files."""
    write(tmp_path / "whole", plain, "fp8")
    folder = with_index(plain, tmp_path / "q", without=(Q,))
    assert same(values_of(folder), values_of(tmp_path / "whole"))


def with_index(plain: Path, folder: Path, without: tuple[str, ...]) -> Path:
    write(folder, plain, "fp8")
    file = (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = {key: file.name for key in load_file(file) if key not in without}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_no_numbers_without_scales_are_taken_for_weights(dtype, plain, tmp_path):
    tensors = load_file(plain / "model.safetensors")
    tensors[Q] = tensors[Q].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(UserError, match=r"q_proj\.weight is .* no plain weights"):
        values_of(tmp_path)


def test_transposed_matrices_of_bitsandbytes_are_refused(tmp_path):
    model = Model("configs/models/tiny-gpt2", init="random")
    load_whole(model, read_config(model)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = METHODS["nf4"][0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="transposed"):
        values_of(tmp_path)


def test_fp8_in_odd_blocks_has_the_scale_of_each_column():
    """Of [300, 192]: the last blocks are cut, and 64 columns share a scale of ours."""
    matrix = torch.randn(300, 192)
    tensors = METHODS["fp8"][1]("a.weight", matrix, {})
    entry = QuantisedEntry("a.weight", "fp8_blocks", "a.weight", "a.weight_scale_inv")
    every = tensors["a.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = tensors["a.weight"].float() * every[:300, :192]
    assert torch.equal(entry.values(tensors.__getitem__), expected)
    stored = entry.stored(tensors.__getitem__)
    assert stored is not None
    assert stored["scales"].shape == (300, 3)
    assert torch.equal(dequantise(stored, "fp8_blocks", torch.float32), expected)


def test_a_rank_that_would_cut_a_block_of_the_folder_is_refused(tmp_path):
    model = Model(str(DEEP / "wide-qwen3_5"), init="random")
    load_whole(model, read_config(model)).save_pretrained(tmp_path / "plain")
    write(tmp_path / "q", tmp_path / "plain", "fp8")
    cfg = run_config(Cell("qwen3_5_text", "tp", "lora", 2))
    cfg = replace(cfg, model=Model(str(tmp_path / "q"), base="fp8"))
    with pytest.raises(UserError, match=r"base is fp8, .* 64 columns .* blocks of 128; use int8"):
        describe(cfg, 2)
