// A linear with a LoRA adapter in CUDA C++: y = x W^T + scale (x A^T) B^T, and the gradient of x.
//
//     make cuda-lora           builds build/cuda_lora, which compares both with float64 on a GPU
//
// The adapter's product is added into the same sums as the linear's, so that y is written once and
// never read. Each block computes TILE x TILE of the outputs with 4 warps of 32 x 32, each of which
// multiplies squares of 16 x 16 on the tensor cores. README.md says what a faster one adds.
#include <cuda_bf16.h>
#include <mma.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <type_traits>
#include <vector>

using bf16 = __nv_bfloat16;
namespace wmma = nvcuda::wmma;

constexpr int TILE = 64, DEPTH = 32, THREADS = 128, SQUARE = 16, WARP_TILE = 32;
constexpr int PAD = 8;  // Rows in shared memory begin in different banks.
template <class Use, class T, class... Layout>
using Fragment = wmma::fragment<Use, SQUARE, SQUARE, SQUARE, T, Layout...>;

// A product left [rows, depth] right^T, where right is [columns, depth] or, TRANSPOSED, stored as
// [depth, columns]. All matrices are row-major.
struct Product {
    const bf16 *left, *right;
    int depth;
};

// Copies a block of `height` x `width` of a matrix of `rows` x `columns` to shared memory, with
// zeros where the matrix has ended.
__device__ void copy_block(bf16* to, int height, int width, const bf16* from, int rows, int columns,
                           int first_row, int first_column) {
    for (int i = threadIdx.x; i < height * width; i += THREADS) {
        int row = first_row + i / width, column = first_column + i % width;
        bool is_inside = row < rows && column < columns;
        to[i / width * (width + PAD) + i % width] =
            is_inside ? from[(size_t)row * columns + column] : __float2bfloat16(0.0f);
    }
}

// Computes out [rows, columns] = scale * (the sum of `count` products).
template <bool TRANSPOSED>
__global__ void sum_of_products(Product first, Product second, int count, int rows, int columns,
                                float scale, bf16* out) {
    using Layout = typename std::conditional<TRANSPOSED, wmma::row_major, wmma::col_major>::type;
    constexpr int RIGHT_HEIGHT = TRANSPOSED ? DEPTH : TILE, RIGHT_WIDTH = TRANSPOSED ? TILE : DEPTH;
    __shared__ bf16 left_block[TILE * (DEPTH + PAD)];
    __shared__ bf16 right_block[RIGHT_HEIGHT * (RIGHT_WIDTH + PAD)];
    __shared__ float results[TILE * TILE];
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE, warp = threadIdx.x / 32;
    int warp_row = warp / 2 * WARP_TILE, warp_column = warp % 2 * WARP_TILE;

    Fragment<wmma::accumulator, float> sums[2][2];
    for (auto& line : sums)
        for (auto& sum : line) wmma::fill_fragment(sum, 0.0f);

    for (int term = 0; term < count; term++) {
        const Product in = term ? second : first;
        for (int k = 0; k < in.depth; k += DEPTH) {
            copy_block(left_block, TILE, DEPTH, in.left, rows, in.depth, row, k);
            if (TRANSPOSED)
                copy_block(right_block, DEPTH, TILE, in.right, in.depth, columns, k, column);
            else
                copy_block(right_block, TILE, DEPTH, in.right, columns, in.depth, column, k);
            __syncthreads();
            for (int inner = 0; inner < DEPTH; inner += SQUARE) {
                Fragment<wmma::matrix_a, bf16, wmma::row_major> left[2];
                Fragment<wmma::matrix_b, bf16, Layout> right[2];
                for (int i = 0; i < 2; i++) {
                    int at = (warp_row + SQUARE * i) * (DEPTH + PAD) + inner;
                    wmma::load_matrix_sync(left[i], left_block + at, DEPTH + PAD);
                    int place = warp_column + SQUARE * i;
                    at = TRANSPOSED ? inner * (TILE + PAD) + place : place * (DEPTH + PAD) + inner;
                    wmma::load_matrix_sync(right[i], right_block + at, RIGHT_WIDTH + PAD);
                }
                for (int i = 0; i < 2; i++)
                    for (int j = 0; j < 2; j++)
                        wmma::mma_sync(sums[i][j], left[i], right[j], sums[i][j]);
            }
            __syncthreads();  // The next blocks take the place of these.
        }
    }
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) {
            int at = (warp_row + SQUARE * i) * TILE + warp_column + SQUARE * j;
            wmma::store_matrix_sync(results + at, sums[i][j], TILE, wmma::mem_row_major);
        }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
        int m = row + i / TILE, n = column + i % TILE;
        if (m < rows && n < columns)
            out[(size_t)m * columns + n] = __float2bfloat16(scale * results[i]);
    }
}

template <bool TRANSPOSED>
void run(Product first, Product second, int count, int rows, int columns, float scale, bf16* out) {
    dim3 blocks((columns + TILE - 1) / TILE, (rows + TILE - 1) / TILE);
    auto kernel = sum_of_products<TRANSPOSED>;
    kernel<<<blocks, THREADS>>>(first, second, count, rows, columns, scale, out);
}

// The adapted linear: x [rows, in], W [out, in], A [rank, in], B [out, rank]; `low` [rows, rank] is
// what the narrow product is kept in.
struct Sizes {
    int rows, in, out, rank;
    float scale;
};

void forward(Sizes s, const bf16* x, const bf16* w, const bf16* a, const bf16* b, bf16* low,
             bf16* y) {
    run<false>({x, a, s.in}, {}, 1, s.rows, s.rank, s.scale, low);
    run<false>({x, w, s.in}, {low, b, s.rank}, 2, s.rows, s.out, 1.0f, y);
}

void input_gradient(Sizes s, const bf16* dy, const bf16* w, const bf16* a, const bf16* b, bf16* low,
                    bf16* dx) {
    run<true>({dy, b, s.out}, {}, 1, s.rows, s.rank, s.scale, low);
    run<true>({dy, w, s.out}, {low, a, s.rank}, 2, s.rows, s.in, 1.0f, dx);
}

// ------------------------------------------------------------------ compared with float64

void require(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "error: %s\n", cudaGetErrorString(error));
    std::exit(2);
}

struct Matrix {
    int rows, columns;
    bf16* data;  // managed memory, which the host reads after cudaDeviceSynchronize
    Matrix(int rows, int columns, double deviation = 0.0) : rows(rows), columns(columns) {
        require(cudaMallocManaged(&data, sizeof(bf16) * rows * columns));
        static std::mt19937 generator(0);
        std::normal_distribution<float> normal(0.0f, 1.0f);
        for (int i = 0; i < rows * columns; i++)
            data[i] = __float2bfloat16(deviation * normal(generator));
    }
    double at(int i, int j) const { return __bfloat162float(data[i * columns + j]); }
};

// Returns |computed - right| / |right| over all elements; `right` computes one of them in float64.
template <class Right>
double distance(const Matrix& computed, Right right) {
    double apart = 0.0, all = 0.0;
    for (int i = 0; i < computed.rows; i++)
        for (int j = 0; j < computed.columns; j++) {
            double expected = right(i, j);
            apart += std::pow(computed.at(i, j) - expected, 2), all += expected * expected;
        }
    return std::sqrt(apart / all);
}

int main() {
    Sizes s{200, 264, 136, 16, 2.0f};  // No multiples of a tile.
    Matrix x(s.rows, s.in, 1.0), dy(s.rows, s.out, 1.0), w(s.out, s.in, 0.06);
    Matrix a(s.rank, s.in, 0.06), b(s.out, s.rank, 0.25);
    Matrix low(s.rows, s.rank), y(s.rows, s.out), dx(s.rows, s.in);
    auto weight = [&](int o, int i) {  // W + scale B A
        double sum = 0.0;
        for (int r = 0; r < s.rank; r++) sum += b.at(o, r) * a.at(r, i);
        return w.at(o, i) + s.scale * sum;
    };
    std::vector<double> merged(s.out * s.in);
    for (int o = 0; o < s.out; o++)
        for (int i = 0; i < s.in; i++) merged[o * s.in + i] = weight(o, i);
    forward(s, x.data, w.data, a.data, b.data, low.data, y.data);
    input_gradient(s, dy.data, w.data, a.data, b.data, low.data, dx.data);
    require(cudaGetLastError());
    require(cudaDeviceSynchronize());
    double of_y = distance(y, [&](int t, int o) {
        double sum = 0.0;
        for (int i = 0; i < s.in; i++) sum += x.at(t, i) * merged[o * s.in + i];
        return sum;
    });
    double of_dx = distance(dx, [&](int t, int i) {
        double sum = 0.0;
        for (int o = 0; o < s.out; o++) sum += dy.at(t, o) * merged[o * s.in + i];
        return sum;
    });
    // The rounding of bfloat16 is at most 2^-8 of each element.
    bool is_right = of_y < 1.0 / 256 && of_dx < 1.0 / 256;
    std::printf("y: %.1e, dx: %.1e from float64: %s\n", of_y, of_dx, is_right ? "ok" : "wrong");
    return is_right ? 0 : 1;
}
