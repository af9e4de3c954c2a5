#pragma once

#include <cstdint>

#include "types.h"

// A softmax over more classes than fit in memory, chunk by chunk (Milakov and Gimelshein 2018). Products with rows and
// features are someone else's work; what lies between them is here, in one pass over a chunk for each.
//
// Note [class by class]
// A chunk is [classes, batch]: all samples of a class lie together. So what belongs to a class (the norm of its row,
// its bias) is one number for a whole vector, what belongs to a sample is a vector that stays in registers, and
// products with the features need no transposed copy.
//
// Note [exact type]
// `Exact` below is double for float64 products, else float: everything but the products is of that type.

namespace hybridpar {

// Logit of class c and sample b: scale * (products[c, b] * inverse_norms[c] + bias[c]).
struct Chunk {
    const void *products; // [classes, batch], contiguous
    DType dtype;
    std::int64_t classes, batch;
    const void *inverse_norms; // Exact [classes]; null: all are 1
    const void *bias;          // Exact [classes]; null: all are 0
    double scale;
};

// Samples whose own class is in the chunk: their logits are known from elsewhere.
struct OwnSamples {
    std::int64_t count;
    const std::int64_t *classes; // in ascending order
    const std::int64_t *samples;
    const void *values; // Exact [count]
};

// Takes a chunk into a running log-sum-exp. `maximum` and `total`, Exact [batch], become the maximum of the logits so
// far and the sum of exp(logit - maximum), the values of `own` standing for the logits of own classes. `rescale`, Exact
// [batch], is by what all that was added up relative to the old maximum must be multiplied. `weights`, like products or
// the same memory, becomes exp(logit - maximum) * inverse_norm, and 0 for own classes.
void add_exponentials(const Chunk &chunk, const OwnSamples &own, void *weights, void *maximum, void *total,
                      void *rescale, std::int64_t threads);

// `probabilities`, like products or the same memory, become exp((logit - maximum) - log_total) * count, and the values
// of `own` for own classes; maximum, log_total and counts are Exact [batch]. `sums`, Exact [classes] or null, become
// the sums of these over the samples.
void to_probabilities(const Chunk &chunk, const OwnSamples &own, void *probabilities, const void *maximum,
                      const void *log_total, const void *counts, void *sums, std::int64_t threads);

} // namespace hybridpar
