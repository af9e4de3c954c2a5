// SGD of rows in formats that are read and written as such: what row_update.cc does by way of exact rows in a dozen
// loops, in two, with the same results.

#include <cmath>
#include <type_traits>

#include "row_values.h"

namespace hybridpar {
namespace {

struct Nothing {};

// The members of structs are named, because compilers do not turn copies of structs into vector code.
HYBRIDPAR_INLINE float value_of(const float &value) {
    return value;
}

HYBRIDPAR_INLINE float value_of(const BFloat16 &value) {
    return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

template <bool kStochastic>
HYBRIDPAR_INLINE void set(float &target, float value, std::uint32_t, std::int64_t) {
    target = value;
}

template <bool kStochastic>
HYBRIDPAR_INLINE void set(BFloat16 &target, float value, std::uint32_t seed, std::int64_t d) {
    if constexpr (kStochastic)
        target.bits = rounded_at_random(value, random_bits(seed, d)).bits;
    else
        target.bits = static_cast<std::uint16_t>(round_to_upper_half(value) >> 16);
}

template <typename Left, typename Right>
HYBRIDPAR_INLINE float product(const Left *left, const Right *right, std::int64_t width) {
    float lanes[kLanes] = {};
    std::int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes)
        for (std::int64_t lane = 0; lane < kLanes; ++lane)
            lanes[lane] += value_of(left[d + lane]) * value_of(right[d + lane]);
    for (std::int64_t lane = 0; d < width; ++d, ++lane)
        lanes[lane] += value_of(left[d]) * value_of(right[d]);
    return total(lanes);
}

// What one row needs.
struct Row {
    float by_gradient, by_weight, rate, mu;
    bool nesterov;
    std::uint32_t weight_seed, momentum_seed;
};

// `count` elements from column `d` on, kLanes at most; the squares of the new ones are added to `lanes`. Each loop has
// few formats, or compilers would not turn it into vector code; in between values stay in registers or next to them.
template <bool kStochastic, typename Weight, typename Momentum, typename Grad>
HYBRIDPAR_INLINE void step_lanes(Weight *weight, Momentum *momentum, const Grad *gradient, const Row &row,
                                 std::int64_t d, std::int64_t count, float *lanes) {
    float w[kLanes], g[kLanes];
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t lane = 0; lane < count; ++lane)
        w[lane] = value_of(weight[d + lane]);
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t lane = 0; lane < count; ++lane)
        g[lane] = row.by_gradient * value_of(gradient[d + lane]) + row.by_weight * w[lane];
    if constexpr (!std::is_same_v<Momentum, Nothing>) {
        float m[kLanes];
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t lane = 0; lane < count; ++lane)
            m[lane] = row.mu * value_of(momentum[d + lane]) + g[lane];
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t lane = 0; lane < count; ++lane)
            set<kStochastic>(momentum[d + lane], m[lane], row.momentum_seed, d + lane);
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t lane = 0; lane < count; ++lane)
            g[lane] = row.nesterov ? g[lane] + row.mu * m[lane] : m[lane];
    }
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t lane = 0; lane < count; ++lane)
        set<kStochastic>(weight[d + lane], w[lane] - row.rate * g[lane], row.weight_seed, d + lane);
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t lane = 0; lane < count; ++lane) {
        const float stored = value_of(weight[d + lane]);
        lanes[lane] += stored * stored;
    }
}

// Returns the squared norm of the new row.
template <bool kStochastic, typename Weight, typename Momentum, typename Grad>
HYBRIDPAR_INLINE float step_row(Weight *weight, Momentum *momentum, const Grad *gradient, const Row row,
                                std::int64_t width) {
    float lanes[kLanes] = {};
    std::int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes)
        step_lanes<kStochastic>(weight, momentum, gradient, row, d, kLanes, lanes);
    if (d < width) step_lanes<kStochastic>(weight, momentum, gradient, row, d, width - d, lanes);
    return total(lanes);
}

template <bool kStochastic, typename Weight, typename Momentum, typename Grad>
HYBRIDPAR_INLINE void step_rows(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &source,
                                const State &state, const Sgd &policy, const Rounding &rounding) {
    const std::int64_t width = rows.width;
    const auto decay = static_cast<float>(policy.decay);
    Row row{0, 0, static_cast<float>(policy.rate), static_cast<float>(policy.momentum), policy.nesterov, 0, 0};
    auto *norms = static_cast<float *>(rows.inverse_norms);
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t number = rows.row(i);
        if (rows.indices != nullptr && i + 1 < rows.count) {
            fetch_ahead(rows.weight, rows.dtype, rows.row(i + 1), width);
            if (state.values != nullptr) fetch_ahead(state.values, state.dtype, rows.row(i + 1), width);
        }
        auto *weight = static_cast<Weight *>(rows.weight) + number * width;
        auto *momentum = state.values == nullptr ? nullptr : static_cast<Momentum *>(state.values) + number * width;
        const auto *gradient = static_cast<const Grad *>(source.values) + i * width;
        row.by_gradient = static_cast<float>(source.factor);
        row.by_weight = decay;
        if (norms != nullptr) {
            const float inverse = norms[number];
            row.by_gradient *= inverse;
            if (inverse < static_cast<float>(1 / kSmallestNorm))
                row.by_weight -= row.by_gradient * (product(weight, gradient, width) * inverse) * inverse;
        }
        row.weight_seed = row_seed(rounding, 0, number);
        row.momentum_seed = row_seed(rounding, 1, number);
        const float norm = std::sqrt(step_row<kStochastic>(weight, momentum, gradient, row, width));
        if (norms != nullptr) {
            // A NaN stays one: it must be seen in the next step.
            constexpr auto kSmallest = static_cast<float>(kSmallestNorm);
            norms[number] = 1 / (norm < kSmallest ? kSmallest : norm);
        }
    }
}

template <typename Weight, typename Momentum, typename Grad>
HYBRIDPAR_INLINE void step_with(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &gradient,
                                const State &momentum, const Sgd &policy, const Rounding &rounding) {
    constexpr bool kHalf = std::is_same_v<Weight, BFloat16> || std::is_same_v<Momentum, BFloat16>;
    if (kHalf && rounding.stochastic)
        step_rows<kHalf, Weight, Momentum, Grad>(rows, begin, end, gradient, momentum, policy, rounding);
    else
        step_rows<false, Weight, Momentum, Grad>(rows, begin, end, gradient, momentum, policy, rounding);
}

#define HYBRIDPAR_SGD(name, Weight, Momentum, Grad)                                                              \
    HYBRIDPAR_CLONES void name(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &gradient, \
                               const State &momentum, const Sgd &policy, const Rounding &rounding) {             \
        step_with<Weight, Momentum, Grad>(rows, begin, end, gradient, momentum, policy, rounding);               \
    }
HYBRIDPAR_SGD(single_by_single, float, Nothing, float)
HYBRIDPAR_SGD(single_by_half, float, Nothing, BFloat16)
HYBRIDPAR_SGD(half_by_single, BFloat16, Nothing, float)
HYBRIDPAR_SGD(half_by_half, BFloat16, Nothing, BFloat16)
HYBRIDPAR_SGD(single_single_by_single, float, float, float)
HYBRIDPAR_SGD(single_single_by_half, float, float, BFloat16)
HYBRIDPAR_SGD(single_half_by_single, float, BFloat16, float)
HYBRIDPAR_SGD(single_half_by_half, float, BFloat16, BFloat16)
HYBRIDPAR_SGD(half_single_by_single, BFloat16, float, float)
HYBRIDPAR_SGD(half_single_by_half, BFloat16, float, BFloat16)
HYBRIDPAR_SGD(half_half_by_single, BFloat16, BFloat16, float)
HYBRIDPAR_SGD(half_half_by_half, BFloat16, BFloat16, BFloat16)
#undef HYBRIDPAR_SGD

// 0 for float32, 1 for bfloat16, else -1.
int kind(DType dtype) {
    return dtype == DType::float32 ? 0 : (dtype == DType::bfloat16 ? 1 : -1);
}

} // namespace

bool sgd_fused(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &gradient, const State &momentum,
               const Sgd &policy, const Rounding &rounding) {
    using Function = void (*)(const Rows &, std::int64_t, std::int64_t, const Gradient &, const State &, const Sgd &,
                              const Rounding &);
    // By rows, momentum (none first) and gradient.
    static const Function functions[2][3][2] = {{{single_by_single, single_by_half},
                                                 {single_single_by_single, single_single_by_half},
                                                 {single_half_by_single, single_half_by_half}},
                                                {{half_by_single, half_by_half},
                                                 {half_single_by_single, half_single_by_half},
                                                 {half_half_by_single, half_half_by_half}}};
    const int weight = kind(rows.dtype), by = kind(gradient.dtype);
    const int moment = momentum.values == nullptr ? 0 : 1 + kind(momentum.dtype);
    if (weight < 0 || by < 0 || (momentum.values != nullptr && moment == 0)) return false;
    functions[weight][moment][by](rows, begin, end, gradient, momentum, policy, rounding);
    return true;
}

} // namespace hybridpar
