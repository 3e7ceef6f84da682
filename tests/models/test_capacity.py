"""Experts with a capacity equal a plain loop that counts the tokens of each expert and row."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.base.batches import Batch
from shardwise.models import load
from shardwise.models.capacity import Capacity
from shardwise.models.causal_lm import CausalLM
from shardwise.models.families import family_of, spec_of
from shardwise.models.patches import patch
from shardwise.models.routed_experts import RoutedExperts
from tests.kernels.lora_linear.cases import worst
from tests.models.test_routed_experts import module_of, outcome
from tests.models.tiny import relative_error
from tests.parity.harness import Cell, run_config

EXPERTS = 5
Ids = list[list[int]]
"""The documents of tokens, [B, T]."""


def kept(ids: Ids, indices: torch.Tensor, factor: float) -> torch.Tensor:
    """Which choices [N, k] are computed: token after token, until an expert is full."""
    keeps = torch.zeros_like(indices, dtype=torch.bool)
    length, top_k = len(ids[0]), indices.shape[1]
    for row, documents in enumerate(ids):
        begins = [0, *(t for t in range(1, length) if documents[t] != documents[t - 1]), length]
        for begin, end in pairwise(begins):
            limit = math.ceil(factor * (end - begin) * top_k / EXPERTS)
            taken: Counter[int] = Counter()
            for token in range(row * length + begin, row * length + end):
                for choice, expert in enumerate(indices[token].tolist()):
                    keeps[token, choice] = taken[expert] < limit
                    taken[expert] += 1
    return keeps


def reference(module: Any, keeps: torch.Tensor) -> Any:
    """transformers' own forward, one choice after the other."""

    def forward(hidden: torch.Tensor, indices: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        ones = shares.new_ones(len(hidden), 1)
        parts = [
            module(hidden, indices[:, [choice]], ones) * (shares * keeps)[:, [choice]]
            for choice in range(indices.shape[1])
        ]
        return torch.stack(parts).sum(0)

    return forward


def with_capacity(module: Any, ids: Ids, factor: float) -> RoutedExperts:
    return RoutedExperts(module, {}, capacity=Capacity(factor), documents=lambda: torch.tensor(ids))


def drawn(random: Any, num_rows: int, length: int, top_k: int) -> torch.Tensor:
    """The experts of each token, of which most like the same ones."""
    liked = [1, 1, 2, 4, 8]
    tokens = range(num_rows * length)
    return torch.tensor(
        [
            sorted(range(EXPERTS), key=lambda e: random.random() ** (1 / liked[e]))[-top_k:]
            for _ in tokens
        ]
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["qwen3_moe", "gpt_oss"]),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([0.1, 0.6, 1.0, 1.3, 5.0]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_routing_equals_a_loop_that_counts(
    model_type, num_rows, length, top_k, factor, isolated, random
):
    numbers = [-1, 0, 1] if isolated else [0]
    ids = [[random.choice(numbers) for _ in range(length)] for _ in range(num_rows)]
    indices = drawn(random, num_rows, length, top_k)
    module, keeps = module_of(model_type), kept(ids, indices, factor)
    routed = with_capacity(module, ids, factor)
    ours = outcome(module, indices, routed.forward)
    assert worst(ours, outcome(module, indices, reference(module, keeps))) < 1e-12
    counts = routed.take_counts()
    assert counts is not None
    in_documents = torch.tensor(ids).flatten() >= 0
    expected = torch.bincount(indices[in_documents].flatten(), minlength=EXPERTS)
    assert counts[:-1].tolist() == expected.tolist()
    assert counts[-1] == (~keeps[in_documents]).sum()


ALL_TO_ONE = torch.full((6, 1), 3)
ONE_ROW = [[0] * 6]


def test_the_first_tokens_of_a_row_are_kept():
    routed = with_capacity(module_of("qwen3_moe"), ONE_ROW, 2.0)
    out, *_ = outcome(routed.module, ALL_TO_ONE, routed.forward)
    assert out.any(dim=1).tolist() == [True] * 3 + [False] * 3  # ceil(2 x 6 / 5)


def test_enough_capacity_and_evaluation_drop_nothing():
    module = module_of("qwen3_moe")
    expected = outcome(module, ALL_TO_ONE)
    dropless = with_capacity(module, ONE_ROW, EXPERTS)
    assert worst(outcome(module, ALL_TO_ONE, dropless.forward), expected) < 1e-12
    routed = with_capacity(module, ONE_ROW, 1.0)
    assert worst(outcome(module, ALL_TO_ONE, routed.forward), expected) > 0.1
    module.eval()
    assert worst(outcome(module, ALL_TO_ONE, routed.forward), expected) < 1e-12


def test_a_part_of_a_row_is_refused():
    routed = with_capacity(module_of("qwen3_moe"), [[0] * 12], 1.0)
    with pytest.raises(AssertionError, match="complete rows"):
        outcome(routed.module, ALL_TO_ONE, routed.forward)


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_padding_makes_no_room_for_a_documents_tokens(packing):
    cfg = run_config(Cell("qwen3_moe", "single", "full", variant="capacity"))
    cfg = replace(cfg, data=replace(cfg.data, packing=packing))
    hf_config = load.read_config(cfg.model)
    hf = load.load_whole(cfg.model, hf_config)
    part = CausalLM(hf, spec_of(hf_config, hf), family_of(hf), cfg)
    patch(part, cfg, torch.device("cpu")).train()
    tokens = torch.randint(0, 256, (1, 25), generator=torch.Generator().manual_seed(0))
    ids, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    alone = Batch(ids[:, :9], labels[:, :9], torch.zeros_like(ids[:, :9]), (0,), step=1)
    documents = torch.where(torch.arange(24) < 9, 0, -1)[None]
    padded = Batch(ids, labels, documents, (0,), step=1)
    roomy = replace(padded, document_ids=documents.clamp(min=0))
    expected, ours, others = (
        part(batch, return_logits=True)[:, :9] for batch in (alone, padded, roomy)
    )
    assert relative_error(ours, expected) < 1e-6
    assert relative_error(others, expected) > 1e-4
