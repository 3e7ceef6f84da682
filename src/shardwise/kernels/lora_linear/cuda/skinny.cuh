// Products with a factor of at most 128 columns. Reading the tall matrix limits them; it is read
// once.
//
// A block has 8 warps: 4 along the 64 rows (or columns) of its tile, 2 along the dim that is summed
// over. The sums of the second four are added to those of the first through shared memory, and so
// in a fixed order.
#pragma once

#include "dropout.cuh"
#include "tiles.cuh"

constexpr int SKINNY_THREADS = 256, SKINNY_TILE = 64, SKINNY_STAGES = 4;

// Blocks that a multiprocessor should hold. R is the columns of the factor, rounded up to a power
// of two.
template <int R>
constexpr int SKINNY_BLOCKS = R <= 32 ? 3 : R <= 64 ? 2 : 1;

// Adds the sums of warps 4 to 7, R / 8 of 16 x 8 elements each, to those of warps 0 to 3. `shared`
// has 256 R bytes.
template <int R>
__device__ __forceinline__ void add_halves(float (&sums)[R / 8][4], uint8_t* shared) {
    float4* exchange = reinterpret_cast<float4*>(shared);
    int thread = threadIdx.x % 128;
    if (threadIdx.x >= 128)
#pragma unroll
        for (int j = 0; j < R / 8; j++)
            exchange[j * 128 + thread] =
                make_float4(sums[j][0], sums[j][1], sums[j][2], sums[j][3]);
    __syncthreads();
    if (threadIdx.x < 128)
#pragma unroll
        for (int j = 0; j < R / 8; j++) {
            float4 other = exchange[j * 128 + thread];
            sums[j][0] += other.x, sums[j][1] += other.y;
            sums[j][2] += other.z, sums[j][3] += other.w;
        }
}

struct RowsArguments {
    Matrix tall;    // [rows, depth]
    Matrix factor;  // [R, depth], or transposed [depth, R]
    Dropout dropout;
    float scale;
    void* out;  // [rows, R], rows `out_stride` apart
    int64_t out_stride;
};

// Computes out = scale * dropout(tall) factor^T, in the dtype of the operands.
template <class T, int R, bool TRANSPOSED>
__global__ void __launch_bounds__(SKINNY_THREADS, SKINNY_BLOCKS<R>) rows_kernel(RowsArguments in) {
    using Tall = Tile<SKINNY_TILE, 8>;
    using Factor = Tile<TRANSPOSED ? SKINNY_TILE : R, TRANSPOSED ? R / 8 : 8>;
    constexpr int STAGES = SKINNY_STAGES, STAGE_BYTES = Tall::BYTES + Factor::BYTES;
    SHARED_MEMORY(shared);
    int row = blockIdx.x * SKINNY_TILE, steps = ceil_div(in.tall.columns, SKINNY_TILE);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warp_offset = warp % 4 * 16, half = warp / 4;

    auto fill = [&](int step) {
        if (step < steps) {
            uint8_t* stage = shared + step % STAGES * STAGE_BYTES;
            int depth = step * SKINNY_TILE;
            Tall::template fill<SKINNY_THREADS>(stage, in.tall, row, depth);
            Factor::template fill<SKINNY_THREADS>(
                stage + Tall::BYTES, in.factor, TRANSPOSED ? depth : 0, TRANSPOSED ? 0 : depth);
        }
        commit_copies();
    };

    float sums[R / 8][4] = {};
    int32_t seeds[2] = {};
    int first = row + warp_offset + lane / 4;  // the first of this lane's two rows, 8 apart
    if (in.dropout.seeds)
        for (int i = 0; i < 2; i++)
            seeds[i] = in.dropout.seeds[min(first + 8 * i, in.tall.rows - 1)];
    for (int step = 0; step < STAGES - 1; step++) fill(step);
    for (int step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        fill(step + STAGES - 1);
        const uint8_t* stage = shared + step % STAGES * STAGE_BYTES;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            int depth = half * 32 + part * 16;
            uint32_t left[4];
            Tall::left(left, stage, warp_offset, depth / 8);
            if (in.dropout.seeds)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int k = step * SKINNY_TILE + depth + lane % 4 * 2 + i / 2 * 8;
                    int last = in.tall.columns - 1;
                    uint32_t feature = in.dropout.feature(min(k, last));
                    uint32_t next = in.dropout.feature(min(k + 1, last));
                    bool low = in.dropout.keeps(seeds[i % 2], feature);
                    left[i] = keep_pair(left[i], low, in.dropout.keeps(seeds[i % 2], next));
                }
#pragma unroll
            for (int j = 0; j < R / 16; j++) {
                uint32_t right[4];
                if constexpr (TRANSPOSED)
                    Factor::right_transposed(right, stage + Tall::BYTES, depth, 2 * j);
                else
                    Factor::right(right, stage + Tall::BYTES, 16 * j, depth / 8);
                multiply_add<T>(sums[2 * j], left, right[0], right[1]);
                multiply_add<T>(sums[2 * j + 1], left, right[2], right[3]);
            }
        }
    }
    wait_copies<0>();
    __syncthreads();
    add_halves<R>(sums, shared);
    if (half == 1) return;
    int rank = TRANSPOSED ? in.factor.columns : in.factor.rows;
    T* out = static_cast<T*>(in.out);
#pragma unroll
    for (int j = 0; j < R / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int m = first + i / 2 * 8, r = j * 8 + lane % 4 * 2 + i % 2;
            if (m < in.tall.rows && r < rank)
                out[m * in.out_stride + r] = narrow<T>(in.scale * sums[j][i]);
        }
}

struct ColumnsArguments {
    Matrix tall;    // [rows, columns]
    Matrix factor;  // [rows, R]
    Matrix other;   // [columns, R]; only WITH_ROWS
    Dropout dropout;
    float scale;
    int row_tiles, column_tiles;  // tiles of 64 in a block
    float* columns_out;           // [row blocks, columns, R], contiguous
    int transposed;               // 1: columns_out is [row blocks, R, columns]
    float* rows_out;              // [column blocks, rows, R], contiguous; only WITH_ROWS
};

constexpr int ROWS_R = 32;  // columns of a factor WITH_ROWS, at most
constexpr int ROWS_SUMS_BYTES = SKINNY_TILE * ROWS_R * 4;  // of one tile

// Computes, for each block's part of `tall`, columns_out = scale * dropout(tall)^T factor and,
// WITH_ROWS, rows_out = scale * tall other. The caller adds up over the blocks of rows, and over
// those of columns.
//
// A block goes down one column of tiles after the other. Its sums for columns are in registers. Its
// sums for rows are in shared memory, where each thread has a place that no other adds to.
template <class T, int R, bool WITH_ROWS>
__global__ void __launch_bounds__(SKINNY_THREADS, SKINNY_BLOCKS<R>)
    columns_kernel(ColumnsArguments in) {
    static_assert(!WITH_ROWS || R == ROWS_R, "two warps share 32 columns");
    using Tall = Tile<SKINNY_TILE, 8>;
    using Factor = Tile<SKINNY_TILE, R / 8>;
    constexpr int STAGES = SKINNY_STAGES;
    constexpr int STAGE_BYTES = Tall::BYTES + (WITH_ROWS ? 2 : 1) * Factor::BYTES;
    SHARED_MEMORY(shared);
    // WITH_ROWS, halves are added while copies are under way, so the exchange has its own memory.
    uint8_t* exchange = shared + (WITH_ROWS ? STAGES * STAGE_BYTES : 0);
    float4* rows_sums = reinterpret_cast<float4*>(exchange + 256 * R) + threadIdx.x;
    int first_row = blockIdx.y * in.row_tiles * SKINNY_TILE;
    int first_column = blockIdx.x * in.column_tiles * SKINNY_TILE;
    int row_tiles = min(in.row_tiles, ceil_div(in.tall.rows - first_row, SKINNY_TILE));
    int columns_left = in.tall.columns - first_column;
    int column_tiles = min(in.column_tiles, ceil_div(columns_left, SKINNY_TILE));
    int steps = row_tiles * column_tiles, rank = in.factor.columns;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int warp_offset = warp % 4 * 16, half = warp / 4;

    auto fill = [&](int step) {
        if (step < steps) {
            uint8_t* stage = shared + step % STAGES * STAGE_BYTES;
            int row = first_row + step % row_tiles * SKINNY_TILE;
            int column = first_column + step / row_tiles * SKINNY_TILE;
            Tall::template fill<SKINNY_THREADS>(stage, in.tall, row, column);
            Factor::template fill<SKINNY_THREADS>(stage + Tall::BYTES, in.factor, row, 0);
            if constexpr (WITH_ROWS)
                Factor::template fill<SKINNY_THREADS>(
                    stage + Tall::BYTES + Factor::BYTES, in.other, column, 0);
        }
        commit_copies();
    };

    if constexpr (WITH_ROWS)
        for (int i = 0; i < 2 * row_tiles; i++)
            rows_sums[i * SKINNY_THREADS] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float sums[R / 8][4] = {};
    for (int step = 0; step < STAGES - 1; step++) fill(step);
    for (int step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        fill(step + STAGES - 1);
        const uint8_t* stage = shared + step % STAGES * STAGE_BYTES;
        int tile = step % row_tiles, column = first_column + step / row_tiles * SKINNY_TILE;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            int depth = half * 32 + part * 16;
            uint32_t left[4];
            Tall::left_transposed(left, stage, depth, warp_offset / 8);
            if (in.dropout.seeds)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int m = first_row + tile * SKINNY_TILE + depth + lane % 4 * 2 + i / 2 * 8;
                    int n = column + warp_offset + lane / 4 + i % 2 * 8, last = in.tall.rows - 1;
                    uint32_t feature = in.dropout.feature(min(n, in.tall.columns - 1));
                    bool low = in.dropout.keeps(in.dropout.seeds[min(m, last)], feature);
                    bool high = in.dropout.keeps(in.dropout.seeds[min(m + 1, last)], feature);
                    left[i] = keep_pair(left[i], low, high);
                }
#pragma unroll
            for (int j = 0; j < R / 16; j++) {
                uint32_t right[4];
                Factor::right_transposed(right, stage + Tall::BYTES, depth, 2 * j);
                multiply_add<T>(sums[2 * j], left, right[0], right[1]);
                multiply_add<T>(sums[2 * j + 1], left, right[2], right[3]);
            }
        }
        if constexpr (WITH_ROWS) {
            // Here both warps of a pair sum over the whole depth, for 16 of the 32 columns each.
            float added[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float4 before = rows_sums[(2 * tile + j) * SKINNY_THREADS];
                added[j][0] = before.x, added[j][1] = before.y;
                added[j][2] = before.z, added[j][3] = before.w;
            }
#pragma unroll
            for (int depth = 0; depth < SKINNY_TILE; depth += 16) {
                uint32_t left[4], right[4];
                Tall::left(left, stage, warp_offset, depth / 8);
                Factor::right_transposed(
                    right, stage + Tall::BYTES + Factor::BYTES, depth, 2 * half);
                multiply_add<T>(added[0], left, right[0], right[1]);
                multiply_add<T>(added[1], left, right[2], right[3]);
            }
#pragma unroll
            for (int j = 0; j < 2; j++)
                rows_sums[(2 * tile + j) * SKINNY_THREADS] =
                    make_float4(added[j][0], added[j][1], added[j][2], added[j][3]);
        }
        if (tile + 1 < row_tiles) continue;
        if constexpr (!WITH_ROWS) {  // there is one column of tiles: these were the last copies
            wait_copies<0>();
            __syncthreads();
        }
        add_halves<R>(sums, exchange);
        if (half == 0)
#pragma unroll
            for (int j = 0; j < R / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int64_t n = column + warp_offset + lane / 4 + i / 2 * 8;
                    int r = j * 8 + lane % 4 * 2 + i % 2;
                    int64_t place = in.transposed ? r * int64_t(in.tall.columns) + n : n * rank + r;
                    int64_t block = blockIdx.y * int64_t(in.tall.columns) * rank;
                    if (n < in.tall.columns && r < rank)
                        in.columns_out[block + place] = in.scale * sums[j][i];
                }
#pragma unroll
        for (int j = 0; j < R / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[j][i] = 0.0f;
    }
    if constexpr (WITH_ROWS)
        for (int tile = 0; tile < row_tiles; tile++)
            for (int j = 0; j < 2; j++) {
                float4 total = rows_sums[(2 * tile + j) * SKINNY_THREADS];
                float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int64_t m = first_row + tile * SKINNY_TILE + warp_offset + lane / 4 + i / 2 * 8;
                    int r = 16 * half + 8 * j + lane % 4 * 2 + i % 2;
                    int64_t block = blockIdx.x * int64_t(in.tall.rows);
                    if (m < in.tall.rows && r < rank)
                        in.rows_out[(block + m) * rank + r] = in.scale * values[i];
                }
            }
}
