"""Adapters that PEFT made, in all ways that it has: each command reads them as plain PEFT does."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import BdLoraConfig, EvaConfig, KasaConfig, LoraLayer, MontecloraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from shardwise.commands import cli
from shardwise.config import Lora, Model, UserError
from shardwise.models.adapters.coverage import audit
from shardwise.models.adapters.lora import inject
from shardwise.models.adapters.peft_config import folder_weights, section_of, section_of_layers
from shardwise.models.adapters.writing import export_adapter, merge_adapter, save_adapter
from shardwise.models.families import spec_of
from shardwise.models.load import fill, read_config, weights
from shardwise.models.names import adapter_layers
from tests.models.tiny import loaded_by_transformers, logits, on_meta, relative_error, tiny, trained

TOLERANCE = 1e-5  # float32, relative to the largest logit
SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
EXPERTS: dict[str, Any] = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 24, "mlp_only_layers": []}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
}
# PEFT 0.21 warns of tied weights, of patterns (of its own too) that match no module, and of a name
# that transformers will drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folders = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return {name: Model(str(folder)) for name, folder in folders.items()}


def make(base: Model, folder: Path, **config: Any) -> Path:
    """An adapter with random factors, made by PEFT and saved by it."""
    torch.manual_seed(1)
    lora = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **config})
    model = get_peft_model(loaded_by_transformers(Path(base.path)), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or ".lora_" in name:
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(str(folder))
    return folder


def of_peft(base: Model, folder: Path) -> tuple[PeftModel, bool]:
    """What plain PEFT loads, and whether it was all that it looks for and all that is there."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(loaded_by_transformers(Path(base.path)), str(folder))
    missing = any("Found missing adapter keys" in str(warning.message) for warning in caught)
    file = load_file(folder / "adapter_model.safetensors")
    unread = set_peft_model_state_dict(model, file).unexpected_keys
    return model.eval(), not missing and not unread


def num_factors(model: torch.nn.Module) -> int:
    return 2 * sum(isinstance(module, LoraLayer) for module in model.modules())


def started(base: Model, folder: Path, out: Path) -> PreTrainedModel:
    """The model that a run with `lora.path` starts with; its adapter is saved to `out`."""
    built = on_meta(base)
    section = section_of(Lora(path=str(folder)), base, built)
    inject(built, section, spec_of(built.config, built))
    own = {name for name, p in built.named_parameters() if p.requires_grad}
    values = dict(folder_weights(section, base, built, own))
    assert values.keys() == own
    factors = {name: value for name, value in values.items() if ".lora_" in name}
    fill(built, chain(weights(built, base, seed=0), factors.items()))
    for name in own - factors.keys():
        built.get_parameter(name).data.copy_(values[name])
    save_adapter(built, section_of_layers(section, built), trained(built), out, base.path)
    return built


MERGE = r"cannot add it to the weights .*\(--for peft\)"
KIND = r"a kind of LoRA that is not computed here; .* \(shardwise export --merge\)"
SERVED = r"reads plain LoRA( of one rank)? only, and .* has .*\(--merge\)"
UNREAD = r"reads no adapter on .*\(--merge\)"
HEAD = r"it adapts .*(lm_head|embed_tokens), the (head|embedding), .* \(shardwise export --merge\)"
TIED = r"trains .* in full, which .* ties to another weight; .* \(shardwise export --merge\)"
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "list": ("llama", {}, {}),
    "regex": ("llama", {"target_modules": r".*layers\.1\..*(q|up)_proj"}, {}),
    "all-linear": ("llama", {"target_modules": "all-linear"}, {}),
    "none": ("llama", {"target_modules": None}, {}),
    "layers": ("llama", {"layers_to_transform": [1]}, {}),
    "exclude": ("llama", {"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, {}),
    "rank": ("llama", {"rank_pattern": {"q_proj": 2}}, {"sglang": SERVED}),
    "alpha": ("llama", {"alpha_pattern": {"layers.1.self_attn.q_proj": 3}}, {"sglang": SERVED}),
    "both": (
        "llama",
        {"rank_pattern": {r".*\.0\..*": 6}, "alpha_pattern": {"v_proj": 5}, "use_rslora": True},
        {"sglang": SERVED},
    ),
    "same scale": ("llama", {"alpha_pattern": {"q_proj": 1, "v_proj": 1}}, {}),
    "rslora": ("llama", {"use_rslora": True}, {}),
    "negative": ("llama", {"lora_alpha": -8}, {}),
    "dora": ("llama", {"use_dora": True}, {"vllm": SERVED, "sglang": SERVED}),
    "eva": ("llama", {"init_lora_weights": "eva", "eva_config": EvaConfig()}, {}),
    "mica": ("llama", {"init_lora_weights": "mica"}, {"start": "mica, which trains A alone"}),
    "orthogonal": ("llama", {"init_lora_weights": "orthogonal"}, {}),
    "pissa": (
        "llama",
        {"init_lora_weights": "pissa"},
        {"vllm": SERVED, "sglang": SERVED, "start": "pissa, which changes the base too"},
    ),
    "olora": (
        "llama",
        {"init_lora_weights": "olora"},
        {"vllm": SERVED, "sglang": SERVED, "start": "olora, which changes the base too"},
    ),
    "bias": ("llama", {"bias": "all"}, {"vllm": SERVED, "sglang": SERVED, "start": KIND}),
    "lora_bias": (
        "llama",
        {"lora_bias": True},
        {"merge": MERGE, "vllm": SERVED, "sglang": SERVED, "start": KIND},
    ),
    "kasa": ("llama", {"kasa_config": KasaConfig()}, dict.fromkeys(("vllm", "sglang"), SERVED)),
    "monteclora": (
        "llama",
        {"monteclora_config": MontecloraConfig()},
        {"vllm": SERVED, "sglang": SERVED, "start": KIND},
    ),
    "blocks": (
        "llama",
        {"use_bdlora": BdLoraConfig(["q_proj"], ["v_proj"], nblocks=2)},
        {"vllm": SERVED, "sglang": SERVED, "start": KIND},
    ),
    "alora": (
        "llama",
        {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
        {"merge": MERGE, "vllm": SERVED, "sglang": SERVED, "start": KIND},
    ),
    "replicated": (
        "llama",
        {"layer_replication": [[0, 2], [1, 2]]},
        dict.fromkeys(("merge", "peft", "hf", "vllm", "sglang"), "one weight, which only PEFT")
        | {"start": KIND},
    ),
    "tokens": (
        "llama",
        {"trainable_token_indices": [1, 2]},
        {"vllm": SERVED, "sglang": SERVED, "start": KIND},
    ),
    "tokens tied": (
        "tied",
        {"trainable_token_indices": {"embed_tokens": [1, 2]}, "ensure_weight_tying": True},
        {"vllm": SERVED, "sglang": SERVED, "start": KIND},
    ),
    "saved": (
        "llama",
        {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"], "ensure_weight_tying": True},
        {"vllm": SERVED, "sglang": SERVED},
    ),
    "saved tied": (
        "tied",
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"vllm": SERVED, "sglang": SERVED, "start": TIED},
    ),
    "saved and kept tied": (
        "tied",
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"vllm": SERVED, "sglang": SERVED, "start": TIED},
    ),
    "embedding": (
        "llama",
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"vllm": UNREAD, "sglang": UNREAD, "start": HEAD},
    ),
    "head": (
        "llama",
        {"target_modules": ["lm_head", "q_proj"]},
        {"vllm": UNREAD, "sglang": UNREAD, "start": HEAD},
    ),
    "embedding tied": (
        "tied",
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"vllm": UNREAD, "sglang": UNREAD, "start": HEAD},
    ),
    "embedding kept tied": (
        "tied",
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {"vllm": UNREAD, "sglang": UNREAD, "start": HEAD},
    ),
    "experts": (
        "moe",
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        {"vllm": "--enable-mixed-moe-lora-format and, on the request, is_3d", "sglang": UNREAD},
    ),
    "experts rslora": (
        "moe",
        {"target_modules": ["q_proj", "gate_proj", "up_proj"], "use_rslora": True},
        {"vllm": "is_3d_lora_weight=True", "sglang": UNREAD},
    ),
    "stacks": (
        "moe",
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        {"vllm": "is_3d_lora_weight=True", "sglang": UNREAD},
    ),
    "one stack": (
        "moe",
        {"target_parameters": ["experts.down_proj"], "rank_pattern": {"experts.down_proj": 2}},
        {"vllm": "is_3d_lora_weight=True", "sglang": UNREAD},
    ),
    "router": (
        "moe",
        {"target_modules": "all-linear"},
        {"vllm": UNREAD, "sglang": UNREAD, "start": r"mlp.gate.weight, a .*Router, which takes no"},
    ),
}
CASES["kasa"][2]["start"] = KIND
COMMANDS = ("merge", "peft", "hf", "vllm", "sglang", "start")


def result_of(command: str, base: Model, folder: Path, out: Path) -> torch.Tensor:
    """The logits of what a command writes, as transformers or PEFT loads it."""
    if command == "merge":
        merge_adapter(base, folder, out)
        return logits(loaded_by_transformers(out))
    if command == "start":
        model = started(base, folder, out)
        assert relative_error(logits(model), logits(of_peft(base, out)[0])) < TOLERANCE
        return logits(model)
    export_adapter(base, folder, out, command)
    model, is_whole = of_peft(base, out)
    assert is_whole or command not in ("peft", "hf")  # a server looks for what the file has
    return logits(model)


@pytest.mark.parametrize("case", CASES)
def test_each_command_computes_what_peft_does_or_says_why_not(case, bases, tmp_path):
    name, config, refused = CASES[case]
    base = bases[name]
    folder = make(base, tmp_path / "adapter", **config)
    model, is_whole = of_peft(base, folder)
    assert is_whole
    result = audit(str(folder), base)
    assert result.findings == ()
    assert 2 * result.num_matched == num_factors(model)
    expected = logits(model)
    plain = logits(loaded_by_transformers(Path(base.path)))
    if case != "alora":  # which begins at a token that is not in the rows
        assert relative_error(plain, expected) > 0.01  # the adapter does something
    for command in COMMANDS:
        if command in refused:
            with pytest.raises(UserError, match=refused[command]) as error:
                result_of(command, base, folder, tmp_path / command)
            assert not (tmp_path / command).exists()
            assert "\n" not in str(error.value)
            continue
        error = relative_error(result_of(command, base, folder, tmp_path / command), expected)
        assert error < TOLERANCE, command


# ------------------------------------------------------------------------------- ranks and alphas

LINEARS = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("up", "down")]
PLACES = st.sampled_from(
    [
        *(name.rpartition(".")[2] for name in LINEARS),
        *(f"layers.1.{name}" for name in LINEARS),
        *(r".*\.0\..*", r"[qk]_proj", "model.layers.0.mlp.down_proj"),
    ]
)


def in_vllm(config: dict[str, Any], module: str) -> tuple[int, float]:
    """Rank and scale that vLLM 0.33 takes for a module's name in the file, in own words."""
    found = {}
    for key, default in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
        entries = (config.get(key) or {}).items()
        matches = (value for end, value in entries if re.match(rf"(.*\.)?({end})$", module))
        found[key] = next(matches, default)
    assert not config["use_rslora"]
    return found["rank_pattern"], found["alpha_pattern"] / found["rank_pattern"]


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    targets=st.lists(st.sampled_from(LINEARS), min_size=2, unique=True),
    ranks=st.dictionaries(PLACES, st.integers(1, 6), max_size=3),
    alphas=st.dictionaries(PLACES, st.integers(1, 20), max_size=3),
    rslora=st.booleans(),
)
def test_any_patterns_are_read_as_peft_reads_them(
    targets, ranks, alphas, rslora, bases, tmp_path_factory
):
    base, folder = bases["llama"], tmp_path_factory.mktemp("patterns")
    # As PEFT writes them: its save sorts the entries, and which one is first decides.
    patterns = {"rank_pattern": dict(sorted(ranks.items()))}
    patterns["alpha_pattern"] = dict(sorted(alphas.items()))
    make(base, folder / "adapter", target_modules=targets, use_rslora=rslora, **patterns)
    model, is_whole = of_peft(base, folder / "adapter")
    assert is_whole
    assert audit(str(folder / "adapter"), base).findings == ()
    expected = logits(model)
    for command in ("merge", "peft", "vllm", "start"):
        out = folder / command
        assert relative_error(result_of(command, base, folder / "adapter", out), expected) < (
            TOLERANCE
        ), command
    config = json.loads((folder / "vllm" / "adapter_config.json").read_text())
    for name, layer in adapter_layers(model.get_base_model()).items():
        rank, scale = in_vllm(config, name)
        assert (rank, scale) == (layer.r["default"], pytest.approx(layer.scaling["default"]))


# ------------------------------------------------------------------------ names of transformers 4


def per_expert(base: Model, folder: Path, **config: Any) -> Path:
    """An adapter with a pair of factors for each expert, as transformers 4 has linears."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        for expert in range(4):
            for part in ("gate", "up", "down"):
                rows, columns = (32, 24) if part == "down" else (24, 32)
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
                tensors[f"{name}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
                b = torch.randn(rows, 4, generator=generator) * 0.05
                tensors[f"{name}.lora_B.weight"] = b
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = ["gate_proj", "up_proj", "down_proj"]
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": targets}
    written |= {"r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def test_factors_of_each_expert_are_read_and_merged_exactly(bases, tmp_path):
    base = bases["moe"]
    folder = per_expert(base, tmp_path / "adapter")
    model, is_whole = of_peft(base, folder)
    assert is_whole
    result = audit(str(folder), base)
    assert (result.findings, 2 * result.num_matched) == ((), num_factors(model))
    expected = logits(model)
    for command in ("merge", "peft", "hf", "start"):
        out = tmp_path / command
        assert relative_error(result_of(command, base, folder, out), expected) < TOLERANCE, command
    # By hand: expert 3's gate is the first half of its stack, with the scale 8 / 4.
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    before, after = (loaded_by_transformers(Path(path)) for path in (base.path, tmp_path / "merge"))
    change = (after.get_parameter(stack) - before.get_parameter(stack))[3, :24]
    file = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.experts.3.gate_proj"
    product = 2 * file[f"{name}.lora_B.weight"] @ file[f"{name}.lora_A.weight"]
    assert torch.allclose(change, product, atol=1e-6)


# ------------------------------------------------------------------------------- the base changes


def test_an_adapter_that_changed_its_base_for_good_is_told(bases, tmp_path):
    base = bases["llama"]
    folder = make(base, tmp_path / "adapter")
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    for init in ("lora_ga", "corda", "pissa_niter_4"):
        file.write_text(json.dumps(config | {"init_lora_weights": init}))
        (finding,) = audit(str(folder), base).findings
        assert f"init_lora_weights is {init}, which changed the base too" in finding
        for command in COMMANDS:
            with pytest.raises(UserError, match=f"init_lora_weights is {init}"):
                result_of(command, base, folder, tmp_path / command)


def test_an_adapter_on_what_a_layer_reads_past_it_is_told_by_its_own_name(tmp_path):
    jamba = tiny("tiny-jamba")
    lora = LoraConfig(r=2, target_modules=["dt_proj", "x_proj"])
    get_peft_model(AutoModelForCausalLM.from_config(read_config(jamba)), lora).save_pretrained(
        str(tmp_path)
    )
    with pytest.raises(UserError, match=r"lora.path .* adapts .*dt_proj, whose weight its layer"):
        section_of(Lora(path=str(tmp_path)), jamba, on_meta(jamba))
    notes = merge_adapter(jamba, tmp_path, tmp_path / "merged")
    assert any("not what PEFT computes" in note and "dt_proj" in note for note in notes)


# ----------------------------------------------------------------------------- dtypes of the base


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "mixed"])
def test_a_merged_folder_has_the_dtypes_of_its_base(dtype, bases, tmp_path):
    base = bases["llama"]
    folder = make(base, tmp_path / "adapter")
    shutil.copytree(base.path, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    small = torch.float16 if dtype == "float16" else torch.bfloat16
    before = {
        key: value if dtype == "mixed" and "norm" in key else value.to(small)
        for key, value in load_file(file).items()
    }
    save_file(before, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["dtype"] = str(small).removeprefix("torch.")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    merge_adapter(Model(str(tmp_path / "base")), folder, tmp_path / "merged")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    assert {key: value.dtype for key, value in after.items()} == {
        key: value.dtype for key, value in before.items()
    }
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written["dtype"] == config["dtype"]
    adapter = load_file(folder / "adapter_model.safetensors")
    for key, value in before.items():
        name = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{name}.lora_A.weight" not in adapter:
            assert torch.equal(after[key], value), key
            continue
        product = 2 * adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]
        assert torch.equal(after[key], (value.float() + product).to(small)), key


# ----------------------------------------------------------------------------- resized vocabulary


def test_copies_that_pefts_loader_skips_do_not_keep_a_run_from_starting(tmp_path):
    torch.manual_seed(0)
    small = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    small.save_pretrained(tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    small.resize_token_embeddings(260, mean_resizing=False)
    small.save_pretrained(tmp_path / "base")
    base = Model(str(tmp_path / "base"))
    for saved in (["embed_tokens", "lm_head"], None):
        folder = tmp_path / f"adapter-{saved}"
        config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved)
        # By the name of the base, PEFT sees that there are more tokens now.
        resized = AutoModelForCausalLM.from_pretrained(base.path)
        resized.name_or_path = resized.config._name_or_path = str(tmp_path / "small")
        model = get_peft_model(resized, config)
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(str(folder), save_embedding_layers=True)
        keys = load_file(folder / "adapter_model.safetensors").keys()
        assert any("original_module" in key for key in keys) is (saved is not None)
        expected = logits(PeftModel.from_pretrained(loaded_by_transformers(base.path), folder))
        assert audit(str(folder), base).findings == ()
        out = tmp_path / f"started-{saved}"
        assert relative_error(logits(started(base, folder, out)), expected) < TOLERANCE
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.weight"][0] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"the file has another lm_head.weight than .*; give that"):
        started(base, folder, tmp_path / "other")


# ----------------------------------------------------------------------------------- bad adapters

Q = "base_model.model.model.layers.0.self_attn.q_proj"
Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


def config_with(**changes: Any) -> Change:
    return lambda tensors, config: config.update(changes)


def factor(change: Callable[[torch.Tensor], torch.Tensor], letter: str = "A") -> Change:
    key = f"{Q}.lora_{letter}.weight"
    return lambda tensors, config: tensors.update({key: change(tensors[key]).clone()})


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, config: tensors.update({k: change(v) for k, v in tensors.items()})


BAD: dict[str, Change] = {
    "int": each(lambda t: (100 * t).to(torch.int32)),
    "one int": factor(lambda t: t.to(torch.int64)),
    "bool": each(lambda t: t > 0),
    "complex": each(lambda t: t.to(torch.complex64)),
    "eight bits": each(lambda t: t.to(torch.float8_e4m3fn)),
    "nan": factor(lambda t: t.fill_(torch.nan)),
    "infinite": factor(lambda t: t.fill_(torch.inf), "B"),
    "one nan": factor(lambda t: torch.cat([t[:, :-1], t[:, -1:] * torch.nan], 1), "B"),
    "scalar": factor(lambda t: t[0, 0]),
    "vector": factor(lambda t: t[0], "B"),
    "narrow A": factor(lambda t: t[:, 1:]),
    "low B": factor(lambda t: t[1:], "B"),
    "rank of A": factor(lambda t: t[1:]),
    "both of another rank": lambda tensors, config: (
        factor(lambda t: t[1:])(tensors, config),
        factor(lambda t: t[:, 1:], "B")(tensors, config),
    )[0],
    "without B": lambda tensors, config: tensors.__delitem__(f"{Q}.lora_B.weight"),
    "empty": lambda tensors, config: tensors.clear(),
    "another name": lambda tensors, config: tensors.update(
        {f"{Q}x.lora_A.weight": tensors.pop(f"{Q}.lora_A.weight")}
    ),
    "more": lambda tensors, config: tensors.update({"more": torch.ones(1)}),
    "pattern": config_with(target_modules="("),
    "rank_pattern": config_with(rank_pattern={"q_proj": 2}),
    "no rank_pattern": config_with(rank_pattern=[3]),
    "infinite alpha": config_with(alpha_pattern={"q_proj": float("inf")}),
    "init 5": config_with(init_lora_weights=5),
    "init of nobody": config_with(init_lora_weights="foo"),
    "megatron": config_with(megatron_config={"a": 1}),
    "arrow": config_with(arrow_config={"a": 1}),
    "bias of nobody": config_with(bias="some"),
    "replicated": config_with(layer_replication=[[0, 9]]),
    "no rank": config_with(r=0),
    "other targets": config_with(target_modules=["k_proj"]),
    "dora without lengths": config_with(use_dora=True),
    "saved that is not there": config_with(modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_adapter_is_one_line_for_each_command(case, bases, tmp_path, capsys):
    base = bases["llama"]
    folder = make(base, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    BAD[case](tensors, config)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert cli.main(["check", str(folder), base.path]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err
    for command in COMMANDS:
        with pytest.raises(UserError) as error:
            result_of(command, base, folder, tmp_path / command)
        assert not (tmp_path / command).exists()
        assert "; " in str(error.value)


def test_check_prints_the_scales_that_modules_have(bases, tmp_path, capsys):
    base = bases["llama"]
    patterns = {"q_proj": 64, "layers.0.self_attn.q_proj": 8}
    folder = make(base, tmp_path, target_modules=["q_proj"], r=8, alpha_pattern=patterns)
    assert cli.main(["check", str(folder), base.path]) == 0
    said = capsys.readouterr().out
    assert "rank 8, alpha 8, 64, scale 1, 8;" in said
    assert "alpha_pattern has two entries for 1 modules" in said
