// csrc/cuda/pack.cu as a host program: the division of work, the alignment and the order of elements are the kernels'
// own; the device's instructions are replaced. Threads run one after the other, in an order that the caller chooses:
// as they never wait for each other, every order must give the same result.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../../csrc/types.h"

#define __global__
#define __device__

struct Dimension {
    unsigned x;
};
static Dimension gridDim, blockDim, blockIdx, threadIdx;

static unsigned long long atomicAdd(unsigned long long *address, unsigned long long value) {
    const unsigned long long before = *address;
    *address += value;
    return before;
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

} // namespace hybridpar::cuda

#include "../../csrc/cuda/pack.cu"

static_assert(alignof(hybridpar::cuda::Vector<float, 4>) == 16);

using Kernel = void (*)(HYBRIDPAR_PARAMETERS);

// Runs `blocks` x `threads` threads, `step` apart (which has no common divisor with their number), from the last on.
extern "C" void run(Kernel kernel, unsigned blocks, unsigned threads, unsigned long long step, HYBRIDPAR_PARAMETERS) {
    gridDim.x = blocks;
    blockDim.x = threads;
    const unsigned long long all = static_cast<unsigned long long>(blocks) * threads;
    for (unsigned long long i = 0; i < all; ++i) {
        const unsigned long long thread = (all - 1 + i * step) % all;
        blockIdx.x = static_cast<unsigned>(thread / threads);
        threadIdx.x = static_cast<unsigned>(thread % threads);
        kernel(numbers, tensors, geometry, items, item_length, bucket, to_bucket, scale, nonfinite);
    }
}

// Compiled with -fsanitize=alignment, which calls this where an address does not suit the type that is read or written
// there: a device stops at such an access, this processor does not.
static long long misaligned = 0;
extern "C" void __ubsan_handle_type_mismatch_v1(void *, void *) {
    ++misaligned;
}
extern "C" long long count_misaligned() {
    return misaligned;
}

// For checks of single parts.
extern "C" void find(const long long *numbers, long long tensors, long long number, long long item_length,
                     long long *found) {
    const hybridpar::cuda::Item item =
        hybridpar::cuda::find_item({numbers, tensors}, number, static_cast<int>(item_length));
    found[0] = item.tensor;
    found[1] = item.begin;
    found[2] = item.length;
}

template <std::size_t kSize>
struct Bytes {
    char bytes[kSize];
};

// From elements of 4 bytes to elements of `target_size`, 4 or 2.
extern "C" int head_of(long long source, long long target, int target_size, int width) {
    const auto *from = reinterpret_cast<const Bytes<4> *>(source);
    return target_size == 4 ? hybridpar::cuda::elements_to_alignment(from, reinterpret_cast<Bytes<4> *>(target), width)
                            : hybridpar::cuda::elements_to_alignment(from, reinterpret_cast<Bytes<2> *>(target), width);
}

extern "C" long long offset_of(const long long *geometry, long long index) {
    return hybridpar::cuda::strided_offset(geometry, index);
}
