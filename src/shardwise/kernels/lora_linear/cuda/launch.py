"""Launch the CUDA kernels on tensors: cut products into blocks, and large ones into launches.

A matrix is read in place if one of its dims is contiguous, whatever the stride of the other. Rows
that do not begin at multiples of 16 bytes are read element by element, which is slow and exact. Any
other matrix, such as a gradient that was expanded from one number, is copied first. A mask is that
of one module here: its seeds are [rows].

Shapes: a tall matrix is x or dy [rows, columns]; a factor has few columns, R. In product.cuh, depth
is the dim that is summed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.kernels.dropout import Dropout, threshold
from shardwise.kernels.lora_linear.cuda.library import (
    MOST_TERMS,
    Columns,
    Drop,
    Matrix,
    Product,
    Rows,
    library,
)

MOST = 128
"""Columns of a factor in one launch; a wider one takes several, which all read the tall matrix."""
MOST_AT_ONCE = 32
"""The same in `rows_and_columns`, whose sums must fit into shared memory."""
TILE = 64


def rows(
    tall: torch.Tensor,
    factor: torch.Tensor,
    out: torch.Tensor,
    scale: float = 1.0,
    mask: Dropout | None = None,
) -> None:
    """Write out = scale * drop(tall) factor^T [rows, R]; tall [rows, depth], factor [R, depth]."""
    tall = _readable(tall)
    for first in range(0, len(factor), MOST):
        (part,), transposed = _oriented([factor[first : first + MOST]])
        out_part = out[:, first : first + MOST]
        arguments = Rows(
            *(_matrix(tall), _matrix(part), _drop(mask), _divided(scale, mask)),
            *(out_part.data_ptr(), out_part.stride(0)),
        )
        _launch("rows", arguments, tall, transposed)


def columns(
    tall: torch.Tensor,
    factor: torch.Tensor,
    scale: float = 1.0,
    mask: Dropout | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """Return scale * drop(tall)^T factor [columns, R] float32, or `transposed`, [R, columns].

    tall [rows, columns], factor [rows, R].
    """
    (num_rows, num_columns), rank = tall.shape, factor.shape[1]
    shape = (rank, num_columns) if transposed else (num_columns, rank)
    if num_rows == 0:
        return tall.new_zeros(shape, dtype=torch.float32)
    if rank > MOST:
        parts = [columns(tall, part, scale, mask, transposed) for part in factor.split(MOST, 1)]
        return torch.cat(parts, 0 if transposed else 1)
    tall, factor = _readable(tall), _readable(factor)
    row_tiles, column_tiles = _cdiv(num_rows, TILE), _cdiv(num_columns, TILE)
    # Four blocks per processor keep it busy. But the sums of a block are written and read again,
    # and must be few beside `tall`.
    blocks_wanted = _cdiv(4 * _processors(tall.device), column_tiles)
    row_blocks = min(blocks_wanted, max(1, num_rows // (32 * rank)))
    row_tiles_per_block = max(1, _cdiv(row_tiles, row_blocks))
    num_parts = _cdiv(row_tiles, row_tiles_per_block)
    out = tall.new_empty(num_parts, *shape, dtype=torch.float32)
    arguments = Columns(
        *(_matrix(tall), _matrix(factor), Matrix(), _drop(mask), _divided(scale, mask)),
        *(row_tiles_per_block, 1, out.data_ptr(), int(transposed), None),
    )
    _launch("columns", arguments, tall, False)
    return out[0] if len(out) == 1 else out.sum(0)


def rows_and_columns(
    tall: torch.Tensor, factor: torch.Tensor, other: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale * tall factor [rows, R] and scale * tall^T other [columns, R] float32.

    tall [rows, columns], factor [columns, R], other [rows, R]. A block that covers p rows and q
    columns of `tall` writes R (p + q) sums: both p and q are large, and about equal.
    """
    tall, factor, other = _readable(tall), _readable(factor), _readable(other)
    (num_rows, num_columns), rank = tall.shape, factor.shape[1]
    if num_rows == 0:
        return tall.new_empty(0, rank), tall.new_zeros(num_columns, rank, dtype=torch.float32)
    row_tiles = min(_most_row_tiles(tall.device), _cdiv(num_rows, TILE))
    row_blocks = _cdiv(num_rows, row_tiles * TILE)
    blocks_wanted = max(1, _processors(tall.device) // row_blocks)
    column_tiles = max(min(4, _cdiv(num_columns, TILE)), _cdiv(num_columns, TILE * blocks_wanted))
    column_blocks = _cdiv(num_columns, column_tiles * TILE)
    for_columns = tall.new_empty(row_blocks, num_columns, rank, dtype=torch.float32)
    for_rows = tall.new_empty(column_blocks, num_rows, rank, dtype=torch.float32)
    arguments = Columns(
        *(_matrix(tall), _matrix(other), _matrix(factor), Drop(), scale),
        *(row_tiles, column_tiles, for_columns.data_ptr(), 0, for_rows.data_ptr()),
    )
    _launch("columns", arguments, tall, True)
    return for_rows.sum(0).to(tall.dtype), for_columns.sum(0)


def product(
    out: torch.Tensor,
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float = 1.0,
    mask: Dropout | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Write out = scale * drop(left_0 right_0^T) + left_1 right_1^T + ... + bias [rows, columns].

    terms: left [rows, depth] and right [columns, depth]; each term may have another depth.
    `accumulate`: add to what `out` holds.
    """
    assert len(terms) <= MOST_TERMS, f"{len(terms) - 1} linears of one input"
    lefts = [_readable(left) for left, _ in terms]
    rights, transposed = _oriented([right for _, right in terms])
    bias = None if bias is None else bias.contiguous()
    arguments = Product(
        count=len(terms),
        adapter=1,
        scale=_divided(scale, mask),
        dropout=_drop(mask),
        bias=None if bias is None else bias.data_ptr(),
        accumulate=int(accumulate),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        rows=out.shape[0],
        columns=out.shape[1],
        aligned=int(_aligned(out) and (bias is None or bias.data_ptr() % 16 == 0)),
    )
    for term, left, right in zip(arguments.terms, lefts, rights):
        term.left, term.right = _matrix(left), _matrix(right)
    _launch("product", arguments, out, transposed)


def _oriented(matrices: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Return the matrices, or all transposed, whichever is contiguous in rows, and which it is.

    The last one, which is the largest, decides.
    """
    transposed = matrices[-1].stride(1) != 1 and matrices[-1].stride(0) == 1
    return [_readable(matrix.t() if transposed else matrix) for matrix in matrices], transposed


def _readable(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix, or a copy of it, with contiguous rows."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _matrix(matrix: torch.Tensor) -> Matrix:
    return Matrix(matrix.data_ptr(), matrix.stride(0), *matrix.shape, int(_aligned(matrix)))


def _aligned(matrix: torch.Tensor) -> bool:
    """Return whether all rows begin at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and (matrix.stride(0) * matrix.itemsize) % 16 == 0


def _drop(mask: Dropout | None) -> Drop:
    if mask is None:
        return Drop()
    features = mask.features
    assert mask.seeds.is_contiguous()
    assert features is None or features.is_contiguous()
    feature_pointer = None if features is None else features.data_ptr()
    return Drop(mask.seeds.data_ptr(), feature_pointer, threshold(mask.p))


def _divided(scale: float, mask: Dropout | None) -> float:
    """Return the scale of a sum of elements that a mask keeps."""
    return scale if mask is None else scale / (1.0 - mask.p)


def _launch(
    name: str, arguments: Rows | Columns | Product, tensor: torch.Tensor, variant: bool
) -> None:
    """Launch a kernel on the device of `tensor`, unless it has no rows."""
    if len(tensor):
        with torch.cuda.device_of(tensor):
            library(tensor.device).launch(name, arguments, tensor, variant)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _most_row_tiles(device: torch.device) -> int:
    """Return how many row tiles a block of `rows_and_columns` may have: at most 8.

    Shared memory holds 8 KiB of sums per tile, beside 72 KiB for copies. More than 8 gain little.
    """
    shared_bytes = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return min(8, (shared_bytes - 72 * 1024) // 8192)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
