"""The chunked loss with the weight sharded over ranks, against the plain one on all of it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from shardwise.kernels.linear_cross_entropy import chunked, naive
from shardwise.metrics.memory import PeakMemory
from tests.distributed import run_ranks
from tests.kernels.linear_cross_entropy.cases import (
    IGNORED,
    inputs,
    own_vocabulary,
    reduced,
    run,
    run_shared,
)
from tests.kernels.linear_cross_entropy.test_chunked import products

V = 37
"""19 and 18 rows on two ranks; 13, 13 and 11 on three."""
OPTIONS = [
    {"with_bias": with_bias, "scale": scale, "softcap": softcap}
    for with_bias, (scale, softcap) in product(
        (True, False), ((1.0, None), (0.3, None), (1.0, 2.0), (1.7, 2.0))
    )
]
# (rows, whether the weight is frozen, options). One row; a whole chunk; one more; many, and a last
# chunk not full.
CASES = [
    (n, frozen, options) for n in (1, 3, 4, 50) for frozen in (True, False) for options in OPTIONS
]


def every_case() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    # Four rows of the last rank's float64 logits, but three of the others': all must take three.
    # (Set for good here.)
    chunked.CHUNK_BYTES = 4 * 8 * {2: 18, 3: 11}[dist.get_world_size()]
    results = []
    for n, frozen, options in CASES:
        tensors, labels = inputs(n, 5, V, ignored=0.3 if n > 1 else 0.0, frozen=frozen)
        results.append(run_shared(tensors, labels, **options))
    return results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_equals_the_plain_loss(num_ranks):
    ranks = run_ranks(num_ranks, every_case)
    for (n, frozen, options), *results in zip(CASES, *ranks, strict=True):
        tensors, labels = inputs(n, 5, V, ignored=0.3 if n > 1 else 0.0, frozen=frozen)
        expected, expected_grads = run(naive.linear_cross_entropy, tensors, labels, **options)
        assert all(value == results[0][0] for value, _ in results)  # bit for bit
        for value, grads in results:
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
            assert (
                len(grads) == len(expected_grads) == 1 + (not frozen) * (1 + options["with_bias"])
            )
            for grad, expected_grad in zip(grads, expected_grads):
                torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)


PRECISIONS = list(product((torch.float32, torch.bfloat16, torch.float16), (True, False)))


def low_precision() -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    chunked.CHUNK_BYTES = 40 * 500 * 4  # 40 rows of this rank's 500 or 499 logits: four chunks
    results = []
    for dtype, autocast in PRECISIONS:
        exact, labels = inputs(130, 64, 999)
        stored = [
            t.detach().to(torch.float32 if autocast else dtype).requires_grad_() for t in exact
        ]
        with torch.autocast("cpu", dtype=dtype, enabled=autocast and dtype != torch.float32):
            results.append(run_shared(stored, labels))
    return results


def test_low_precision_is_as_good_as_the_plain_loss():
    """Against float64, no more than twice the error of whole logits and their gradient in the same
    dtype.

    (In float32 both errors are roundings of sums in another order, of a few units in the last
    place, 6e-8.)
    """
    for (dtype, autocast), *ranks in zip(PRECISIONS, *run_ranks(2, low_precision), strict=True):
        exact, labels = inputs(130, 64, 999)
        stored = [
            t.detach().to(torch.float32 if autocast else dtype).requires_grad_() for t in exact
        ]
        exact = [t.detach().double().requires_grad_() for t in stored]
        truth, true_grads = run(naive.linear_cross_entropy, exact, labels)
        with torch.autocast("cpu", dtype=dtype, enabled=autocast and dtype != torch.float32):
            plain = run(naive.linear_cross_entropy, stored, labels)

        def errors(value, grads, truths=(truth, *true_grads)):
            return [
                ((g - t).norm() / t.norm()).item()
                for g, t in zip((value, *grads), truths, strict=True)
            ]

        least = 1e-6 if dtype == torch.float32 else 0.0
        for value, grads in ranks:
            assert value.dtype == torch.float32
            assert [grad.dtype for grad in grads] == [t.dtype for t in stored]
            ours = errors(value, grads)
            assert ours[0] < (1e-6 if dtype == torch.float32 else 1e-3)
            for error, plain_error in zip(ours[1:], errors(*plain)[1:]):
                assert error <= max(2 * plain_error, least), (dtype, autocast, ours)


def extremes() -> tuple[float, list[float], float]:
    """A target whose logit lies far below another rank's largest; and no target at all."""
    vocabulary, rows = own_vocabulary(3)
    weight = torch.tensor([[1e4], [0.0], [-1e4]])[rows]
    hidden = torch.ones(2, 1, requires_grad=True)
    loss = chunked.linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), vocabulary=vocabulary)
    loss.backward()
    nothing = chunked.linear_cross_entropy(
        hidden, weight, torch.full((2,), IGNORED), vocabulary=vocabulary
    )
    return loss.item(), reduced(hidden.grad, dist.ReduceOp.SUM).flatten().tolist(), nothing.item()


@pytest.mark.parametrize("num_ranks", [2, 3])  # the last rank has one token either way
def test_large_logits_stay_finite_and_no_target_is_no_loss(num_ranks):
    for loss, gradient, nothing in run_ranks(num_ranks, extremes):
        # The distance of each target's logit, 1e4 and 0, from the largest, 1e4; d loss / d hidden
        # is w[0] - w[target].
        assert (loss, gradient, nothing) == (1e4, [0.0, 1e4], 0.0)


def flops() -> list[float]:
    (hidden, weight, _), labels = inputs(60, 5, 37, ignored=0.0)
    vocabulary, rows = own_vocabulary(37)
    trained, frozen = weight.detach()[rows].clone().requires_grad_(), weight.detach()[rows]

    def loss(w):
        return chunked.linear_cross_entropy(hidden, w, labels, vocabulary=vocabulary)

    counted = [
        products(lambda: loss(trained).backward()),
        products(lambda: loss(frozen).backward()),
    ]
    return [value * 37 / len(frozen) for value in counted]  # over N D and this rank's rows


def test_each_rank_multiplies_its_own_rows_only():
    # z = x w^T, dx = dz w, dw = dz^T x; a frozen weight has no dw.
    assert run_ranks(3, flops) == [pytest.approx([3.0, 2.0])] * 3


N, D, LARGE = 512, 16, 4001
"""Rows, width, and tokens: 1334, 1334 and 1333 of them on three ranks."""


def peak(frozen: bool, chunk_bytes: int) -> tuple[int, int, int]:
    """Bytes that the loss takes at its peak beyond what was there, those of this rank's weight, and
    of `hidden`.
    """
    chunked.CHUNK_BYTES = chunk_bytes
    (hidden, weight, _), labels = inputs(N, D, LARGE, dtype=torch.float32, frozen=frozen)
    vocabulary, rows = own_vocabulary(LARGE)
    local_weight = weight.detach()[rows].clone().requires_grad_(not frozen)
    del weight
    with PeakMemory(torch.device("cpu")) as memory:
        chunked.linear_cross_entropy(hidden, local_weight, labels, vocabulary=vocabulary).backward()
    assert memory.peak_bytes is not None
    assert memory.entry_bytes is not None
    return memory.peak_bytes - memory.entry_bytes, local_weight.nbytes, hidden.nbytes


@pytest.mark.parametrize("frozen", [True, False])
def test_no_rank_ever_has_all_logits(frozen, capsys):
    full = N * LARGE * 4  # 8.2 MB
    share = -(-LARGE // 3)
    # 32 rows of a rank's logits, 171 KB, 48 times less than all logits; then the most on a CPU.
    for rows_in_chunk in (32, chunked.CPU_ROWS):
        chunk = rows_in_chunk * share * 4
        for rank, (taken, weight, hidden) in enumerate(run_ranks(3, peak, frozen, chunk)):
            with capsys.disabled():
                where = f"rank {rank}, {rows_in_chunk} rows"
                print(f"\n  {where}: peak {taken:>9,} B, all logits {full:,} B", end="")
            # A chunk (at least 0.6 of one: of 512 rows 30 % have no target, and chunks are alike),
            # the weight's gradient, and a few tensors of hidden's size.
            assert 0.6 * chunk < taken - (not frozen) * weight < chunk + 6 * hidden + 2**16
            assert taken < full / 2
