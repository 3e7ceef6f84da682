"""Values that `shardwise eval` prints, against log-likelihoods by plain transformers and PEFT."""

from __future__ import annotations

import json
import os
import sys

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from shardwise.base.records.record import RunRecord
from shardwise.commands import cli
from tests.data.exact_turns import byte_tokenizer

TASK = """\
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: " "
metric_list:
  - {metric: acc}
  - {metric: brier_score}
"""
QUESTIONS = [
    {"question": f"Item {n} is", "choices": ["red", "tan", "mud"], "answer": n % 3}
    for n in range(20)
]


def needed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        if os.environ.get("SHARDWISE_NEEDS_LM_EVAL") == "1":
            pytest.fail("SHARDWISE_NEEDS_LM_EVAL is 1, but lm-eval is not installed")
        pytest.skip("no lm-eval: pip install -c constraints.txt '.[eval]'")


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A random GPT-2 of bytes, and a folder with a task of 20 questions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 32}
    config = GPT2Config(**sizes, n_layer=2, n_head=2, initializer_range=0.2)
    GPT2LMHeadModel(config).save_pretrained("model")
    tokenizer.save_pretrained("model")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "colours.yaml").write_text(TASK)
    lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    (tmp_path / "tasks" / "questions.jsonl").write_text(lines)
    return tokenizer


def judged(hf, tokenizer) -> dict[str, float]:
    """The share of questions whose answer is the likeliest, and Brier's score: the squares of what
    the choices' probabilities lack to 1 for the answer and to 0 for the others."""
    right, squares = 0, 0.0
    for question in QUESTIONS:
        sums = []
        for choice in question["choices"]:
            begin = len(tokenizer(question["question"], add_special_tokens=False).input_ids)
            ids = tokenizer(f"{question['question']} {choice}", add_special_tokens=False).input_ids
            with torch.no_grad():
                logs = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(logs[i - 1, ids[i]].item() for i in range(begin, len(ids))))
        right += sums.index(max(sums)) == question["answer"]
        lacks = torch.tensor(sums).softmax(0)
        lacks[question["answer"]] -= 1
        squares += lacks.square().sum().item()
    count = len(QUESTIONS)
    return {"acc,none": right / count, "brier_score,none": squares / count}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_a_model_and_the_adapter_of_a_run(model, tmp_path, capsys):
    needed()
    plain = AutoModelForCausalLM.from_pretrained("model")
    expected = judged(plain, model)

    def found(folder: str) -> dict[str, float]:
        assert cli.main(["eval", folder, "--tasks", "tasks", "--out", "found.json"]) == 0
        return json.loads((tmp_path / "found.json").read_text())["results"]["colours"]

    for name, value in expected.items():
        assert found("model")[name] == pytest.approx(value)
    assert f"{expected['brier_score,none']:.4f}" in capsys.readouterr().out

    factors = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True
    )
    adapted = peft.get_peft_model(plain, factors)
    adapted.save_pretrained("run/adapter")
    other = judged(adapted.eval(), model)
    assert abs(other["brier_score,none"] - expected["brier_score,none"]) > 0.01
    config = {"model": {"path": str(tmp_path / "model"), "init": "weights", "base": "none"}}
    RunRecord("ok", config).write("run/record.json")
    for name, value in other.items():
        assert found("run")[name] == pytest.approx(value)


def test_mistakes_are_one_line(model, tmp_path, capsys, monkeypatch):
    def refused(*arguments: str) -> str:
        assert cli.main(["eval", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'shardwise[eval]'" in refused("model", "--tasks", "tasks")
    monkeypatch.delitem(sys.modules, "lm_eval")
    needed()
    assert "--tasks nowhere is no folder" in refused("model", "--tasks", "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no task of lm-eval" in refused("model", "--tasks", "empty")
    assert "--limit is 0" in refused("model", "--tasks", "tasks", "--limit", "0")
    (tmp_path / "run").mkdir()
    for init, base, text in (("random", "none", "saved nowhere"), ("weights", "nf4", "")):
        config = {"model": {"path": "model", "init": init, "base": base}}
        RunRecord("ok", config).write("run/record.json")
        assert "no adapter/ or model/" in refused("run", "--tasks", "tasks")
        (tmp_path / "run" / "adapter").mkdir()
        if text:
            assert text in refused("run", "--tasks", "tasks")
        (tmp_path / "run" / "adapter").rmdir()
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    assert "is an adapter" in refused("model", "--tasks", "tasks")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one process" in refused("model", "--tasks", "tasks")
