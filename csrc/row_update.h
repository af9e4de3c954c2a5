#pragma once

#include <cstdint>

#include "types.h"

// Rows of a classification head, and what an optimizer does to those of one chunk in one pass over their memory.
//
// Note [projection]
// Products are taken with rows of any length and then divided by their norms. The gradient by a unit row u = w / |w|
// becomes that by the row itself: (g - (g . u) u) / |w|. Rows shorter than 1e-12 are only divided by that constant, so
// nothing is projected out of their gradient.
//
// `Exact` is double for float64 rows, else float: norms, and all arithmetic.

namespace hybridpar {

struct Rows {
    void *weight; // [n, width], contiguous
    DType dtype;
    std::int64_t width;
    std::int64_t count;          // of the rows that are meant
    const std::int64_t *indices; // [count] their numbers, none twice; null: `first` and those behind it
    std::int64_t first;
    void *inverse_norms; // Exact [n], 1 / max(norm, 1e-12); null: rows are not normalised

    std::int64_t row(std::int64_t i) const {
        return indices == nullptr ? first + i : indices[i];
    }
};

// By the unit rows (the rows themselves where they are not normalised), [count, width].
struct Gradient {
    const void *values;
    DType dtype;
    double factor; // what they still must be multiplied by
};

// [n, width], as the rows.
struct State {
    void *values;
    DType dtype;
};

// How new rows and states become bfloat16: up or down at random, so that on average nothing is lost of steps that are
// smaller than the distance of neighbours. The same seed, row and column give the same choice.
struct Rounding {
    bool stochastic;
    std::uint64_t seed;
};

struct Sgd {
    double rate, momentum, decay;
    bool nesterov;
};

struct AdamW {
    double rate, first, second, epsilon, decay; // first and second: the betas
};

struct Adagrad {
    double rate, epsilon, decay;
};

// target [count, width] becomes the rows.
void load_rows(const Rows &rows, void *target, DType target_dtype, std::int64_t threads);

// inverse_norms become those of the rows.
void measure_rows(const Rows &rows, std::int64_t threads);

// target [count, width], of the dtype of the rows, becomes the gradient by the rows.
void project_gradient(const Rows &rows, const Gradient &gradient, void *target, std::int64_t threads);

// One step each; inverse_norms become those of the new rows.
//
// SGD as in PyTorch: g += decay * w; m = momentum * m + g; w -= rate * (nesterov ? g + momentum * m : m).
// `momentum.values` may be null where the policy's is 0.
void step_sgd(const Rows &rows, const Gradient &gradient, const State &momentum, const Sgd &policy,
              const Rounding &rounding, std::int64_t threads);

// AdamW as in PyTorch, for each row by the number of its own steps, int64 [n], which grows by 1 first.
void step_adamw(const Rows &rows, const Gradient &gradient, const State &first, const State &second,
                std::int64_t *steps, const AdamW &policy, const Rounding &rounding, std::int64_t threads);

// Adagrad with one second moment for each row: sums, Exact [n], grow by the mean of g^2 first.
void step_adagrad(const Rows &rows, const Gradient &gradient, void *sums, const Adagrad &policy,
                  const Rounding &rounding, std::int64_t threads);

// (w, m) becomes (a w + b m, c w + d m) with the four numbers `matrices`, [count, 4], of each row: what steps without a
// gradient would have done. `momentum.values` may be null where all b, c and d are 0.
void advance_rows(const Rows &rows, const State &momentum, const double *matrices, const Rounding &rounding,
                  std::int64_t threads);

} // namespace hybridpar
