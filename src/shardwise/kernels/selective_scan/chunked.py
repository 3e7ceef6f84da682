"""The selective scan, a chunk of C tokens at a time, with its own backward.

Each element of the state has a decay of its own, so that a chunk is no matrix product. Its states
are made token by token in one buffer, an operation each, and everything else for all tokens of the
chunk at once. Decays are only multiplied, never divided by: none is too strong.

The backward goes from the last chunk to the first. It keeps the inputs and the state before each
chunk, and computes the states within a chunk again.
Source: Gu and Dao, "Mamba", arXiv 2312.00752, section 3.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardwise.kernels.gated_delta_rule.naive import begins, wide
from shardwise.kernels.recurrence import Summary

CHUNK = 64
"""C: tokens of a chunk."""


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [B, T, D] and the last state [B, D, S], as the package does."""
    out, last = _SelectiveScan.apply(x, dt, a, b, c, d, z, bias, state, documents)
    return out, last


def summary(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
    documents: torch.Tensor | None,
) -> Summary:
    """Return the map of all tokens: factors [B, D, S] and states [B, D, S]."""
    starts = None if documents is None else begins(documents)
    s, total = _first_state(x, a, None), torch.zeros((), dtype=torch.float64, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, x.shape[1], CHUNK):
            chunk = _chunk(x, dt, a, b, c, bias, starts, start)
            s = _states(chunk, s)[-1]
            total = total + chunk.dt.sum(0, dtype=torch.float64)
        transition = (total[..., None] * a.double()).to(s.dtype).exp_()
        if starts is not None:
            transition.masked_fill_(starts.any(1)[:, None, None], 0)
    return Summary(transition, s.mT.contiguous())


def grad_before(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
    grad_out: torch.Tensor,
    documents: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient [B, D, S] of the first state that the gradient of outputs gives."""
    starts = None if documents is None else begins(documents)
    grad_state = _first_state(x, a, None)
    with torch.autocast(x.device.type, enabled=False):
        for start in reversed(range(0, x.shape[1], CHUNK)):
            chunk = _chunk(x, dt, a, b, c, bias, starts, start)
            grad_read = _tokens_first(grad_out, start) * F.silu(_tokens_first(z, start))
            grad_state = _grad_states(chunk, grad_read, grad_state)[0] * chunk.decay[0]
    return grad_state.mT.contiguous()


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor,
        z: torch.Tensor,
        bias: torch.Tensor,
        state: torch.Tensor | None,
        documents: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = None if documents is None else begins(documents)
        s = _first_state(x, a, state)
        states, out = [], torch.empty_like(x)
        # Autocast is off: the state has 32 bits, whatever dtype the products around it have.
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, x.shape[1], CHUNK):
                states.append(s)
                chunk = _chunk(x, dt, a, b, c, bias, starts, start)
                chunk_states = _states(chunk, s)
                read = _read(chunk, chunk_states, d) * F.silu(_tokens_first(z, start))
                out[:, start : start + CHUNK] = read.transpose(0, 1)
                s = chunk_states[-1].clone()
        ctx.state_dtype = s.dtype if state is None else state.dtype
        ctx.save_for_backward(x, dt, a, b, c, d, z, bias, documents, *states)
        return out, s.mT.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, dt, a, b, c, d, z, bias, documents, *states = ctx.saved_tensors
        grad_out, grad_last = gradients
        starts = None if documents is None else begins(documents)
        grad_state = wide(grad_last).mT
        grad_by_token = [torch.empty_like(y) for y in (x, dt, b, c, z)]
        grad_a, grad_d, grad_bias = (torch.zeros_like(wide(y)) for y in (a.mT, d, bias))
        with torch.autocast(x.device.type, enabled=False):
            for start in reversed(range(0, x.shape[1], CHUNK)):
                chunk = _chunk(x, dt, a, b, c, bias, starts, start)
                before = states.pop()
                chunk_states = _states(chunk, before)

                # Through the gate and the read.
                gate, grad_gated = _tokens_first(z, start), _tokens_first(grad_out, start)
                open_share = gate.sigmoid()
                grad_read = grad_gated * gate * open_share
                slope = open_share * (1 + gate * (1 - open_share))
                grad_z = grad_gated * _read(chunk, chunk_states, d) * slope
                grad_d += (grad_read * chunk.x).sum((0, 1))
                grad_c = (chunk_states @ grad_read[..., None])[..., 0]

                # Through what each token writes.
                grad_states = _grad_states(chunk, grad_read, grad_state)
                grad_state = grad_states[0] * chunk.decay[0]
                grad_b = (grad_states @ (chunk.dt * chunk.x)[..., None])[..., 0]
                grad_written = (chunk.b[..., None, :] @ grad_states)[..., 0, :]

                # Through the decays e^{dt a}: of what is in the exponent, the gradient is that of
                # the state times what is left in it of the state before.
                grad_exponent = grad_states.mul_(chunk.decay)
                grad_exponent[1:] *= chunk_states[:-1]
                grad_exponent[0] *= before
                grad_step = (grad_exponent * chunk.a).sum(-2) + grad_written * chunk.x
                grad_a += grad_exponent.mul_(chunk.dt[..., None, :]).sum((0, 1))
                # The slope of softplus is 1 - e^{-softplus}.
                grad_raw = grad_step * -torch.expm1(-chunk.dt)
                grad_bias += grad_raw.sum((0, 1))

                grad_x = grad_written * chunk.dt + grad_read * wide(d)
                for grad_y, grad_slice in zip(
                    grad_by_token, (grad_x, grad_raw, grad_b, grad_c, grad_z)
                ):
                    grad_y[:, start : start + CHUNK] = grad_slice.transpose(0, 1)
        grad_x, grad_dt, grad_b, grad_c, grad_z = grad_by_token
        grad_shared = (grad_a.mT.to(a.dtype), grad_d.to(d.dtype), grad_bias.to(bias.dtype))
        grad_inputs = (
            grad_x,
            grad_dt,
            grad_shared[0],
            grad_b,
            grad_c,
            grad_shared[1],
            grad_z,
            grad_shared[2],
        )
        if not ctx.needs_input_grad[8]:
            return *grad_inputs, None, None
        return *grad_inputs, grad_state.mT.to(ctx.state_dtype), None


class _ScanChunk(NamedTuple):
    """A chunk in float32 or float64, tokens first, and channels last, as are all its states."""

    x: torch.Tensor
    """[C, B, D]."""
    dt: torch.Tensor
    """The time step after its softplus: [C, B, D]."""
    a: torch.Tensor
    """[S, D]."""
    b: torch.Tensor
    """[C, B, S]."""
    c: torch.Tensor
    """[C, B, S]."""
    decay: torch.Tensor
    """The share of the state before each token that is left at it: [C, B, S, D]."""


def _chunk(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor,
    starts: torch.Tensor | None,
    start: int,
) -> _ScanChunk:
    """Prepare the inputs of `selective_scan` from token `start` on."""
    x, dt, b, c = (_tokens_first(y, start) for y in (x, dt, b, c))
    dt, a = F.softplus(dt + wide(bias)), wide(a).mT.contiguous()
    decay = (dt[..., None, :] * a).exp_()
    if starts is not None:
        decay.masked_fill_(_tokens_first(starts, start)[..., None, None], 0)
    return _ScanChunk(x, dt, a, b, c, decay)


def _states(chunk: _ScanChunk, before: torch.Tensor) -> torch.Tensor:
    """Return the state after each token [C, B, S, D]; `before` [B, S, D] is that before them."""
    written = (chunk.dt * chunk.x)[..., None, :] * chunk.b[..., None]
    return pass_on(chunk.decay, written, before)


def _grad_states(
    chunk: _ScanChunk, grad_read: torch.Tensor, grad_after: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the state after each token [C, B, S, D].

    `grad_read` [C, B, D] is the gradient of what is read of the states; `grad_after` [B, S, D] that
    of the state after the last token, from later ones.
    """
    return pass_back(chunk.decay, grad_read[..., None, :] * chunk.c[..., None], grad_after)


# torch.compile does not look inside an operator: it would trace every token by itself.
@torch.library.custom_op("shardwise_scan::pass_on", mutates_args=())
def pass_on(decay: torch.Tensor, written: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the state after each token of `written` [C, B, S, D], from `before` [B, S, D] on."""
    states = torch.empty_like(written)
    for state, share, added in zip(states.unbind(), decay.unbind(), written.unbind()):
        before = torch.addcmul(added, share, before, out=state)
    return states


@torch.library.custom_op("shardwise_scan::pass_back", mutates_args=())
def pass_back(
    decay: torch.Tensor, grad_read: torch.Tensor, grad_after: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the state after each token, what later tokens give to it included.

    `grad_read` [C, B, S, D] is what each token's own read gives; `grad_after` [B, S, D] what tokens
    after these give to the last state.
    """
    grad_states = grad_read.clone()
    grad_states[-1] += grad_after
    pairs = zip(grad_states[:-1].unbind(), grad_states[1:].unbind(), decay[1:].unbind())
    for grad_state, grad_next, share in reversed(list(pairs)):
        grad_state.addcmul_(share, grad_next)
    return grad_states


@pass_on.register_fake
@pass_back.register_fake
def _like_the_second(
    decay: torch.Tensor, by_token: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(by_token)


def _read(chunk: _ScanChunk, states: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return the outputs before their gate: [C, B, D]."""
    return (chunk.c[..., None, :] @ states)[..., 0, :] + wide(d) * chunk.x


def _first_state(x: torch.Tensor, a: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    """Return the state before the first token: [B, S, D]."""
    if state is None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.new_zeros(x.shape[0], *a.mT.shape, dtype=dtype)
    return wide(state).mT.contiguous()


def _tokens_first(y: torch.Tensor, start: int) -> torch.Tensor:
    """Return a chunk of y [B, T, ...] as [C, B, ...]; the last chunk may be shorter."""
    y = y[:, start : start + CHUNK].transpose(0, 1)
    return y if y.dtype == torch.bool else wide(y).contiguous()
