"""Bytes that each operator reads and writes within an operation of several: see `Moves` of tape.py.

Each function follows the code of one operation, operator by operator. `numel`: elements of its
input; `itemsize`: bytes of each; in between it computes in float32. Operators on one number a row
or a channel count as launched, with 0 bytes.
"""

from __future__ import annotations

from shardwise.models.tape import Moves

WIDE = 4
"""Bytes of a number in float32, in which norms, states and softmax are computed."""
SMALL = 0
"""Bytes of an operator on one number a row or a channel."""


def cast(numel: int, itemsize: int) -> list[int]:
    """Return the moves of a copy to float32 or back."""
    return [] if itemsize == WIDE else [numel * (itemsize + WIDE)]


def gated_norm(numel: int, itemsize: int, is_trained: bool) -> tuple[Moves, Moves]:
    """Return the moves of the forward and the backward of kernels/gated_norm/fused.py."""
    wide, copied = numel * WIDE, cast(numel, itemsize)
    root = [2 * wide, wide, SMALL, SMALL]
    forward = [*copied, *root, 2 * wide, 2 * wide, *copied, 2 * wide, 3 * wide, *copied]
    normed = [*copied, *copied, *copied, 2 * wide, 2 * wide]
    to_gate = [3 * wide, 2 * wide, 3 * wide, *copied]
    to_weight = [3 * wide, wide] if is_trained else []
    to_x = [2 * wide, 3 * wide, wide, 2 * wide, 3 * wide, 2 * wide, *copied]
    return forward, [*normed, *to_gate, 3 * wide, *to_weight, *to_x]


def convolution(
    numel: int, itemsize: int, width: int, *, bias: bool, silu: bool, is_trained: bool
) -> tuple[Moves, Moves]:
    """Return the moves of the forward and the backward of kernels/short_conv/shifted.py.

    `width`: taps, of all tokens at once.
    """
    wide, copied = numel * WIDE, cast(numel, itemsize)
    taps = [2 * wide, *[3 * wide] * (width - 1)]
    seen = [SMALL, numel * (itemsize + WIDE)]
    sums = [*taps, *[2 * wide] * bias]
    written = numel * (WIDE + itemsize)
    forward = [SMALL, *seen, *sums, *[2 * wide] * silu, written]
    to_z = [*copied, *seen, *[*sums, 3 * wide] * silu]
    to_taps = [3 * wide, wide, SMALL, SMALL] * width
    to_bias = [wide, SMALL]
    to_weights = [*to_taps, *to_bias * bias, SMALL] * is_trained
    to_x = [2 * wide, *taps, written]
    zeros = [SMALL] * (1 + is_trained + (bias and is_trained))
    return forward, [SMALL, *zeros, *to_z, *to_weights, *to_x]


def generated_convolution(numel: int, itemsize: int, width: int) -> tuple[Moves, Moves]:
    """Return the moves of the forward and the backward of kernels/dynamic_conv/shifted.py."""
    wide, copied, narrow = numel * WIDE, cast(numel, itemsize), numel * itemsize
    tap = [*copied, 2 * wide + narrow, 3 * wide]
    sums = [2 * narrow, wide, *tap * width]
    given = [2 * wide + narrow, wide + narrow, 2 * wide + narrow, 3 * wide, 2 * wide]
    forward = [*sums, 2 * wide, *copied]
    backward = [*copied, *sums, 3 * wide, 2 * narrow, wide, *given * width, 2 * wide, *copied]
    return forward, backward


def dropout(numel: int, itemsize: int) -> Moves:
    """Return the moves of models/patches/dropout.py: a hash of each feature and token, and of each
    number.
    """
    whole = 4 * numel  # int32
    mixed = [2 * whole, 2 * whole, 3 * whole, 2 * whole] * 2 + [2 * whole, 2 * whole, 3 * whole]
    kept = [whole + numel, numel + 2 * numel * itemsize, 2 * numel * itemsize]
    return [*[SMALL] * 13, whole, *mixed, *kept]


def loss_in_chunks(
    sizes: tuple[int, int, int],
    itemsizes: tuple[int, int, int],
    chunk: int,
    *,
    in_triton: bool,
    needs: tuple[bool, bool],
) -> tuple[Moves, Moves]:
    """Return the moves of the forward and the backward of kernels/linear_cross_entropy/chunked.py.

    `sizes`: tokens, their features, and the vocabulary. `itemsizes`: of hidden states, of products
    and of the weight. `chunk`: tokens at a time. `needs`: gradients of hidden states and weight.
    """
    (tokens, num_in, vocabulary), (hidden, itemsize, weight) = sizes, itemsizes
    num_chunks = -(-tokens // chunk)
    rows, logits = tokens * num_in // num_chunks, tokens * vocabulary // num_chunks
    softmax = [2 * logits * itemsize]
    if not in_triton:
        wide, copied = logits * WIDE, cast(logits, itemsize)
        softmax = [*copied, wide, 2 * wide, SMALL, 2 * wide, wide, SMALL, 2 * wide, SMALL, *copied]
        softmax += [SMALL] * 3  # the sum of the losses
    to_x = [0, rows * (itemsize + WIDE), 2 * rows * WIDE] if needs[0] else []
    to_weight = [0, 2 * rows * itemsize] if needs[1] else []
    zeros = [tokens * num_in * WIDE] * needs[0] + [vocabulary * num_in * WIDE] * needs[1]
    copies = [tokens * num_in * (hidden + itemsize)] * (hidden != itemsize)
    copies += [vocabulary * num_in * (weight + itemsize)] * (weight != itemsize)
    forward = [*copies, *zeros, *[0, *softmax, *to_x, *to_weight] * num_chunks]
    backward = list[int]()
    for is_needed, numel, narrow in zip(
        needs, (tokens * num_in, vocabulary * num_in), (hidden, weight), strict=True
    ):
        if is_needed:
            backward += [2 * numel * WIDE, *cast(numel, narrow)]
    return forward, backward
