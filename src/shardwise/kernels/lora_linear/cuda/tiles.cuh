// Tiles of matrices in shared memory: how they are laid out, filled and read.
#pragma once

#include "device.cuh"

__host__ __device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// A matrix of 16-bit elements in global memory, rows `stride` elements apart. `aligned`: every row
// begins at a multiple of 16 bytes and can be copied asynchronously; others are copied element by
// element.
struct Matrix {
    const void* data;
    int64_t stride;
    int rows, columns;
    int aligned;
};

// ROWS x (8 CHUNKS) elements, in chunks of 16 bytes. Chunks trade places within a line of 128 bytes
// by the row's number, so that the 8 rows that ldmatrix reads at once lie in different banks.
template <int ROWS_, int CHUNKS_>
struct Tile {
    static constexpr int ROWS = ROWS_, CHUNKS = CHUNKS_, BYTES = ROWS * CHUNKS * 16;
    static constexpr int WAYS = CHUNKS < 8 ? CHUNKS : 8, ROWS_A_LINE = 8 / WAYS;

    static __device__ __forceinline__ int offset(int row, int chunk) {
        return (row * CHUNKS + (chunk ^ ((row / ROWS_A_LINE) & (WAYS - 1)))) * 16;
    }

    // Starts to copy the part of `from` that begins at (row, column); fills with 0 beyond its
    // edges.
    template <int THREADS>
    static __device__ __forceinline__ void fill(
        uint8_t* tile, const Matrix& from, int row, int column) {
        const uint16_t* data = static_cast<const uint16_t*>(from.data);
        // The number of elements of chunk i that lie within `from`.
        auto count = [&](int i) {
            if (row + i / CHUNKS >= from.rows) return 0;
            return max(0, min(8, from.columns - column - i % CHUNKS * 8));
        };
        auto source = [&](int i) {
            return data + (row + i / CHUNKS) * from.stride + column + i % CHUNKS * 8;
        };
        if (from.aligned) {
            for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS)
                copy_async(
                    tile + offset(i / CHUNKS, i % CHUNKS),
                    count(i) > 0 ? source(i) : data,
                    2 * count(i));
        } else {
            for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
                uint8_t* chunk = tile + offset(i / CHUNKS, i % CHUNKS);
                uint16_t* elements = reinterpret_cast<uint16_t*>(chunk);
                for (int e = 0; e < 8; e++) elements[e] = e < count(i) ? source(i)[e] : 0;
            }
        }
    }

    // Reads the left operand, 16 x 16, that begins at (row, 8 chunk).
    static __device__ __forceinline__ void left(
        uint32_t (&to)[4], const uint8_t* tile, int row, int chunk) {
        int lane = threadIdx.x % 32;
        load_matrices(to, tile + offset(row + lane % 16, chunk + lane / 16));
    }

    // Reads the transpose of the operand at (row, 8 chunk): [column, row].
    static __device__ __forceinline__ void left_transposed(
        uint32_t (&to)[4], const uint8_t* tile, int row, int chunk) {
        int lane = threadIdx.x % 32;
        int from_row = row + lane % 8 + lane / 16 * 8;
        load_matrices_transposed(to, tile + offset(from_row, chunk + lane / 8 % 2));
    }

    // Reads two right operands, 16 x 8 each and side by side, at (row, 8 chunk) of a tile that
    // holds [column, depth].
    static __device__ __forceinline__ void right(
        uint32_t (&to)[4], const uint8_t* tile, int row, int chunk) {
        int lane = threadIdx.x % 32;
        load_matrices(to, tile + offset(row + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
    }

    // The same for a tile that holds [depth, column].
    static __device__ __forceinline__ void right_transposed(
        uint32_t (&to)[4], const uint8_t* tile, int row, int chunk) {
        int lane = threadIdx.x % 32;
        load_matrices_transposed(to, tile + offset(row + lane % 16, chunk + lane / 16));
    }
};
