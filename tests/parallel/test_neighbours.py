"""Rows of random documents, cut over ranks: results and gradients equal those of complete rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.base.interfaces import Mesh
from shardwise.base.schedule.context import Sent, sent_by_convolution, sent_by_recurrence
from shardwise.kernels import kimi_delta_attention
from shardwise.kernels.gated_delta_rule import RECURRENCE
from shardwise.kernels.recurrence import Recurrence, Tokens
from shardwise.kernels.short_conv import short_conv
from shardwise.lab.planner.collectives import Collectives
from shardwise.lab.planner.communication import Total, add_up
from shardwise.parallel.neighbours import ContextNeighbours
from tests.distributed import run_ranks

CASES = 12
B, N, S, H, D, W = 2, 2, 3, 4, 5, 4
Tensors = list[torch.Tensor]


def _documents(length: int, stretch: int, seed: int) -> torch.Tensor | None:
    """Documents of rows: none; each token one; borders at a rank's first token; any."""
    if seed % 4 == 0:
        return None
    if seed % 4 == 1:
        return torch.arange(length).expand(B, -1)
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(B, length, generator=generator) < 0.15
    if seed % 4 == 2:
        begins[0, stretch] = begins[1, -stretch] = True
    return begins.long().cumsum(1)


def _inputs(length: int, seed: int) -> Tensors:
    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    generator = torch.Generator().manual_seed(seed)
    q, k, v = draw(B, length, N, S), draw(B, length, N, S), draw(B, length, N, H)
    g, beta = -draw(B, length, N).abs() * 0.2, draw(B, length, N).sigmoid()
    return [q, k, v, g, beta, draw(B, length, D)]


def _outputs(tokens: Tokens, inputs: Tensors) -> Tensors:
    *of_rule, x = inputs
    earlier, documents = tokens.earlier(x, W - 1)
    weight = torch.linspace(-1, 1, D * W, dtype=torch.float64).view(D, W)
    convolved = short_conv(x, weight, None, "silu", earlier, documents)
    return [tokens.recur(RECURRENCE, *of_rule), convolved]


def _results(tokens: Tokens, inputs: Tensors, weights: Tensors) -> Tensors:
    inputs = [x.clone().requires_grad_() for x in inputs]
    outs = _outputs(tokens, inputs)
    sum((out * weight).sum() for out, weight in zip(outs, weights)).backward()
    return [*(out.detach() for out in outs), *(x.grad for x in inputs)]


def _error() -> float:
    """The largest difference of this rank's outputs and gradients over all cases."""
    rank, size = dist.get_rank(), dist.get_world_size()
    errors = []
    for seed in range(CASES):
        stretch = (3, 4, 67)[seed % 3]
        length = stretch * size
        inputs, documents = _inputs(length, seed), _documents(length, stretch, seed)
        like = (inputs[2], inputs[5])
        weights = [torch.randn(x.shape, generator=_of(seed), dtype=x.dtype) for x in like]

        def share(x: torch.Tensor) -> torch.Tensor:
            return x.chunk(size, 1)[rank]

        isolated = documents is not None
        ids = documents if documents is not None else torch.zeros(B, length, dtype=torch.int64)
        ranks = ContextNeighbours(dist.group.WORLD, ids, isolated)
        expected = _results(Tokens(documents), inputs, weights)
        cut = Tokens(share(ids) if isolated else None, ranks)
        results = _results(cut, [*map(share, inputs)], [*map(share, weights)])
        errors += [(a - share(b)).abs().max().item() for a, b in zip(results, expected)]
    return max(errors)


def _of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_cut_rows_equal_complete_ones(size):
    assert max(run_ranks(size, _error)) < 1e-10


def _halo_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = ContextNeighbours.shift
    monkeypatch.setattr(ContextNeighbours, "shift", lambda self, x, by: shift(self, x, -by))


def _no_gradient_of_the_halo(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = ContextNeighbours.shift
    monkeypatch.setattr(
        ContextNeighbours, "shift", lambda self, x, by: shift(self, x, by) * (by > 0)
    )


def _transition_without_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ContextNeighbours.state_before

    def without(self: Any, core: Recurrence, summary: Any) -> torch.Tensor:
        return before(self, core._replace(pass_on=lambda transition, state: state), summary)

    monkeypatch.setattr(ContextNeighbours, "state_before", without)


def _transition_not_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    after = ContextNeighbours.grad_state_after

    def without(self: Any, core: Recurrence, *rest: torch.Tensor) -> torch.Tensor:
        return after(self, core._replace(pass_back=core.pass_on), *rest)

    monkeypatch.setattr(ContextNeighbours, "grad_state_after", without)


def _state_across_a_border(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContextNeighbours, "_into", lambda self, x: x)


def _documents_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_ones(self: ContextNeighbours, num_tokens: int) -> torch.Tensor:
        return self.document_ids[:, :num_tokens]

    monkeypatch.setattr(ContextNeighbours, "documents_before", first_ones)


@pytest.mark.parametrize(
    "plant",
    [
        _halo_from_the_next,
        _no_gradient_of_the_halo,
        _transition_without_decay,
        _transition_not_transposed,
        _state_across_a_border,
        _documents_of_others,
    ],
)
def test_a_planted_mistake_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    assert max(run_ranks(3, _error)) > 1e-3


def _sent_and_predicted(length: int, dtype: torch.dtype) -> list[tuple[Total, Total]]:
    """Return what this rank sent in each pass of a core or convolution, and what formulas say."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh_axes = init_device_mesh("cpu", (1, 1, 1, size, 1), mesh_dim_names=Mesh.AXES)
    mesh = Mesh(mesh_axes, torch.device("cpu"))
    ids = torch.zeros(B, length * size, dtype=torch.int64)
    tokens = Tokens(None, ContextNeighbours(mesh.group("cp"), ids, False))
    inputs = [x.to(dtype).requires_grad_() for x in _inputs(length, seed=rank)]
    q, k, v, g, beta, x = inputs
    weight = torch.ones(D, W, dtype=dtype)

    def convolve() -> torch.Tensor:
        earlier, documents = tokens.earlier(x, W - 1)
        return short_conv(x, weight, None, "silu", earlier, documents)

    def by_key() -> torch.Tensor:
        decays = g.unsqueeze(-1).expand(-1, -1, -1, S)
        return tokens.recur(kimi_delta_attention.RECURRENCE, q, k, v, decays, beta)

    of_map = sent_by_recurrence(B * N * S * S, B * N * S * H, dtype.itemsize, rank, size)
    grad_halo = sent_by_convolution(W, B * D * dtype.itemsize, rank, size)
    results = []
    for compute, predicted in (
        (lambda: tokens.recur(RECURRENCE, q, k, v, g, beta), of_map),
        (by_key, of_map),
        (convolve, grad_halo),
    ):
        with Collectives(mesh) as forward:
            out = compute()
        with Collectives(mesh) as backward:
            out.sum().backward()
        for counted, of_pass in zip((forward, backward), predicted):
            results.append((add_up(counted.messages), _as_total(of_pass)))
    return results


def _as_total(sent: Sent) -> Total:
    return {(kind, "cp"): number for kind, number in sent.items() if number[0]}


@pytest.mark.parametrize(
    ("size", "length", "dtype"),
    [
        (2, 3, torch.float64),
        (4, 67, torch.float32),
        pytest.param(5, 3, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_sends_what_the_formulas_say(size, length, dtype):
    for rank, results in enumerate(run_ranks(size, _sent_and_predicted, length, dtype)):
        for counted, predicted in results:
            assert counted == predicted, rank
