from __future__ import annotations

import pytest
import yaml

from shardwise.config import UserError
from shardwise.run_file import _NoDuplicates, load_config

SECTIONS = """
model: {path: base, init: random}
data: {train: a.txt}
training: {output_dir: out}
"""


def load(folder, text):
    (folder / "run.yaml").write_text(SECTIONS + text)
    return load_config(folder / "run.yaml", [])


def test_merge_keys(tmp_path):
    cfg = load(tmp_path, "optimizer: {lr: 0.5, eps: 0.25, betas: [0.5, 0.5]}\nlora: {r: 4}\n")
    merged = """
optimizer:
  <<: [{lr: 0.5, eps: 0.25}, {eps: 0.75, betas: [0.5, 0.5]}]  # the first of several goes before
lora: {<<: {r: 2}, r: 4}  # and its own keys before all
"""
    assert load(tmp_path, merged) == cfg


def test_a_mapping_that_was_merged_elsewhere_before_it_is_read():
    # The outer mappings are read first, and by then the inner one holds the merged key beside its own.
    text = "a: {b: &b {<<: {x: 1}, x: 2}}\nc: {<<: *b}\n"
    assert yaml.load(text, _NoDuplicates) == {"a": {"b": {"x": 2}}, "c": {"x": 2}}


@pytest.mark.parametrize("twice", ["lora: {r: 1, r: 2}", "lora: {<<: {r: 1, r: 2}}", "lora: {<<: {r: 1}, <<: {r: 2}}"])
def test_a_key_given_twice(twice, tmp_path):
    with pytest.raises(UserError, match=r"not valid YAML .*the key (r|<<) is given twice"):
        load(tmp_path, twice)
