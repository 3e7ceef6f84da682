"""Bytes that each operator reads and writes within an operation of several: see `Moves` of tape.py.

Each function follows the code of one operation, operator by operator. `numel`: elements of its
input; `itemsize`: bytes of each; in between it computes in float32. Operators on one number a row
or a channel count as launched, with 0 bytes.
"""

from collections.abc import Sequence

from shardwise.models.tape import Moves

WIDE = 4
"""Bytes of a number in float32, in which norms, states and softmax are computed."""
SMALL = 0
"""Bytes of an operator on one number a row or a channel."""


def cast(numel: int, itemsize: int) -> list[int]:
    """Return the moves of a copy to float32 or back."""
    return [] if itemsize == WIDE else [numel * (itemsize + WIDE)]


def rms_norm(numel: int, itemsize: int, trained: int, in_one: bool) -> tuple[Moves, Moves]:
    """Return the moves of the forward and the backward of kernels/rms_norm.

    `trained`: bytes of a number of its weight, to which its gradient is rounded; 0 of a frozen one.
    `in_one`: by liger_kernel, whose backward first fills its output with zeros.
    """
    wide, narrow, copied = numel * WIDE, numel * itemsize, cast(numel, itemsize)
    if in_one:
        return [2 * narrow], [narrow, 3 * narrow, *[SMALL] * 2 * (trained > 0)]
    to_weight = [wide + narrow, 3 * wide, wide, *[SMALL] * (trained < WIDE)] if trained else []
    forward = [*_root(narrow), narrow + wide, 2 * wide, *copied]
    return forward, [*copied, *copied, *to_weight, 2 * wide, *_grad_of_x(wide), *copied]


def gated_norm(numel: int, itemsize: int, trained: int, in_one: bool) -> tuple[Moves, Moves]:
    """Return the moves of the forward and the backward of kernels/gated_norm; see `rms_norm`.

    `in_one`: by fla, whose backward adds up the gradient of a frozen weight too.
    """
    wide, narrow, copied = numel * WIDE, numel * itemsize, cast(numel, itemsize)
    if in_one:
        return [3 * narrow], [5 * narrow, SMALL, SMALL]
    gated = [*copied, 2 * wide, 3 * wide, *copied]  # the activation, and its product
    forward = [*_root(narrow), narrow + wide, 2 * wide, *gated]
    given = [*copied, *copied, *copied, 2 * wide]
    to_gate = [2 * wide, 3 * wide, 2 * wide, 3 * wide, *copied]
    to_weight = [2 * wide, 3 * wide, wide, *[SMALL] * (trained < WIDE)] if trained else []
    to_x = [3 * wide, 2 * wide, *_grad_of_x(wide), *copied]
    return forward, [*given, *to_gate, *to_weight, *to_x]


def _root(read: int) -> list[int]:
    """Return the moves of the root of the mean square of each row."""
    return [read, SMALL, SMALL, SMALL, SMALL]


def _grad_of_x(wide: int) -> list[int]:
    """Return the moves of the gradient of x from that of x times its root."""
    return [3 * wide, wide, SMALL, SMALL, 3 * wide, 2 * wide]


def rotation(
    numel: int, rotated: int, angles: int, itemsize: int, wide: int, is_paired: bool
) -> Moves:
    """Return the moves of kernels/rotary/fused.py in a pass.

    `rotated`: elements that are turned, `angles`: of cosines. `wide`: bytes of a number in between.
    """
    x, turned = rotated * itemsize, rotated * wide
    added = turned + x // 2 + angles * wide // 2
    times_cosines = x + turned + angles * wide
    rounded = [x + turned] if wide != itemsize else []
    return [
        *([times_cosines // 2] * 2 if is_paired else [times_cosines]),
        added,
        added,
        *rounded,
        *[2 * numel * itemsize] * (rotated < numel),
    ]


def convolution(
    numel: int, itemsize: int, width: int, *, bias: bool, silu: bool, is_trained: bool, in_one: bool
) -> tuple[Moves, Moves]:
    """Return the moves of the forward and the backward of kernels/short_conv.

    `width`: taps, of all tokens at once. `in_one`: by fla, which computes what goes into silu once
    more, and adds up the gradients of frozen weights too.
    """
    if in_one:
        size = numel * itemsize
        return [2 * size], [*[2 * size] * silu, (3 + silu) * size, *[SMALL] * 2 * (1 + bias)]
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
    """Return the moves of models/slot_dropout.py: a hash of each feature and token, and of each
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


def attention_in_pieces(
    pieces: Sequence[tuple[int, int, bool]],
    is_capped: bool,
    heads: int,
    row: int,
    value_size: int,
    numels: tuple[int, int, int],
    itemsize: int,
) -> tuple[list[int], list[int]]:
    """Return the moves of kernels/attention/places.py, and those of its backward.

    `pieces`: queries and keys of an operator, and whether it has a mask; `heads`: of all rows;
    `row`: queries of a head; `numels`: of queries, keys and values. Scores that a cap changes are
    read and written one by one.
    """
    size = heads * row * value_size
    forward, backward = [size * WIDE, SMALL], [numel * WIDE for numel in (*numels, *numels[1:])]
    for num_queries, num_keys, is_masked in pieces:
        scores, share = heads * num_queries * num_keys * WIDE, num_queries / row
        out, narrow = int(size * share) * WIDE, int(size * share) * itemsize
        seen = num_queries * num_keys * is_masked
        mask = [*[SMALL] * 4, seen, seen, 3 * seen] * is_masked
        if not is_capped:
            mask += [seen * itemsize, 2 * seen, seen * (2 * itemsize + 1)] * is_masked
        forward += mask
        backward += mask
        shares = share, num_keys / row, num_keys / row
        q, k, v = (int(numel * part) for numel, part in zip(numels, shares, strict=True))
        if is_capped:
            forward += [*[2 * scores] * 6, *[scores] * 2, 2 * out, *[SMALL] * 5, 2 * narrow]
            backward += [*[2 * scores] * 10, *[3 * scores] * 2, *[SMALL] * 3, 2 * out + narrow]
            # Queries are copied to lie in the order of keys' heads, and 16 bits for a CPU.
            forward.append(2 * q * itemsize)
            backward += [*[2 * q * itemsize] * 2, *[2 * narrow] * 2]
            if itemsize < WIDE:
                forward += [*(n * (WIDE + itemsize) for n in (q, k, v)), out + narrow]
                backward += [n * (WIDE + itemsize) for n in (q, q, k, k, v)]
                backward += [out + narrow] * 3
        forward += [seen, *[SMALL] * 2, out + narrow] * is_masked
        forward += [*[SMALL] * 9, 2 * out, out + narrow, 3 * out]
        backward += [*[SMALL] * 3, *(3 * numel * WIDE for numel in (q, k, v))]
    backward += [3 * numel * WIDE for numel in numels[1:]]
    if itemsize < WIDE:
        forward.append(size * (WIDE + itemsize))
        backward += [numel * (WIDE + itemsize) for numel in (*numels, *numels[1:])]
    return forward, backward
