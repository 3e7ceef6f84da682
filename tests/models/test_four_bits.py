"""Matrices of 4 bits have the values that the packages read which publish them.

The records were made by `four_bits_by_others.py`; their metadata names packages and versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.kernels.quantised import quantise
from shardwise.models import quantised_entry
from shardwise.models.published import entries_in
from shardwise.models.quantised_entry import QuantisedEntry
from tests.models.quantised_folders import GPTQ, METHODS

RECORDS = load_file(Path(__file__).with_name("four_bits.safetensors"))
Tensors = dict[str, torch.Tensor]
Record = tuple[str, dict[str, Any], str]
CASES: dict[str, Record] = {
    "mxfp4": ("mxfp4", METHODS["nvfp4"][0], "mxfp4.compressed"),
    "nvfp4": ("nvfp4", METHODS["nvfp4"][0], "nvfp4.values"),
    "modelopt": ("modelopt", METHODS["modelopt"][0], "modelopt.values"),
    "gptq.sym": ("gptq.sym", GPTQ, "gptq.sym.values"),
    "gptq.asym": ("gptq.asym", GPTQ, "gptq.asym.values"),
    "gptq.desc_act": ("gptq.desc_act", GPTQ | {"desc_act": True}, "gptq.desc_act.values"),
    "awq": ("awq", METHODS["awq"][0] | {"group_size": 32}, "awq.values"),
}
IN_E2M1, IN_WORDS = [*CASES][:3], [*CASES][3:]
"""Of each case the records of its tensors, the section of config.json and the record of values."""


def assert_read(case: str, folder: Path) -> None:
    """Compare a record with what is read of its tensors, in the dtype of the package."""
    prefix, section, name = CASES[case]
    tensors = {
        f"a.{key.removeprefix(f'{prefix}.')}": tensor
        for key, tensor in RECORDS.items()
        if key.startswith(f"{prefix}.") and key.rpartition(".")[2] not in _RESULTS
    }
    file = folder / "model.safetensors"
    save_file(tensors, file)
    (entry,) = entries_in(dict.fromkeys(tensors, file), section).values()
    assert entry.key == "a.weight"
    values = entry.values(tensors.__getitem__)
    expected = RECORDS[name]
    assert torch.equal(values.to(expected.dtype), expected)


_RESULTS = ("values", "compressed", "transformers")


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_package(case, tmp_path):
    assert_read(case, tmp_path)
    assert RECORDS[CASES[case][2]].unique().numel() > 30


@pytest.mark.parametrize(
    ("base", "codes", "scales"),
    [
        ("mxfp4", "mxfp4.weight_packed", "mxfp4.weight_scale"),
        ("nvfp4", "modelopt.weight", "modelopt.weight_scale"),
    ],
)
def test_plain_weights_get_the_codes_of_torchao(base, codes, scales):
    stored = quantise(RECORDS["plain"], base)
    assert torch.equal(stored["codes"], RECORDS[codes])
    assert torch.equal(stored["scales"], RECORDS[scales].view(torch.uint8))


def scales_of_the_block_before(tensors: Tensors) -> Tensors:
    return {**tensors, "scales": tensors["scales"].roll(1, -1)}


def nibbles_exchanged(tensors: Tensors) -> Tensors:
    codes = tensors["codes"]
    return {**tensors, "codes": codes >> 4 | codes << 4}


def factor_taken_the_other_way(tensors: Tensors) -> Tensors:
    return {**tensors, "steps": 1 / tensors["steps"]}


def zeros_without_their_one(tensors: Tensors) -> Tensors:
    return {**tensors, "zeros": tensors["zeros"] - 1 & 15}


def inputs_in_order(tensors: Tensors) -> Tensors:
    return {**tensors, "groups": tensors["groups"].sort().values}


def test_the_order_of_awq_that_is_not_undone_gives_other_values(tmp_path, monkeypatch):
    monkeypatch.setattr(quantised_entry, "AWQ_ORDER", tuple(range(8)))
    with pytest.raises(AssertionError):
        assert_read("awq", tmp_path)


def test_words_of_another_version_have_other_zeros(tmp_path, monkeypatch):
    section = GPTQ | {"checkpoint_format": "gptq_v2"}
    monkeypatch.setitem(CASES, "gptq.asym", ("gptq.asym", section, "gptq.asym.values"))
    with pytest.raises(AssertionError):
        assert_read("gptq.asym", tmp_path)


@pytest.mark.parametrize(
    ("bug", "case"),
    [
        *((scales_of_the_block_before, case) for case in CASES),
        *((nibbles_exchanged, case) for case in CASES),
        *((zeros_without_their_one, case) for case in IN_WORDS[:3]),
        (inputs_in_order, "gptq.desc_act"),
        *((factor_taken_the_other_way, case) for case in ("nvfp4", "modelopt")),
    ],
)
def test_a_planted_bug_gives_other_values(bug, case, tmp_path, monkeypatch):
    read = QuantisedEntry._tensors
    monkeypatch.setattr(QuantisedEntry, "_tensors", lambda self, files: bug(read(self, files)))
    with pytest.raises(AssertionError):
        assert_read(case, tmp_path)
