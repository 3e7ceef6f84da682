// The dropout masks of kernels/dropout.py in CUDA, bit by bit.
#pragma once

#include "device.cuh"

struct Dropout {
    const int32_t* seeds;     // [rows]; null: nothing is dropped
    const int32_t* features;  // [features], their global numbers; null: 0, 1, 2, ...
    int32_t threshold;        // the smallest hash that is kept

    static __device__ __forceinline__ uint32_t mix(uint32_t x) {
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        return x ^ (x >> 16);
    }

    // Returns the hash of feature number `index`, which `keeps` takes.
    __device__ __forceinline__ uint32_t feature(int index) const {
        return mix(features ? features[index] : index);
    }

    __device__ __forceinline__ bool keeps(int32_t seed, uint32_t feature) const {
        return int32_t(mix(uint32_t(seed) ^ feature)) >= threshold;
    }
};

// Returns a register of two elements, with 0 for those that are not kept.
__device__ __forceinline__ uint32_t keep_pair(uint32_t pair, bool low, bool high) {
    return pair & ((low ? 0x0000ffffu : 0u) | (high ? 0xffff0000u : 0u));
}
