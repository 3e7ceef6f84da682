// The product of a linear and its adapter in one sum, in blocks of 128 x 128, 4 warps of 64 x 64.
#pragma once

#include "dropout.cuh"
#include "tiles.cuh"

constexpr int PRODUCT_THREADS = 128, PRODUCT_TILE = 128, PRODUCT_DEPTH = 32, PRODUCT_STAGES = 4;
constexpr int PRODUCT_SHARED = PRODUCT_STAGES * 2 * PRODUCT_TILE * PRODUCT_DEPTH * 2;
constexpr int MOST_TERMS = 9;  // of a sum: an adapter, and 8 linears that share their input

struct Term {
    Matrix left;   // [rows, depth]
    Matrix right;  // [columns, depth], or transposed [depth, columns]
};

struct ProductArguments {
    Term terms[MOST_TERMS];
    int count;
    int adapter;       // 1: the first term is one; scale and dropout apply to its product alone
    float scale;       // with dropout, 1 / (1 - p) included
    Dropout dropout;   // of the elements of the first term's product
    const void* bias;  // [columns], or null
    int accumulate;    // 1: add to what `out` holds
    void* out;         // [rows, columns], rows `out_stride` apart
    int64_t out_stride;
    int rows, columns;
    int aligned;  // 1: bias and the rows of `out` begin at multiples of 16 bytes
};

// Copies up to 8 elements; 16 bytes at once if both places are aligned to them.
template <class T>
__device__ __forceinline__ void copy_elements(T* to, const T* from, int count, int aligned) {
    if (aligned && count == 8) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (e < count) to[e] = from[e];
    }
}

// Computes out = scale * dropout(left_0 right_0^T) + left_1 right_1^T + ... + bias. TRANSPOSED: the
// right matrices are stored transposed.
template <class T, bool TRANSPOSED>
__global__ void __launch_bounds__(PRODUCT_THREADS, 2) product_kernel(ProductArguments in) {
    using Left = Tile<PRODUCT_TILE, PRODUCT_DEPTH / 8>;
    constexpr int RIGHT_ROWS = TRANSPOSED ? PRODUCT_DEPTH : PRODUCT_TILE;
    constexpr int RIGHT_COLUMNS = TRANSPOSED ? PRODUCT_TILE : PRODUCT_DEPTH;
    using Right = Tile<RIGHT_ROWS, RIGHT_COLUMNS / 8>;
    SHARED_MEMORY(shared);
    // Blocks that run at the same time form squares of about 8 x 8: their operands stay in L2.
    int across = ceil_div(in.columns, PRODUCT_TILE), down = ceil_div(in.rows, PRODUCT_TILE);
    int group = blockIdx.x / (8 * across), within = blockIdx.x % (8 * across);
    int in_group = min(8, down - 8 * group);
    int row = (8 * group + within % in_group) * PRODUCT_TILE;
    int column = within / in_group * PRODUCT_TILE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warp_row = warp % 2 * 64, warp_column = warp / 2 * 64;

    auto steps_of = [&](int term) { return ceil_div(in.terms[term].left.columns, PRODUCT_DEPTH); };
    int steps = 0;
    for (int term = 0; term < in.count; term++) steps += steps_of(term);
    int term = 0, depth = 0;  // of the next copy

    auto fill = [&](int step) {
        if (step < steps) {
            uint8_t* stage = shared + step % PRODUCT_STAGES * (Left::BYTES + Right::BYTES);
            const Term& from = in.terms[term];
            Left::template fill<PRODUCT_THREADS>(stage, from.left, row, depth);
            int right_row = TRANSPOSED ? depth : column, right_column = TRANSPOSED ? column : depth;
            Right::template fill<PRODUCT_THREADS>(
                stage + Left::BYTES, from.right, right_row, right_column);
            depth += PRODUCT_DEPTH;
            if (depth >= from.left.columns) term++, depth = 0;
        }
        commit_copies();
    };

    float sums[4][8][4] = {};
    int adapter_steps = in.adapter ? steps_of(0) : 0;
    for (int step = 0; step < PRODUCT_STAGES - 1; step++) fill(step);
    for (int step = 0; step < steps; step++) {
        wait_copies<PRODUCT_STAGES - 2>();
        __syncthreads();
        fill(step + PRODUCT_STAGES - 1);
        const uint8_t* stage = shared + step % PRODUCT_STAGES * (Left::BYTES + Right::BYTES);
        const uint8_t* right_tile = stage + Left::BYTES;
#pragma unroll
        for (int k = 0; k < PRODUCT_DEPTH; k += 16) {
            uint32_t left[4][4], right[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++) Left::left(left[i], stage, warp_row + 16 * i, k / 8);
#pragma unroll
            for (int j = 0; j < 4; j++)
                if constexpr (TRANSPOSED)
                    Right::right_transposed(right[j], right_tile, k, warp_column / 8 + 2 * j);
                else
                    Right::right(right[j], right_tile, warp_column + 16 * j, k / 8);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const uint32_t* pair = right[j / 2] + j % 2 * 2;
                    multiply_add<T>(sums[i][j], left[i], pair[0], pair[1]);
                }
        }
        if (step + 1 != adapter_steps) continue;
        // Up to here the sums are those of the adapter alone.
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int m = min(row + warp_row + i / 2 * 16 + i % 2 * 8 + lane / 4, in.rows - 1);
            int32_t seed = in.dropout.seeds ? in.dropout.seeds[m] : 0;
#pragma unroll
            for (int j = 0; j < 16; j++) {
                int n = column + warp_column + j / 2 * 8 + lane % 4 * 2 + j % 2;
                n = min(n, in.columns - 1);
                bool kept = !in.dropout.seeds || in.dropout.keeps(seed, in.dropout.feature(n));
                float& sum = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
                sum = kept ? in.scale * sum : 0.0f;
            }
        }
    }
    // Through shared memory, so that whole rows of the block are written, 16 bytes per thread.
    wait_copies<0>();
    __syncthreads();
    using Sums = Tile<PRODUCT_TILE, PRODUCT_TILE / 4>;  // of float32, 4 in a chunk
    static_assert(Sums::BYTES <= PRODUCT_SHARED, "the sums take the place of the stages");
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int m = warp_row + i / 2 * 16 + i % 2 * 8 + lane / 4;
            int n = warp_column + j * 8 + lane % 4 * 2;
            float* to = reinterpret_cast<float*>(shared + Sums::offset(m, n / 4)) + n % 4;
            to[0] = sums[i / 2][j][i % 2 * 2], to[1] = sums[i / 2][j][i % 2 * 2 + 1];
        }
    __syncthreads();
    for (int i = threadIdx.x; i < PRODUCT_TILE * PRODUCT_TILE / 8; i += PRODUCT_THREADS) {
        int m = row + i / 16, n = column + i % 16 * 8, count = min(8, in.columns - n);
        if (m >= in.rows || count <= 0) continue;
        T* out = static_cast<T*>(in.out) + m * in.out_stride + n;
        const T* bias = in.bias ? static_cast<const T*>(in.bias) + n : nullptr;
        alignas(16) T added[2][8] = {};
        if (bias) copy_elements(added[0], bias, count, in.aligned);
        if (in.accumulate) copy_elements(added[1], out, count, in.aligned);
        alignas(16) T result[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
            int offset = Sums::offset(i / 16, i % 16 * 2 + e / 4);
            float sum = reinterpret_cast<const float*>(shared + offset)[e % 4];
            result[e] = narrow<T>(sum + widen(added[0][e]) + widen(added[1][e]));
        }
        copy_elements(out, result, count, in.aligned);
    }
}
