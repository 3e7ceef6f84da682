"""The chunked loss against the plain one: value, gradients, and what it leaves undone."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.kernels.linear_cross_entropy import chunked, naive
from shardwise.metrics.memory import PeakMemory
from tests.kernels.linear_cross_entropy.cases import IGNORED, inputs, run
from tests.uninitialised import filled_with_nan


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 3 * 37 * 8)  # three rows of 37 float64 logits


# One row; a whole chunk; one more; many, with a last chunk that is not full.
@pytest.mark.parametrize("n", [1, 3, 4, 50])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, None), (1.0, 2.0), (1.7, 2.0)])
@pytest.mark.parametrize(("frozen", "with_bias"), list(product([True, False], [True, False])))
def test_equals_the_plain_loss(small_chunks, n, scale, softcap, frozen, with_bias):
    tensors, labels = inputs(n, 5, 37, ignored=0.3 if n > 1 else 0.0, frozen=frozen)
    options = {"with_bias": with_bias, "scale": scale, "softcap": softcap}
    value, grads = run(chunked.linear_cross_entropy, tensors, labels, **options)
    expected, expected_grads = run(naive.linear_cross_entropy, tensors, labels, **options)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert len(grads) == len(expected_grads) == 1 + (not frozen) * (1 + with_bias)
    for grad, expected_grad in zip(grads, expected_grads):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)
    assert (grads[0][labels == IGNORED] == 0).all()


def test_gradient_of_the_input_by_differences(small_chunks):
    (hidden, weight, bias), labels = inputs(7, 5, 37, frozen=True)
    assert torch.autograd.gradcheck(
        lambda x: chunked.linear_cross_entropy(
            x, weight, labels, bias=bias, scale=0.8, softcap=3.0
        ),
        (hidden,),
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_loss_of_each_row_takes_a_factor_of_its_own(small_chunks, softcap, frozen):
    (hidden, weight, bias), labels = inputs(20, 5, 37, ignored=0.3, frozen=frozen)
    factors = torch.randn(int((labels != IGNORED).sum()), dtype=hidden.dtype)
    found = []
    for function in (chunked.linear_cross_entropy, naive.linear_cross_entropy):
        losses = function(
            hidden, weight, labels, bias=bias, scale=0.7, softcap=softcap, is_summed=False
        )
        wanted = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
        # A loss that is not linear in them: a factor is known only after all losses are.
        loss = (losses * factors).sum().square()
        found.append([losses, *torch.autograd.grad(loss, wanted)])
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


def test_without_any_target():
    tensors, labels = inputs(6, 5, 37, ignored=1.1)
    value, grads = run(chunked.linear_cross_entropy, tensors, labels)
    assert value == 0.0
    assert all((grad == 0).all() and grad.shape == t.shape for grad, t in zip(grads, tensors))


def test_ignored_rows_may_hold_anything():
    (hidden, weight, _), labels = inputs(9, 5, 37, frozen=True)
    poisoned = (
        hidden.detach().masked_fill((labels == IGNORED)[:, None], float("nan")).requires_grad_()
    )
    value, (grad,) = run(
        chunked.linear_cross_entropy, (poisoned, weight, None), labels, with_bias=False
    )
    expected, (expected_grad,) = run(
        chunked.linear_cross_entropy, (hidden, weight, None), labels, with_bias=False
    )
    assert torch.equal(value, expected)
    assert torch.equal(grad, expected_grad)


def test_large_logits_stay_finite():
    # 1e4 is far beyond where exp overflows; the right answer is the distance to the largest logit,
    # or 0.
    weight = torch.tensor([[1e4], [0.0], [-1e4]])
    hidden = torch.ones(2, 1, requires_grad=True)
    loss = chunked.linear_cross_entropy(hidden, weight, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == 1e4
    assert hidden.grad.flatten().tolist() == [0.0, 1e4]


def test_gradients_add_up_over_two_calls_and_shared_weights(small_chunks):
    (hidden, weight, _), labels = inputs(8, 5, 37)
    for loss, expected in ((chunked, None), (naive, True)):
        hidden.grad = weight.grad = None
        for part in (slice(0, 5), slice(5, 8)):
            # The weight is used twice, as a tied embedding is.
            x = hidden[part] + weight[labels[part].clamp(min=0)]
            loss.linear_cross_entropy(x, weight, labels[part]).backward()
        if expected is None:
            ours = hidden.grad, weight.grad
    for grad, expected_grad in zip(ours, (hidden.grad, weight.grad)):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)


def test_a_second_backward_is_an_error_or_right():
    (hidden, weight, _), labels = inputs(6, 5, 37)
    loss = chunked.linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    frozen = chunked.linear_cross_entropy(hidden, weight.detach(), labels)
    once = torch.autograd.grad(frozen, hidden, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(frozen * 2, hidden)[0], 2 * once)


def test_gradients_may_be_taken_one_after_the_other():
    """As a zero-bubble pipeline does: the hidden states' in a first backward, the weights' in a
    later one.
    """
    tensors, labels = inputs(6, 5, 37)
    _, together = run(chunked.linear_cross_entropy, tensors, labels)
    loss = chunked.linear_cross_entropy(tensors[0], tensors[1], labels, bias=tensors[2]) * 0.7
    apart = [torch.autograd.grad(loss, tensor, retain_graph=True)[0] for tensor in tensors]
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_low_precision_is_as_good_as_the_plain_loss(monkeypatch, dtype, autocast):
    """Against float64, over all gradients, no more than twice the error of logits and their
    gradient in `dtype`.
    """
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 40 * 999 * 4)
    exact, labels = inputs(130, 64, 999)
    stored = [t.detach().to(torch.float32 if autocast else dtype).requires_grad_() for t in exact]
    exact = [t.detach().double().requires_grad_() for t in stored]
    truth, true_grads = run(naive.linear_cross_entropy, exact, labels)
    errors = []
    for loss in (chunked, naive):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            value, grads = run(loss.linear_cross_entropy, stored, labels)
        assert value.dtype == torch.float32
        assert [grad.dtype for grad in grads] == [t.dtype for t in stored]
        errors.append(
            [
                ((g - t).norm() / t.norm()).item()
                for g, t in zip((value, *grads), (truth, *true_grads))
            ]
        )
    ours, plain = errors
    assert max(plain[1:]) > 1e-4  # the precision is low indeed
    assert ours[0] < 1e-3
    assert all(a <= 2 * b for a, b in zip(ours[1:], plain[1:])), (ours, plain)


def test_float16_keeps_small_probabilities():
    # Of 248,320 equal logits each has probability 4.03e-6, in float16 68 times its least number:
    # 0.65 % too much.
    weight = 1 + torch.randn(248_320, 4, generator=torch.Generator().manual_seed(0)).half()
    hidden = torch.zeros(1, 4, dtype=torch.float16, requires_grad=True)
    chunked.linear_cross_entropy(hidden, weight, torch.tensor([7])).backward()
    expected = weight.double().mean(0) - weight[7].double()
    torch.testing.assert_close(hidden.grad[0].double(), expected, rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v", [37, 250, 999])
def test_no_product_is_handed_uninitialised_memory(monkeypatch, dtype, v):
    """Rows have padding, which oneDNN reads on a CPU with AMX: what lay there must not be a NaN."""
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 8 * v * 4)
    tensors, labels = inputs(20, 8, v, ignored=0.0, dtype=dtype)
    with filled_with_nan() as products:
        run(chunked.linear_cross_entropy, tensors, labels)
    assert products.count == 9  # three of each of three chunks
    assert products.poisoned == []


def products(call) -> float:
    """Multiply-adds of `call` over N V D, for N = 60 rows, V = 37, D = 5."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / (2 * 60 * 37 * 5)


def test_what_is_not_needed_is_not_computed(small_chunks):
    (hidden, weight, _), labels = inputs(60, 5, 37, ignored=0.0)
    half = labels.clone()
    half[::2] = IGNORED
    loss = chunked.linear_cross_entropy
    assert products(lambda: loss(hidden, weight, labels).backward()) == 3
    assert products(lambda: loss(hidden, weight.detach(), labels).backward()) == 2
    assert products(lambda: loss(hidden.detach(), weight, labels).backward()) == 2
    assert products(lambda: loss(hidden, weight, half).backward()) == 1.5
    assert products(lambda: loss(hidden, weight, torch.full_like(labels, IGNORED)).backward()) == 0
    with torch.no_grad():
        assert products(lambda: loss(hidden, weight, labels)) == 1


@pytest.mark.parametrize("frozen", [True, False])
def test_logits_are_never_all_in_memory(monkeypatch, frozen):
    n, d, v = 512, 16, 4001
    chunk = 32 * v * 4
    monkeypatch.setattr(chunked, "CHUNK_BYTES", chunk)
    (hidden, weight, _), labels = inputs(n, d, v, dtype=torch.float32, frozen=frozen)
    with PeakMemory(torch.device("cpu")) as memory:
        chunked.linear_cross_entropy(hidden, weight, labels).backward()
    peak = memory.peak_bytes - memory.entry_bytes
    # One chunk (all logits: 16 of them), the gradient of the head, and a few tensors of hidden's
    # size.
    assert chunk < peak - (not frozen) * weight.nbytes < chunk + 6 * hidden.nbytes + 2**16


def test_chunks_are_equal_and_within_bounds():
    assert chunked._rows_per_chunk(0, 100) == 0
    # 270 rows of 248,320 float32 logits fit 256 MiB: 16 chunks of 256 are enough for 4096.
    assert chunked._rows_per_chunk(4096, 248_320 * 4) == 256
    assert chunked._rows_per_chunk(5, 2**40) == 1
