"""The arguments that fla's kernels get on a GPU mean what the torch path computes.

The kernels themselves need a GPU (tests/gpu). The stand-in is written from their source, in plain
torch on a CPU.
"""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise.kernels.gated_delta_rule as package_of_rule
import shardwise.models  # noqa: F401  # registers Jet-Nemotron
from shardwise.kernels.gated_delta_rule import backend, gated_delta_rule, naive
from shardwise.models.documents import documents_of
from tests.kernels.gated_delta_rule.test_chunked import inputs, run
from tests.models.patches.test_isolation import LENGTHS, packed
from tests.models.tiny import CONFIGS, relative_error

CUDA = torch.device("cuda")
# fla-core 0.4.2, fla/ops/gated_delta_rule/{chunk,fused_recurrent}.py, without annotations.
SIGNATURES = {
    "chunk_gated_delta_rule": "(q, k, v, g, beta, scale=None, initial_state=None, "
    "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
    "cu_seqlens_cpu=None, cp_context=None, transpose_state_layout=False, **kwargs)",
    "fused_recurrent_gated_delta_rule": "(q, k, v, g=None, gk=None, gv=None, beta=None, "
    "scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
    "cu_seqlens=None, transpose_state_layout=False)",
}
# fla-core 0.6.0 has other arguments besides: by name, ours mean the same.
LATER = {
    "chunk_gated_delta_rule": "(q, k, v, g, beta, scale=None, initial_state=None, "
    "output_final_state=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
    "chunk_indices=None, cp_context=None, **kwargs)",
    "fused_recurrent_gated_delta_rule": "(q, k, v, g=None, gk=None, gv=None, beta=None, "
    "scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
    "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs)",
}
BF16 = 2 * torch.finfo(torch.bfloat16).eps
"""Of what is rounded to 16 bits once on each side."""


def kernel(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what both compute: q, k [B, T, H, K], v [B, T, H, V], g (a log) and beta [B, T, H],
    the state [B, H, K, V] in float32. Tokens are scaled by 1/sqrt(K) if no scale is given, and
    norms have 1e-6 under the root. `cu_seqlens` are the ends of sequences in one row, each with a
    state [sequences, H, K, V].
    """
    ends, state = given["cu_seqlens"], given["initial_state"]
    if ends is not None:
        assert given["v"].shape[0] == 1
        assert state is None or len(state) == len(ends) - 1
        parts = []
        for number, (start, end) in enumerate(pairwise(ends.tolist())):
            sequence = {name: given[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
            before = None if state is None else state[number : number + 1]
            parts.append(kernel({**given, **sequence, "initial_state": before, "cu_seqlens": None}))
        outs, lasts = zip(*parts)
        return torch.cat(outs, 1), torch.cat(lasts) if given["output_final_state"] else None
    assert given["v"].element_size() == 2
    assert {given[name].dtype for name in ("q", "k", "beta")} == {
        given["v"].dtype
    }  # products of tensor cores
    assert (
        given["g"].dtype == torch.float32
    )  # its sums over a chunk would lose the decay in 16 bits
    q, k, v, g, beta = (given[name].float() for name in ("q", "k", "v", "g", "beta"))
    if given["use_qk_l2norm_in_kernel"]:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * (k.shape[-1] ** -0.5 if given["scale"] is None else given["scale"])
    (batch, tokens, heads, size), width = k.shape, v.shape[-1]
    state = torch.zeros(batch, heads, size, width)
    if given["initial_state"] is not None:
        assert given["initial_state"].shape == state.shape
        state = given["initial_state"].float()
    outs = []
    for t in range(tokens):
        state = state * g[:, t, :, None, None].exp()
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    out = torch.stack(outs, 1).to(given["v"].dtype)
    return out, state if given["output_final_state"] else None


@pytest.fixture(params=["0.4.2", "0.6.0"])
def calls(request, monkeypatch) -> list[tuple[str, dict[str, Any]]]:
    """Pretend that fla is installed and tensors are on a GPU; give the calls of its kernels."""
    kernel_calls: list[tuple[str, dict[str, Any]]] = []
    ops: Any = ModuleType("fla.ops.gated_delta_rule")
    for name, text in (SIGNATURES if request.param == "0.4.2" else LATER).items():
        namespace: dict[str, Any] = {}
        exec(f"def {name}{text}: pass", namespace)
        signature = inspect.signature(namespace[name])
        assert str(signature) == text

        def stand_in(
            *args: Any, _name: str = name, _signature: inspect.Signature = signature, **kwargs: Any
        ) -> Any:
            bound = _signature.bind(*args, **kwargs)
            bound.apply_defaults()
            assert not bound.arguments.get("kwargs")  # what it does not know
            kernel_calls.append((_name, bound.arguments))
            if _name.startswith("fused"):
                assert not torch.is_grad_enabled(), "the recurrent kernel has no backward"
            return kernel(bound.arguments)

        setattr(ops, name, stand_in)
    package = ModuleType("fla")
    package.__spec__ = ModuleSpec("fla", None)
    for module in (package, ModuleType("fla.ops"), ops):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package_of_rule, "backend", lambda _, dtype: backend(CUDA, dtype))
    return kernel_calls


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_training_is_the_chunked_kernel(tokens, with_state, calls):
    tensors = [
        x.detach().bfloat16().requires_grad_() for x in inputs(tokens, with_state=with_state)
    ]
    for place in (
        3,
        *range(5, len(tensors)),
    ):  # the decay and the state are float32, as JetBlock has them
        tensors[place] = tensors[place].detach().float().requires_grad_()
    (out, state), grads = run(gated_delta_rule, tensors)
    ((name, given),) = calls
    assert name == "chunk_gated_delta_rule"
    assert given["initial_state"] is (tensors[5] if with_state else None)
    assert given["cu_seqlens"] is None
    (expected, expected_state), expected_grads = run(naive.gated_delta_rule, tensors)
    assert out.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert relative_error(out, expected) < BF16
    assert relative_error(state, expected_state) < 1e-5
    for grad, other in zip(grads, expected_grads):
        # One token that starts from nothing: nothing decays.
        assert (
            relative_error(grad.float(), other.float()) < BF16
            if other.abs().max() > 0
            else grad.abs().max() == 0
        )


@pytest.mark.parametrize("with_state", [True, False])
def test_documents_are_sequences_of_one_row(with_state, calls):
    dtypes = (*[torch.bfloat16] * 3, torch.float32, torch.bfloat16, torch.float32)
    tensors = [
        x.detach().to(dtype).requires_grad_()
        for x, dtype in zip(inputs(70, with_state=with_state), dtypes)
    ]
    # The second row begins documents elsewhere; its first one is one token.
    places = torch.arange(70)
    documents = torch.stack([places >= 50, (places >= 1).long() + (places >= 33)]).long()

    def with_documents(rule: Any) -> Any:
        def of(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return rule(*x, *[None] * (not with_state), documents)

        return run(of, tensors)

    (out, state), grads = with_documents(gated_delta_rule)
    ((name, given),) = calls
    assert name == "chunk_gated_delta_rule"
    for ends in (given["cu_seqlens"], given["cu_seqlens_cpu"]):  # fla would read the former
        assert ends.tolist() == [0, 50, 70, 71, 103, 140]
    (expected, expected_state), expected_grads = with_documents(naive.gated_delta_rule)
    assert relative_error(out, expected) < BF16
    assert relative_error(state, expected_state) < 1e-5
    for grad, other in zip(grads, expected_grads):
        assert relative_error(grad.float(), other.float()) < BF16


def test_layers_that_share_documents_look_for_their_borders_once(calls):
    """fla keeps what it finds by the tensors that it is given."""
    tensors = [x.detach() for x in inputs(7, with_state=False)]
    tensors = [x if place == 3 else x.bfloat16() for place, x in enumerate(tensors)]
    documents = torch.arange(7).div(3, rounding_mode="floor").expand(2, -1)
    for of_layer in (documents, documents, documents.clone()):
        gated_delta_rule(*tensors, None, of_layer)
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        first, again, of_others = (given[name] for _, given in calls)
        assert first is again
        assert first is not of_others


@pytest.mark.parametrize(
    ("tokens", "name"), [(1, "fused_recurrent_gated_delta_rule"), (5, "chunk_gated_delta_rule")]
)
def test_a_step_without_gradients_is_the_recurrent_kernel(tokens, name, calls):
    q, k, v, g, beta, state = (x.detach() for x in inputs(tokens))
    given = (q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta.bfloat16(), state)
    with torch.no_grad():
        out, end = gated_delta_rule(*given)
    assert [called for called, _ in calls] == [name]
    expected, expected_end = naive.gated_delta_rule(*given)
    assert relative_error(out, expected) < BF16
    assert relative_error(end, expected_end) < 1e-5


def test_what_the_kernels_do_not_take_is_torchs(calls, monkeypatch):
    tensors = inputs(7)
    gated_delta_rule(*tensors)  # float32
    monkeypatch.setattr(package_of_rule, "backend", backend)
    gated_delta_rule(*(x.bfloat16() for x in tensors))  # on a CPU
    assert calls == []
    monkeypatch.setattr(package_of_rule, "backend", lambda _, dtype: backend(CUDA, dtype))
    monkeypatch.setitem(sys.modules, "fla", None)  # not installed
    gated_delta_rule(*(x.bfloat16() for x in tensors))
    assert calls == []


def model() -> Any:
    """In bfloat16; its weights are large enough for tokens to matter to each other."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(CONFIGS / "jet-nemotron-tiny", initializer_range=0.1)
    return AutoModelForCausalLM.from_config(config).bfloat16().eval()


def test_generation_goes_on_from_the_kernels_own_states(calls, monkeypatch):
    """Two rows, the first with 3 tokens of padding before it."""
    ids = torch.randint(1, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = model().generate(ids, **options, max_new_tokens=6)
    names = [name.partition("_")[0] for name, _ in calls]
    assert names == 2 * ["chunk"] + 5 * 2 * [
        "fused"
    ]  # 2 layers; the last token that is made is not read
    for before, (_, given) in zip(calls, calls[2:]):
        assert given["initial_state"].shape == (2, 4, 12, 32)
        assert given["initial_state"].dtype == torch.float32
        assert before[1]["v"].shape[1] in (1, 9)
    padded = calls[0][1]
    for name in ("k", "v"):
        assert padded[name][0, :3].abs().max() == 0  # so padding writes nothing into the state
        assert padded[name][0, 3:].abs().min(-1).values.max() > 0
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert torch.equal(model().generate(ids, **options, max_new_tokens=6), made)


def test_isolated_documents_are_rows_of_their_own(calls):
    """No kernel is told where a document ends: each begins a row, and padding comes after it."""
    batch = packed(LENGTHS)
    documents = documents_of(batch.documents_on_host, batch.device)
    assert documents is not None
    block = model().model.layers[0].self_attn
    hidden = torch.randn(*batch.input_ids.shape, 64, dtype=torch.bfloat16)
    for rows in documents.unpack(hidden):
        block(rows)
    assert [tuple(given["v"].shape[:2]) for _, given in calls] == list(documents.shapes)
    assert all(given["initial_state"] is None and given["cu_seqlens"] is None for _, given in calls)
    assert {name for name, _ in calls} == {"chunk_gated_delta_rule"}
