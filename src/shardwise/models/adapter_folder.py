"""A folder with a LoRA adapter in PEFT's format, whoever wrote it: its config and its headers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors import SafetensorError, safe_open

from shardwise.base.safety import check_no_pipes
from shardwise.config import UserError

PREFIX = "base_model.model."
"""Prefix that PEFT puts before the name of a module."""
_FACTOR = re.compile(r"(.+)\.lora_(?:[AB](?:\.[^.]+)?\.weight|embedding_[AB](?:\.[^.]+)?)")
_FLOATING = ("F64", "F32", "BF16", "F16")
"""Dtypes of a file whose numbers are the weights."""


@dataclass(frozen=True)
class AdapterFolder:
    """Facts that a folder states of its adapter; no factor is in memory."""

    path: Path
    config: Mapping[str, Any]
    """`adapter_config.json`."""
    factors: tuple[str, ...]
    """Names of the modules that have a factor, A or B, in the file."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every entry of the file by its key."""

    @property
    def file(self) -> Path:
        """The file with the factors."""
        return self.path / SAFETENSORS_WEIGHTS_NAME

    def patterns(self, key: str) -> tuple[str, ...]:
        """Return a list of the config as it is, empty where there is none or a pattern instead."""
        value = self.config.get(key) or ()
        return () if isinstance(value, str) else tuple(value)


def as_in_file(name: str) -> str:
    """Return a parameter's name as PEFT's files have it, in which magnitudes are no modules."""
    module, magnitude, _ = name.partition(".lora_magnitude_vector")
    return module + magnitude if magnitude else name


def without_adapter_name(name: str) -> str:
    """Return a parameter's name without the adapter's, which PEFT's files leave out."""
    return name.replace(".default.", ".").removesuffix(".default")


def read_adapter(folder: str | Path) -> AdapterFolder:
    """Read a folder's config and the header of its factors; UserError where it has no adapter.

    Nothing is unpickled: `adapter_model.bin` is refused.
    """
    path = Path(folder)
    check_no_pipes(path)
    config, file = path / CONFIG_NAME, path / SAFETENSORS_WEIGHTS_NAME
    if not config.is_file():
        raise UserError(f"{path}: no {CONFIG_NAME} here; give the folder of a PEFT adapter")
    if not file.is_file():
        way_out = "give the folder of a PEFT adapter"
        if (path / WEIGHTS_NAME).is_file():
            way_out = f"{WEIGHTS_NAME} is a pickle, which is never read: save it as safetensors"
        raise UserError(f"{path}: no {SAFETENSORS_WEIGHTS_NAME} here; {way_out}")
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in list(opened.keys())}
            shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
            dtypes = {key: part.get_dtype() for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file}: not a whole safetensors file ({str(error)[:200]}); fetch it again"
        ) from None
    for key, dtype in dtypes.items():
        if dtype not in _FLOATING:
            raise UserError(
                f"{file}: {key} is {dtype}, which are no plain weights; save the adapter in "
                "float32, bfloat16 or float16"
            )
    matches = (_FACTOR.fullmatch(key.removeprefix(PREFIX)) for key in sorted(shapes))
    factors = dict.fromkeys(match[1] for match in matches if match)
    return AdapterFolder(path, _read_config(config), tuple(factors), shapes)


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{file}: not the config of a LoRA adapter; fetch the file again")
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{file}: peft_type is {_shown(config.get('peft_type'))}; give the folder of a LoRA "
            "adapter"
        )
    for key, is_valid, wanted in _TYPES:
        if not is_valid(config.get(key, _DEFAULTS.get(key))):
            raise UserError(
                f"{file}: {key} is {_shown(config.get(key))} instead of {wanted}; save the adapter "
                "again with PEFT, or correct the file"
            )
    return config


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1  # True is an int too


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < abs(value) < float("inf")


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _are_names(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, str)


def _is_init(value: Any) -> bool:
    known = r"(?i:gaussian|olora|mica)|pissa(_niter_\d+)?|corda|eva|loftq|lora_ga|orthogonal"
    return value is None or _is_bool(value) or bool(re.fullmatch(known, str(value)))


def _shown(value: Any) -> str:
    return json.dumps(value)[:100]


_DEFAULTS = {"use_rslora": False, "use_dora": False}
_TYPES = (
    ("r", _is_rank, "a whole number of at least 1"),
    ("lora_alpha", _is_alpha, "a finite number other than 0"),
    ("use_rslora", _is_bool, "true or false"),
    ("use_dora", _is_bool, "true or false"),
    ("target_modules", _are_names, "a list of names or a pattern"),
    ("target_parameters", _are_names, "a list of names or a pattern"),
    ("modules_to_save", _are_names, "a list of names or a pattern"),
    ("init_lora_weights", _is_init, "one of PEFT's initialisations"),
)
"""Keys that are computed with, what their JSON must be, and that in words."""
