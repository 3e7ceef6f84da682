"""From tensors to launches: how a product is cut into blocks, and into launches where a kernel takes no more.

A matrix is read in place as long as one of its dimensions is contiguous, whatever the other's stride; rows that do not
begin at 16 bytes are read element by element, which is slow and exact. Anything else (a gradient that was expanded
from one number) is copied first, since a kernel has no way to read it in whole words. A mask is of one module: its
seeds are [M].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.kernels.dropout import Dropout, threshold
from shardwise.kernels.lora_linear.cuda.library import MOST_TERMS, Columns, Drop, Matrix, Product, Rows, library

MOST = 128
"""Columns of a factor that one launch takes; for more, the tall matrix is read again."""
MOST_AT_ONCE = 32
"""The same where the tall matrix is multiplied from both sides: its sums must fit in shared memory."""
TILE = 64


def rows(
    tall: torch.Tensor, factor: torch.Tensor, out: torch.Tensor, scale: float = 1.0, mask: Dropout | None = None
) -> None:
    """Write out [M, R] = scale * drop(tall) factor^T, of tall [M, D] and factor [R, D]."""
    tall = _readable(tall)
    for first in range(0, len(factor), MOST):
        part, transposed = _oriented([factor[first : first + MOST]])
        own = out[:, first : first + MOST]
        arguments = Rows(
            _matrix(tall), _matrix(part[0]), _drop(mask), _divided(scale, mask), own.data_ptr(), own.stride(0)
        )
        _launch("rows", arguments, tall, transposed)


def columns(
    tall: torch.Tensor, factor: torch.Tensor, scale: float = 1.0, mask: Dropout | None = None, transposed: bool = False
) -> torch.Tensor:
    """Give scale * drop(tall)^T factor, [N, R] float32, or its transpose, of tall [M, N] and factor [M, R]."""
    (m, n), rank = tall.shape, factor.shape[1]
    if m == 0:
        return tall.new_zeros((rank, n) if transposed else (n, rank), dtype=torch.float32)
    if rank > MOST:
        parts = [columns(tall, part, scale, mask, transposed) for part in factor.split(MOST, 1)]
        return torch.cat(parts, 0 if transposed else 1)
    tall, factor = _readable(tall), _readable(factor)
    row_tiles, across = _cdiv(m, TILE), _cdiv(n, TILE)
    # Four blocks a processor keep it busy; but the sums of each, written and read, shall be few beside `tall`.
    splits = min(_cdiv(4 * _processors(tall.device), across), max(1, m // (32 * rank)))
    a_block = max(1, _cdiv(row_tiles, splits))
    shape = (rank, n) if transposed else (n, rank)
    out = tall.new_empty(_cdiv(row_tiles, a_block), *shape, dtype=torch.float32)
    arguments = Columns(
        *(_matrix(tall), _matrix(factor), Matrix(), _drop(mask), _divided(scale, mask)),
        *(a_block, 1, out.data_ptr(), int(transposed), None),
    )
    _launch("columns", arguments, tall, False)
    return out[0] if len(out) == 1 else out.sum(0)


def rows_and_columns(
    tall: torch.Tensor, factor: torch.Tensor, other: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give scale * tall factor, [M, R], and scale * tall^T other, [N, R] float32, of factor [N, R] and other [M, R].

    A block that has p rows and q columns of `tall` writes R (p + q) sums: both are large, and about alike.
    """
    tall, factor, other = _readable(tall), _readable(factor), _readable(other)
    (m, n), rank = tall.shape, factor.shape[1]
    if m == 0:
        return tall.new_empty(0, rank), tall.new_zeros(n, rank, dtype=torch.float32)
    row_tiles = min(_most_row_tiles(tall.device), _cdiv(m, TILE))
    down = _cdiv(m, row_tiles * TILE)
    column_tiles = max(min(4, _cdiv(n, TILE)), _cdiv(n, TILE * max(1, _processors(tall.device) // down)))
    across = _cdiv(n, column_tiles * TILE)
    for_columns = tall.new_empty(down, n, rank, dtype=torch.float32)
    for_rows = tall.new_empty(across, m, rank, dtype=torch.float32)
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
    """Write out [M, N] = scale * drop(left_0 right_0^T) + left_1 right_1^T + ... + bias.

    left [M, D], right [N, D]; D may be another one in each term. `accumulate`: add to what `out` has.
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
    """Matrices as they lie in memory, all alike, and whether that is transposed. The last one, the largest, decides."""
    transposed = matrices[-1].stride(1) != 1 and matrices[-1].stride(0) == 1
    return [_readable(matrix.t() if transposed else matrix) for matrix in matrices], transposed


def _readable(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _matrix(matrix: torch.Tensor) -> Matrix:
    return Matrix(matrix.data_ptr(), matrix.stride(0), *matrix.shape, int(_aligned(matrix)))


def _aligned(matrix: torch.Tensor) -> bool:
    return matrix.data_ptr() % 16 == 0 and (matrix.stride(0) * matrix.itemsize) % 16 == 0


def _drop(mask: Dropout | None) -> Drop:
    if mask is None:
        return Drop()
    assert mask.seeds.is_contiguous()
    assert mask.features is None or mask.features.is_contiguous()
    return Drop(mask.seeds.data_ptr(), None if mask.features is None else mask.features.data_ptr(), threshold(mask.p))


def _divided(scale: float, mask: Dropout | None) -> float:
    return scale if mask is None else scale / (1.0 - mask.p)


def _launch(name: str, arguments: Rows | Columns | Product, tensor: torch.Tensor, variant: bool) -> None:
    """Where the tensor is; of no rows, nothing."""
    if len(tensor):
        with torch.cuda.device_of(tensor):
            library(tensor.device).launch(name, arguments, tensor, variant)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _most_row_tiles(device: torch.device) -> int:
    """8 KiB of sums for each in shared memory, beside 72 KiB for copies: 8 at most, of which more gain little."""
    return min(8, (torch.cuda.get_device_properties(device).shared_memory_per_block_optin - 72 * 1024) // 8192)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
