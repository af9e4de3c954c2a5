#include "row_update.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "clones.h"
#include "parallel.h"
#include "row_values.h"

namespace hybridpar {
namespace {

// Rows that a thread takes at a time.
constexpr std::int64_t kBlock = 64;

std::int64_t blocks(const Rows &rows) {
    return (rows.count + kBlock - 1) / kBlock;
}

template <typename Value, typename Exact>
HYBRIDPAR_INLINE void load_values(const Value *values, std::int64_t width, Exact *result) {
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t d = 0; d < width; ++d) {
        if constexpr (std::is_same_v<Value, double>)
            result[d] = static_cast<Exact>(values[d]);
        else
            result[d] = static_cast<Exact>(to_float(values[d]));
    }
}

template <typename Value, typename Exact>
HYBRIDPAR_INLINE void store_values(Value *values, std::int64_t width, const Exact *source) {
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t d = 0; d < width; ++d) {
        if constexpr (std::is_same_v<Value, double>)
            values[d] = static_cast<double>(source[d]);
        else
            store(values[d], static_cast<float>(source[d]));
    }
}

// Row `row` of [.., width] memory.
template <typename Exact>
HYBRIDPAR_INLINE void load_row(const void *base, DType dtype, std::int64_t row, std::int64_t width, Exact *result) {
    const std::int64_t begin = row * width;
    switch (dtype) {
    case DType::float32: return load_values(static_cast<const float *>(base) + begin, width, result);
    case DType::float64: return load_values(static_cast<const double *>(base) + begin, width, result);
    case DType::bfloat16: return load_values(static_cast<const BFloat16 *>(base) + begin, width, result);
    default: return load_values(static_cast<const Float16 *>(base) + begin, width, result);
    }
}

template <typename Exact>
HYBRIDPAR_INLINE void store_row(void *base, DType dtype, std::int64_t row, std::int64_t width, const Exact *source) {
    const std::int64_t begin = row * width;
    switch (dtype) {
    case DType::float32: return store_values(static_cast<float *>(base) + begin, width, source);
    case DType::float64: return store_values(static_cast<double *>(base) + begin, width, source);
    case DType::bfloat16: return store_values(static_cast<BFloat16 *>(base) + begin, width, source);
    default: return store_values(static_cast<Float16 *>(base) + begin, width, source);
    }
}

// `stream` tells apart what is stored of one row: its weight, its states.
template <typename Exact>
HYBRIDPAR_INLINE void store_row(void *base, DType dtype, std::int64_t row, std::int64_t width, const Exact *source,
                                const Rounding &rounding, std::uint64_t stream) {
    if (!rounding.stochastic || dtype != DType::bfloat16) return store_row(base, dtype, row, width, source);
    auto *values = static_cast<BFloat16 *>(base) + row * width;
    const std::uint32_t seed = row_seed(rounding, stream, row);
    HYBRIDPAR_INDEPENDENT
    for (std::int64_t d = 0; d < width; ++d)
        values[d] = rounded_at_random(static_cast<float>(source[d]), random_bits(seed, d));
}

// Side by side, so that the additions do not wait for one another.
template <typename Exact>
HYBRIDPAR_INLINE Exact dot(const Exact *left, const Exact *right, std::int64_t width) {
    Exact lanes[kLanes] = {};
    std::int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes)
        for (std::int64_t lane = 0; lane < kLanes; ++lane)
            lanes[lane] += left[d + lane] * right[d + lane];
    for (std::int64_t lane = 0; d < width; ++d, ++lane)
        lanes[lane] += left[d] * right[d];
    return total(lanes);
}

// A row at a time: its weight and its gradient, in exact arithmetic.
template <typename Exact>
class Worker {
  public:
    Worker(const Rows &rows, const Rounding &rounding)
        : weight(static_cast<std::size_t>(rows.width)), gradient(weight.size()), first(weight.size()),
          second(weight.size()), rows_(rows), rounding_(rounding) {}

    std::vector<Exact> weight, gradient, first, second;

    HYBRIDPAR_INLINE void load_weight(std::int64_t row) {
        load_row(rows_.weight, rows_.dtype, row, rows_.width, weight.data());
    }
    HYBRIDPAR_INLINE void load_state(const State &state, std::int64_t row, std::vector<Exact> &values) {
        load_row(state.values, state.dtype, row, rows_.width, values.data());
    }
    HYBRIDPAR_INLINE void store_state(const State &state, std::int64_t row, const std::vector<Exact> &values,
                                      std::uint64_t stream) {
        store_row(state.values, state.dtype, row, rows_.width, values.data(), rounding_, stream);
    }
    HYBRIDPAR_INLINE void fetch_next(std::int64_t i, const State &state) const {
        if (rows_.indices == nullptr || i + 1 >= rows_.count) return;
        fetch_ahead(rows_.weight, rows_.dtype, rows_.row(i + 1), rows_.width);
        if (state.values != nullptr) fetch_ahead(state.values, state.dtype, rows_.row(i + 1), rows_.width);
    }
    // Weight and gradient of the i-th row, Note [projection], plus `decay` times the weight.
    HYBRIDPAR_INLINE void load(std::int64_t i, std::int64_t row, const Gradient &source, Exact decay) {
        load_weight(row);
        load_row(source.values, source.dtype, i, rows_.width, gradient.data());
        auto by_gradient = static_cast<Exact>(source.factor);
        Exact by_weight = decay;
        if (rows_.inverse_norms != nullptr) {
            const Exact inverse = static_cast<const Exact *>(rows_.inverse_norms)[row];
            by_gradient *= inverse;
            if (inverse < static_cast<Exact>(1 / kSmallestNorm))
                by_weight -= by_gradient * (dot(weight.data(), gradient.data(), rows_.width) * inverse) * inverse;
        }
        const Exact *w = weight.data();
        Exact *g = gradient.data();
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t d = 0; d < rows_.width; ++d)
            g[d] = by_gradient * g[d] + by_weight * w[d];
    }
    HYBRIDPAR_INLINE void store_weight(std::int64_t row) {
        store_row(rows_.weight, rows_.dtype, row, rows_.width, weight.data(), rounding_, 0);
        measure(row);
    }
    // The norm is that of the row as it is stored.
    HYBRIDPAR_INLINE void measure(std::int64_t row) {
        if (rows_.inverse_norms == nullptr) return;
        load_weight(row);
        const Exact norm = std::sqrt(dot(weight.data(), weight.data(), rows_.width));
        // A NaN stays one: it must be seen in the next step.
        static_cast<Exact *>(rows_.inverse_norms)[row] =
            1 / (norm < static_cast<Exact>(kSmallestNorm) ? static_cast<Exact>(kSmallestNorm) : norm);
    }

  private:
    const Rows &rows_;
    const Rounding &rounding_;
};

constexpr Rounding kNearest{false, 0};

template <typename Exact>
HYBRIDPAR_INLINE void measure_block(const Rows &rows, std::int64_t begin, std::int64_t end) {
    Worker<Exact> worker(rows, kNearest);
    for (std::int64_t i = begin; i < end; ++i)
        worker.measure(rows.row(i));
}

template <typename Exact>
HYBRIDPAR_INLINE void load_block(const Rows &rows, std::int64_t begin, std::int64_t end, void *target, DType dtype) {
    std::vector<Exact> values(static_cast<std::size_t>(rows.width));
    for (std::int64_t i = begin; i < end; ++i) {
        if (rows.indices != nullptr && i + 2 < rows.count)
            fetch_ahead(rows.weight, rows.dtype, rows.row(i + 2), rows.width);
        load_row(rows.weight, rows.dtype, rows.row(i), rows.width, values.data());
        store_row(target, dtype, i, rows.width, values.data());
    }
}

template <typename Exact>
HYBRIDPAR_INLINE void project_block(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &gradient,
                                    void *target) {
    Worker<Exact> worker(rows, kNearest);
    for (std::int64_t i = begin; i < end; ++i) {
        worker.load(i, rows.row(i), gradient, Exact{0});
        store_row(target, rows.dtype, i, rows.width, worker.gradient.data());
    }
}

template <typename Exact>
HYBRIDPAR_INLINE void sgd_block(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &gradient,
                                const State &momentum, const Sgd &policy, const Rounding &rounding) {
    Worker<Exact> worker(rows, rounding);
    const auto rate = static_cast<Exact>(policy.rate), mu = static_cast<Exact>(policy.momentum);
    Exact *w = worker.weight.data(), *g = worker.gradient.data(), *m = worker.first.data();
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = rows.row(i);
        worker.fetch_next(i, momentum);
        worker.load(i, row, gradient, static_cast<Exact>(policy.decay));
        if (momentum.values != nullptr) {
            worker.load_state(momentum, row, worker.first);
            HYBRIDPAR_INDEPENDENT
            for (std::int64_t d = 0; d < rows.width; ++d)
                m[d] = mu * m[d] + g[d];
            worker.store_state(momentum, row, worker.first, 1);
            HYBRIDPAR_INDEPENDENT
            for (std::int64_t d = 0; d < rows.width; ++d)
                g[d] = policy.nesterov ? g[d] + mu * m[d] : m[d];
        }
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t d = 0; d < rows.width; ++d)
            w[d] -= rate * g[d];
        worker.store_weight(row);
    }
}

template <typename Exact>
HYBRIDPAR_INLINE void adamw_block(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &gradient,
                                  const State &first, const State &second, std::int64_t *steps, const AdamW &policy,
                                  const Rounding &rounding) {
    Worker<Exact> worker(rows, rounding);
    const auto beta1 = static_cast<Exact>(policy.first), beta2 = static_cast<Exact>(policy.second);
    const auto rest1 = static_cast<Exact>(1 - policy.first), rest2 = static_cast<Exact>(1 - policy.second);
    const auto epsilon = static_cast<Exact>(policy.epsilon);
    const auto kept = static_cast<Exact>(1 - policy.rate * policy.decay);
    Exact *w = worker.weight.data(), *g = worker.gradient.data();
    Exact *m = worker.first.data(), *v = worker.second.data();
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = rows.row(i);
        const auto step = static_cast<double>(++steps[row]);
        const auto rate = static_cast<Exact>(policy.rate / (1 - std::pow(policy.first, step)));
        const auto root = static_cast<Exact>(1 / std::sqrt(1 - std::pow(policy.second, step)));
        worker.fetch_next(i, first);
        worker.load(i, row, gradient, Exact{0});
        worker.load_state(first, row, worker.first);
        worker.load_state(second, row, worker.second);
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t d = 0; d < rows.width; ++d) {
            m[d] = beta1 * m[d] + rest1 * g[d];
            v[d] = beta2 * v[d] + rest2 * g[d] * g[d];
            w[d] = kept * w[d] - rate * m[d] / (std::sqrt(v[d]) * root + epsilon);
        }
        worker.store_state(first, row, worker.first, 1);
        worker.store_state(second, row, worker.second, 2);
        worker.store_weight(row);
    }
}

template <typename Exact>
HYBRIDPAR_INLINE void adagrad_block(const Rows &rows, std::int64_t begin, std::int64_t end, const Gradient &gradient,
                                    Exact *sums, const Adagrad &policy, const Rounding &rounding) {
    Worker<Exact> worker(rows, rounding);
    Exact *w = worker.weight.data(), *g = worker.gradient.data();
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = rows.row(i);
        worker.fetch_next(i, {});
        worker.load(i, row, gradient, static_cast<Exact>(policy.decay));
        sums[row] += dot(g, g, rows.width) / static_cast<Exact>(rows.width);
        const auto rate = static_cast<Exact>(policy.rate) / (std::sqrt(sums[row]) + static_cast<Exact>(policy.epsilon));
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t d = 0; d < rows.width; ++d)
            w[d] -= rate * g[d];
        worker.store_weight(row);
    }
}

template <typename Exact>
HYBRIDPAR_INLINE void advance_block(const Rows &rows, std::int64_t begin, std::int64_t end, const State &momentum,
                                    const double *matrices, const Rounding &rounding) {
    Worker<Exact> worker(rows, rounding);
    Exact *w = worker.weight.data(), *m = worker.first.data();
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t row = rows.row(i);
        const auto a = static_cast<Exact>(matrices[4 * i]), b = static_cast<Exact>(matrices[4 * i + 1]);
        const auto c = static_cast<Exact>(matrices[4 * i + 2]), d = static_cast<Exact>(matrices[4 * i + 3]);
        worker.load_weight(row);
        if (momentum.values != nullptr) worker.load_state(momentum, row, worker.first);
        HYBRIDPAR_INDEPENDENT
        for (std::int64_t j = 0; j < rows.width; ++j) {
            const Exact old = w[j];
            w[j] = a * old + b * m[j];
            m[j] = c * old + d * m[j];
        }
        if (momentum.values != nullptr) worker.store_state(momentum, row, worker.first, 1);
        worker.store_weight(row);
    }
}

#define HYBRIDPAR_ROWS(suffix, Exact)                                                                                 \
    HYBRIDPAR_CLONES void measure_##suffix(const Rows &rows, std::int64_t begin, std::int64_t end) {                  \
        measure_block<Exact>(rows, begin, end);                                                                       \
    }                                                                                                                 \
    HYBRIDPAR_CLONES void load_##suffix(const Rows &rows, std::int64_t begin, std::int64_t end, void *target,         \
                                        DType dtype) {                                                                \
        load_block<Exact>(rows, begin, end, target, dtype);                                                           \
    }                                                                                                                 \
    HYBRIDPAR_CLONES void project_##suffix(const Rows &rows, std::int64_t begin, std::int64_t end,                    \
                                           const Gradient &gradient, void *target) {                                  \
        project_block<Exact>(rows, begin, end, gradient, target);                                                     \
    }                                                                                                                 \
    HYBRIDPAR_CLONES void sgd_##suffix(const Rows &rows, std::int64_t begin, std::int64_t end,                        \
                                       const Gradient &gradient, const State &momentum, const Sgd &policy,            \
                                       const Rounding &rounding) {                                                    \
        if (!sgd_fused(rows, begin, end, gradient, momentum, policy, rounding))                                       \
            sgd_block<Exact>(rows, begin, end, gradient, momentum, policy, rounding);                                 \
    }                                                                                                                 \
    HYBRIDPAR_CLONES void adamw_##suffix(const Rows &rows, std::int64_t begin, std::int64_t end,                      \
                                         const Gradient &gradient, const State &first, const State &second,           \
                                         std::int64_t *steps, const AdamW &policy, const Rounding &rounding) {        \
        adamw_block<Exact>(rows, begin, end, gradient, first, second, steps, policy, rounding);                       \
    }                                                                                                                 \
    HYBRIDPAR_CLONES void adagrad_##suffix(const Rows &rows, std::int64_t begin, std::int64_t end,                    \
                                           const Gradient &gradient, void *sums, const Adagrad &policy,               \
                                           const Rounding &rounding) {                                                \
        adagrad_block<Exact>(rows, begin, end, gradient, static_cast<Exact *>(sums), policy, rounding);               \
    }                                                                                                                 \
    HYBRIDPAR_CLONES void advance_##suffix(const Rows &rows, std::int64_t begin, std::int64_t end,                    \
                                           const State &momentum, const double *matrices, const Rounding &rounding) { \
        advance_block<Exact>(rows, begin, end, momentum, matrices, rounding);                                         \
    }

HYBRIDPAR_ROWS(float, float)
HYBRIDPAR_ROWS(double, double)

// Calls one of two functions, by the exact type of the rows, for each block of them.
template <typename Function, typename... Arguments>
void each_block(const Rows &rows, std::int64_t threads, Function of_float, Function of_double,
                const Arguments &...arguments) {
    const auto function = rows.dtype == DType::float64 ? of_double : of_float;
    in_parallel(blocks(rows), threads, [&](std::int64_t block) {
        const std::int64_t begin = block * kBlock;
        function(rows, begin, std::min(begin + kBlock, rows.count), arguments...);
    });
}

} // namespace

void measure_rows(const Rows &rows, std::int64_t threads) {
    each_block(rows, threads, measure_float, measure_double);
}

void load_rows(const Rows &rows, void *target, DType target_dtype, std::int64_t threads) {
    each_block(rows, threads, load_float, load_double, target, target_dtype);
}

void project_gradient(const Rows &rows, const Gradient &gradient, void *target, std::int64_t threads) {
    each_block(rows, threads, project_float, project_double, gradient, target);
}

void step_sgd(const Rows &rows, const Gradient &gradient, const State &momentum, const Sgd &policy,
              const Rounding &rounding, std::int64_t threads) {
    each_block(rows, threads, sgd_float, sgd_double, gradient, momentum, policy, rounding);
}

void step_adamw(const Rows &rows, const Gradient &gradient, const State &first, const State &second,
                std::int64_t *steps, const AdamW &policy, const Rounding &rounding, std::int64_t threads) {
    each_block(rows, threads, adamw_float, adamw_double, gradient, first, second, steps, policy, rounding);
}

void step_adagrad(const Rows &rows, const Gradient &gradient, void *sums, const Adagrad &policy,
                  const Rounding &rounding, std::int64_t threads) {
    each_block(rows, threads, adagrad_float, adagrad_double, gradient, sums, policy, rounding);
}

void advance_rows(const Rows &rows, const State &momentum, const double *matrices, const Rounding &rounding,
                  std::int64_t threads) {
    each_block(rows, threads, advance_float, advance_double, momentum, matrices, rounding);
}

} // namespace hybridpar
