// csrc/cuda/pack.cu as a host program.
#include "cuda_host.h"

static unsigned long long atomicAdd(unsigned long long *address, unsigned long long value) {
    const unsigned long long before = *address;
    *address += value;
    return before;
}

#include "../../csrc/cuda/pack.cu"

static_assert(alignof(hybridpar::cuda::Vector<float, 4>) == 16);

using Kernel = void (*)(HYBRIDPAR_PARAMETERS);

// Threads never wait for each other here, so that those of all blocks run one after the other, in any order.
extern "C" void run_pack(Kernel kernel, unsigned blocks, unsigned threads, unsigned long long step,
                         HYBRIDPAR_PARAMETERS) {
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
