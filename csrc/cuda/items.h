#pragma once

#include "threads.h"

// Note [items]
// The elements of many tensors are cut into items of one length (the last of a tensor may be shorter), and each warp
// takes every so many-th item. So one launch serves any mixture of sizes, neighbouring warps touch neighbouring
// memory, and no thread ever waits for another. Which tensor an item belongs to is found by binary search in a table
// that hybridpar/kernels/pack_cuda.py makes: how many items come before each tensor.
namespace hybridpar::cuda {

// Columns of one number a tensor, one after the other.
struct Table {
    const Index *numbers;
    Index tensors;

    __device__ Index address(Index tensor) const {
        return numbers[tensor];
    }
    __device__ Index place_in_bucket(Index tensor) const {
        return numbers[tensors + tensor];
    }
    __device__ Index count(Index tensor) const {
        return numbers[2 * tensors + tensor];
    }
    __device__ Index items_before(Index tensor) const {
        return numbers[3 * tensors + tensor];
    }
    // Where the geometry of a strided tensor begins; negative for a contiguous one.
    __device__ Index geometry_at(Index tensor) const {
        return numbers[4 * tensors + tensor];
    }
};

// Elements [begin, begin + length) of a tensor.
struct Item {
    Index tensor, begin;
    int length;
};

__device__ inline Item find_item(const Table &table, Index number, int item_length) {
    // The last tensor with no more than `number` items before it. Empty ones have none, so it is not empty.
    Index low = 0, high = table.tensors - 1;
    while (low < high) {
        const Index middle = low + (high - low + 1) / 2;
        if (table.items_before(middle) <= number)
            low = middle;
        else
            high = middle - 1;
    }
    const Index begin = (number - table.items_before(low)) * item_length;
    const Index left = table.count(low) - begin;
    return {low, begin, static_cast<int>(left < item_length ? left : item_length)};
}

// How many elements to take one by one before `width` of them can be moved at once on both sides: both addresses
// are then multiples of `width` elements. -1 where that is never so.
template <typename Source, typename Target>
__device__ inline int elements_to_alignment(const Source *source, const Target *target, int width) {
    const auto from = reinterpret_cast<unsigned long long>(source) / sizeof(Source);
    const auto to = reinterpret_cast<unsigned long long>(target) / sizeof(Target);
    const auto head = static_cast<int>((width - from % width) % width);
    return (to + head) % width == 0 ? head : -1;
}

// Where element `index` of a strided tensor lies, in elements. `geometry`: dimensions, shape..., strides...
__device__ inline Index strided_offset(const Index *geometry, Index index) {
    const auto dimensions = static_cast<int>(geometry[0]);
    const Index *shape = geometry + 1, *strides = shape + dimensions;
    Index offset = 0;
#pragma unroll 1
    for (int i = dimensions - 1; i >= 0; --i) {
        // Division of 64-bit numbers costs several times as much as of 32-bit ones.
        const Index rest = ((index | shape[i]) >> 32) == 0
                               ? static_cast<unsigned>(index) / static_cast<unsigned>(shape[i])
                               : index / shape[i];
        offset += (index - rest * shape[i]) * strides[i];
        index = rest;
    }
    return offset;
}

} // namespace hybridpar::cuda
