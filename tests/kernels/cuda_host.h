// What a CUDA device has and a host has not, for csrc/cuda as host programs: the division of work, the alignment, the
// order of elements and the places where threads wait for each other are the kernels' own.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "../../csrc/types.h"

#define __global__
#define __device__
#define __launch_bounds__(...)
// Blocks run one after the other.
#define __shared__ static

struct Dimension {
    unsigned x;
};
inline Dimension gridDim, blockDim, blockIdx, threadIdx;

namespace host {

// Threads of a block run in turns, each until it waits for others, in an order that the caller chooses: every order
// must give the same result.
enum class Waits { for_nothing, for_warp, for_block, done };

// Runs a kernel: blocks and threads `step` apart (which has no common divisor with their numbers), from the last on.
void launch(unsigned blocks, unsigned threads, unsigned long long step, const std::function<void()> &kernel);
void wait(Waits why);
std::uint64_t exchange(std::uint64_t bits, unsigned mask);

} // namespace host

inline void __syncthreads() {
    host::wait(host::Waits::for_block);
}
inline void __syncwarp() {
    host::wait(host::Waits::for_warp);
}

// Stands for csrc/cuda/hardware.h.
#define HYBRIDPAR_HARDWARE
namespace hybridpar::cuda {

template <typename Value>
Value *global_pointer(long long address) {
    return reinterpret_cast<Value *>(address);
}

template <typename Value>
Value product(Value left, Value right) {
    return left * right;
}

inline double double_of(float value) {
    return value;
}
inline float float_of(double value) {
    return static_cast<float>(value);
}
inline float float_of_bits(unsigned bits) {
    return bit_cast<float>(bits);
}
inline unsigned bits_of(float value) {
    return bit_cast<unsigned>(value);
}
inline float float_of_half_bits(unsigned short bits) {
    return to_float(hybridpar::Float16{bits});
}
inline unsigned short half_bits_of(float value) {
    hybridpar::Float16 half;
    store(half, value);
    return half.bits;
}
inline unsigned short bfloat_bits_of(float value) {
    hybridpar::BFloat16 half;
    store(half, value);
    return half.bits;
}
template <typename Value>
Value shuffle_xor(Value value, int mask) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(value));
    bits = host::exchange(bits, static_cast<unsigned>(mask));
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

} // namespace hybridpar::cuda
