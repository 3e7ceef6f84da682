"""Documents in rows are rotated as each of them is, alone, in a new model of transformers."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Phi3Config, PreTrainedModel

from shardwise.base.batches import Batch
from shardwise.config import RunConfig
from shardwise.lab.proof.harness import RandomRows, verdict
from shardwise.models import load
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import FAMILIES, family_of, spec_of
from shardwise.models.patches import patch
from shardwise.models.patches.rotary import scaled_by_length
from tests.distributed import run_ranks
from tests.left_out import some_now
from tests.models.tiny import TINY_OF, on_meta, relative_error, tiny
from tests.parity.harness import Cell, compare, microbatches, run, run_config

LIMIT = 8
"""Tokens of the longest document with the usual frequencies."""
LENGTH = 24
TYPES = ("longrope", "dynamic")
ROWS = ((3, 9, 12), (8, 1, 15), (24,), (5, 6, 13))
"""The lengths of the documents of rows; the last one of a row is padding where a test says so."""
Lengths = tuple[tuple[int, ...], ...]


def scaled(config: Any, rope_type: str) -> Any:
    """A config whose positions are scaled in documents of more than LIMIT tokens."""
    buffers = (pair for module in rotary_of(config) for pair in module.named_buffers())
    (size,) = {len(buffer) for name, buffer in buffers if name.endswith("original_inv_freq")}
    keys: dict[str, Any] = {"rope_type": rope_type, "factor": 4.0}
    if rope_type == "longrope":
        factors = {"short_factor": [1.0] * size, "long_factor": [2.0 + i for i in range(size)]}
        keys |= {"original_max_position_embeddings": LIMIT, **factors}
    config.max_position_embeddings = 32 if rope_type == "longrope" else LIMIT
    parts = config.rope_parameters
    for part in [v for v in parts.values() if isinstance(v, dict)] or [parts]:
        part |= keys
    return config


def rotary_of(config: Any) -> list[Any]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [m for m in model.modules() if "rope_type" in vars(m)]


def config_of(family: str) -> Any:
    return load.read_config(tiny(TINY_OF[family]))


WITH_ROTARY = [
    f for f in FAMILIES if any("rope_type" in vars(m) for m in on_meta(tiny(TINY_OF[f])).modules())
]


def batch_of(rows: Lengths, padded: bool) -> Batch:
    tokens = torch.randint(
        0, 256, (2, len(rows), LENGTH), generator=torch.Generator().manual_seed(0)
    )
    ids = []
    for row in rows:
        numbers = [number for number, length in enumerate(row) for _ in range(length)]
        ids.append([-1 if padded and n == len(row) - 1 > 0 else n for n in numbers])
    return Batch(tokens[0], tokens[1], torch.tensor(ids), tuple(range(len(rows))), step=1)


def worst(hf: PreTrainedModel, cfg: RunConfig, batch: Batch) -> float:
    """The largest difference between the logits of documents in rows and of each alone."""
    model = copy.deepcopy(hf)
    assert scaled_by_length(model)
    part = CausalLM(model, spec_of(model.config, model), family_of(model), cfg)
    patch(part, cfg, torch.device("cpu")).eval()
    with torch.no_grad():
        logits = part(batch, return_logits=True)
        errors = []
        for row, ids in enumerate(batch.document_ids):
            ids = ids if cfg.data.keeps_documents_apart else ids.clamp(max=0)
            for number in ids[ids >= 0].unique():
                tokens = batch.input_ids[row, ids == number][None]
                expected = copy.deepcopy(hf)(tokens, use_cache=False).logits[0]
                errors.append(relative_error(logits[row, ids == number], expected))
    return max(errors)


def run_of(family: str, packing: str) -> RunConfig:
    cfg = run_config(Cell(family, "single", "full"))
    return replace(cfg, data=replace(cfg.data, packing=packing))  # ty: ignore[invalid-argument-type]


PACKINGS = [("none", True), ("concat", False), ("documents", True), ("isolated", False)]


@pytest.mark.parametrize(
    ("family", "rope_type"),
    some_now(
        product(WITH_ROTARY, TYPES),
        [(family, TYPES[place % 2]) for place, family in enumerate(WITH_ROTARY)],
    ),
)
def test_every_family_rotates_documents_as_they_are_alone(family, rope_type):
    cfg = run_of(family, "none")
    hf = load.load_whole(cfg.model, scaled(config_of(family), rope_type))
    apart = FAMILIES[family].keeps_documents_apart
    for packing, padded in PACKINGS if apart else PACKINGS[:2]:
        assert worst(hf, run_of(family, packing), batch_of(ROWS, padded)) < 2e-5, packing


def unlisted(model_type: str) -> Any:
    """Phi, which is published with longrope, and Gemma, whose kinds of layers differ in them."""
    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    if model_type == "phi3":
        return Phi3Config(**sizes)
    return Gemma3TextConfig(**sizes, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize("rope_type", TYPES)
@pytest.mark.parametrize("model_type", ["phi3", "gemma3_text"])
def test_families_that_are_not_listed_rotate_alike(model_type, rope_type):
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(scaled(unlisted(model_type), rope_type)).eval()
    for packing, padded in PACKINGS[:2]:
        assert worst(hf, run_of("llama", packing), batch_of(ROWS, padded)) < 2e-5, packing


@pytest.fixture(scope="module", params=TYPES)
def llama(request) -> PreTrainedModel:
    cfg = run_of("llama", "none")
    return load.load_whole(cfg.model, scaled(config_of("llama"), request.param))


def _row(cuts: set[int]) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in pairwise([0, *sorted(cuts), LENGTH]))


rows = st.lists(st.sets(st.integers(1, LENGTH - 1), max_size=5).map(_row), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(rows, st.sampled_from(PACKINGS))
def test_any_documents_in_any_packing(llama, lengths, packing):
    name, padded = packing
    assert worst(llama, run_of("llama", name), batch_of(tuple(lengths), padded)) < 2e-5


def _outcome(cfg: RunConfig) -> Any:
    return run(cfg, partial(microbatches, cfg, row=padded_row))


def padded_row(slot: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, labels, documents = RandomRows()(slot, step)
    return tokens, labels, documents.where(labels >= 0, -1)


@pytest.mark.parametrize(("rope_type", "packing"), [("longrope", "documents"), ("dynamic", "none")])
def test_layouts_and_micro_batches_rotate_alike(tmp_path, rope_type, packing):
    scaled(config_of("llama"), rope_type).save_pretrained(tmp_path)

    def outcomes(cell: Cell) -> list[Any]:
        cfg = run_of("llama", packing)
        cell_cfg = run_config(cell)
        model = replace(cfg.model, path=str(tmp_path))
        return run_ranks(cell.nproc, _outcome, replace(cell_cfg, model=model, data=cfg.data))

    (alone,) = outcomes(Cell("llama", "single", "lora"))
    cells = [
        Cell("llama", "single", "lora", micro_rows=4),
        Cell("llama", "cp", "lora", 2),
        Cell("llama", "tp", "lora", 2),
        Cell("llama", "pp", "lora", 2, schedule="1f1b"),
    ]
    for cell in cells:
        assert not verdict(compare(outcomes(cell), alone)), cell.id
