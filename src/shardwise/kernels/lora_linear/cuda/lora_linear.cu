// The kernels as a library with a C interface. It takes device pointers, the number of their device
// and a stream of that device, and returns a CUDA error code (0: success).
#include "product.cuh"
#include "skinny.cuh"

namespace {

struct Place {
    int device;
    void* stream;
};

template <class Arguments>
using Kernel = void (*)(Arguments);

template <class Arguments>
int launch(
    Kernel<Arguments> kernel, dim3 blocks, int threads, int shared_bytes, const Arguments& in,
    Place place) {
    cudaError_t error = cudaSetDevice(place.device);  // this library has a CUDA runtime of its own
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(
            reinterpret_cast<const void*>(kernel),
            cudaFuncAttributeMaxDynamicSharedMemorySize,
            shared_bytes);
    if (error == cudaSuccess) {
        LAUNCH(kernel, blocks, threads, shared_bytes, static_cast<cudaStream_t>(place.stream), in);
        error = cudaGetLastError();
    }
    return error;
}

// Calls `run` with the smallest of 16, 32, 64 and 128 that is at least `rank`, as a type.
template <int R>
struct Columns {};

template <class Run>
int by_rank(int rank, Run run) {
    if (rank <= 16) return run(Columns<16>());
    if (rank <= 32) return run(Columns<32>());
    if (rank <= 64) return run(Columns<64>());
    return rank <= 128 ? run(Columns<128>()) : cudaErrorInvalidValue;
}

template <class Run>
int by_type(int bfloat16, Run run) {
    return bfloat16 ? run(BFloat16()) : run(Float16());
}

}  // namespace

extern "C" {

int lora_sizes(int64_t* sizes) {
    sizes[0] = sizeof(RowsArguments);
    sizes[1] = sizeof(ColumnsArguments);
    sizes[2] = sizeof(ProductArguments);
    return cudaSuccess;
}

// Returns an error if the driver is older than this toolkit.
int lora_ready(int device) { return cudaSetDevice(device); }

const char* lora_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int lora_rows(const RowsArguments* in, int bfloat16, int transposed, int device, void* stream) {
    return by_type(bfloat16, [&](auto type) {
        return by_rank(transposed ? in->factor.columns : in->factor.rows, [&]<int R>(Columns<R>) {
            using T = decltype(type);
            Kernel<RowsArguments> kernel = rows_kernel<T, R, false>;
            if (transposed) kernel = rows_kernel<T, R, true>;
            dim3 blocks(ceil_div(in->tall.rows, SKINNY_TILE));
            int bytes = SKINNY_STAGES * (64 + R) * 128;
            return launch(kernel, blocks, SKINNY_THREADS, bytes, *in, Place{device, stream});
        });
    });
}

int lora_columns(
    const ColumnsArguments* in, int bfloat16, int with_rows, int device, void* stream) {
    dim3 blocks(ceil_div(ceil_div(in->tall.columns, SKINNY_TILE), in->column_tiles),
                ceil_div(ceil_div(in->tall.rows, SKINNY_TILE), in->row_tiles));
    return by_type(bfloat16, [&](auto type) -> int {
        using T = decltype(type);
        if (with_rows) {
            constexpr int R = ROWS_R;
            if (in->factor.columns > R) return cudaErrorInvalidValue;
            int copies = SKINNY_STAGES * (64 + 2 * R) * 128;
            int bytes = copies + 256 * R + in->row_tiles * ROWS_SUMS_BYTES;
            Kernel<ColumnsArguments> kernel = columns_kernel<T, R, true>;
            return launch(kernel, blocks, SKINNY_THREADS, bytes, *in, Place{device, stream});
        }
        if (in->column_tiles != 1) return cudaErrorInvalidValue;
        return by_rank(in->factor.columns, [&]<int R>(Columns<R>) {
            int bytes = SKINNY_STAGES * (64 + R) * 128;
            Kernel<ColumnsArguments> kernel = columns_kernel<T, R, false>;
            return launch(kernel, blocks, SKINNY_THREADS, bytes, *in, Place{device, stream});
        });
    });
}

int lora_product(
    const ProductArguments* in, int bfloat16, int transposed, int device, void* stream) {
    return by_type(bfloat16, [&](auto type) {
        using T = decltype(type);
        Kernel<ProductArguments> kernel = product_kernel<T, false>;
        if (transposed) kernel = product_kernel<T, true>;
        dim3 blocks(ceil_div(in->rows, PRODUCT_TILE) * ceil_div(in->columns, PRODUCT_TILE));
        return launch(kernel, blocks, PRODUCT_THREADS, PRODUCT_SHARED, *in, Place{device, stream});
    });
}

}  // extern "C"
