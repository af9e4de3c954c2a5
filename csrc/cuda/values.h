#pragma once

#include "hardware.h"

// The four floating-point formats, as pack.h has them: the half formats are carried as their bits, so that no header
// of the CUDA toolkit is needed.
namespace hybridpar::cuda {

struct BFloat16 {
    unsigned short bits;
};
struct Float16 {
    unsigned short bits;
};

// float, or double where one of the two is double: the type that a product is taken in.
template <typename Source, typename Target>
struct Common {
    using Type = float;
};
template <typename Target>
struct Common<double, Target> {
    using Type = double;
};
template <typename Source>
struct Common<Source, double> {
    using Type = double;
};
template <>
struct Common<double, double> {
    using Type = double;
};

__device__ inline void widen(float value, float &wide) {
    wide = value;
}
__device__ inline void widen(BFloat16 value, float &wide) {
    wide = float_of_bits(static_cast<unsigned>(value.bits) << 16);
}
__device__ inline void widen(Float16 value, float &wide) {
    wide = float_of_half_bits(value.bits);
}
__device__ inline void widen(double value, double &wide) {
    wide = value;
}
template <typename Value>
__device__ inline void widen(Value value, double &wide) {
    float between;
    widen(value, between);
    wide = double_of(between);
}

__device__ inline void narrow(float wide, float &value) {
    value = wide;
}
__device__ inline void narrow(float wide, BFloat16 &value) {
    value.bits = bfloat_bits_of(wide);
}
__device__ inline void narrow(float wide, Float16 &value) {
    value.bits = half_bits_of(wide);
}
__device__ inline void narrow(double wide, double &value) {
    value = wide;
}
// A half format is reached by way of float32, as in PyTorch.
template <typename Value>
__device__ inline void narrow(double wide, Value &value) {
    narrow(float_of(wide), value);
}

__device__ inline bool is_finite(float value) {
    return fabsf(value) <= 0x1.fffffep+127f;
}
__device__ inline bool is_finite(double value) {
    return fabs(value) <= 0x1.fffffffffffffp+1023;
}

} // namespace hybridpar::cuda
