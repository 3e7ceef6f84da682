// Runs the CUDA kernels on a CPU, so that they can be compared with a reference where there is no
// GPU.
//
// Every thread of a block is a fiber; blocks come one after the other. It is random (emulator_seed)
// which warp runs first after a barrier, which lane within it, and whether an asynchronous copy is
// done at once or as late as its wait allows. Shared memory begins as NaN. So a missing barrier or
// wait shows as a wrong result under some seed.
// Also checked: bounds of shared memory, alignment, that a warp's lanes meet at one collective,
// bank conflicts of ldmatrix. Not seen here: the speed, real races within a warp's instruction,
// PTX itself (nvcc assembles that).
// Layouts are written down from the PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix",
// independently of how the kernels use them.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
    ((void)(stream), emulator::run(blocks, threads, shared_bytes, [&] { kernel(__VA_ARGS__); }))
#define SHARED_MEMORY(name) uint8_t* name = emulator::shared_memory

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : "invalid argument";
}
inline cudaError_t cudaFuncSetAttribute(const void*, int, int bytes) {
    // What a block of sm_80 may have.
    return bytes <= 163 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}

inline dim3 blockIdx, threadIdx;

namespace emulator {

constexpr size_t STACK_BYTES = 1 << 16, GUARD_BYTES = 64;
enum class State { ready, at_barrier, at_collective, ended };

struct Copy {
    void* to;
    const void* from;
    int bytes;
};

struct Fiber {
    ucontext_t context;
    void* stack;
    State state;
    std::vector<std::vector<Copy>> groups;  // of asynchronous copies; the last one is open
    const char* operation;                  // the collective it is at, and what it brings to it
    void* argument;
};

inline std::mt19937_64 random_source{0};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline int current;
inline uint8_t* shared_memory;
inline int shared_size;
inline const std::function<void()>* body;
inline long bank_conflicts;

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "cuda_on_cpu: %s (thread %d, block %u %u)\n", what, current, blockIdx.x,
                 blockIdx.y);
    std::abort();
}

inline void pause(State state) {
    fibers[current].state = state;
    swapcontext(&fibers[current].context, &scheduler);
}

inline void check_shared(const void* address, int bytes, int alignment) {
    auto place = static_cast<const uint8_t*>(address) - shared_memory;
    if (place < 0 || place + bytes > shared_size) fail("address beyond shared memory");
    if (place % alignment) fail("address in shared memory is not aligned");
}

inline void finish(const Copy& copy) {
    std::memset(copy.to, 0, 16);
    std::memcpy(copy.to, copy.from, copy.bytes);
}

// Every lane of the warp brings an argument; `all` sees the 32 once all have come.
inline void collective(
    const char* operation, void* argument, const std::function<void(void**)>& all) {
    int first = current / 32 * 32;
    fibers[current].operation = operation;
    fibers[current].argument = argument;
    for (int lane = first; lane < first + 32; lane++)
        if (lane != current && fibers[lane].state != State::at_collective)
            return pause(State::at_collective);
    void* arguments[32];
    for (int lane = 0; lane < 32; lane++) {
        if (fibers[first + lane].operation != operation)
            fail("lanes of a warp are at different instructions");
        arguments[lane] = fibers[first + lane].argument;
        fibers[first + lane].state = State::ready;
    }
    all(arguments);
    pause(State::ready);
}

inline void enter() {
    (*body)();
    pause(State::ended);
}

inline void run_block(int threads) {
    for (int t = 0; t < threads; t++) {
        Fiber& fiber = fibers[t];
        fiber.state = State::ready;
        fiber.groups.assign(1, {});
        getcontext(&fiber.context);
        fiber.context.uc_link = nullptr;
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, enter, 0);
    }
    // Between two barriers one warp runs as far as it can before the next one begins: they drift
    // apart as far as possible.
    std::vector<int> warps(threads / 32), lanes(32);
    for (int i = 0; i < threads / 32; i++) warps[i] = i;
    for (int i = 0; i < 32; i++) lanes[i] = i;
    for (;;) {
        std::shuffle(warps.begin(), warps.end(), random_source);
        for (int warp : warps)
            for (bool ran = true; ran;) {
                ran = false;
                std::shuffle(lanes.begin(), lanes.end(), random_source);
                for (int lane : lanes)
                    if (fibers[32 * warp + lane].state == State::ready) {
                        current = 32 * warp + lane;
                        threadIdx = dim3(current);
                        swapcontext(&scheduler, &fibers[current].context);
                        ran = true;
                    }
            }
        int ended = 0, waiting = 0;
        for (int t = 0; t < threads; t++) {
            ended += fibers[t].state == State::ended;
            waiting += fibers[t].state == State::at_barrier;
            if (fibers[t].state == State::at_barrier) fibers[t].state = State::ready;
        }
        if (ended == threads) return;
        if (ended + waiting < threads) fail("a warp waits for lanes that do not come");
    }
}

inline void run(dim3 blocks, int threads, int shared_bytes, const std::function<void()>& kernel) {
    if (threads % 32) fail("not whole warps");
    while (int(fibers.size()) < threads) {
        fibers.emplace_back();
        fibers.back().stack = mmap(
            nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fibers.back().stack == MAP_FAILED) fail("no memory for stacks");
    }
    body = &kernel;
    shared_size = shared_bytes;
    std::vector<uint8_t> memory(shared_bytes + 128 + GUARD_BYTES);
    shared_memory = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
    std::vector<int> order(blocks.x * blocks.y);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_source);
    for (int block : order) {
        blockIdx = dim3(block % blocks.x, block / blocks.x);
        std::memset(shared_memory, 0xff, shared_bytes + GUARD_BYTES);
        run_block(threads);
        for (size_t i = 0; i < GUARD_BYTES; i++)
            if (shared_memory[shared_bytes + i] != 0xff)
                fail("shared memory was written beyond its end");
    }
}

}  // namespace emulator

inline void __syncthreads() { emulator::pause(emulator::State::at_barrier); }

inline void copy_async(void* to, const void* from, int bytes) {
    emulator::check_shared(to, 16, 16);
    if (reinterpret_cast<uintptr_t>(from) % 16)
        emulator::fail("address in global memory is not aligned");
    if (bytes < 0 || bytes > 16) emulator::fail("not 0 to 16 bytes");
    emulator::Copy copy{to, from, bytes};
    if (emulator::random_source() % 2)
        emulator::finish(copy);
    else
        emulator::fibers[emulator::current].groups.back().push_back(copy);
}

inline void commit_copies() { emulator::fibers[emulator::current].groups.emplace_back(); }

template <int PENDING>
inline void wait_copies() {
    auto& groups = emulator::fibers[emulator::current].groups;
    while (int(groups.size()) - 1 > PENDING) {
        for (const auto& copy : groups.front()) emulator::finish(copy);
        groups.erase(groups.begin());
    }
}

namespace emulator {

struct MatrixLoad {
    const uint16_t* row;
    uint32_t* to;
};

inline void load(void** lanes, bool transposed) {
    auto request = [&](int lane) { return static_cast<MatrixLoad*>(lanes[lane]); };
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned banks = 0;
        for (int row = 0; row < 8; row++) {
            const uint16_t* address = request(8 * matrix + row)->row;
            check_shared(address, 16, 16);
            banks |= 1u << (reinterpret_cast<uintptr_t>(address) / 16 % 8);
        }
        bank_conflicts += banks != 0xff;
        auto element = [&](int row, int column) {
            return uint32_t(request(8 * matrix + row)->row[column]);
        };
        for (int lane = 0; lane < 32; lane++) {
            int major = lane / 4, minor = lane % 4 * 2;
            request(lane)->to[matrix] =
                transposed ? element(minor, major) | element(minor + 1, major) << 16
                           : element(major, minor) | element(major, minor + 1) << 16;
        }
    }
}

struct MultiplyAdd {
    float* sum;
    const uint32_t* left;
    uint32_t right[2];
};

}  // namespace emulator

inline void load_matrices(uint32_t (&to)[4], const void* row) {
    emulator::MatrixLoad request{static_cast<const uint16_t*>(row), to};
    emulator::collective("ldmatrix", &request, [](void** lanes) { emulator::load(lanes, false); });
}

inline void load_matrices_transposed(uint32_t (&to)[4], const void* row) {
    emulator::MatrixLoad request{static_cast<const uint16_t*>(row), to};
    auto load = [](void** lanes) { emulator::load(lanes, true); };
    emulator::collective("ldmatrix.trans", &request, load);
}

inline float widen(BFloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline float widen(Float16 value) {
    _Float16 half;
    std::memcpy(&half, &value, 2);
    return float(half);
}

template <class T>
inline T narrow(float value);

template <>
inline BFloat16 narrow<BFloat16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return {0x7fff};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
inline Float16 narrow<Float16>(float value) {
    _Float16 half = _Float16(value);
    Float16 result;
    std::memcpy(&result, &half, 2);
    return result;
}

template <class T>
inline void multiply_add(float (&sum)[4], const uint32_t (&left)[4], uint32_t low, uint32_t high) {
    emulator::MultiplyAdd request{sum, left, {low, high}};
    emulator::collective("mma", &request, [](void** lanes) {
        auto request = [&](int lane) { return static_cast<emulator::MultiplyAdd*>(lanes[lane]); };
        auto half = [](uint32_t word, int i) { return widen(T{uint16_t(word >> 16 * i)}); };
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 2; i++) {
                int group = lane / 4, pair = lane % 4 * 2 + i;
                for (int j = 0; j < 4; j++)
                    a[group + j % 2 * 8][pair + j / 2 * 8] = half(request(lane)->left[j], i);
                for (int j = 0; j < 2; j++)
                    b[pair + 8 * j][group] = half(request(lane)->right[j], i);
            }
        for (int lane = 0; lane < 32; lane++)
            for (int j = 0; j < 4; j++) {
                int row = lane / 4 + j / 2 * 8, column = lane % 4 * 2 + j % 2;
                for (int k = 0; k < 16; k++) request(lane)->sum[j] += a[row][k] * b[k][column];
            }
    });
}

extern "C" {
inline __attribute__((used)) void emulator_seed(uint64_t seed) {
    emulator::random_source.seed(seed);
}
inline __attribute__((used)) long emulator_bank_conflicts() { return emulator::bank_conflicts; }
}
