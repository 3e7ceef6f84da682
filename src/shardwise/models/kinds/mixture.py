"""Mixtures of experts.

Tensor parallelism shards the feed-forward width of every expert alike; routers are whole.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from shardwise.models.kinds import feed_forward
from shardwise.models.kinds.base import Kind
from shardwise.models.moves import SMALL, WIDE
from shardwise.models.operations import TapedBlock
from shardwise.models.tape import Tensor
from shardwise.models.tensor_cuts import (
    BlockSplit,
    DimCut,
    Rows,
    Segment,
    blocked,
    even,
    evenly,
    linear,
    unwrapped,
)

BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the bias on a router's scores that evens out the loads: a buffer."""


def split(block: Any, num_ranks: int) -> BlockSplit:
    """Shard routed experts, stacked [E, out, in] or [E, in, out], and one that is shared by all
    tokens.

    Rows of gate and up lie one after the other in one stack, or in pairs.
    """
    experts = unwrapped(block.experts)
    out, into = (2, 1) if experts.is_transposed else (1, 2)
    width, what = experts.down_proj.shape[into], "features of an expert"
    weights = {"experts.down_proj": DimCut(into, even(num_ranks, width, what))}
    up, rows = "experts.up_proj", even(num_ranks, width, what)
    if experts.has_gate:
        up, rows = "experts.gate_up_proj", blocked(num_ranks, (width, width), what)
        if not experts.is_concatenated:
            rows = even(num_ranks, 2 * width, what)
    weights[up] = DimCut(out, rows)
    if experts.has_bias:
        weights[f"{up}_bias"] = DimCut(1, rows)
    # Nemotron-H's experts have a narrower width of their own, out of which a linear leads.
    latent = unwrapped(getattr(block, "fc2_latent_proj", None))
    if getattr(latent, "bias", None) is not None:
        # Every rank holds it whole; it is called cut, so that its bias is added by one rank only.
        whole = Rows(num_ranks, (Segment(latent.in_features, 1),))
        weights |= linear(block, "fc2_latent_proj", "in", whole)
    shared = {"out": _shared(feed_forward.UP), "into": _shared(feed_forward.DOWN)}
    return BlockSplit(weights | evenly(block, num_ranks, feed_forward.FEATURES, **shared))


def activations(
    block: TapedBlock, x: Tensor, rounds_weights: bool = True, shared_first: bool = False
) -> Tensor:
    """Keep the input, the router's scores, and for each token and expert of it what an MLP keeps.

    Those are the rows sorted by expert, gate and product, their product, and the outputs.
    `rounds_weights`: what outputs count is rounded to the dtype of hidden states. `shared_first`:
    shared experts come before the routed ones, as a single one does in all families.
    """
    shared = [p for p in ("shared_expert", "shared_experts") if _has(block, p)]
    added = []
    for path in shared:
        if shared_first or path == "shared_expert":
            added.append(feed_forward.activations(block.within(path), x))
    weights, _logits = _routed(block, x, rounds_weights)  # named until the block returns
    hidden = x
    if _has(block, "fc1_latent_proj"):
        hidden = block.linear("fc1_latent_proj", hidden)
    out = _experts(block.within("experts"), block, hidden, weights)
    del hidden
    if _has(block, "fc2_latent_proj"):
        out = block.linear("fc2_latent_proj", out)
    for path in shared:
        if not (shared_first or path == "shared_expert"):
            added.append(feed_forward.activations(block.within(path), x))
    for term in added:
        if _has(block, "shared_expert_gate"):
            score = block.pointwise(block.linear("shared_expert_gate", x), keeps_outputs=True)
            term = block.product(score, term)
        out = block.sum(out, term)
    return out


def _has(block: TapedBlock, path: str) -> bool:
    return any(name.startswith(f"{path}.") for name in block.parameters)


def _routed(block: TapedBlock, x: Tensor, rounds_weights: bool) -> tuple[Tensor, Tensor]:
    """Return what the outputs of a token's experts count, [B*T, top_k], and the router's logits."""
    names = ("gate.weight", "router.weight", "router.gate.weight")
    name = next(name for name in names if name in block.parameters)
    num_experts = block.parameters[name].shape[0]
    is_ernie = "gate.moe_statics.e_score_correction_bias" in block.buffers
    is_wide = is_ernie or "gate.e_score_correction_bias" in block.buffers
    weight, hidden = block.weight(name), block.cast or x.itemsize
    if is_wide:
        x, weight = block.as_dtype(x, WIDE), block.as_dtype(weight, WIDE)
    itemsize = (not is_ernie and block.cast) or x.itemsize  # ERNIE's is outside of autocast
    x, weight = block.as_dtype(x, itemsize), block.as_dtype(weight, itemsize)
    keeps = [x] if weight.slot is not None else []
    if x.slot is not None:
        keeps.append(weight)
    numel = block.tokens * num_experts
    if (router := name.removesuffix(".weight")) in block.adapters:
        logits = block.linear(router, x)
    else:
        (logits,) = block.tape.run([x, weight], [(numel, x.itemsize)], keeps=keeps, product=True)
    has_bias = f"{router}.bias" in block.parameters
    # Granite's and gpt-oss' softmax is over the chosen ones.
    is_late = has_bias or hasattr(block.config, "logits_scaling")
    # LFM2's sigmoids are in the dtype of the logits, and so is gpt-oss' softmax.
    is_narrow = is_wide or has_bias or ("expert_bias" in block.buffers and name == "gate.weight")
    scores = logits if is_narrow else block.as_dtype(logits, WIDE)
    named = scores if is_late else logits
    if not is_late:
        scores = block.pointwise(scores, keeps_outputs=True)
    chosen = block.tape.tensor(block.tokens * block.top_k, 8)
    whole = scores.num_bytes
    # A bias is added; groups of experts are chosen, then experts of them.
    moves = [2 * whole, whole, *[SMALL] * 7, 2 * whole, whole, whole] if is_wide else [whole]
    moves = [2 * whole, whole] if is_ernie else moves
    size = [(block.tokens * block.top_k, scores.itemsize)]
    (top,) = block.tape.run(
        [scores], size, keeps=[chosen], forward_moves=moves, backward_moves=(whole, 2 * whole)
    )
    # A softmax, or a sum by which what was chosen is divided.
    moves, back = ([SMALL], [SMALL]) if is_late else ([SMALL] * 3, [SMALL] * 7)
    kept = [] if is_late else [top]
    options = {"forward_moves": moves, "backward_moves": back}
    top = block.pointwise(top, kept, keeps_outputs=is_late, **options)
    # What sigmoids give stays in 32 bits.
    if rounds_weights and (is_ernie or not is_wide):
        top = block.as_dtype(top, hidden)
    return top, named


def _experts(experts: TapedBlock, block: TapedBlock, x: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the experts' outputs; see models/routed_experts.py."""
    rows = block.tokens * block.top_k
    up = "gate_up_proj" if "gate_up_proj" in experts.parameters else "up_proj"
    is_turned = f"{up}_bias" in experts.parameters  # so are the stacks
    num_out, width = (experts.parameters[name].shape[1 + is_turned] for name in (up, "down_proj"))
    order = [block.tape.tensor(rows, 8) for _ in range(2)]
    named = [block.tape.tensor(num, 8) for num in (rows, block.tokens)]  # experts and documents
    size = [(rows * (x.numel // block.tokens), x.itemsize)]
    taken_bytes, sorting = size[0][0] * x.itemsize, [SMALL] * 12
    (taken,) = block.tape.run(
        [x],
        size,
        keeps=[order[0]],
        forward_moves=[*sorting, x.num_bytes + taken_bytes],
        backward_moves=(2 * taken_bytes, taken_bytes + x.num_bytes),
    )
    sent: list[Tensor] = []
    if block.spreads_experts:
        # Rows go to their experts' ranks, where they are sorted once more. What left and what came
        # stays until the outputs are back; only the sorted ones are kept.
        (received,) = block.tape.run([taken], size, forward_moves=(), backward_moves=())
        sent = [taken, received]
        del received
        order += [block.tape.tensor(rows, 8) for _ in range(2)]
        (taken,) = block.tape.run([sent[1]], size, keeps=[order[2]])
    hidden = _grouped(experts, up, taken, rows * num_out)
    del taken
    if hasattr(block.config, "swiglu_limit"):
        hidden = block.clamped_gate(hidden)
    elif up == "gate_up_proj":
        hidden = block.gated_silu(*block.split(hidden, (1, 1)))
    else:
        hidden = block.activation(hidden)
    y = _grouped(experts, "down_proj", hidden, rows * width)
    del hidden
    if block.spreads_experts:
        (y,) = block.tape.run([y], [(y.numel, y.itemsize)], keeps=[order[3]])
        (y,) = block.tape.run([y], [(y.numel, y.itemsize)], forward_moves=(), backward_moves=())
    del sent
    moved = 2 * y.num_bytes
    y = block.tape.run(
        [y], [(y.numel, y.itemsize)], keeps=[order[1]], forward_moves=(SMALL, moved)
    )[0]
    weighted = block.product(y, weights, repeats=block.top_k)
    out = block.tape.run([weighted], [(y.numel // block.top_k, weighted.itemsize)], passes=True)[0]
    del weighted, named
    return block.as_dtype(out, x.itemsize)


def _grouped(experts: TapedBlock, name: str, x: Tensor, numel: int) -> Tensor:
    """Return products of rows with their experts' weights, which keep the rows alone."""
    weight = experts.weight(name)
    x = experts.as_dtype(x, weight.itemsize)
    factors = experts.factors(name)
    # Adapters in another dtype are cast, all experts' at once, and kept so.
    cast = [experts.as_dtype(factor, weight.itemsize) for factor in factors]
    inputs = [x, weight, *cast]
    kept = [x, *(new for new, old in zip(cast, factors) if new is not old)]
    values, most = experts.parameters[name].reading(weight.itemsize)
    experts.tape.touch(most)
    back, sizes = max(values, most - x.num_bytes), [(numel, x.itemsize)]
    # The gradients of all experts' factors B lie apart in the parameter.
    copied = [2 * factor.num_bytes for factor in factors[1:]]
    (y,) = experts.tape.run(
        inputs,
        sizes,
        keeps=kept,
        forward=values,
        backward=back,
        product=True,
        backward_moves=(0, *copied),
    )
    if (bias := experts.parameters.get(f"{name}_bias")) is None:
        return y
    (added,) = experts.tape.run(
        [bias.on_tape],
        [(numel, y.itemsize)],
        keeps=[experts.tape.tensor(bias.shape[0], 8)],
        forward_moves=(*[SMALL] * 4, 2 * y.num_bytes),
        backward_moves=(y.num_bytes,),
    )
    moves = (3 * y.num_bytes,)
    return experts.tape.run([added, y], sizes, view=True, passes=True, forward_moves=moves)[0]


def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(
        f"{shared}.{name}" for shared in ("shared_expert", "shared_experts") for name in names
    )


MIXTURE = Kind(
    "moe",
    split=split,
    mixes_tokens=False,
    activations=activations,
    gating=("gate",),
    experts=("experts.gate_up_proj", "experts.down_proj"),
)
"""With routed experts, and `gate` for a router; others for all tokens may be added after them.

Some families balance the load by a bias that is added to the routers' scores to choose experts, not
by a loss. That bias (`e_score_correction_bias`, `expert_bias`) is a buffer: no gradient reaches it.
Training keeps it as it is in the base model, in LoRA and in full, and a saved model has it.
"""
SHARED_FIRST = replace(MIXTURE, activations=partial(activations, shared_first=True))
"""The same, whose shared experts come first."""
WIDE_WEIGHTS = replace(MIXTURE, activations=partial(activations, rounds_weights=False))
"""The same, whose router gives what an expert counts in 32 bits: Mixtral's."""
OF_AFMOE = replace(
    MIXTURE,
    activations=partial(activations, shared_first=True, rounds_weights=False),
    gates=("router.gate",),
    gating=("router.gate",),
)
"""The same, whose router has a linear."""
ROUTER = replace(MIXTURE, gating=("router",))
"""With routed experts alone, and `router` for a router."""
WITH_GATED_EXPERT = replace(
    MIXTURE, gates=("shared_expert_gate",), gating=("gate", "shared_expert_gate")
)
"""With an expert for all tokens, which a score of its own weighs."""
WITHOUT_GATES = replace(MIXTURE, experts=("experts.up_proj", "experts.down_proj"))
"""With experts of two matrices."""
