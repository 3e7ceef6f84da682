"""`shardwise init` writes a run file that trains as it is, and never replaces a file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from shardwise.base.layouts import Facts
from shardwise.commands import cli
from shardwise.config import rules
from shardwise.config.presets import MODELS, preset_names, recipes
from shardwise.config.run_file import json_schema, load_config
from shardwise.data.tokenizer import load_tokenizer
from shardwise.models.folder_config import check_vocabulary, read_config
from tests.command import run_command


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_what_it_writes_trains_at_once(folder):
    assert run_command(["init"]).returncode == 0
    done = run_command(["train", "run.yaml", "--training.steps=2", "--training.eval_every=0"])
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "runs" / "run" / "record.json").read_text())
    assert record["status"] == "ok"
    assert (folder / "runs" / "run" / "model" / "tokenizer.json").is_file()


def test_what_it_writes_goes_over_two_processes():
    assert cli.main(["init"]) == 0
    rules.check(load_config("run.yaml", ["--parallel.data=fsdp2"]), Facts(2))


@pytest.mark.parametrize("preset", [name for name in preset_names() if name.startswith("tiny-")])
def test_its_tokenizer_has_ids_that_every_tiny_model_knows(preset):
    """transformers takes a class of its own for some model types, which may add a token."""
    assert cli.main(["init", "--model", preset]) == 0
    cfg = load_config("run.yaml")
    tokenizer = load_tokenizer(cfg.model)
    check_vocabulary(read_config(cfg.model), tokenizer)


def test_a_run_file_names_the_schema_beside_it_and_describes_each_key(folder):
    (folder / "below").mkdir()
    assert cli.main(["init", "below/mine.yaml"]) == 0
    first, *lines = (folder / "below" / "mine.yaml").read_text(encoding="utf-8").splitlines()
    _, mark, schema = first.partition("# yaml-language-server: $schema=")
    assert mark
    assert json.loads((folder / "below" / schema).read_text(encoding="utf-8")) == json_schema()
    cfg = load_config("below/mine.yaml")
    assert cfg.model.path == "below/tiny-qwen3_5"
    assert any(line.startswith("  # Optimizer steps") for line in lines)
    assert max(map(len, lines)) <= 100
    keys = [line for line in lines if line.startswith("  ") and not line.startswith("  #")]
    before = [lines[lines.index(line) - 1] for line in keys]
    assert all(line.startswith("  # ") for line in before)


def test_a_folder_or_hub_id_and_data_take_their_places(folder, capsys):
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text("{}")
    for name in ("a.jsonl", "b: c.jsonl"):
        (folder / name).write_text('{"text": "x"}\n')
    assert cli.main(["init", "--model", "mine", "--data", "a.jsonl", "b: c.jsonl"]) == 0
    cfg = load_config("run.yaml")
    assert (cfg.model.path, cfg.model.init, cfg.model.dtype) == ("mine", "weights", "bfloat16")
    assert cfg.data.train == ["a.jsonl", "b: c.jsonl"]
    assert cfg.lora is not None
    written = {"run.yaml", "run-file.schema.json"}
    assert set(content(folder)) == {"mine/config.json", "a.jsonl", "b: c.jsonl", *written}
    assert cli.main(["init", "hub.yaml", "--model", "owner/name", "--data", "a.jsonl"]) == 0
    assert load_config("hub.yaml").model.path == "owner/name"
    assert capsys.readouterr().out.endswith("next: shardwise train hub.yaml\n")


def test_a_recipe_says_what_it_trains_and_how_much_a_gpu_holds(folder, capsys):
    assert cli.main(["init", "--recipe", "lfm2-1.2b-tp"]) == 0
    assert capsys.readouterr().out.endswith("next: shardwise train run.yaml --nproc 2\n")
    cfg = load_config("run.yaml")
    assert (cfg.model.path, cfg.parallel.tp) == ("LiquidAI/LFM2-1.2B", 2)
    # 1.17 billion parameters in bfloat16 over 2 ranks, and adapters.
    assert "holds at most 1.2 GiB" in (folder / "run.yaml").read_text(encoding="utf-8")


def test_a_recipe_of_pairs_trains_on_the_pairs_beside_it(folder):
    assert cli.main(["init", "--recipe", "qwen3_5-9b-dpo", "--model", "tiny-qwen3_5"]) == 0
    short = ("--training.steps=2", "--training.eval_every=0", "--training.global_batch_size=4")
    done = run_command(["train", "run.yaml", "--nproc=2", "--data.sequence_length=128", *short])
    assert done.returncode == 0, done.stderr
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "rewards/accuracies" in row]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    pairs = (folder / "pairs.jsonl").read_bytes()
    assert cli.main(["init", "mine.yaml", "--data", "pairs.jsonl"]) == 0
    cfg = load_config("mine.yaml")
    assert (cfg.objective, cfg.optimizer.lr, cfg.preference.beta) == ("dpo", 5e-6, 0.1)
    assert (folder / "pairs.jsonl").read_bytes() == pairs


def test_a_preset_is_a_folder_that_a_recipe_may_train(folder):
    assert cli.main(["init", "--recipe", "lfm2-1.2b-pp", "--model", "tiny-lfm2"]) == 0
    cfg = load_config("run.yaml")
    assert (cfg.model.path, cfg.model.init, cfg.parallel.pp) == ("tiny-lfm2", "random", 2)
    config = (folder / "tiny-lfm2" / "config.json").read_bytes()
    assert config == (MODELS / "tiny-lfm2" / "config.json").read_bytes()


def test_the_list_has_every_recipe_and_preset(capsys):
    assert cli.main(["init", "--list"]) == 0
    out = capsys.readouterr().out
    for recipe in recipes().values():
        assert f"{recipe.layout} on {recipe.num_gpus}" in out
        assert recipe.path in out
    assert all(f"  {path.name}\n" in out for path in MODELS.iterdir())


FILES = {
    "empty.jsonl": "\n",
    "broken.jsonl": "{\n",
    "broken.parquet": "PAR1",
    "words.jsonl": '{"words": "x"}',
    "text.jsonl": '{"text": "x"}',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "x"}]}',
    "splits/train.jsonl": '{"text": "x"}',
    "splits/test.jsonl": '{"text": "x"}',
}


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["run.yaml"], "run.yaml exists; it is kept"),
        (["new.yaml"], "corpus.jsonl exists with other content; it is kept"),
        (["tiny-lfm2"], "tiny-lfm2 exists"),
        (["run-file.schema.json"], "run-file.schema.json is written too"),
        (["tiny-qwen3_5"], "tiny-qwen3_5 is written too"),
        (["none/run.yaml"], "no folder none; make it first"),
        (["a\0.yaml"], "an argument has a NUL; take it out"),
        (["new.yaml", "--recipe", "lfm2-1.2b-ppp"], "did you mean lfm2-1.2b-pp?"),
        (
            ["new.yaml", "--recipe", "qwen3_5-9b-dpo", "--data", "text.jsonl"],
            "a recipe of dpo needs pairs of answers",
        ),
        (["new.yaml", "--model", "tiny_lfm2"], "did you mean tiny-lfm2?"),
        (["new.yaml", "--model", "/none/at/all"], "no such folder or preset"),
        (["new.yaml", "--model", "./tiny-lfm2"], "no config.json here"),
        (["--list", "new.yaml"], "--list writes nothing"),
        (["new.yaml", "--data"], "argument --data: expected at least one argument"),
        (["new.yaml", "--data", "none.jsonl"], "--data: none.jsonl matches no file"),
        (["new.yaml", "--data", "empty.jsonl"], "--data: no document in empty.jsonl"),
        (["new.yaml", "--data", "broken.jsonl"], "broken.jsonl:1: not JSON"),
        (["new.yaml", "--data", "words.jsonl"], "the fields of its first document are words,"),
        (["new.yaml", "--data", "broken.parquet"], "broken.parquet: cannot be read as PARQUET"),
        (["new.yaml", "--data", "splits"], "splits has the splits train, test"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, fragment, folder, capsys):
    (folder / "run.yaml").write_text("mine")
    (folder / "corpus.jsonl").write_text("mine")
    (folder / "tiny-lfm2").mkdir()
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    before = content(folder)
    assert cli.main(["init", *arguments]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert fragment in error
    assert content(folder) == before


def test_yaml_that_looks_like_another_type_stays_text(folder):
    for name in ("yes", "1.5", "a #b", "{c"):
        (folder / name).write_text("words")
    assert cli.main(["init", "--model", "owner/name", "--data", "yes", "1.5", "a #b", "{c"]) == 0
    written = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    assert written["data"]["train"] == ["yes", "1.5", "a #b", "{c"]


CHAT = {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]}


@pytest.mark.parametrize(
    ("document", "keys"),
    [
        (CHAT, {"format": "chat"}),
        (SHAREGPT, {"format": "chat", "fields": {"messages": "conversations"}}),
        ({"prompt": "2+2=", "completion": "4"}, {"format": "completion"}),
        (
            {"instruction": "2+2=", "output": "4"},
            {"format": "completion", "fields": {"prompt": "instruction", "completion": "output"}},
        ),
        (
            {"instruction": "add", "input": "2 2", "output": "4"},
            {
                "format": "completion",
                "fields": {"prompt": ["instruction", "input"], "completion": "output"},
            },
        ),
        (
            {"question": "2+2=", "answer": "4"},
            {"format": "completion", "fields": {"prompt": "question", "completion": "answer"}},
        ),
        (
            {"prompt": "2+2=", "response": "4"},
            {"format": "completion", "fields": {"completion": "response"}},
        ),
        ({"id": 1, "text": "2+2=4"}, {"format": "text"}),
    ],
    ids=lambda value: "-".join(value) if "format" not in value else "",
)
def test_the_format_is_that_of_the_first_document(folder, document, keys):
    (folder / "a.jsonl").write_text(json.dumps(document) + "\n{")  # the rest is not read
    pq.write_table(pa.Table.from_pylist([document]), folder / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        run_file = f"{name}.yaml"
        assert cli.main(["init", run_file, "--model", "owner/name", "--data", name]) == 0
        data = yaml.safe_load((folder / run_file).read_text(encoding="utf-8"))["data"]
        assert {key: data.get(key) for key in keys} == keys


def test_data_of_the_hub_is_not_read(folder):
    assert cli.main(["init", "--model", "owner/name", "--data", "owner/data"]) == 0
    assert load_config("run.yaml").data.format == "text"


def test_a_preset_trains_on_chats_at_once(folder):
    (folder / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 40)
    assert cli.main(["init", "--model", "tiny-lfm2", "--data", "chats.jsonl"]) == 0
    done = run_command(["train", "run.yaml", "--training.steps=2", "--training.eval_every=0"])
    assert done.returncode == 0, done.stderr
