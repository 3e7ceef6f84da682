import json
import logging
import re
import shutil
import weakref
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
)

from shardwise.config import Model, UserError
from shardwise.models import initialise, weight_files, weight_folder
from shardwise.models.folder_config import check_vocabulary, read_config
from shardwise.models.load import build_meta, load_whole, weights
from shardwise.models.save import save_model
from tests.left_out import some_now
from tests.models.tiny import CONFIGS, EACH_KIND, TINY, entries, on_meta, same, tiny


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it, of the family whose names differ most from modules'."""
    path = tmp_path_factory.mktemp("written")
    whole = load_whole(tiny("tiny-olmo_hybrid"), read_config(tiny("tiny-olmo_hybrid")))
    whole.save_pretrained(path)
    return path


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may damage."""
    return Path(shutil.copytree(written, tmp_path, dirs_exist_ok=True))


# --- the config


def test_a_missing_folder_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"is no folder here, so it has no config\.json"):
        read_config(Model(str(tmp_path / "nowhere")))


def test_what_is_neither_a_folder_nor_on_the_hub_is_the_users_mistake():
    with pytest.raises(UserError, match=r"no folder with a config\.json, nor one of the hub"):
        read_config(Model("nobody/nothing"))  # the tests' environment keeps the hub out


def test_a_folder_without_a_config_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="is a folder without a config"):
        read_config(Model(str(tmp_path)))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"hidden_size": 64}',
        '{"model_type": "nonesuch"}',
        '{"model_type": "llama", "rms_norm_eps": "wide"}',
    ],
)
def test_a_broken_config_is_the_users_mistake(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"cannot read config\.json"):
        read_config(Model(str(tmp_path)))


LLAMA = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 .* from 1 to 2,048"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"vocab_size": 10**15}, "vocab_size is 1000000000000000 "),
        ({"head_dim": 10**13}, "head_dim is"),
        (
            {"hidden_size": 2**20, "intermediate_size": 2**24},
            r"the model has [\d,]+ parameters, more than",
        ),
        (
            {"hidden_size": 2**24, "intermediate_size": 2**24, "head_dim": 2**24},
            "cannot build|parameters",
        ),
        ({"rope_parameters": {"rope_type": "magic"}}, "rope_type is 'magic'.*yarn"),
        ({"rope_scaling": {"type": "magic"}}, "rope_type is 'magic'"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is"),
        ({"pad_token_id": 10**6}, "pad_token_id is 1000000 .* beyond vocab_size, 256"),
        (
            {"num_experts": 4, "num_experts_per_tok": 1000},
            "num_experts_per_tok is 1000 .* no more than all 4",
        ),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"ssm_state_size": 0}, "ssm_state_size is 0"),
    ],
    ids=str,
)
def test_sizes_that_no_model_has_are_refused_by_name(tmp_path, change, named, capfd):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    model = Model(str(tmp_path), init="random")
    with pytest.raises(UserError, match=named):
        build_meta(model, read_config(model))
    assert capfd.readouterr().err == ""  # transformers adds no lines of its own


@pytest.mark.parametrize(
    "text", ["[" * 10**5 + "]" * 10**5, '{"a":' * 40 + "1" + "}" * 40], ids=["far too", "too"]
)
def test_a_config_that_is_nested_deep_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "more": ' + text + "}")
    with pytest.raises(UserError, match="nested"):
        read_config(Model(str(tmp_path)))


def test_a_quantised_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}'
    )
    with pytest.raises(UserError, match="quantised"):
        read_config(Model(str(tmp_path)))


def test_remote_code_runs_only_when_asked_for(tmp_path):
    config = {"model_type": "odd", "auto_map": {"AutoConfig": "code.OddConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(
        "from transformers import PretrainedConfig\n"
        "class OddConfig(PretrainedConfig):\n    model_type = 'odd'\n"
    )
    with pytest.raises(UserError, match="trust_remote_code"):
        read_config(Model(str(tmp_path)))
    assert read_config(Model(str(tmp_path), trust_remote_code=True)).model_type == "odd"


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_tokenizer_that_adds_a_token_without_an_embedding_is_refused(name):
    config = read_config(tiny("tiny-llama"))
    vocabulary = {"a": 0, "b": 255}
    model = WordLevel(vocabulary, unk_token="a")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
    assert check_vocabulary(config, tokenizer) is None
    tokenizer.add_tokens(["<image>"], special_tokens=True)  # gets 256, if the model has that
    ids = tokenizer.get_vocab()
    config.vocab_size = ids["<image>"]
    assert check_vocabulary(config, tokenizer) == ids["<image>"]
    setattr(tokenizer, name, "<image>")
    with pytest.raises(UserError, match="<image> has the id"):
        check_vocabulary(config, tokenizer)


# --- the model on meta


@pytest.mark.parametrize(
    ("name", "dtype"),
    some_now(
        product(TINY, ("float32", "bfloat16")),
        [(name, "bfloat16") for name in (*EACH_KIND, "tiny-qwen3_5-tied")],
    ),
)
def test_meta_model_is_what_transformers_loads(name, dtype, tmp_path):
    model = tiny(name, dtype)
    load_whole(model, read_config(model)).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    built = on_meta(model)
    assert all(parameter.is_meta for parameter in built.parameters())
    theirs, buffers = dict(reference.named_parameters()), dict(reference.named_buffers())
    # Biases of routers are parameters in some classes, which nothing trains.
    buffers |= {n: theirs.pop(n).data for n, _ in built.named_buffers() if n in theirs}
    assert {n: (p.shape, p.dtype) for n, p in built.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in theirs.items()
    }
    assert same(dict(built.named_buffers()), buffers)
    assert built.config._attn_implementation == "sdpa"
    assert built.config.use_cache is False


def test_parameters_that_a_family_keeps_in_float32_stay_so():
    olmo = on_meta(tiny("tiny-olmo_hybrid", "bfloat16"))
    assert olmo.get_parameter("model.layers.0.linear_attn.A_log").dtype == torch.float32
    assert olmo.get_parameter("model.layers.0.linear_attn.q_proj.weight").dtype == torch.bfloat16
    nemotron = on_meta(tiny("tiny-nemotron_h", "bfloat16"))
    assert (
        nemotron.get_buffer("model.layers.1.mixer.gate.e_score_correction_bias").dtype
        == torch.float32
    )


def test_tied_parameters_are_one_object_on_meta_and_when_filled():
    model = tiny("tiny-qwen3_5-tied")
    built = on_meta(model)
    assert built.lm_head.weight is built.model.embed_tokens.weight
    whole = load_whole(model, read_config(model))
    assert whole.lm_head.weight is whole.model.embed_tokens.weight


class LargestAllocation(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return out


def test_building_on_meta_allocates_nothing_large():
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, vocab_size=128_000
    )
    state = torch.get_rng_state()
    with LargestAllocation() as largest:
        built = build_meta(Model("none", dtype="bfloat16"), config)
    # 2 * 128,000 * 8192 in the embeddings, about 1.7e9 in two layers, 2 bytes each: more than 7 GB
    assert sum(p.nbytes for p in built.parameters()) > 7e9
    assert 0 < largest.nbytes < 10_000  # rope tables: 8192 / 32 heads / 2 = 128 angles of 4 bytes
    assert torch.equal(torch.get_rng_state(), state)
    assert config.use_cache is True


def test_the_notice_of_a_missing_kernel_is_quiet_where_there_is_no_gpu(monkeypatch, caplog):
    caplog.set_level(
        logging.WARNING, "transformers"
    )  # commands that ran in this process may have lowered it
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "handlers", [handler])
    notice = "`f` is falling back to its reference PyTorch implementation"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_meta(tiny("tiny-llama"))
    logger.warning(notice)
    assert seen == [notice]  # on a GPU it says why training is slow
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_meta(tiny("tiny-llama"))
    logger.warning(notice)
    logger.warning("something else")
    assert seen == [notice, "something else"]


# --- one at a time


@pytest.mark.parametrize("init", ["random", "weights"])
def test_weights_are_handed_over_one_at_a_time(init, folder):
    model = tiny("tiny-olmo_hybrid") if init == "random" else Model(str(folder))
    before: weakref.ref[torch.Tensor] | None = None
    owner = ""
    count = 0
    for name, tensor in weights(on_meta(model), model, 0):
        # Random values of one module's own parameters are made together.
        assert before is None or before() is None or owner == name.rpartition(".")[0], name
        before, owner = weakref.ref(tensor), name.rpartition(".")[0]
        count += 1
        del tensor
    assert count == len(on_meta(model).state_dict())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that are read from files, as they are."""
    keys: list[str] = []
    original = weight_files._Reader.__call__

    def call(
        self: weight_files._Reader, key: str, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        keys.append(key)
        return original(self, key, dtype)

    monkeypatch.setattr(weight_files._Reader, "__call__", call)
    return keys


def test_files_are_read_as_the_weights_are_asked_for(folder, read):
    for name, _ in weights(on_meta(Model(str(folder))), Model(str(folder)), 0):
        expected = 3 if name.endswith("conv1d.weight") else 1  # q, k and v lie apart in the file
        assert len(read) == expected, (name, read)
        read.clear()


def parts_of(names: Iterable[str]) -> list[set[str]]:
    """Names of every layer, and of every module around them, by themselves."""
    parts: dict[str, set[str]] = {}
    for name in names:
        number = re.search(r"\.\d+\.", name)
        parts.setdefault(number[0] if number else name.rpartition(".")[0], set()).add(name)
    return list(parts.values())


@pytest.mark.parametrize(
    "name", ["tiny-qwen3_moe", "tiny-olmo_hybrid", "tiny-nemotron_h", "tiny-gpt2", "tiny-lfm2"]
)
def test_only_what_is_wanted_is_read(name: str, tmp_path: Path, read: list[str]) -> None:
    # Experts are stacked and convolutions joined from several keys, and names differ; the last two
    # are tied.
    load_whole(tiny(name), read_config(tiny(name))).save_pretrained(tmp_path)
    model = Model(str(tmp_path))
    everything = entries(model)
    read.clear()
    for wanted in parts_of(everything):
        found = dict(weights(on_meta(model), model, 0, wanted))
        assert same(found, {entry: everything[entry] for entry in wanted})
    assert sorted(read) == sorted(load_file(tmp_path / "model.safetensors"))  # each key once


def test_tied_weights_are_read_where_they_are_wanted(tmp_path, read):
    whole = load_whole(tiny("tiny-gpt2"), read_config(tiny("tiny-gpt2")))
    whole.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    embedding = whole.get_parameter("transformer.wte.weight")
    for keys in (
        {"lm_head.weight"},
        {"lm_head.weight", "transformer.wte.weight"},
    ):  # the head alone; both, if equal
        held = {key: value for key, value in stored.items() if "wte" not in key}
        save_file(
            held | {key: embedding.detach().clone() for key in keys}, tmp_path / "model.safetensors"
        )
        model = Model(str(tmp_path))
        ((name, value),) = weights(on_meta(model), model, 0, {"transformer.wte.weight"})
        assert name == "transformer.wte.weight"
        assert torch.equal(value, embedding)
        assert set(read) == keys
        read.clear()
        ((name, _),) = weights(on_meta(model), model, 0, {"transformer.ln_f.bias"})
        assert len(read) == 1
        read.clear()


@pytest.mark.parametrize("name", ["tiny-qwen3_next", "tiny-kimi_linear", "tiny-gpt2"])
def test_only_what_is_wanted_is_drawn(name, monkeypatch):
    everything = entries(tiny(name))
    drawn: list[str] = []
    original = initialise._values_of

    def values_of(
        skeleton: PreTrainedModel, path: str, module: nn.Module, own: dict[str, str], seed: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        drawn.extend(own)
        return original(skeleton, path, module, own, seed)

    monkeypatch.setattr(initialise, "_values_of", values_of)
    for wanted in parts_of(everything):
        found = dict(weights(on_meta(tiny(name)), tiny(name), 0, wanted))
        assert same(found, {entry: everything[entry] for entry in wanted})
        assert set(drawn) <= wanted
        drawn.clear()
    (one,) = weights(on_meta(tiny(name)), tiny(name), 0, [next(iter(everything))])
    assert torch.equal(one[1], everything[one[0]])


# --- weights from files


def test_weights_take_the_dtype_that_is_asked_for(folder):
    model = Model(str(folder), dtype="bfloat16")
    rounded = load_whole(model, read_config(model)).state_dict()
    exact = load_file(folder / "model.safetensors")
    key = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(rounded[key], exact[key].bfloat16())
    key = "model.layers.0.linear_attn.A_log"
    assert torch.equal(rounded[key], exact[key])


def test_a_convolution_stored_as_queries_keys_and_values(folder: Path) -> None:
    # As in the published checkpoints. transformers 5.23 writes thirds, which load the same way.
    layer = "model.layers.0.linear_attn."
    whole = entries(Model(str(folder)))[layer + "conv1d.weight"]
    parts = {f"{layer}{part}_conv1d.weight": v for part, v in zip("qkv", whole.split([48, 48, 96]))}
    rewrite(folder, **{name.replace(".", "__"): value.clone() for name, value in parts.items()})
    assert torch.equal(entries(Model(str(folder)))[layer + "conv1d.weight"], whole)


@pytest.mark.parametrize(
    ("model", "bias_name"),
    [
        ("tiny-nemotron_h", "mixer.gate.e_score_correction_bias"),
        ("tiny-kimi_linear", "mlp.gate.e_score_correction_bias"),
        ("tiny-glm4_moe", "mlp.gate.e_score_correction_bias"),
        ("tiny-deepseek_v3", "mlp.gate.e_score_correction_bias"),
        ("tiny-lfm2_moe", "feed_forward.expert_bias"),
    ],
)
def test_persistent_buffers_come_from_the_file_too(model, bias_name, tmp_path):
    model, name = tiny(model, "bfloat16"), f"model.layers.1.{bias_name}"
    bias = torch.arange(8) / 7  # bfloat16 would round it
    save_model(on_meta(model), {**entries(model), name: bias}.items(), tmp_path)
    stored = Model(str(tmp_path), dtype="bfloat16")
    assert torch.equal(load_whole(stored, read_config(stored)).get_buffer(name), bias)


def test_the_language_model_of_a_multimodal_checkpoint(tmp_path):
    text = read_config(tiny("tiny-qwen3_5"))
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": 64,
    }
    Qwen3_5Config(text_config=text.to_dict(), vision_config=vision).save_pretrained(tmp_path)
    state = entries(tiny("tiny-qwen3_5"))
    stored = {n.replace("model.", "model.language_model.", 1): v for n, v in state.items()}
    extra = {"model.visual.merger.norm.weight": torch.ones(4), "mtp.fc.weight": torch.ones(4)}
    save_file({**stored, **extra}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_config(Model(str(tmp_path))).model_type == "qwen3_5_text"
    assert same(entries(Model(str(tmp_path))), state)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors = {
        **load_file(file),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    save_file(
        {key: value for key, value in tensors.items() if value is not None},
        file,
        metadata={"format": "pt"},
    )


def test_a_missing_entry_is_named(folder):
    rewrite(folder, model__norm__weight=None)
    with pytest.raises(
        UserError, match=r"1 entries without weights in the files, such as model\.norm\.weight"
    ):
        entries(Model(str(folder)))


def test_an_unexpected_entry_is_named(folder):
    rewrite(folder, model__layers__9__mlp__up_proj__weight=torch.ones(2))
    with pytest.raises(
        UserError, match=r"no place for, such as model\.layers\.9\.mlp\.up_proj\.weight"
    ):
        entries(Model(str(folder)))


def test_a_wrong_shape_is_named(folder):
    rewrite(folder, model__norm__weight=torch.ones(65))
    with pytest.raises(UserError, match=r"model\.norm\.weight has the shape \[65\].*it is \[64\]"):
        entries(Model(str(folder)))


def test_a_missing_part_of_an_entry_is_named(folder):
    rewrite(folder, model__layers__0__linear_attn__k_conv1d__weight=None)
    # 4 heads with queries and keys of 12 and values of 24 channels: 192 together, which
    # transformers writes as thirds
    with pytest.raises(
        UserError, match=r"layers\.0\.linear_attn\.conv1d\.weight has the shape \[128, 1, 4\]"
    ):
        entries(Model(str(folder)))


def test_parts_that_do_not_fit_together_are_named(folder):
    rewrite(folder, model__layers__0__linear_attn__k_conv1d__weight=torch.ones(48, 1, 5))
    with pytest.raises(
        UserError, match=r"cannot make model\.layers\.0\.linear_attn\.conv1d\.weight from"
    ):
        entries(Model(str(folder)))


def test_no_safetensors_is_the_users_mistake():
    with pytest.raises(UserError, match=r"no model\.safetensors.*model\.init: random"):
        entries(Model(tiny("tiny-llama").path))


def test_a_cut_off_file_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
        entries(Model(str(folder)))


def test_damage_to_a_sharded_checkpoint_is_named(tmp_path):
    model = tiny("tiny-llama")
    save_model(on_meta(model), entries(model).items(), tmp_path, shard_bytes=200_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].write_bytes(b"not a header")
    with pytest.raises(UserError, match=shards[1].name):
        entries(Model(str(tmp_path)))
    shards[1].unlink()
    with pytest.raises(UserError, match=f"{shards[1].name}' is named in"):
        entries(Model(str(tmp_path)))
    (tmp_path / weight_folder.INDEX).write_text("{}")
    with pytest.raises(UserError, match="not a safetensors index"):
        entries(Model(str(tmp_path)))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "sub/../../x.safetensors"])
def test_an_index_that_points_outside_its_folder_is_refused(tmp_path, name):
    (tmp_path / weight_folder.INDEX).write_text(
        json.dumps({"weight_map": {"lm_head.weight": name}})
    )
    for read in (
        lambda: weight_folder.fingerprint(Model(str(tmp_path)), weights=True),
        lambda: weight_folder.files_by_key(tmp_path),
    ):
        with pytest.raises(UserError, match="not in its folder"):
            read()


UP, CONVOLUTION = (
    f"model.layers.0.{name}.weight" for name in ("mlp.up_proj", "linear_attn.k_conv1d")
)


@pytest.mark.parametrize(
    ("key", "dtype"), [(UP, "int32"), (UP, "uint8"), (UP, "bool"), (CONVOLUTION, "float8_e4m3fn")]
)
def test_numbers_that_need_a_scale_are_no_weights(folder, key, dtype):
    value = load_file(folder / "model.safetensors")[key]
    rewrite(folder, **{key.replace(".", "__"): value.to(getattr(torch, dtype))})
    with pytest.raises(UserError, match=rf"{re.escape(key)} is {dtype}"):
        entries(Model(str(folder)))


def test_tied_weights_in_the_file_must_be_equal(tmp_path):
    model = tiny("tiny-qwen3_5-tied")
    state = entries(model)
    save_model(on_meta(model), state.items(), tmp_path)
    embedding = state["model.embed_tokens.weight"]
    rewrite(tmp_path, lm_head__weight=embedding.clone())
    assert same(entries(Model(str(tmp_path))), state)
    rewrite(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(UserError, match="tie_word_embeddings to false"):
        entries(Model(str(tmp_path)))
    rewrite(tmp_path, lm_head__weight=embedding.clone(), model__embed_tokens__weight=None)
    assert same(entries(Model(str(tmp_path))), state)


def test_gpt2_as_the_hub_has_it(tmp_path: Path) -> None:
    # Without the prefix of the whole model, and with the causal masks that old versions saved.
    saved = entries(tiny("tiny-gpt2"))
    files = {name.removeprefix("transformer."): value for name, value in saved.items()}
    files |= {f"h.{i}.attn.bias": torch.ones(1, 1, 1024, 1024) for i in range(4)}
    save_file(files, tmp_path / "model.safetensors")
    shutil.copy(CONFIGS / "tiny-gpt2" / "config.json", tmp_path)
    assert same(entries(Model(str(tmp_path))), saved)
