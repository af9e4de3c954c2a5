#include "exponents.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "check.h"
#include "clones.h"
#include "exponent_window.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the compressed form is that of machines that store the lowest byte first"
#endif

namespace hybridpar {
namespace {

using namespace exponents;

// One block, taken apart. `lower` is not used for bfloat16.
struct alignas(64) Parts {
    Bytes exponents, rest;
    std::array<std::uint16_t, kBlock> lower;
};

HYBRIDPAR_INLINE void take_apart(const std::uint16_t *values, Parts &parts) {
    for (int i = 0; i < kBlock; ++i) {
        parts.exponents[i] = static_cast<std::uint8_t>(values[i] >> 7);
        parts.rest[i] = static_cast<std::uint8_t>(((values[i] >> 8) & 0x80) | (values[i] & 0x7f));
    }
}

HYBRIDPAR_INLINE void take_apart(const std::uint32_t *values, Parts &parts) {
    std::array<std::uint16_t, kBlock> upper;
    for (int i = 0; i < kBlock; ++i) {
        upper[i] = static_cast<std::uint16_t>(values[i] >> 16);
        parts.lower[i] = static_cast<std::uint16_t>(values[i]);
    }
    take_apart(upper.data(), parts);
}

HYBRIDPAR_INLINE void put_together(const Parts &parts, std::uint16_t *values) {
    for (int i = 0; i < kBlock; ++i) {
        const unsigned rest = parts.rest[i];
        values[i] = static_cast<std::uint16_t>((rest & 0x80) << 8 | parts.exponents[i] << 7 | (rest & 0x7f));
    }
}

HYBRIDPAR_INLINE void put_together(const Parts &parts, std::uint32_t *values) {
    std::array<std::uint16_t, kBlock> upper;
    put_together(parts, upper.data());
    for (int i = 0; i < kBlock; ++i)
        values[i] = static_cast<std::uint32_t>(upper[i]) << 16 | parts.lower[i];
}

// `zero` says which values have the code for zeros, if that is not all zero itself: the last one but for that of
// exponents outside the window.
template <int width, bool sparse>
HYBRIDPAR_INLINE void to_planes(const Bytes &exponents, const Bytes &zero, std::uint8_t top, std::uint8_t *planes) {
    constexpr std::uint8_t outside = (1 << width) - 1, last = sparse ? outside - 2 : outside - 1;
    Bytes codes;
    for (int i = 0; i < kBlock; ++i) {
        const auto distance = static_cast<std::uint8_t>(top - exponents[i]); // above the window: a large one
        codes[i] = distance > last ? outside : distance;
        if (sparse) codes[i] = zero[i] != 0 ? outside - 1 : codes[i];
    }
    for (int bit = 0; bit < width; ++bit) {
        std::array<std::uint8_t, kLanes> plane{};
        for (int k = 0; k < kDepth; ++k)
            for (int j = 0; j < kLanes; ++j)
                plane[j] |= static_cast<std::uint8_t>(((codes[kLanes * k + j] >> bit) & 1) << k);
        std::memcpy(planes + kLanes * bit, plane.data(), kLanes);
    }
}

template <int width>
HYBRIDPAR_INLINE void from_planes(const std::uint8_t *planes, std::uint8_t top, Bytes &exponents) {
    Bytes codes{};
    for (int bit = 0; bit < width; ++bit) {
        std::array<std::uint8_t, kLanes> plane;
        std::memcpy(plane.data(), planes + kLanes * bit, kLanes);
        for (int k = 0; k < kDepth; ++k)
            for (int j = 0; j < kLanes; ++j)
                codes[kLanes * k + j] |= static_cast<std::uint8_t>(((plane[j] >> k) & 1) << bit);
    }
    for (int i = 0; i < kBlock; ++i)
        exponents[i] = static_cast<std::uint8_t>(top - codes[i]);
}

// Calls `visit` with the index of every value whose code has all bits set, in an order that the planes alone decide.
template <typename Visit>
HYBRIDPAR_INLINE void for_each_outside(const std::uint8_t *planes, int width, Visit visit) {
    for (int first = 0; first < kLanes; first += 8) {
        std::uint64_t marks = ~std::uint64_t{0};
        for (int bit = 0; bit < width; ++bit) {
            std::uint64_t word;
            std::memcpy(&word, planes + kLanes * bit + first, sizeof(word));
            marks &= word;
        }
        for (; marks != 0; marks &= marks - 1) {
            const int place = __builtin_ctzll(marks);
            visit(kLanes * (place & 7) + first + (place >> 3));
        }
    }
}

HYBRIDPAR_INLINE std::uint8_t *append(std::uint8_t *target, const void *bytes, std::size_t length) {
    std::memcpy(target, bytes, length);
    return target + length;
}

// Those of values that are not zero. `zero` is 0 or 1.
template <typename Item>
HYBRIDPAR_INLINE std::uint8_t *append_some(std::uint8_t *target, const std::array<Item, kBlock> &items,
                                           const Bytes &zero) {
    std::array<Item, kBlock> some;
    std::size_t length = 0;
    for (int i = 0; i < kBlock; ++i) {
        some[length] = items[i]; // a zero's is overwritten by the next one
        length += 1 - zero[i];
    }
    return append(target, some.data(), length * sizeof(Item));
}

// Writes codes, and behind them the exponents that have none.
template <bool sparse>
HYBRIDPAR_INLINE std::uint8_t *write_exponents(const Parts &parts, const Bytes &zero, Window window,
                                               std::uint8_t *target) {
    std::uint8_t *const planes = target;
    switch (window.width) {
    case 0: return target;
    case 1: to_planes<1, false>(parts.exponents, zero, window.top, planes); break;
    case 2: to_planes<2, sparse>(parts.exponents, zero, window.top, planes); break;
    case 3: to_planes<3, sparse>(parts.exponents, zero, window.top, planes); break;
    case kWidest: to_planes<kWidest, sparse>(parts.exponents, zero, window.top, planes); break;
    default: return append(target, parts.exponents.data(), kBlock);
    }
    target += kLanes * window.width;
    for_each_outside(planes, window.width, [&](int i) { *target++ = parts.exponents[i]; });
    return target;
}

template <typename Bits>
HYBRIDPAR_INLINE std::uint8_t *compress_block(const Bits *values, std::uint8_t *target) {
    const int zeros = count_where([&](int i) { return values[i] == 0; });
    if (zeros == kBlock) {
        *target++ = kZeros;
        *target++ = 0;
        return target;
    }
    const bool sparse = zeros >= kManyZeros;
    Parts parts;
    take_apart(values, parts);
    const Window window = choose(parts.exponents, sparse ? zeros : 0);
    *target++ = static_cast<std::uint8_t>(window.width + (sparse ? kSparse : 0));
    *target++ = window.top;
    if (!sparse) {
        target = write_exponents<false>(parts, {}, window, target);
        target = append(target, parts.rest.data(), kBlock);
        if constexpr (sizeof(Bits) == 4) target = append(target, parts.lower.data(), sizeof(parts.lower));
        return target;
    }
    Bytes zero;
    for (int i = 0; i < kBlock; ++i)
        zero[i] = values[i] == 0;
    target = write_exponents<true>(parts, zero, window, target);
    target = append_some(target, parts.rest, zero);
    if constexpr (sizeof(Bits) == 4) target = append_some(target, parts.lower, zero);
    return target;
}

// The bytes still to be read.
struct Reader {
    const std::uint8_t *next;
    std::size_t left;

    HYBRIDPAR_INLINE const std::uint8_t *take(std::size_t count) {
        if (count > left) throw std::invalid_argument("expected more compressed values, got bytes that end too early");
        const std::uint8_t *const taken = next;
        next += count;
        left -= count;
        return taken;
    }
};

// The inverse of `append_some`: those of zeros become 0.
template <typename Item>
HYBRIDPAR_INLINE void take_some(Reader &reader, const Bytes &zero, int zeros, std::array<Item, kBlock> &items) {
    const auto some = static_cast<std::size_t>(kBlock - zeros);
    std::array<Item, kBlock + 1> taken; // behind the last one lies what is read for zeros, and not used
    taken[some] = 0;
    std::memcpy(taken.data(), reader.take(some * sizeof(Item)), some * sizeof(Item));
    std::size_t next = 0;
    for (int i = 0; i < kBlock; ++i) {
        items[i] = static_cast<Item>(taken[next] & (zero[i] - 1)); // no branch: nothing foretells which are zero
        next += 1 - zero[i];
    }
}

// Reads codes, and the exponents that have none. With `sparse`, says which values are zero.
template <bool sparse>
HYBRIDPAR_INLINE void read_exponents(Reader &reader, Window window, Bytes &exponents, Bytes &zero) {
    const std::uint8_t *const planes = reader.take(static_cast<std::size_t>(kLanes) * window.width);
    switch (window.width) {
    case 0: from_planes<0>(planes, window.top, exponents); break;
    case 1: from_planes<1>(planes, window.top, exponents); break;
    case 2: from_planes<2>(planes, window.top, exponents); break;
    case 3: from_planes<3>(planes, window.top, exponents); break;
    default: from_planes<kWidest>(planes, window.top, exponents);
    }
    if (sparse) {
        const auto code = static_cast<std::uint8_t>(window.top - ((1 << window.width) - 2));
        for (int i = 0; i < kBlock; ++i) {
            zero[i] = exponents[i] == code;
            exponents[i] = zero[i] != 0 ? 0 : exponents[i];
        }
    }
    if (window.width > 0) for_each_outside(planes, window.width, [&](int i) { exponents[i] = *reader.take(1); });
}

template <typename Bits>
HYBRIDPAR_INLINE void expand_block(Reader &reader, Bits *values) {
    const std::uint8_t *const head = reader.take(kHead);
    const Window window{head[0], head[1]};
    if (window.width == kZeros) {
        std::memset(values, 0, kBlock * sizeof(Bits));
        return;
    }
    Parts parts;
    Bytes zero;
    const int width = window.width - kSparse;
    if (width >= kNarrowestSparse && width <= kWidest) {
        read_exponents<true>(reader, {width, window.top}, parts.exponents, zero);
        const int zeros = count_where([&](int i) { return zero[i]; });
        take_some(reader, zero, zeros, parts.rest);
        if constexpr (sizeof(Bits) == 4) take_some(reader, zero, zeros, parts.lower);
        put_together(parts, values);
        return;
    }
    if (window.width == kWhole) {
        std::memcpy(parts.exponents.data(), reader.take(kBlock), kBlock);
    } else {
        check(window.width <= kWidest, "expected a block of compressed values, got one that begins with ",
              window.width);
        read_exponents<false>(reader, window, parts.exponents, zero);
    }
    std::memcpy(parts.rest.data(), reader.take(kBlock), kBlock);
    if constexpr (sizeof(Bits) == 4)
        std::memcpy(parts.lower.data(), reader.take(sizeof(parts.lower)), sizeof(parts.lower));
    put_together(parts, values);
}

HYBRIDPAR_INLINE void add_to(std::uint16_t *values, const std::uint16_t *others, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        BFloat16 sum;
        store(sum, to_float(BFloat16{values[i]}) + to_float(BFloat16{others[i]}));
        values[i] = sum.bits;
    }
}

HYBRIDPAR_INLINE void add_to(std::uint32_t *values, const std::uint32_t *others, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i)
        values[i] = bit_cast<std::uint32_t>(bit_cast<float>(values[i]) + bit_cast<float>(others[i]));
}

template <typename Bits>
HYBRIDPAR_INLINE std::size_t compress(const Bits *values, std::int64_t count, std::uint8_t *target) {
    std::uint8_t *const first = target;
    std::int64_t done = 0;
    for (; count - done >= kBlock; done += kBlock)
        target = compress_block(values + done, target);
    if (done < count) {
        std::array<Bits, kBlock> filled{};
        std::copy(values + done, values + count, filled.data());
        target = compress_block(filled.data(), target);
    }
    return static_cast<std::size_t>(target - first);
}

template <typename Bits>
HYBRIDPAR_INLINE void expand(Reader reader, Bits *values, std::int64_t count, bool add) {
    alignas(64) std::array<Bits, kBlock> block;
    for (std::int64_t done = 0; done < count; done += kBlock) {
        const std::int64_t length = std::min(kBlock, count - done);
        if (!add && length == kBlock) {
            expand_block(reader, values + done);
            continue;
        }
        expand_block(reader, block.data());
        if (!add)
            std::copy(block.data(), block.data() + length, values + done);
        else if (length == kBlock)
            add_to(values + done, block.data(), kBlock);
        else
            add_to(values + done, block.data(), length);
    }
    check(reader.left == 0, "expected the bytes of ", count, " compressed values, got ", reader.left, " more");
}

HYBRIDPAR_CLONES std::size_t compress_halves(const std::uint16_t *values, std::int64_t count, std::uint8_t *target) {
    return compress(values, count, target);
}

HYBRIDPAR_CLONES std::size_t compress_words(const std::uint32_t *values, std::int64_t count, std::uint8_t *target) {
    return compress(values, count, target);
}

HYBRIDPAR_CLONES void expand_halves(Reader reader, std::uint16_t *values, std::int64_t count, bool add) {
    expand(reader, values, count, add);
}

HYBRIDPAR_CLONES void expand_words(Reader reader, std::uint32_t *values, std::int64_t count, bool add) {
    expand(reader, values, count, add);
}

void check_dtype(DType dtype) {
    check(dtype == DType::bfloat16 || dtype == DType::float32, "expected bfloat16 or float32, got dtype code ",
          int{static_cast<std::uint8_t>(dtype)});
}

} // namespace

std::size_t compressed_bound(std::int64_t count, DType dtype) {
    check_dtype(dtype);
    check(count >= 0, "expected zero or more values, got ", count);
    const auto blocks = static_cast<std::size_t>((count + kBlock - 1) / kBlock);
    return blocks * (kHead + kBlock * item_size(dtype));
}

std::size_t compress_exponents(const void *values, std::int64_t count, DType dtype, std::uint8_t *target) {
    check_dtype(dtype);
    return dtype == DType::float32 ? compress_words(static_cast<const std::uint32_t *>(values), count, target)
                                   : compress_halves(static_cast<const std::uint16_t *>(values), count, target);
}

void expand_exponents(const std::uint8_t *source, std::size_t bytes, void *values, std::int64_t count, DType dtype,
                      bool add) {
    check_dtype(dtype);
    if (dtype == DType::float32)
        expand_words({source, bytes}, static_cast<std::uint32_t *>(values), count, add);
    else
        expand_halves({source, bytes}, static_cast<std::uint16_t *>(values), count, add);
}

} // namespace hybridpar
