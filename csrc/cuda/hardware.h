#pragma once

// Single instructions of the device, written out, because what the compiler would choose for a plain expression
// depends on its flags: CuPy always compiles with -ftz=true, under which ordinary float arithmetic takes subnormals
// for zero. The instructions below keep them, as PyTorch does, whatever the flags.
//
// A build for the host brings its own versions and defines HYBRIDPAR_HARDWARE (tests/kernels/cuda_host.cc).
#ifndef HYBRIDPAR_HARDWARE
#define HYBRIDPAR_HARDWARE

namespace hybridpar::cuda {

// A pointer that the compiler knows to point to the device's memory: it reads and writes there directly.
template <typename Value>
__device__ inline Value *global_pointer(long long address) {
    return static_cast<Value *>(const_cast<void *>(__cvta_global_to_generic(static_cast<size_t>(address))));
}

__device__ inline float product(float left, float right) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(left), "f"(right));
    return result;
}

__device__ inline double product(double left, double right) {
    return left * right;
}

__device__ inline double double_of(float value) {
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
    return result;
}

__device__ inline float float_of(double value) {
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
    return result;
}

__device__ inline float float_of_half_bits(unsigned short bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}

__device__ inline unsigned short half_bits_of(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline float float_of_bits(unsigned bits) {
    return __uint_as_float(bits);
}

__device__ inline unsigned bits_of(float value) {
    return __float_as_uint(value);
}

__device__ inline unsigned short bfloat_bits_of(float value) {
#if __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const unsigned bits = __float_as_uint(value);
    const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
}

// The value of the thread of this warp whose number differs in the bits of `mask`. All threads of the warp take part.
template <typename Value>
__device__ inline Value shuffle_xor(Value value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

} // namespace hybridpar::cuda

#endif
