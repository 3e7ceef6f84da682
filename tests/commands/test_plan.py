"""`shardwise plan` prints, writes and draws, and mistakes are one line each."""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from shardwise.commands import cli
from shardwise.commands.command import with_preset
from shardwise.config import Data, Model, Recomputation, RunConfig, Training
from shardwise.config.presets import MODELS
from shardwise.config.run_file import load_config
from shardwise.models import hub

DEVICES = ["--devices", "2xRTX4090", "--sequence", "128", "--tokens-per-step", "1K"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_garbage_collection_stays_as_it_was(capsys):
    for is_enabled in (True, False):
        (gc.enable if is_enabled else gc.disable)()
        try:
            assert cli.main(["plan", "tiny-qwen3_5", *DEVICES, "--top=0"]) == 2
            assert gc.isenabled() == is_enabled
        finally:
            gc.enable()


def test_it_prints_the_best_and_the_reasons(capsys):
    assert cli.main(["plan", "tiny-qwen3_5", *DEVICES]) == 0
    out = capsys.readouterr().out
    assert "LoRA r=16" in out
    assert "8 rows of 128 tokens, 1,024 in all" in out
    assert re.search(r"pp:2: layers over 2 stages", out)  # each host queues half of them
    assert "memory does not bind" in out
    assert "layouts computed exactly" in out


def test_a_table_without_rows_is_not_printed(capsys):
    for devices, is_there in (("1xRTX4090", False), ("2xRTX4090", True)):
        assert cli.main(["plan", "tiny-qwen3_5", *DEVICES, "--devices", devices, "--all"]) == 0
        out = capsys.readouterr().out
        assert ("why not" in out) == is_there
        assert "the best with" in out


def test_what_it_writes_is_what_train_takes(folder, capsys):
    arguments = ["plan", "tiny-qwen3_5", *DEVICES, "--full", "--explain", "fsdp2:2"]
    assert cli.main([*arguments, "--write", "run.yaml", "--html", "page.html"]) == 0
    cfg = load_config("run.yaml")
    assert (cfg.parallel.data, cfg.lora, cfg.data.sequence_length) == ("fsdp2", None, 128)
    assert cfg.training.global_batch_size == 8
    assert Path(cfg.data.train).is_file()
    capsys.readouterr()
    assert cli.main(["train", "run.yaml", "--dry-run", "--devices", "2xRTX4090"]) == 0
    out = capsys.readouterr().out
    assert "fsdp2:2" in out
    assert "groups of ranks: dp_shard [0,1]\n" in out
    assert re.search(r"weights +[\d.]+ [KM]iB", out)
    assert not (folder / "runs").exists()
    html = (folder / "page.html").read_text(encoding="utf-8")
    assert "fsdp2:2" in html
    assert re.search(r"dp_shard</th>\s*<td>\[0,1\]</td>", html)
    assert not re.search("https?:", html)
    assert 'th[data-kind="number"]' in html  # the style is not escaped


@pytest.mark.parametrize(
    ("command", "options"), [("plan", ["--top=1"]), ("train", ["--dry-run"]), ("split", [])]
)
def test_a_recipe_is_planned_by_the_shape_of_its_preset(command, options, capsys, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(hub, "get_hf_file_metadata", refuse)
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    hub.ask_hub.cache_clear()
    assert cli.main(["init", "--recipe", "lfm2-1.2b-pp"]) == 0
    options = options if command == "split" else [*options, "--devices", "2xRTX4090"]
    outputs = []
    for path in (None, MODELS / "lfm2-1.2b"):
        capsys.readouterr()
        given = [] if path is None else [f"--model.path={path}"]
        assert cli.main([command, "run.yaml", *options, *given]) == 0
        printed = capsys.readouterr()
        note = "note: the shape of LiquidAI/LFM2-1.2B is that of the preset lfm2-1.2b"
        assert printed.err.startswith(note) == (path is None)
        text = re.sub(r"[\d.,]+ m?s\b", "", printed.out)
        # A split times products of this machine first, so its words alone are compared.
        outputs.append(re.findall("[a-z_]+" if command == "split" else r"\S+", text))
    assert outputs[0] == outputs[1]


def test_what_was_downloaded_or_is_a_folder_here_is_read_itself(folder, monkeypatch, capsys):
    recipe = RunConfig(Model("LiquidAI/LFM2-1.2B"), Data("d"), Training("o"))
    assert with_preset(recipe).model.path == str(MODELS / "lfm2-1.2b")
    (folder / "LiquidAI" / "LFM2-1.2B").mkdir(parents=True)
    assert with_preset(recipe) == recipe
    (folder / "LiquidAI" / "LFM2-1.2B").rmdir()
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: "there")
    assert with_preset(recipe) == recipe
    assert with_preset(replace(recipe, model=Model("owner/other"))).model.path == "owner/other"


def test_a_run_file_keeps_what_is_not_searched(folder):
    assert cli.main(["init"]) == 0
    run = ["plan", "run.yaml", "--training.global_batch_size=4", "--devices", "2xRTX4090"]
    assert cli.main([*run, "--parallel.pp=2", "--write", "best.yaml"]) == 0
    before, after = load_config("run.yaml"), load_config("best.yaml")
    assert (after.data, after.optimizer) == (before.data, before.optimizer)
    assert (after.training.global_batch_size, after.parallel.pp) == (4, 2)


def test_it_says_what_it_does_not_take_from_a_run_file(folder, capsys):
    assert cli.main(["init"]) == 0
    run = ["plan", "run.yaml", "--devices", "2xRTX4090"]
    assert cli.main([*run, "--parallel.pp=2"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "not taken from run.yaml" in x]
    assert "training.micro_batch_size" in line
    assert "parallel.pp" not in line
    assert cli.main(["plan", "tiny-qwen3_5", *DEVICES]) == 0
    assert "not taken" not in capsys.readouterr().out


def test_a_budget_stays_in_the_run_file(folder, capsys):
    assert cli.main(["init"]) == 0
    run = ["plan", "run.yaml", "--devices", "2xRTX4090", "--parallel.data=ddp"]
    budget = "--training.checkpointing={budget_gib: 20}"
    assert cli.main([*run, budget, "--write", "best.yaml"]) == 0
    assert "none: layers" in capsys.readouterr().out
    assert load_config("best.yaml").training.checkpointing == Recomputation(budget_gib=20.0)
    layers = "--training.checkpointing={full: [0], operators: [2]}"
    assert cli.main([*run, layers, "--write", "layers.yaml"]) == 0
    chosen = load_config("layers.yaml").training.checkpointing
    assert chosen == Recomputation(full=(0,), operators=(2,))
    assert cli.main([*run, "--training.checkpointing={budget_gib: 0.01}"]) == 2
    assert "the smallest that this run can keep is 1." in capsys.readouterr().err


def test_a_stored_base_needs_less_and_takes_the_time_to_read_it(capsys):
    def best(base: str, *options: str) -> dict:
        arguments = [*DEVICES, "--explain", "fsdp2:2", f"--model.base={base}", *options, "--json"]
        assert cli.main(["plan", "tiny-qwen3_5", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["choices"][0]

    plain, stored = best("none"), best("int8")
    assert stored["memory"]["weights"] < 0.8 * plain["memory"]["weights"]
    assert stored["time"]["layers"] > plain["time"]["layers"]
    for part in ("head", "recomputation", "optimizer"):
        assert stored["time"][part] == pytest.approx(plain["time"][part])
    for data in ("cp", "tp", "pp"):
        options = [*DEVICES, "--model.base=fp8", f"--parallel.{data}=2"]
        assert cli.main(["plan", "tiny-qwen3_5", *options]) == 0


@pytest.mark.parametrize(
    ("override", "layouts"),
    [
        ("parallel.reshard_after_forward=false", "fsdp2|hsdp"),
        ("parallel.dp_replicate=2", "hsdp:2x"),
        ("parallel.sequence_parallel=true", "-sp$"),
        ("parallel.schedule=gpipe", "pp:"),
    ],
)
def test_a_key_that_not_every_layout_has_is_kept(override, layouts, capsys):
    options = ["--devices", "4xRTX4090", "--sequence", "128", "--tokens-per-step", "1K", "--json"]
    assert cli.main(["plan", "tiny-qwen3_5", *options, f"--{override}"]) == 0
    titles = [choice["title"] for choice in json.loads(capsys.readouterr().out)["choices"]]
    assert titles
    assert all(re.search(layouts, title) for title in titles)


def planned(capsys, *arguments: str) -> dict:
    assert cli.main(["plan", "tiny-qwen3_5", "--devices=2xRTX4090", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (["--data.sequence_length=64", "--tokens-per-step=1K"], "16 rows of 64 tokens"),
        (["--sequence=128", "--training.global_batch_size=6"], "6 rows of 128 tokens"),
        (["--sequence=512", "--data.sequence_length=128"], "8192 rows of 128 tokens"),
        (["--sequence=3000"], "256 rows of 3,000 tokens"),
    ],
)
def test_a_step_has_the_rows_that_are_asked_for(arguments, step, capsys):
    assert step in planned(capsys, *arguments)["heading"][1]


def test_a_whole_section_is_kept_as_its_keys_are(capsys):
    content = planned(capsys, *DEVICES[2:], "--parallel={tp: 2}")
    assert {choice["division"]["tp"] for choice in content["choices"]} == {2}


def test_keys_that_need_an_axis_are_kept_where_it_is(capsys):
    content = planned(capsys, *DEVICES[2:], "--parallel.cp_attention=gather")
    kept = {c["division"]["cp"]: c["parallel"]["cp_attention"] for c in content["computed"]}
    assert kept == {1: "auto", 2: "gather"}
    content = planned(capsys, *DEVICES[2:], "--parallel.speeds=[1.0, 0.5]")
    kept = {c["division"]["pp"]: c["parallel"]["speeds"] for c in content["computed"]}
    assert kept == {1: None, 2: [1.0, 0.5]}


def test_a_limit_of_stages_needs_a_split_that_obeys_it(capsys):
    limit = "--parallel.memory_limit_gib=[20, 20]"
    assert cli.main(["plan", "tiny-qwen3_5", *DEVICES, limit]) == 2
    assert "which is for a pipeline" in capsys.readouterr().err
    content = planned(capsys, *DEVICES[2:], limit, "--parallel.split=balanced")
    kept = {c["division"]["pp"]: c["parallel"]["memory_limit_gib"] for c in content["computed"]}
    assert kept == {1: None, 2: [20.0, 20.0]}


@pytest.mark.parametrize("mistake", ["--data=my.jsonl", "--training=3", "--parallel=[]"])
def test_a_section_of_another_type_is_one_line(mistake, capsys):
    assert cli.main(["plan", "tiny-qwen3_5", *DEVICES, mistake]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_run_for_gpus_is_planned_where_there_are_none(folder, capsys):
    assert cli.main(["init"]) == 0
    run = ["train", "run.yaml", "--dry-run", "--devices", "2xRTX4090"]
    run += ["--parallel.pp=2", "--training.global_batch_size=16"]
    assert cli.main([*run, "--training.device=cuda"]) == 0


def test_what_is_written_keeps_what_was_given(folder):
    (folder / "my.jsonl").write_text('{"text": "a"}\n')
    given = ["--data.train=my.jsonl", "--training.output_dir=runs/x"]
    assert cli.main(["plan", "tiny-qwen3_5", *DEVICES, *given, "--write", "run.yaml"]) == 0
    cfg = load_config("run.yaml")
    assert (cfg.data.train, cfg.training.output_dir) == ("my.jsonl", "runs/x")
    assert not (folder / "corpus.jsonl").exists()
    assert Path(cfg.model.path, "tokenizer.json").is_file()


def test_a_run_that_compares_copies_is_planned_on_ranks_that_have_them(folder, capsys):
    assert cli.main(["init"]) == 0
    run = ["train", "run.yaml", "--dry-run", "--devices", "2xRTX4090"]
    run += ["--training.check_copies_every=100", "--training.global_batch_size=16"]
    assert cli.main([*run, "--parallel.data=ddp"]) == 0
    capsys.readouterr()
    assert cli.main([*run, "--parallel.data=fsdp2"]) == 2
    assert "no rank holds a copy" in capsys.readouterr().err


def test_all_as_data(capsys):
    options = ["--json", "--top", "2", "--html", "page.html"]
    assert cli.main(["plan", "tiny-qwen3_5", *DEVICES, *options]) == 0
    content = json.loads(capsys.readouterr().out)
    best, _ = content["choices"]
    assert best["title"] == "pp:2"
    assert best["training"] == {"micro_batch_size": 8, "checkpointing": "none"}
    assert content["cluster"]["links"].keys() == {"inside", "between", "host"}
    parts = [num for part, num in best["memory"].items() if part not in ("total", "moment")]
    assert sum(parts) == best["memory"]["total"]
    beside = ("total", "hidden_communication", "elementwise")
    parts = [s for part, s in best["time"].items() if part not in beside]
    assert sum(parts) == pytest.approx(best["time"]["total"])


def test_a_dry_run_that_does_not_fit_is_out_of_memory(capsys):
    assert cli.main(["init"]) == 0
    options = ["--dry-run", "--devices", "1xRTX4090", "--data.sequence_length=262144"]
    assert cli.main(["train", "run.yaml", *options, "--training.loss=plain"]) == 3
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.micro_batch_size=3", "is not a multiple of"),
        ("training.micro_batch_size=1000", "is not a multiple of"),
        ("training.checkpointing=[full]", "training.checkpointing names full"),
        ("parallel.dp_replicate=3", "does not divide the 8 data-parallel devices"),
    ],
)
def test_a_key_that_no_layout_can_keep_is_refused(override, words, capsys):
    options = ["--devices", "8xRTX4090", "--sequence", "128", "--tokens-per-step", "4K"]
    assert cli.main(["plan", "tiny-qwen3_5", *options, f"--{override}"]) == 2
    assert words in capsys.readouterr().err


def test_a_key_that_the_one_layout_cannot_keep_is_refused(capsys):
    options = ["--devices", "8xRTX4090", "--sequence", "128", "--tokens-per-step", "4K"]
    options += ["--explain", "ddp", "--training.micro_batch_size=3"]
    assert cli.main(["plan", "tiny-qwen3_5", *options]) == 2
    assert "is not a multiple of" in capsys.readouterr().err


def test_kinds_of_layers_may_be_recomputed(capsys):
    options = ["--devices", "2xRTX4090", "--sequence", "128", "--tokens-per-step", "1K"]
    override = "--training.checkpointing=[full_attention]"
    assert cli.main(["plan", "tiny-qwen3_5", *options, override, "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert choices
    assert all("recompute full_attention" in choice["details"] for choice in choices)


def test_layers_that_are_recomputed_are_named(folder, capsys):
    assert cli.main(["init"]) == 0
    run = ["train", "run.yaml", "--dry-run", "--devices", "1xRTX4090"]
    assert cli.main([*run, "--training.checkpointing={full: [0, 1], operators: [3]}"]) == 0
    assert "recompute full in layers 0-1, operators in layer 3" in capsys.readouterr().out


def test_products_are_said_to_be_in_the_dtype_that_they_are_in(capsys):
    for arguments, dtype in (
        (["--precision=float32"], "weights in bfloat16, products in bfloat16"),
        (["--precision=float32", "--model.dtype=float32"], "products in float32"),
        ([], "products in bfloat16"),
    ):
        assert dtype in planned(capsys, *DEVICES[2:], *arguments)["heading"][0]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["tiny-qwen3_6", *DEVICES], "did you mean tiny-qwen3_5?"),
        (["tiny-qwen3_5", "--devices", "8xT1000"], "8xT1000"),
        (["tiny-qwen3_5", *DEVICES, "--tokens-per-step", "1000"], "give 896 or another multiple"),
        (["tiny-qwen3_5", *DEVICES, "--tokens-per-step", "1G"], "and a step has at most"),
        (["tiny-qwen3_5", *DEVICES, "--link", "400Gbps"], "joins nodes, and there is one"),
        (["tiny-qwen3_5", *DEVICES, "--devices=here", "--link=PCIe4"], "leave --link out"),
        (["tiny-qwen3_5", *DEVICES, "--sequence", "long"], "--sequence long: write a number"),
        (["tiny-qwen3_5", *DEVICES, "--sequence", "0"], "--sequence is 0"),
        (["tiny-qwen3_5", *DEVICES, "--lora", "r=x"], "write the rank as r=16"),
        (["tiny-qwen3_5", *DEVICES, "--lora", "r=8", "--full"], "--lora and --full"),
        (["tiny-qwen3_5", *DEVICES, "--top", "0"], "--top is 0"),
        (["tiny-qwen3_5", *DEVICES, "--explain", "fsdp3"], "no layout is called fsdp3"),
        (["tiny-qwen3_5", *DEVICES, "--explain", "tp:2x2"], "only hsdp has two sizes"),
        (
            ["tiny-qwen3_5", *DEVICES, "--explain=zero2-tp", "--devices=4xL40S"],
            "zero2-tp is not offered",
        ),
        (["tiny-qwen3_5", *DEVICES, "--write", "none/run.yaml"], "no folder none"),
        (["tiny-qwen3_5", *DEVICES, "--html", "."], "is a folder"),
        (["tiny-qwen3_5", *DEVICES, "--parallel.tp=3"], "parallel.tp is 3"),
        (["tiny-qwen3_5", *DEVICES[:1], "6xL40S", "--parallel.tp=4"], "a multiple of 4 devices"),
        (["tiny-qwen3_5", *DEVICES[:1], "8xL40S", "--explain=ddp:4"], "ddp:4 needs 4 devices"),
        (["tiny-qwen3_5", *DEVICES, "--explain=tp-tp"], "write a layout as"),
        (["tiny-qwen3_5", *DEVICES, "--explain=ddp:2-ep:2"], "has no routed experts"),
        (["tiny-qwen3_5", *DEVICES, "--explain=ddp-ep"], "has no routed experts"),
        (["tiny-qwen3_moe", *DEVICES, "--explain=ddp:2-ep:3"], "does not divide the"),
        (["tiny-qwen3_moe", *DEVICES, "--explain=ddp:2-ep:4"], "does not divide the 2 ranks of"),
        (["tiny-qwen3_5", *DEVICES, "--explain=hsdp:1x2"], "--explain it as fsdp2:2"),
        (["tiny-qwen3_5", *DEVICES, "--explain=hsdp:2x1"], "--explain it as ddp:2"),
        (["tiny-qwen3_5", *DEVICES, "--explain=fsdp2-tp:1"], "leave out tp:1"),
        (["tiny-qwen3_5", *DEVICES, "--explain=hsdp:0x2"], "write a layout as"),
        (["folder", *DEVICES], "folder"),
        (["unknown", *DEVICES, "--full"], "helium is not a family that shardwise knows"),
        (["quantised", *DEVICES], "the weights are quantised"),
        (
            ["llama-3.1-8b", "--devices", "1xRTX4090", "--full", "--html=page.html"],
            "nothing fits on 1 x RTX4090",
        ),
        (
            ["llama-3.1-8b", "--devices", "1xRTX4090", "--sequence", "16384", "--lora", "r=16"],
            "with --model.base=int8 single fits",
        ),
    ],
    ids=lambda value: " ".join(value[:1] + value[7:]) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_a_way_out(arguments, fragment, folder, capsys):
    for name in ("folder", "unknown", "quantised"):
        (folder / name).mkdir()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9, "intermediate_size": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    unknown = {"model_type": "helium", **sizes, **heads}
    (folder / "unknown" / "config.json").write_text(json.dumps(unknown))
    llama = {"model_type": "llama", **sizes, **heads}
    llama["quantization_config"] = {"quant_method": "fp8"}
    (folder / "quantised" / "config.json").write_text(json.dumps(llama))
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert fragment in error


def test_the_stages_of_a_pipeline_as_data_and_on_the_page(capsys, tmp_path):
    page = tmp_path / "page.html"
    arguments = ["plan", "tiny-llama", *DEVICES, "--explain", "pp:2", "--html", str(page)]
    assert cli.main([*arguments, "--json"]) == 0
    (best, *_) = json.loads(capsys.readouterr().out)["choices"]
    totals = [stage["total"] for stage in best["stages"].values()]
    assert (len(totals), max(totals)) == (2, best["memory"]["total"])
    html = page.read_text(encoding="utf-8")
    assert "Stages of pp:2" in html
    assert html.count("<span>stage ") == 2


def test_a_published_run_is_planned_by_its_name(capsys):
    run = ["plan", "published:gpt2-large-zero3-tp"]
    assert cli.main([*run, "--json"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)["computed"]
    assert choice["title"] == "fsdp2:2-tp:2"
    assert choice["training"] == {"micro_batch_size": 8, "checkpointing": "full"}
    run += ["--devices", "8xH100-80GB", "--parallel.tp=4", "--tokens-per-step", "64K"]
    assert cli.main(run) == 0
    printed = capsys.readouterr().out
    assert "fsdp2:2-tp:4" in printed
    assert "products in float16" in printed


def test_the_guide_says_what_more_rows_are_planned_to_gain(capsys):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "gpt2-large.md").read_text("utf-8")
    more = ["--training.micro_batch_size=32", "--training.global_batch_size=64"]
    for rows, overrides in ((8, []), (32, more)):
        assert cli.main(["plan", "published:gpt2-large-zero3-tp", "--json", *overrides]) == 0
        (choice,) = json.loads(capsys.readouterr().out)["computed"]
        (line,) = re.findall(rf"^\| ZeRO-3 x TP \| {rows} \| .* s \|.*$", page, re.MULTILINE)
        assert line.split(" | ")[7] == f"{100 * choice['mfu']:.0f}"


def test_a_published_run_takes_other_nodes(capsys):
    assert cli.main(["plan", "published:yi-34b", "--lora=r=8", "--nodes=2"]) == 0
    assert "16 x A100-80GB in 2 nodes" in capsys.readouterr().out
    assert cli.main(["plan", "published:yi-34b", "--lora=8", "--nodes=4"]) == 0
    assert "32 x A100-80GB in 4 nodes" in capsys.readouterr().out


def test_a_model_that_learns_its_positions_is_planned_with_as_many(capsys):
    assert cli.main(["plan", "tiny-gpt2", "--devices", "1xRTX4090", "--top=1"]) == 0
    assert "rows of 1,024 tokens" in capsys.readouterr().out


def test_memory_binds_where_more_of_it_would_be_faster(capsys):
    run = ["plan", "llama-3.1-8b", "--devices", "8xRTX4090", "--top=1"]
    alone = [f"--parallel.{axis}=1" for axis in ("pp", "tp", "cp")]
    assert cli.main([*run, "--parallel.data=zero1", *alone]) == 0
    assert "memory binds" in capsys.readouterr().out
    assert cli.main([*run[:3], "8xH100-80GB", "--top=1"]) == 0
    assert "micro-batch 2 would be faster, but needs 86 GiB" in capsys.readouterr().out
    run = ["plan", "tiny-llama", "--devices", "1xH100-80GB", "--top=1"]
    assert cli.main([*run, "--training.checkpointing=full"]) == 0
    assert "memory does not bind" in capsys.readouterr().out


def test_a_published_run_that_cannot_fit_is_shown_as_it_is(capsys):
    """Not even a lower bound of its memory fits, and it has more axes than a simpler layout."""
    assert cli.main(["plan", "published:llama-3-405b-8k-8192"]) == 2
    out, err = capsys.readouterr()
    assert "pp:16-fsdp2:64-tp:8-sp: interleaved-1f1b x4" in out
    assert "nothing fits on 8192 x H100-80GB" in err
    assert "give --training.checkpointing=full, more --devices" in err
    assert cli.main(["plan", "published:deepseek-v3"]) == 2
    out, err = capsys.readouterr()
    assert "pp:16-zero1:128-ep:64: dualpipe-v x2" in out
    assert "nothing fits on 2048 x H100-80GB" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["published:olmo-7"], "published:olmo-7: no such run; did you mean olmo-7b?"),
        (["published:gemma-2-27b"], "in words (768 replicas x 8 shards); give a model"),
        (["tiny-llama"], "--devices is missing; give the devices of a node, such as"),
        (["published:yi-34b", "--lora", "r=8", "--full"], "--lora and --full: give one of them"),
    ],
)
def test_a_plan_needs_devices_and_a_run_that_is_known(arguments, words, capsys):
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("share", "verdict", "code"),
    [(0.94, "fits", 0), (0.97, "uncertain", 0), (1.01, "does not fit", 2)],
)
def test_more_than_is_safe_of_a_device_is_uncertain(share, verdict, code, folder, capsys):
    """Published runs take 95 to 99 % of a device; what takes all of it does not fit."""
    fixed = ["--training.micro_batch_size=4", "--training.checkpointing=none"]
    explained = ["plan", "tiny-qwen3_5", *DEVICES, *fixed, "--explain", "ddp:2"]
    assert cli.main([*explained, "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["choices"][0]["memory"]["total"]
    card = {"gib": needed / share / 2**30, "memory_bandwidth": 1e12, "flops": {"float32": 1e14}}
    card |= {"inside": "PCIe4", "host": "PCIe4"}
    (folder / "card.yaml").write_text(json.dumps(card))
    assert cli.main([*explained, "--devices", "2xcard.yaml"]) == code
    printed = capsys.readouterr()
    assert verdict in printed.out + printed.err
