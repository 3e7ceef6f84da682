"""The arguments that fla's kernels get on a GPU mean what the torch path computes.

The kernels themselves need a GPU. The stand-in is written from their source, in plain torch.
"""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from shardwise.kernels import kimi_delta_attention as package_of_core
from shardwise.kernels.kimi_delta_attention import backend, kimi_delta_attention, naive
from tests.kernels.gated_delta_rule.test_chunked import run
from tests.kernels.kimi_delta_attention.test_chunked import inputs
from tests.models.tiny import relative_error

# fla-core 0.4.2 and 0.6.0, fla/ops/kda/{chunk,fused_recurrent}.py, without annotations.
SIGNATURES = {
    "0.4.2": {
        "chunk_kda": "(q, k, v, g, beta, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, lower_bound=None, "
        "disable_recompute=False, return_intermediate_states=False, cp_context=None, "
        "transpose_state_layout=False, **kwargs)",
        "fused_recurrent_kda": "(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, "
        "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None, "
        "transpose_state_layout=False, **kwargs)",
    },
    "0.6.0": {
        "chunk_kda": "(q, k, v, g, beta, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, "
        "use_graph=False, max_num_seqs=None, **kwargs)",
        "fused_recurrent_kda": "(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, "
        "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
        "lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs)",
    },
}
CUDA = torch.device("cuda")
BF16 = 2 * torch.finfo(torch.bfloat16).eps
"""The relative error of what is rounded to 16 bits once on each side."""


def kernel(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what both compute of q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H] and states.

    `cu_seqlens` are the ends of sequences in one row, each with a state [sequences, H, K, V].
    """
    assert {given[name].dtype for name in ("q", "k", "v", "beta")} == {torch.bfloat16}
    assert given["g"].dtype == torch.float32
    assert given["k"].shape == given["q"].shape == given["g"].shape
    (batch, tokens, heads, size), width = given["k"].shape, given["v"].shape[-1]
    assert size <= 256
    ends = given["cu_seqlens"]
    assert ends is None or batch == 1
    num_sequences = batch if ends is None else len(ends) - 1
    state = given["initial_state"]
    if state is not None:
        assert state.dtype == torch.float32
        assert state.shape == (num_sequences, heads, size, width)
    if not given["use_qk_l2norm_in_kernel"] or given["scale"] is not None:
        raise NotImplementedError
    q, k, v, g, beta = (given[name].float() for name in ("q", "k", "v", "g", "beta"))
    outs, lasts = [], []
    for number in range(num_sequences):
        row = slice(number, number + 1) if ends is None else slice(0, 1)
        span = slice(0, tokens) if ends is None else slice(ends[number], ends[number + 1])
        before = None if state is None else state[number : number + 1]
        sequence = (x[row, span] for x in (q, k, v, g, beta))
        out, last = naive.kimi_delta_attention(*sequence, before)
        outs.append(out)
        lasts.append(last)
    out = torch.cat(outs, 0 if ends is None else 1).to(given["v"].dtype)
    return out, torch.cat(lasts) if given["output_final_state"] else None


@pytest.fixture(params=sorted(SIGNATURES))
def calls(request, monkeypatch) -> list[tuple[str, dict[str, Any]]]:
    """Pretend that fla is installed and tensors are on a GPU. Return the calls of its kernels."""
    kernel_calls: list[tuple[str, dict[str, Any]]] = []
    ops: Any = ModuleType("fla.ops.kda")
    for name, text in SIGNATURES[request.param].items():
        namespace: dict[str, Any] = {}
        exec(f"def {name}{text}: pass", namespace)
        signature = inspect.signature(namespace[name])

        def stand_in(
            *args: Any, _name: str = name, _signature: inspect.Signature = signature, **kwargs: Any
        ) -> Any:
            bound = _signature.bind(*args, **kwargs)
            bound.apply_defaults()
            assert not bound.arguments["kwargs"]  # what it does not know
            kernel_calls.append((_name, bound.arguments))
            if _name.startswith("fused"):
                assert not torch.is_grad_enabled(), "the recurrent kernel has no backward"
            return kernel(bound.arguments)

        setattr(ops, name, stand_in)
    package = ModuleType("fla")
    package.__spec__ = ModuleSpec("fla", None)
    for module in (package, ModuleType("fla.ops"), ops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package_of_core, "backend", lambda _, dtype: backend(CUDA, dtype))
    return kernel_calls


def of_16_bits(tokens: int) -> list[torch.Tensor]:
    """Return inputs in bfloat16, with the decays and the state in float32, as mixers give them."""
    dtypes = (*[torch.bfloat16] * 3, torch.float32, torch.bfloat16, torch.float32)
    return [x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs(tokens), dtypes)]


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_training_is_the_chunked_kernel(tokens, with_documents, calls):
    tensors, documents = of_16_bits(tokens), None
    if with_documents:
        # The second row begins documents elsewhere; its first one is one token.
        row = torch.arange(tokens)
        documents = torch.stack([row >= 50, (row >= 1).long() + (row >= 33)]).long()
    (out, state), grads = run(lambda *x: kimi_delta_attention(*x, documents), tensors)
    ((name, given),) = calls
    assert name == "chunk_kda"
    for ends in ("cu_seqlens", "cu_seqlens_cpu"):  # fla would read the former
        assert (given[ends] is not None) == with_documents
    (expected, expected_state), expected_grads = run(
        lambda *x: naive.kimi_delta_attention(*x, documents), tensors
    )
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) < BF16
    assert relative_error(state, expected_state) < 1e-5
    for grad, other in zip(grads, expected_grads):
        assert relative_error(grad.float(), other.float()) < BF16


@pytest.mark.parametrize(("tokens", "name"), [(1, "fused_recurrent_kda"), (5, "chunk_kda")])
def test_a_step_without_gradients_is_the_recurrent_kernel(tokens, name, calls):
    *tensors, state = (x.detach() for x in of_16_bits(tokens))
    with torch.no_grad():
        # The kernel takes a state of 32 bits alone.
        out, end = kimi_delta_attention(*tensors, state.bfloat16())
    assert [called for called, _ in calls] == [name]
    expected, expected_end = naive.kimi_delta_attention(*tensors, state.bfloat16())
    assert relative_error(out, expected) < BF16
    assert relative_error(end, expected_end) < 1e-5


def test_what_the_kernels_do_not_take_is_torchs(calls, monkeypatch):
    tensors = inputs(7)
    kimi_delta_attention(*tensors)  # float32
    monkeypatch.setattr(package_of_core, "backend", backend)
    kimi_delta_attention(*(x.bfloat16() for x in tensors))  # on a CPU
    assert calls == []
    assert backend(CUDA, torch.bfloat16) == "fla"
    monkeypatch.setitem(sys.modules, "fla", None)  # not installed
    assert backend(CUDA, torch.bfloat16) == "torch"
