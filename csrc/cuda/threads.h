#pragma once

#include "hardware.h"

// Blocks, their warps, and what a thread of them reads at once.
namespace hybridpar::cuda {

using Index = long long;

constexpr int kWarp = 32;
// Blocks are of 32 to 256 threads: hybridpar/kernels/cuda.py launches 256.
constexpr int kMostWarps = 8, kMostThreads = kMostWarps * kWarp;

// Before the name of a kernel. A multiprocessor must have room for so many blocks of it, which limits their registers.
#define HYBRIDPAR_KERNEL(kBlocks) extern "C" __global__ void __launch_bounds__(kMostThreads, kBlocks)

// Read and written in one instruction, where it is of 16 bytes at most.
template <typename Value, int kWidth>
struct alignas(sizeof(Value) * kWidth) Vector {
    Value values[kWidth];
};

__device__ inline int lane() {
    return threadIdx.x % kWarp;
}
// Of this block.
__device__ inline int warp() {
    return threadIdx.x / kWarp;
}
__device__ inline int warps() {
    return blockDim.x / kWarp;
}

// Over the threads of a warp, which must all call it: the same bits for each, and in every run.
template <typename Value>
__device__ inline Value warp_sum(Value value) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
        value += shuffle_xor(value, offset);
    return value;
}

} // namespace hybridpar::cuda
