"""What docs/guides/security.md promises, clause by clause: where it is shown, and what is tried.

CLAUSES names the tests of other files; what has no better place is tried here.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.base.interfaces import Mesh
from shardwise.base.records.cell import RECORD, RUN_FILE, SWEEP
from shardwise.base.records.record import RunRecord
from shardwise.base.safety import warn_of_code, write_atomically
from shardwise.checkpoint.output_dir import claim, locked
from shardwise.config import Model, RunConfig, UserError
from shardwise.data.tokenizer import load_tokenizer
from shardwise.lab.benchmark.runner import bench
from shardwise.lab.report.folder import read_bench
from shardwise.models.adapters.reading import read_adapter
from shardwise.models.load import read_config, weights
from shardwise.parallel import compile as compiling
from tests.benchmark.sweeps import sweep_file
from tests.launch.test_local import config, launch_in_a_fork
from tests.models.tiny import on_meta
from tests.parity.harness import CONFIGS
from tests.report.conftest import strategies, write

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "shardwise").rglob("*.py"))

CLAUSES = {
    "nothing unpickles a file that a stranger could give": [
        "checkpoint/test_hostile.py::test_no_pickle_in_a_checkpoint_is_loaded",
        "models/adapters/test_coverage.py::test_a_folder_that_cannot_be_read_is_one_line",
        "data/test_text.py::test_files_that_are_no_text_are_known_by_their_first_bytes",
    ],
    "ports bind to the address that was asked for": [
        "launch/test_local.py::test_no_process_of_a_run_on_one_machine_listens_beyond_it",
        "launch/test_local.py::test_tasks_of_slurm_listen_where_they_meet",
        "launch/test_local.py::test_the_interface_that_the_user_names_is_kept",
    ],
    "names cannot leave their folder": [
        "benchmark/test_sweep.py::test_hostile_names_give_safe_folders",
        "models/test_load.py::test_an_index_that_points_outside_its_folder_is_refused",
        "checkpoint/test_hostile.py::test_an_index_that_lies_is_damage",
    ],
    "files without end are refused": [
        "test_config.py::test_deep_or_endless_yaml_is_one_line",
        "data/test_text.py::test_json_that_is_nested_without_end",
        "data/test_formats.py::test_template_without_end",
    ],
    "the page escapes everything": [
        "report/test_page.py::test_hostile_names_are_text",
        "report/test_page.py::test_what_records_say_is_text_on_the_page_and_in_its_figures",
        "report/test_page.py::test_both_pages_escape_by_their_templates",
        "report/test_page.py::test_nothing_points_outside",
    ],
    "trust_remote_code is off": ["models/test_load.py::test_remote_code_runs_only_when_asked_for"],
}


@pytest.mark.parametrize("clause", CLAUSES)
def test_the_tests_of_a_clause_are_there(clause):
    for name in CLAUSES[clause]:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------- code in files

UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "os.system", "os.popen", "tempfile.mktemp", "yaml.unsafe_load"}
PEERS = {"parallel/reduce.py", "checkpoint/export.py"}
"""What receives objects from other ranks: torch pickles them. Who can reach a rank: the page."""


def offences(source: str, name: str = "") -> list[str]:
    """The calls and imports of a module that can run what a file or a stranger says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [each for each in names if each.partition(".")[0] in UNPICKLERS]
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        values = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        loads = call == "torch.load" and values.get("weights_only") != "True"
        loads |= values.get("allow_pickle") == "True" or values.get("weights_only") == "False"
        loads |= call == "yaml.load" and "_PlainData" not in ast.unparse(node)
        loads |= values.get("trust_remote_code") == "True" or values.get("shell") == "True"
        loads |= "object" in call.split(".")[-1] and call.startswith("dist.") and name not in PEERS
        if call in CALLS or loads:
            found.append(ast.unparse(node))
    return found


def test_no_line_of_the_library_runs_what_a_file_says():
    folder = ROOT / "src" / "shardwise"
    for path in SOURCES:
        name = str(path.relative_to(folder))
        assert offences(path.read_text(encoding="utf-8"), name) == [], name


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, yaml.Loader)",
        "eval(text)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "subprocess.run(text, shell=True)",
        "tempfile.mktemp()",
        "dist.broadcast_object_list(values)",
    ],
)
def test_the_search_finds(line):
    assert offences(line)


class Touch:
    """What a pickle can do to whoever loads it."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return open, (self.file, "w")


PICKLES = (
    *("pytorch_model.bin", "model.pt", "optimizer.pt", "training_args.bin", "scheduler.pt"),
    *("rng_state.pth", "adapter_model.bin", "tokenizer.pkl"),
)


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    """The file that appears if code of a stranger runs."""
    return tmp_path / "touched"


@pytest.fixture
def poisoned(tmp_path: Path, touched: Path) -> Path:
    """A folder with a config and pickles under every name that libraries look for."""
    folder = tmp_path / "model"
    folder.mkdir()
    content = (CONFIGS / "tiny-llama" / "config.json").read_bytes()
    (folder / "config.json").write_bytes(content)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    for name in PICKLES:
        torch.save(Touch(touched), folder / name)
    return folder


@pytest.mark.parametrize("as_safetensors", [False, True])
def test_no_pickle_in_a_model_or_adapter_is_loaded(poisoned, touched, as_safetensors):
    if as_safetensors:
        for name in ("model.safetensors", "adapter_model.safetensors"):
            (poisoned / name).write_bytes(pickle.dumps(Touch(touched)))
    model = Model(str(poisoned))
    with pytest.raises(UserError, match="safetensors"):
        read_adapter(poisoned)
    (poisoned / "adapter_config.json").unlink()  # a model with an adapter beside it is refused
    with pytest.raises(UserError, match="safetensors"):
        next(weights(on_meta(Model(str(CONFIGS / "tiny-llama"), "random")), model, 0))
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(model)
    assert not touched.exists()


def with_code(folder: Path, touched: Path) -> Model:
    """A model whose config and tokenizer come with code."""
    maps = {"AutoConfig": "code.Odd", "AutoTokenizer": ["code.OddTokenizer", None]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "odd", "auto_map": maps}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": maps}))
    (folder / "code.py").write_text(
        f"open({str(touched)!r}, 'w').close()\nfrom transformers import PretrainedConfig\n"
        "class Odd(PretrainedConfig):\n    model_type = 'odd'\n"
        "class OddTokenizer:\n    pass\n"
    )
    return Model(str(folder))


def test_code_of_a_model_or_tokenizer_runs_only_when_asked_for_and_that_is_said(
    tmp_path, touched, capfd, monkeypatch
):
    model = with_code(tmp_path / "odd", touched)
    for read in (read_config, load_tokenizer):
        with pytest.raises(UserError):
            read(model)
    assert not touched.exists()
    assert capfd.readouterr().err == ""
    trusted = Model(model.path, trust_remote_code=True, tokenizer="another")
    warn_of_code.cache_clear()
    monkeypatch.setenv("RANK", "1")  # rank 0 says it for all
    warn_of_code(trusted)
    assert capfd.readouterr().err == ""
    warn_of_code.cache_clear()
    monkeypatch.delenv("RANK")
    said = mock.Mock(side_effect=OSError("stop here"))
    with monkeypatch.context() as patch:
        patch.setattr("transformers.AutoTokenizer.from_pretrained", said)
        with pytest.raises(UserError):
            load_tokenizer(trusted)
    (line,) = capfd.readouterr().err.splitlines()
    assert "trust_remote_code is true" in line
    assert model.path in line
    assert "another" in line
    read_config(trusted)
    assert touched.exists()
    assert capfd.readouterr().err == ""  # once a process


# --------------------------------------------------------------------------------- files of others


def test_compiled_code_lies_where_only_this_user_writes(tmp_path, monkeypatch):
    """torch's own default is a name in the temporary folder, where another user may be first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by the user")
    modules = mock.MagicMock()
    modules.return_value.default_cache_dir.return_value = "torch's default"
    monkeypatch.setattr(compiling.importlib, "import_module", modules)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    cfg: Any = SimpleNamespace(training=SimpleNamespace(compile="inductor"))
    arguments: tuple[Any, ...] = (SimpleNamespace(parts=()), None, cfg, SimpleNamespace(layers=()))
    compiling.apply(*arguments)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "set by the user"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compiling.apply(*arguments)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "torch's default")  # as its imports do
    compiling.apply(*arguments)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder == tmp_path / "cache" / "compiled"
    assert folder.stat().st_mode & 0o077 == 0
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o777)
    with pytest.raises(UserError, match="others may write"):
        compiling.apply(*arguments)
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(UserError, match="others may write"):
        compiling.apply(*arguments)


def report_modes(cfg: RunConfig, mesh: Mesh) -> None:
    temporary = Path(os.environ["TMPDIR"])
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in temporary.iterdir()}
    Path(cfg.training.output_dir, "modes.json").write_text(json.dumps(modes))


def test_temporary_folders_of_a_run_are_private(tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    mask = os.umask(0)
    try:
        assert launch_in_a_fork(config(tmp_path / "run"), report_modes) == 0
    finally:
        os.umask(mask)
    modes = json.loads((tmp_path / "run" / "modes.json").read_text())
    assert modes
    assert {mode & 0o077 for mode in modes.values()} == {0}
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "name", [".lock", "metrics.jsonl", "stacks-rank-0.txt", ".record.json.5f.tmp"]
)
def test_a_run_does_not_write_through_a_link_in_its_folder(name, tmp_path):
    cfg = config(tmp_path / "run")
    (tmp_path / "run").mkdir()
    target = tmp_path / "mine"
    target.write_text("mine")
    (tmp_path / "run" / name).symlink_to(target)
    with pytest.raises(UserError, match="is a link to"), locked(cfg, None):
        pass
    with pytest.raises(UserError, match="is a link to"):
        claim(cfg, clear=True)
    assert target.read_text() == "mine"


def test_writing_a_file_replaces_a_link(tmp_path):
    target = tmp_path / "mine"
    target.write_text("mine")
    (tmp_path / "page").symlink_to(target)
    write_atomically(tmp_path / "page", b"new")
    assert (tmp_path / "page").read_text() == "new"
    assert not (tmp_path / "page").is_symlink()
    assert target.read_text() == "mine"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder of a bench, to be harmed."""
    return write(tmp_path / "bench", *strategies())


@pytest.mark.parametrize("name", [RUN_FILE, RECORD])
def test_a_report_shows_no_file_from_outside_the_folder(name, made, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text((made / "ddp" / name).read_text())
    (made / "ddp" / name).unlink()
    (made / "ddp" / name).symlink_to(secret)
    with pytest.raises(UserError, match="is a link out of"):
        read_bench(made)


HARMS: dict[str, Callable[[dict[str, Any]], object]] = {
    "digits": lambda record: record.update(peak_memory_bytes=[10**400, 1]),
    "sent": lambda record: record.update(sent_bytes_per_step=[10**30, 1]),
    "step": lambda record: record.update(eval=[{"step": float("nan"), "loss": 1.0}]),
    "large": lambda record: record.update(losses=[1e308, 1.0]),
    "infinite": lambda record: record.update(eval=[{"step": float("inf"), "loss": 1.0}]),
}


@pytest.mark.parametrize("harm", HARMS)
def test_numbers_that_no_run_has_measured_are_a_problem_of_their_cell(harm, made):
    path = made / "ddp" / RECORD
    content = json.loads(path.read_text())
    HARMS[harm](content)
    path.write_text(json.dumps(content))
    assert str(path) in read_bench(made).problems["ddp"]


def test_a_record_that_is_nested_without_end_is_no_record(tmp_path):
    (tmp_path / RECORD).write_text("[" * 100_000)
    with pytest.raises(UserError, match="not a record"):
        RunRecord.read(tmp_path / RECORD)


def outside(out: Path) -> None:
    content = json.loads((out / SWEEP).read_text())
    content["cells"][0]["id"] = "../elsewhere"
    (out / SWEEP).write_text(json.dumps(content))


def endless(out: Path) -> None:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (out / "ddp" / RUN_FILE).write_text("\n".join(["a0: &a0 [x]", *levels]))


def linked(out: Path) -> None:
    (out / "ddp").rename(out.parent / "elsewhere")
    (out / "ddp").symlink_to(out.parent / "elsewhere")


@pytest.mark.parametrize("harm", [outside, endless, linked])
def test_a_bench_stays_in_its_folder(harm, tmp_path):
    sweep, out = sweep_file(tmp_path), tmp_path / "out"
    never = ("false",)
    bench(sweep, out, train=never)
    harm(out)
    with pytest.raises(UserError, match=r"damaged bench|is a link"):
        bench(sweep, out, train=never)
