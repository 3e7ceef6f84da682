"""What a user can get wrong, through the command: exit code 2, one line on stderr that says what
and how to correct it."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from transformers import AutoConfig

from shardwise.commands.cli import main
from shardwise.config import Model, Parallel, UserError
from shardwise.models.load import read_config
from tests.distributed import run_ranks
from tests.integration.test_train import CONFIGS, config, run


@pytest.fixture
def run_file(folder, tmp_path) -> Path:
    cfg = config(folder, "unused")
    path = tmp_path / "run.yaml"
    content = cfg.to_dict()
    content["training"]["output_dir"] = str(tmp_path / "out")
    path.write_text(yaml.safe_dump(json.loads(json.dumps(content))))
    return path


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What transformers logs."""
    logger, stream = logging.getLogger("transformers"), io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.WARNING)  # a command of another test may have raised it
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def refused(capfd, *arguments: object) -> str:
    assert main(["train", *map(str, arguments)]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


CASES = {
    "misspelt key": (["--lora.rank=3"], r"unknown key lora.rank; known keys: path, r, alpha"),
    "misspelt section": (["--modle.path=x"], r"unknown key modle; did you mean model\?"),
    "near key": (["--training.step=3"], r"unknown key training.step; did you mean steps\?"),
    "wrong type": (
        ["--training.steps=many"],
        r"training.steps is 'many'; give a whole number or null$",
    ),
    "steps and epochs": (
        ["--training.epochs=2"],
        r"training.steps and training.epochs are both set.*; leave one of them out",
    ),
    "no epochs": (
        ["--training.steps=null", "--training.epochs=0"],
        r"training.epochs is 0.0; give at least",
    ),
    "an empty name": (
        ['--data.train=[corpus.jsonl, ""]'],
        r"data.train has an empty name; give files",
    ),
    "no documents": (["--data.max_documents=0"], r"data.max_documents is 0; give at least 1"),
    "a file as a stream": (
        ["--data.streaming=true", "--data.validation=0", "--training.eval_every=0"],
        r"corpus.jsonl is no folder here .* data.streaming .*; give one, or leave",
    ),
    "a share of a stream": (["--data.streaming=true"], r"data.validation is a share.*; name a sp"),
    "wrong choice": (
        ["--parallel.data=fsdp3"],
        r"parallel.data is 'fsdp3'; give ddp, .* or zero3$",
    ),
    "batch sizes": (
        ["--training.micro_batch_size=3"],
        r"8 is not a multiple of 1 .* micro_batch_size 3; use .*micro_batch_size 2, or .* 6 or 9",
    ),
    "missing corpus": (["--data.train=nowhere.jsonl"], r"nowhere.jsonl"),
    "missing model": (["--model.path=/nowhere/model"], r"/nowhere/model"),
    "missing tokenizer": (["--model.tokenizer=/nowhere/tokenizer"], r"/nowhere/tokenizer"),
    "no adapter there": (["--lora.targets=[q_prj]"], r"q_prj.*q_proj"),
    "replicas of ddp": (
        ["--parallel.data=ddp", "--parallel.dp_replicate=2"],
        r"dp_replicate is 2, which is for parallel.data fsdp2 .*leave it at 1",
    ),
    "replicas that do not divide": (
        ["--parallel.data=fsdp2", "--parallel.dp_replicate=2"],
        r"does not divide the 1 data-parallel proc",
    ),
    "a switch for a number": (
        ["--training.steps=true"],
        r"training.steps is true; give a whole number or null$",
    ),
    "betas": (
        ["--optimizer.betas=[1.5, 2]"],
        r"optimizer.betas is \[1.5, 2.0\]; give two in \[0, 1\)",
    ),
    "infinite rate": (["--optimizer.lr=.inf"], r"optimizer.lr is inf; give at most 1,000,000"),
    "no folder": (["--training.output_dir="], r"training.output_dir"),
    "no targets": (["--lora.targets=[]"], r"lora.targets is an empty list"),
    "target trained in full": (
        ["--lora.targets=[q_proj,k_proj]", "--lora.modules_to_save=[q_proj]"],
        r"lora.targets: q_proj lies in lora.modules_to_save too",
    ),
    "compiled for every shape": (
        ["--data.packing=isolated", "--training.compile=aot_eager"],
        r"training.compile is aot_eager, but with data.packing isolated .*set compile to none",
    ),
    "no time limit": (
        ["--launch.timeout_seconds=.inf"],
        r"launch.timeout_seconds is inf; give at most 1,000,000",
    ),
    "a date that is none": (
        ["--training.seed=2024-06-31"],
        r"the value is not valid YAML; quote it",
    ),
    "more positions than learned": (
        [f"--model.path={CONFIGS / 'tiny-gpt2'}", "--data.sequence_length=5000"],
        r"data.sequence_length is 5000, but gpt2 has learned only \d+ positions; lower it",
    ),
    "a step without end": (
        ["--training.global_batch_size=1000000000000"],
        r"batch_size is 10*; give at most 1,000,000",
    ),
    "a row without end": (
        ["--data.sequence_length=2000000000000000000"],
        r"sequence_length is 20*; give at most 16,7",
    ),
    "a pipe": (["--data.train=/dev/zero"], r"/dev/zero: a pipe, socket or device, which"),
    "empty prompt": (["--training.sample=''"], r"training.sample '' has no tokens"),
    "sample beyond what is learned": (
        [f"--model.path={CONFIGS / 'tiny-gpt2'}", f"--training.sample={'state ' * 400}"],
        r"training.sample has \d+ tokens and is continued by \d+, but .* only 1024 positions",
    ),
    "a pipeline of one process": (
        ["--parallel.pp=2"],
        r"parallel.pp is 2, which does not divide the 1 processes; use --nproc 2",
    ),
    "a pipeline's key without one": (
        ["--parallel.split=uniform"],
        r"split is 'uniform', which is for a pipeline; set",
    ),
    "schedule": (
        ["--parallel.pp=2", "--parallel.schedule=zb"],
        r"parallel.schedule is 'zb'; give gpipe, ",
    ),
    "shares of a layer in one process": (
        ["--parallel.tp=2"],
        r"parallel.tp is 2, which does not divide the 1 processes; use --nproc 2",
    ),
    "a key of tensor parallelism without it": (
        ["--parallel.sequence_parallel=true"],
        r"set parallel.tp to 2 or more",
    ),
    "home of nobody": (["--data.train=~nouser/x"], r"data.train: ~nouser/x matches no file"),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES)
def test_one_line_and_a_way_out(run_file, capfd, arguments, message):
    assert re.search(message, refused(capfd, run_file, *arguments))


def test_dropout_that_no_seed_reaches(run_file, capfd, tmp_path):
    AutoConfig.for_model(
        "starcoder2", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=256, residual_dropout=0.3,
        bos_token_id=0, eos_token_id=0,
    ).save_pretrained(tmp_path)  # fmt: skip
    line = refused(
        capfd,
        run_file,
        f"--model.path={tmp_path}",
        "--model.init=random",
        "--model.tokenizer=" + _tokenizer(run_file),
    )
    assert "residual_dropout is 0.3 in the model's config.json" in line
    assert line.endswith("; set it to 0.0")


def test_missing_run_file(capfd):
    assert "nowhere.yaml: cannot read the file" in refused(capfd, "nowhere.yaml")


def test_a_key_given_twice(capfd, tmp_path):
    (tmp_path / "twice.yaml").write_text("training: {steps: 1}\ntraining: {steps: 2}\n")
    assert "the key training is given twice" in refused(capfd, tmp_path / "twice.yaml")


def test_empty_corpus(run_file, capfd, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    line = refused(capfd, run_file, f"--data.train={empty}")
    assert f"no document in {empty}; give files that are not empty" in line


def test_malformed_line_names_file_and_line(run_file, capfd, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "good"}\n{"text": "bad\n{"text": "good"}\n')
    line = refused(capfd, run_file, f"--data.train={broken}")
    assert re.search(r"broken.jsonl.*line 2|broken.jsonl:2", line)


def test_vocabulary_smaller_than_the_tokenizer(run_file, capfd, tmp_path):
    small = json.loads((CONFIGS / "tiny-qwen3_5" / "config.json").read_text()) | {"vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(small))
    line = refused(capfd, run_file, f"--model.path={tmp_path}")
    assert re.search(r"corpus.jsonl:\d+: .* is token \d+, but the model has 100 embeddings", line)


def test_a_config_that_is_nested_without_end(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UserError, match="nested too deep"):
        read_config(Model(str(tmp_path)))


def test_model_that_is_not_of_the_common_shape(run_file, capfd, tmp_path):
    config = {
        "model_type": "opt",
        "hidden_size": 8,
        "word_embed_proj_dim": 8,
        "num_attention_heads": 2,
        "ffn_dim": 8,
    }
    config |= {"num_hidden_layers": 1, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = refused(
        capfd,
        run_file,
        f"--model.path={tmp_path}",
        "--model.init=random",
        "--model.tokenizer=" + _tokenizer(run_file),
    )
    assert "opt is not one that shardwise knows" in line
    assert "it has no final norm after its layers" in line


def test_model_with_a_part_beside_the_common_ones(run_file, capfd, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bloom", "n_layer": 1, "vocab_size": 256})
    )
    line = refused(
        capfd,
        run_file,
        f"--model.path={tmp_path}",
        "--model.init=random",
        "--model.tokenizer=" + _tokenizer(run_file),
    )
    assert "transformer.word_embeddings_layernorm.weight beside embedding" in line


def _tokenizer(run_file: Path) -> str:
    return yaml.safe_load(run_file.read_text())["model"]["tokenizer"]


def test_output_folder_that_holds_another_run(run_file, capfd, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("{}\n")
    assert "holds another run, which has saved nothing; choose another folder" in refused(
        capfd, run_file
    )


def test_a_world_that_does_not_fit(run_file, capfd):
    line = refused(capfd, run_file, "--nproc=2")
    assert "parallel.data is single but there are 2 processes" in line


def test_shares_of_layers_that_there_are_not(folder):
    """On every rank the user's mistake; that it is one line then, the test above shows."""
    shares = "this qwen3_5_text has [^,]*, which cannot be sharded evenly over 3 ranks"
    cfg = replace(config(folder, "three-shares"), parallel=Parallel(tp=3))
    with pytest.raises(RuntimeError, match=f"UserError: .*{shares}.*; use 1, 2 or 4\n"):
        run_ranks(3, run, cfg)


def test_a_tokenizer_that_is_none(run_file, capfd, tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    line = refused(capfd, run_file, f"--model.tokenizer={tmp_path}")
    assert f"{tmp_path}: no tokenizer could be loaded (" in line


@pytest.mark.parametrize("name", ["corpus.txt", "corpus.json.log", "corpus"])
def test_json_lines_under_another_name(run_file, capfd, tmp_path, name):
    (tmp_path / name).write_text('\n{"text": "a"}\n\n{"text": "b"}\n')
    line = refused(capfd, run_file, f"--data.train={tmp_path / name}")
    assert f"{tmp_path / name}: its lines are JSON objects" in line


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rope_parameters": {"rope_type": "nope"}}, "rope_type is 'nope'"),
        ({"num_hidden_layers": True}, "cannot read config.json"),
    ],
    ids=str,
)
def test_a_wrong_config_beside_a_tokenizer_is_one_line_of_the_config(
    run_file, folder, capfd, tmp_path, change, fragment, logged
):
    """Transformers reads it with the tokenizer too."""
    tokenizer = Path(yaml.safe_load(run_file.read_text())["model"]["tokenizer"])
    model = shutil.copytree(tokenizer, tmp_path / "model")
    content = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(content))
    options = [f"--model.path={model}", "--model.tokenizer=null", "--model.init=random"]
    assert fragment in refused(capfd, run_file, *options)
    assert logged.getvalue() == ""


@pytest.mark.parametrize(
    "change",
    [{"pad_token_id": 999}, {"rope_parameters": {"rope_type": "linear", "factor": 0}}],
    ids=str,
)
def test_beside_an_error_transformers_logs_nothing(run_file, capfd, tmp_path, change, logged):
    content = json.loads((CONFIGS / "tiny-llama" / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(content))
    other = 900 + len(str(change))  # a line is logged once in a process
    refused(capfd, run_file, f"--model.path={tmp_path}", "--model.init=random")
    assert logged.getvalue() == ""
    (tmp_path / "config.json").write_text(json.dumps(content | {"bos_token_id": other} | GOOD))
    for _ in range(2):
        read_config(Model(str(tmp_path)))
    assert logged.getvalue().count(f"got {other}") == 1


GOOD = {"pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def test_two_columns_of_one_name_are_one_line(run_file, capfd, tmp_path):
    text = pyarrow.array(["a b c"] * 9)
    pyarrow.parquet.write_table(
        pyarrow.table([text, text], names=["text", "text"]), tmp_path / "two.parquet"
    )
    line = refused(capfd, run_file, f"--data.train={tmp_path / 'two.parquet'}")
    assert "Multiple matches" in line
