// Which elements dropout keeps: kernels/dropout.py in CUDA, bit by bit.
#pragma once

#include "device.cuh"

struct Dropout {
    const int32_t* seeds;     // of each token; null: nothing is dropped
    const int32_t* features;  // global numbers of this rank's features; null: 0, 1, 2, ...
    int32_t threshold;        // of the hashes that are kept

    static __device__ __forceinline__ uint32_t mix(uint32_t x) {
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        return x ^ (x >> 16);
    }

    // What `keeps` takes for feature k of a row.
    __device__ __forceinline__ uint32_t feature(int k) const { return mix(features ? features[k] : k); }

    __device__ __forceinline__ bool keeps(int32_t seed, uint32_t feature) const {
        return int32_t(mix(uint32_t(seed) ^ feature)) >= threshold;
    }
};

// A register of two elements, those that are not kept replaced by 0.
__device__ __forceinline__ uint32_t keep_pair(uint32_t pair, bool low, bool high) {
    return pair & ((low ? 0x0000ffffu : 0u) | (high ? 0xffff0000u : 0u));
}
