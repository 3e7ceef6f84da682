// The hardware's instructions: tensor cores, asynchronous copies, rounding. Only this file has PTX.
//
// Other compilers than nvcc take these functions from cuda_on_cpu.h, which the tests bring: with it
// the same kernels run on a CPU.
// Layouts of fragments: PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#pragma once

#include <cstdint>

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

#ifndef __CUDACC__
#include "cuda_on_cpu.h"
#else

#define LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
    kernel<<<(blocks), (threads), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define SHARED_MEMORY(name) extern __shared__ __align__(128) uint8_t name[]

// Copies the first `bytes` (0 to 16) of 16 bytes from global to shared memory; the rest becomes 0.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING groups of this thread's copies are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Computes sum += left right, of 16 x 16 and 16 x 8 elements, in float32.
template <class T>
__device__ __forceinline__ void multiply_add(
    float (&sum)[4], const uint32_t (&left)[4], uint32_t low, uint32_t high);

template <>
__device__ __forceinline__ void multiply_add<BFloat16>(
    float (&sum)[4], const uint32_t (&left)[4], uint32_t low, uint32_t high) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
}

template <>
__device__ __forceinline__ void multiply_add<Float16>(
    float (&sum)[4], const uint32_t (&left)[4], uint32_t low, uint32_t high) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ float widen(BFloat16 value) {
    return __uint_as_float(uint32_t(value.bits) << 16);
}

__device__ __forceinline__ float widen(Float16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

// Rounds to the nearest, ties to even.
template <class T>
__device__ __forceinline__ T narrow(float value);

template <>
__device__ __forceinline__ BFloat16 narrow<BFloat16>(float value) {
    BFloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

template <>
__device__ __forceinline__ Float16 narrow<Float16>(float value) {
    Float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

#endif
