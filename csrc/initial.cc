#include "initial.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "clones.h"
#include "parallel.h"
#include "splitmix.h"

namespace hybridpar {
namespace {

constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15u;
// Elements that a thread draws at a time, about.
constexpr std::int64_t kBlock = 1 << 16;

// Natural logarithm of a positive normal number, without branches or calls. Within 2 units in the last place.
HYBRIDPAR_INLINE float logarithm(float x) {
    // x = 2^k m with m in [sqrt(1/2), sqrt(2)).
    const std::uint32_t bits = bit_cast<std::uint32_t>(x) - 0x3f3504f3u;
    const auto k = static_cast<float>(static_cast<std::int32_t>(bits) >> 23);
    const float r = bit_cast<float>((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
    // log(1 + r) = r - r^2 / 2 + r^3 q(r), q by Remez (as in Cephes).
    float q = 7.0376836292e-2f;
    q = q * r - 1.1514610310e-1f;
    q = q * r + 1.1676998740e-1f;
    q = q * r - 1.2420140846e-1f;
    q = q * r + 1.4249322787e-1f;
    q = q * r - 1.6668057665e-1f;
    q = q * r + 2.0000714765e-1f;
    q = q * r - 2.4999993993e-1f;
    q = q * r + 3.3333331174e-1f;
    const float square = r * r;
    const float small = q * r * square + k * -2.12194440e-4f - 0.5f * square;
    return (r + small) + k * 0.693359375f;
}

// The inverse of the error function in (-1, 1), relative error below 4e-7: two polynomials in w = -log(1 - x^2), for
// the middle and the tails (Giles 2010).
HYBRIDPAR_INLINE float inverse_error(float x) {
    const float w = -logarithm((1.0f - x) * (1.0f + x));
    const float a = w - 2.5f;
    float middle = 2.81022636e-08f;
    middle = middle * a + 3.43273939e-07f;
    middle = middle * a - 3.5233877e-06f;
    middle = middle * a - 4.39150654e-06f;
    middle = middle * a + 0.00021858087f;
    middle = middle * a - 0.00125372503f;
    middle = middle * a - 0.00417768164f;
    middle = middle * a + 0.246640727f;
    middle = middle * a + 1.50140941f;
    const float b = std::sqrt(w < 0.0f ? 0.0f : w) - 3.0f;
    float tail = -0.000200214257f;
    tail = tail * b + 0.000100950558f;
    tail = tail * b + 0.00134934322f;
    tail = tail * b - 0.00367342844f;
    tail = tail * b + 0.00573950773f;
    tail = tail * b - 0.0076224613f;
    tail = tail * b + 0.00943887047f;
    tail = tail * b + 1.00167406f;
    tail = tail * b + 2.83297682f;
    return (w < 5.0f ? middle : tail) * x;
}

template <typename Value>
HYBRIDPAR_INLINE void draw_row(Value *row, std::int64_t width, std::uint64_t counter, double factor) {
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t d = 0; d < width; ++d) {
        const std::uint64_t random = mixed(counter + static_cast<std::uint64_t>(d) * kStep);
        // The middle of one of 2^23 cells of (-1, 1), exactly: never an end, where the inverse is infinite.
        const auto cell = static_cast<std::int32_t>(random >> 41);
        const float normal = inverse_error(static_cast<float>(2 * cell + 1 - (1 << 23)) * 0x1p-23f);
        if constexpr (std::is_same_v<Value, double>)
            row[d] = static_cast<double>(normal) * factor;
        else
            store(row[d], normal * static_cast<float>(factor));
    }
}

#define HYBRIDPAR_DRAW(Value)                                                                                         \
    HYBRIDPAR_CLONES void draw_rows(Value *rows, const std::int64_t *classes, std::int64_t count, std::int64_t width, \
                                    std::uint64_t start, double factor) {                                             \
        for (std::int64_t i = 0; i < count; ++i)                                                                      \
            draw_row(rows + i * width, width,                                                                         \
                     start + static_cast<std::uint64_t>(classes[i]) * static_cast<std::uint64_t>(width) * kStep,      \
                     factor);                                                                                         \
    }
HYBRIDPAR_DRAW(float)
HYBRIDPAR_DRAW(double)
HYBRIDPAR_DRAW(BFloat16)
HYBRIDPAR_DRAW(Float16)
#undef HYBRIDPAR_DRAW

template <typename Value>
void draw(const std::int64_t *classes, std::int64_t count, std::int64_t width, std::uint64_t start, double factor,
          Value *rows, std::int64_t threads) {
    const std::int64_t block = std::max<std::int64_t>(1, kBlock / std::max<std::int64_t>(width, 1));
    in_parallel((count + block - 1) / block, threads, [&](std::int64_t part) {
        const std::int64_t begin = part * block;
        draw_rows(rows + begin * width, classes + begin, std::min(block, count - begin), width, start, factor);
    });
}

} // namespace

void draw_normal_rows(const std::int64_t *classes, std::int64_t count, std::int64_t width, std::uint64_t seed,
                      double deviation, DType dtype, void *rows, std::int64_t threads) {
    const std::uint64_t start = mixed(seed + kStep);
    const double factor = deviation * std::sqrt(2.0);
    switch (dtype) {
    case DType::float32: return draw(classes, count, width, start, factor, static_cast<float *>(rows), threads);
    case DType::float64: return draw(classes, count, width, start, factor, static_cast<double *>(rows), threads);
    case DType::bfloat16: return draw(classes, count, width, start, factor, static_cast<BFloat16 *>(rows), threads);
    default: return draw(classes, count, width, start, factor, static_cast<Float16 *>(rows), threads);
    }
}

} // namespace hybridpar
