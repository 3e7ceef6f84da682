"""The command `shardwise eval`."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.base.safety import check_output, write_output
from shardwise.commands.command import Command, show
from shardwise.config import Model, UserError, require
from shardwise.lab.drawing.text_table import TextTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run(args: Namespace) -> int:
    """Print what lm-eval measures of a model on the tasks of a folder."""
    require(
        find_spec("lm_eval") is not None,
        "shardwise eval needs lm-eval, which is not installed; pip install 'shardwise[eval]'",
    )
    require(
        os.environ.get("WORLD_SIZE", "1") == "1",
        "shardwise eval runs in one process; start it once, or serve the model on several GPUs and "
        "give lm-eval the server's address",
    )
    tasks = Path(args.tasks).resolve()
    require(tasks.is_dir(), f"--tasks {args.tasks} is no folder; give one with tasks of lm-eval")
    for option, least in (("batch_size", 1), ("limit", 1)):
        number = getattr(args, option)
        name = f"--{option.replace('_', '-')}"
        require(number is None or number >= least, f"{name} is {number}; give at least {least}")
    if args.out is not None:
        check_output(args.out, "--out")
        args.out = Path(args.out).resolve()
    base, adapter, notes = _sources(Path(args.folder))

    from rich.console import Console

    console = Console()
    show(console, notes)
    found = _evaluate(_model(base, adapter), base, adapter, tasks, args)
    show(console, [_table(found["results"])])
    if args.out is not None:
        write_output(args.out, json.dumps(found, indent=1, default=str) + "\n")
        show(console, [f"wrote {args.out}"])
    return 0


def _sources(folder: Path) -> tuple[str, str | None, list[str]]:
    """Return the model that a folder stands for, its adapter, and notes; UserError for no model."""
    from shardwise.base.records.record import RunRecord

    if not (folder / "record.json").exists():
        require(
            not (folder / "adapter_config.json").exists(),
            f"{folder} is an adapter; give the folder of its run, or what `shardwise export "
            "--merge` makes of it",
        )
        return str(folder), None, []
    if (folder / "model").is_dir():
        return str(folder / "model"), None, []
    require(
        (folder / "adapter").is_dir(), f"{folder}: the run has left no adapter/ or model/; train it"
    )
    model = RunRecord.read(folder / "record.json").config["model"]
    require(
        model["init"] == "weights",
        f"{folder}: the run's base was random, and is saved nowhere; train in full (lora: null)",
    )
    stored, notes = model.get("base", "none"), []
    if stored != "none":
        notes = [
            f"note: trained on model.base {stored}, evaluated on the plain weights; `shardwise "
            f"export --merge --base {stored}` writes a model with the stored values"
        ]
    return model["path"], str(folder / "adapter"), notes


def _model(base: str, adapter: str | None) -> PreTrainedModel:
    """Return the whole model in the dtype of its files, on the GPU if there is one."""
    import torch

    from shardwise.models.hub import check_source
    from shardwise.models.load import load_whole, read_config

    check_source(base)
    model: Any = load_whole(Model(base), read_config(Model(base)), cast=False)
    if adapter is not None:
        from peft import PeftModel

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            model = PeftModel.from_pretrained(model, adapter).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _evaluate(
    model: PreTrainedModel, base: str, adapter: str | None, tasks: Path, args: Namespace
) -> dict[str, Any]:
    """Return lm-eval's results of all tasks in a folder; their relative paths begin there."""
    import logging

    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from shardwise.data.tokenizer import find_tokenizer

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of a model that is given
    tokenizer = find_tokenizer(*filter(None, (adapter, base)))
    if tokenizer is None:
        raise UserError(f"{base}: no tokenizer there; put its files beside the weights")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    require(bool(manager.all_tasks), f"--tasks {args.tasks}: no task of lm-eval in this folder")
    judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch_size)
    with contextlib.chdir(tasks):
        found = lm_eval.simple_evaluate(
            model=judged,
            tasks=[*manager.all_tasks],
            task_manager=manager,
            limit=args.limit,
            log_samples=False,
        )
    assert found is not None, "only ranks after the first have no results"
    kept = {name: found[name] for name in ("results", "versions", "n-samples")}
    return {"model": base, "adapter": adapter, "lm_eval": lm_eval.__version__, **kept}


def _table(results: dict[str, dict[str, Any]]) -> TextTable:
    """Return the metrics of each task with their standard errors."""
    rows = []
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, kind = key.partition(",")
            if isinstance(value, float) and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr,{kind}")
                spread = f"{error:.4f}" if isinstance(error, float) else ""
                rows.append((task, name if kind in ("", "none") else key, f"{value:.4f}", spread))
    return TextTable(("task", "metric", ">value", ">standard error"), rows)


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="a run's output_dir, or a model's folder")
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="FOLDER",
        help="with task files of lm-eval, which may run Python code; their paths begin there",
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="(default 8)")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N documents of each task")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")


COMMAND = Command(
    "eval",
    "Evaluate a run's model or adapter by lm-eval. It runs in one process, on tasks that lie in a "
    "folder.",
    _add_arguments,
    run,
)
