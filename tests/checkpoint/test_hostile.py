"""A checkpoint that a stranger made and signed: it runs no code, and is refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from shardwise.assembly import build as assembly
from shardwise.assembly.build import build
from shardwise.checkpoint.folder import FORMAT, MANIFEST, _encode, checksums, damage
from shardwise.checkpoint.resume import Start, find_start
from shardwise.config import RunConfig, UserError
from shardwise.parallel.mesh import build_mesh
from tests.checkpoint.test_checkpointer import config, equal, save_steps, values
from tests.distributed import run_ranks
from tests.integration.test_faults import Touch


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A run of one rank with checkpoints after steps 1 and 2."""
    folder = tmp_path_factory.mktemp("original")
    run_ranks(1, save_steps, config(folder), 2)
    return folder


@pytest.fixture
def saved(original, tmp_path) -> Path:
    """A copy of it, to be harmed."""
    shutil.copytree(original, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-2"


def sign(folder: Path, **changed: Any) -> None:
    """Write the manifest with the checksums of what the folder holds."""
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("sha256")
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    files = {name: asdict(file) for name, file in checksums(folder, names).items()}
    (folder / MANIFEST).write_bytes(_encode(content | {"files": files} | changed))


def resume(run: Path, wanted: str) -> Start | str:
    """Resume on one rank: return where the run starts, or the error before it took memory."""

    def body() -> Start | str:
        cfg: RunConfig = config(run, resume=wanted)
        mesh, refusal = build_mesh(cfg, torch.device("cpu")), ""
        with mock.patch.object(assembly, "materialise", wraps=assembly.materialise) as materialise:
            try:
                start = find_start(cfg)
                job = build(cfg, mesh, start.state())
            except UserError as error:
                refusal = str(error)
        if refusal:
            assert not materialise.called
            return refusal
        assert not equal(values(job, cfg), values(build(cfg, mesh), cfg))
        return start

    return run_ranks(1, body)[0]


def refused(run: Path) -> str:
    """The one line about the newest checkpoint, for which `auto` goes back to the one before it."""
    told = damage(newest(run))
    assert told is not None
    assert "\n" not in told
    assert len(told) < 600
    return told


# ------------------------------------------------------------------------------------------- code


def pickled_metadata(folder: Path, touched: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(str(touched))))


def bytes_entries(folder: Path, touched: Path) -> None:
    """Write, as torch does, a state dict with an object in it, which torch would unpickle."""
    keys = json.loads((folder / "index.json").read_text())["tensors"]
    dcp.save(dict.fromkeys(keys, Touch(str(touched))), checkpoint_id=str(folder), no_dist=True)
    metadata = dcp.FileSystemReader(str(folder)).read_metadata()
    assert all(
        isinstance(entry, BytesStorageMetadata) for entry in metadata.state_dict_metadata.values()
    )
    touched.unlink(missing_ok=True)


def pickles_as_shards(folder: Path, touched: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".distcp"):
            path.write_bytes(pickle.dumps(Touch(str(touched))))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("version", [2, FORMAT])
@pytest.mark.parametrize("harm", [pickled_metadata, bytes_entries, pickles_as_shards])
def test_no_pickle_in_a_checkpoint_is_loaded(harm, version, saved, tmp_path):
    touched = tmp_path / "touched"
    harm(newest(saved), touched)
    sign(newest(saved), format=version)
    resume(saved, "latest")
    assert not touched.exists()


def test_an_older_format_is_refused_before_anything_of_it_is_read(saved):
    for path in newest(saved).iterdir():
        if path.name != MANIFEST:
            os.truncate(path, 0)
    sign(newest(saved), format=2)
    told = f"has format 2, and this version reads {FORMAT}: end that run with the version"
    assert told in refused(saved)
    assert told in str(resume(saved, "latest"))
    start = resume(saved, "auto")
    assert isinstance(start, Start)
    assert start.step == 1
    assert told in start.passed_over[0]


# --------------------------------------------------------------------------------------- manifest


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {name: value for name, value in content.items() if name != key}


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "extra key": lambda content: content | {"more": 1},
    "missing key": without("loader"),
    "missing step": without("step"),
    "missing format": without("format"),
    "text as step": lambda content: content | {"step": "2"},
    "negative step": lambda content: content | {"step": -1},
    "loader is a list": lambda content: content | {"loader": []},
    "loader without slots": lambda content: content | {"loader": {"step": 2, "read_from": {}}},
    "slots are text": lambda content: (
        content | {"loader": content["loader"] | {"slots": {"0": "x"}}}
    ),
    "scale is text": lambda content: (
        content | {"loss_scale": content["loss_scale"] | {"scale": "1"}}
    ),
    "scale is nothing": lambda content: content | {"loss_scale": None},
    "best is a number": lambda content: content | {"best": 3},
    "best without step": lambda content: content | {"best": {"loss": 1.0}},
    "model is a list": lambda content: content | {"model": ["config.json"]},
    "files are a list": lambda content: content | {"files": list(content["files"])},
    "a file without checksum": lambda content: (
        content | {"files": content["files"] | {"index.json": {}}}
    ),
    "no files": lambda content: content | {"files": {}},
    "a file elsewhere": lambda content: (
        content | {"files": content["files"] | {"../step-1/index.json": FILE}}
    ),
    "a file at the root": lambda content: (
        content | {"files": content["files"] | {"/etc/hostname": FILE}}
    ),
    "lora is text": lambda content: content | {"lora": "x"},
    "lora of another shape": lambda content: content | {"lora": {"r": "four"}},
    "lora with another key": lambda content: content | {"lora": {"more": 1}},
    "lora out of range": lambda content: content | {"lora": {"r": -1}},
    "config is text": lambda content: content | {"config": "x"},
    "config is empty": lambda content: content | {"config": {}},
    "config of another shape": lambda content: (
        content | {"config": content["config"] | {"training": []}}
    ),
    "no slots": lambda content: content | {"loader": content["loader"] | {"slots": {}}},
    "another step": lambda content: content | {"step": content["step"] + 1},
}
FILE = {"num_bytes": 1, "sha256": "0"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_of_another_shape_is_damage(name, saved):
    path = newest(saved) / MANIFEST
    content = json.loads(path.read_text())
    content.pop("sha256")
    path.write_bytes(_encode(MANIFESTS[name](content)))
    assert str(path) in refused(saved)


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"text"', "", "\xff", NESTED, f'{{"sha256": {NESTED}}}']
)
@pytest.mark.parametrize("name", [MANIFEST, "index.json", "metrics.jsonl"])
def test_a_file_that_is_none_of_ours_is_damage(name, text, saved):
    path = newest(saved) / name
    path.write_bytes(text.encode("latin-1"))
    if name != MANIFEST:
        sign(newest(saved))
    if name == "metrics.jsonl" and not text:  # no step has been told of
        assert damage(newest(saved)) is None
    else:
        assert str(path) in refused(saved)


@pytest.mark.parametrize("name", [MANIFEST, "index.json", "tensors-0.safetensors"])
def test_a_pipe_is_not_waited_for(name, saved):
    path = newest(saved) / name
    path.unlink()
    os.mkfifo(path)
    assert f"{path} is not a file" in refused(saved)


# ---------------------------------------------------------------------------------------- tensors

Tensors = dict[str, dict[str, Any]]


def first(tensors: Tensors) -> tuple[str, dict[str, Any]]:
    key = next(
        key
        for key, entry in tensors.items()
        if key.startswith("weights/") and len(entry["shape"]) == 2
    )
    return key, tensors[key]


def larger(tensors: Tensors) -> None:
    first(tensors)[1]["shape"][0] += 1


def beyond_all(tensors: Tensors) -> None:
    first(tensors)[1]["shape"][0] = 10**30


def shifted(tensors: Tensors) -> None:
    first(tensors)[1]["chunks"][0]["offsets"][0] += 1


def negative(tensors: Tensors) -> None:
    first(tensors)[1]["chunks"][0]["offsets"][0] = -1


def twice(tensors: Tensors) -> None:
    first(tensors)[1]["chunks"] *= 2


def no_chunks(tensors: Tensors) -> None:
    first(tensors)[1]["chunks"] = []


def other_dtype(tensors: Tensors) -> None:
    first(tensors)[1]["dtype"] = "F64"


def no_dtype(tensors: Tensors) -> None:
    first(tensors)[1]["dtype"] = "object"


def other_dims(tensors: Tensors) -> None:
    first(tensors)[1]["chunks"][0]["offsets"].append(0)


def elsewhere(tensors: Tensors) -> None:
    first(tensors)[1]["chunks"][0]["file"] = "../step-1/tensors-0.safetensors"


def unknown_file(tensors: Tensors) -> None:
    first(tensors)[1]["chunks"][0]["file"] = "tensors-9.safetensors"


def bytes_entry(tensors: Tensors) -> None:
    tensors[first(tensors)[0]] = {"bytes": "gASVKA=="}


def untold(tensors: Tensors) -> None:
    del tensors[first(tensors)[0]]


LIES = (
    larger,
    beyond_all,
    shifted,
    negative,
    twice,
    no_chunks,
    other_dtype,
    no_dtype,
    other_dims,
    elsewhere,
)
LIES += (unknown_file, bytes_entry, untold)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_an_index_that_lies_is_damage(lie, saved):
    path = newest(saved) / "index.json"
    content = json.loads(path.read_text())
    lie(content["tensors"])
    path.write_text(json.dumps(content))
    sign(newest(saved))
    assert str(newest(saved)) in refused(saved)


def cut_header(content: bytes) -> bytes:
    return content[:8] + b"\xff" * 20 + content[28:]


def endless_header(content: bytes) -> bytes:
    return (2**62).to_bytes(8, "little") + content[8:]


def other_shape(content: bytes) -> bytes:
    return content.replace(b'"F32"', b'"I32"')


@pytest.mark.parametrize(
    "lie", [cut_header, endless_header, other_shape], ids=lambda lie: lie.__name__
)
def test_a_header_that_lies_is_damage(lie, saved):
    path = newest(saved) / "tensors-0.safetensors"
    path.write_bytes(lie(path.read_bytes()))
    sign(newest(saved))
    assert str(path) in refused(saved)


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Write a checkpoint that agrees with itself, and holds something else."""
    path = folder / "tensors-0.safetensors"
    tensors = change(load_file(path))
    save_file(tensors, path)
    names = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
    content = {
        key: {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "chunks": [
                {"file": path.name, "offsets": [0] * tensor.dim(), "shape": list(tensor.shape)}
            ],
        }
        for key, tensor in tensors.items()
    }
    (folder / "index.json").write_text(json.dumps({"tensors": content}))
    sign(folder)


OTHERS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]]] = {
    "dtype": ("weights/", lambda tensors: {key: value.double() for key, value in tensors.items()}),
    "integers": (
        "optimizer/",
        lambda ts: {k: v.long() if "exp_avg" in k else v for k, v in ts.items()},
    ),
    "shape": ("weights/", lambda ts: {k: v[:1].clone() if v.dim() else v for k, v in ts.items()}),
    "no weights": (
        "weights/",
        lambda ts: {k: v for k, v in ts.items() if k.startswith("optimizer/")},
    ),
    "states": (
        "does not keep",
        lambda ts: {k.replace("exp_avg_sq", "exp_max"): v for k, v in ts.items()},
    ),
    "half a state": (
        "does not keep",
        lambda ts: {k: v for k, v in ts.items() if "exp_avg_sq" not in k},
    ),
    "a frozen weight": (
        "which this run does not train",
        lambda ts: {**ts, "weights/model.norm.weight": torch.zeros(1)},
    ),
    "other names": (
        "and is not here",
        lambda ts: {k.replace("lora_A", "lora_Z"): v for k, v in ts.items()},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_that_do_not_fit_are_refused_before_any_is_overwritten(name, saved):
    fragment, change = OTHERS[name]
    rewrite(newest(saved), change)
    told = resume(saved, "latest")
    assert isinstance(told, str)
    assert "does not fit this run" in told
    assert fragment in told


def test_a_checkpoint_that_was_written_anew_with_the_same_tensors_is_taken(saved):
    rewrite(newest(saved), lambda tensors: tensors)
    assert isinstance(resume(saved, "latest"), Start)


def test_ranks_refuse_together(saved):
    rewrite(newest(saved), lambda ts: {k: v.double() if k == min(ts) else v for k, v in ts.items()})

    def body() -> str:
        cfg = config(saved, resume="latest")
        cfg = replace(cfg, parallel=replace(cfg.parallel, data="ddp"))
        with pytest.raises(UserError) as error:
            build(cfg, build_mesh(cfg, torch.device("cpu")), find_start(cfg).state())
        return str(error.value)

    told = run_ranks(2, body)
    assert told[0] == told[1]
