"""Attention of rows whose tokens lie on several ranks equals that of one process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from shardwise.kernels.attention import Merged, Sight, naive
from shardwise.parallel.context_attention import ContextAttention, Places, _AllToAll
from shardwise.parallel.context_exchange import Ring
from shardwise.schedule.context import Cut, Way
from tests.distributed import run_ranks

WAYS: tuple[tuple[Way, bool], ...] = (
    ("ring", False),
    ("ring", True),
    ("gather", False),
    ("gather", True),
    ("ulysses", False),
)
"""Each way, with a zigzag cut or not."""
HEADS = ((4, 4), (4, 2), (4, 1), (8, 1), (12, 3))
NUM_TOKENS = 48


@dataclass(frozen=True)
class Case:
    way: Way
    zigzag: bool
    heads: tuple[int, int] = (4, 2)
    window: int | None = None
    documents: bool = False
    sizes: tuple[int, int] = (8, 8)
    dtype: torch.dtype = torch.float64


CASES = [
    *(
        Case(*way, window=window, documents=documents)
        for way in WAYS
        for window in (None, 1, 5, 13, 30, 60)
        for documents in (False, True)
    ),
    *(Case(*way, heads=heads) for way in WAYS for heads in HEADS),
    *(Case(*way, heads=(4, 4), sizes=sizes) for way in WAYS for sizes in ((6, 4), (4, 6))),
]
SHORT = [
    Case(*way, dtype=dtype, documents=documents)
    for way in WAYS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for documents in (False, True)
]


def inputs(case: Case) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return q, k, v and a gradient of complete rows, and their documents."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = case.heads
    key_size, value_size = case.sizes
    shapes = [(num_heads, key_size), (num_kv_heads, key_size)]
    shapes += [(num_kv_heads, value_size), (num_heads, value_size)]
    tensors = tuple(
        torch.randn(2, heads, NUM_TOKENS, size, generator=generator, dtype=torch.float64)
        for heads, size in shapes
    )
    # Documents of 1 token up to several chunks; the second row has one that fills it.
    begins = torch.rand(2, NUM_TOKENS, generator=generator) < 0.15
    begins[1] = False
    documents = begins.cumsum(1) if case.documents else None
    return tuple(x.to(case.dtype) for x in tensors), documents


def of_one_process(case: Case) -> tuple[torch.Tensor, ...]:
    """Return output and gradients of complete rows."""
    (q, k, v, of_out), documents = inputs(case)
    for x in (q, k, v):
        x.requires_grad_()
    sight = Sight(0.4, 0, case.window, documents, documents)
    out, _ = naive.attend(q, k, v, sight)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), of_out)


def differences(cases: list[Case]) -> list[list[float]]:
    """Return how far this rank's output and gradients are from one process's."""
    rank, n = dist.get_rank(), dist.get_world_size()
    found = []
    for case in cases:
        cut = Cut(n, case.zigzag)
        chunks = cut.chunks(rank)

        def here(x: torch.Tensor, cut: Cut = cut, chunks: tuple[int, ...] = chunks) -> torch.Tensor:
            parts = x.chunk(n * cut.chunks_per_rank, 2)
            return torch.cat([parts[chunk] for chunk in chunks], 2)

        tensors, documents = inputs(case)
        q, k, v, of_out = map(here, tensors)
        for x in (q, k, v):
            x.requires_grad_()
        attend = ContextAttention(dist.group.WORLD, cut, case.way)
        out = attend(q, k, v, 0.4, case.window, documents)
        results = out.detach(), *torch.autograd.grad(out, (q, k, v), of_out)
        wanted = of_one_process(case)
        found.append(
            [
                float((mine - here(other)).abs().max() / other.abs().max().clamp(min=1))
                for mine, other in zip(results, wanted, strict=True)
            ]
        )
        assert [x.dtype for x in results] == [case.dtype] * 4
    return found


def largest(cases: list[Case], num_ranks: int) -> dict[Case, float]:
    """Return the largest difference of each case over ranks."""
    by_rank = run_ranks(num_ranks, differences, cases)
    return {case: max(map(max, of_case)) for case, of_case in zip(cases, zip(*by_rank))}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_one_process(num_ranks):
    found = largest(CASES, num_ranks)
    assert {case: error for case, error in found.items() if not error < 1e-12} == {}


def test_equals_one_process_in_fewer_bits():
    allowed = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
    found = largest(SHORT, 2)
    assert {case: error for case, error in found.items() if not error < allowed[case.dtype]} == {}


ADD, BLOCKS, GIVE_BACK = Merged.add, Places.blocks, Ring.give_back


def merge_without_rescaling(self, queries, out, lse):
    self.out[:, :, queries] += out
    self.lse[:, :, queries] = torch.logaddexp(self.lse[:, :, queries], lse)


def places_of_the_front(self, keys):
    """Take the back chunk's places for the chunk after the front one's."""
    first = self.queries[0]
    follow = range(first.stop, first.stop + len(first))
    return BLOCKS(self._replace(queries=(first, follow)[: len(self.queries)]), keys)


def without_documents(self, keys):
    return BLOCKS(self._replace(documents=None), keys)


def lose_gradients(self, number, of_k, of_v):
    lost = number == 1
    return GIVE_BACK(self, number, of_k * (not lost), of_v * (not lost))


def keep_gradients(_, gradient):
    return gradient, None


@pytest.mark.parametrize(
    ("place", "name", "planted", "case"),
    [
        (Merged, "add", merge_without_rescaling, Case("ring", False)),
        (Places, "blocks", places_of_the_front, Case("ring", True)),
        (Places, "blocks", places_of_the_front, Case("gather", True)),
        (Places, "blocks", without_documents, Case("ulysses", False, documents=True)),
        (Ring, "give_back", lose_gradients, Case("ring", False)),
        (_AllToAll, "backward", staticmethod(keep_gradients), Case("ulysses", False)),
    ],
)
def test_a_mistake_is_seen(monkeypatch, place, name, planted, case):
    monkeypatch.setattr(place, name, planted)
    assert not largest([case], 2)[case] < 1e-3
