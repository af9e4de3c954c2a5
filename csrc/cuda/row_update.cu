// The functions of row_update.h on a CUDA device. Compiled at run time by hybridpar/kernels/cuda.py, with no header but
// those of this folder. See Note [strips].
#include "strips.h"

namespace hybridpar::cuda {

constexpr double kSmallestNorm = 1e-12;

struct Rows {
    Memory weight;
    Index width, count;
    const Index *indices;
    Index first;
    void *inverse_norms;

    __device__ Index row(Index i) const {
        return indices == nullptr ? first + i : indices[i];
    }
};

struct Gradient {
    Memory memory;
    double number;
    // On the device, so that nobody has to wait for it; null: `number` is the factor.
    const void *at;
    DType dtype;

    __device__ double factor() const {
        if (at == nullptr) return number;
        return dtype == DType::float64 ? *static_cast<const double *>(at) : double_of(*static_cast<const float *>(at));
    }
};

struct Policy {
    double rate, decay, epsilon, first, second, log_first, log_second;
    bool nesterov;
};

__device__ inline float square_root(float value) {
    return sqrtf(value);
}
__device__ inline double square_root(double value) {
    return sqrt(value);
}
// 1 - beta^step.
__device__ inline float rest_of_power(double log_beta, Index step, float) {
    return -expm1f(float_of(log_beta * static_cast<double>(step)));
}
__device__ inline double rest_of_power(double log_beta, Index step, double) {
    return -expm1(log_beta * static_cast<double>(step));
}

// What one warp does to one row.
template <typename Exact, int kWidth>
struct Worker {
    using Part = Strip<Exact, kWidth>;

    const Rows &rows;
    const Gradient gradient;
    const Rounding rounding;
    Index i, row;
    Part w, g;
    Exact by_gradient, by_weight;

    __device__ Worker(const Rows &rows, const Gradient &gradient, const Rounding &rounding, Index i)
        : rows(rows), gradient(gradient), rounding(rounding), i(i), row(rows.row(i)) {}

    __device__ Exact *inverse_norm() const {
        return static_cast<Exact *>(rows.inverse_norms) + row;
    }
    __device__ bool has_more_strips() const {
        return rows.width > Part::kLength;
    }
    __device__ void load_weight(Index begin) {
        w.load(rows.weight, row, begin, rows.width);
    }
    __device__ void load_both(Index begin) {
        load_weight(begin);
        g.load(gradient.memory, i, begin, rows.width);
    }
    // How the gradient by the row is made of what comes as gradient and of the row: see Note [projection] in
    // row_update.h. `decay` times the row is added. A row of one strip is loaded with that.
    __device__ void project(Exact decay) {
        by_gradient = static_cast<Exact>(gradient.factor());
        by_weight = decay;
        if (!has_more_strips()) load_both(0);
        if (rows.inverse_norms == nullptr) return;
        const Exact inverse = *inverse_norm();
        by_gradient *= inverse;
        if (!(inverse < static_cast<Exact>(1 / kSmallestNorm))) return;
        Exact inner = 0;
        if (has_more_strips()) {
#pragma unroll 1
            for (Index begin = 0; begin < rows.width; begin += Part::kLength) {
                load_both(begin);
                inner += w.dot(g);
            }
        } else {
            inner = w.dot(g);
        }
        by_weight -= by_gradient * (warp_sum(inner) * inverse) * inverse;
    }
    // Calls use(begin) for each strip of the row, its weight and its projected gradient at hand.
    template <typename Use>
    __device__ void each_strip(Use use) {
#pragma unroll 1
        for (Index begin = 0; begin < rows.width; begin += Part::kLength) {
            if (has_more_strips()) load_both(begin);
            apply_projection();
            use(begin);
        }
    }
    __device__ void apply_projection() {
#pragma unroll
        for (int j = 0; j < Part::kMine; ++j)
            g.values[j] = by_gradient * g.values[j] + by_weight * w.values[j];
    }
    // Returns what this thread adds to the square of the row's norm: that of the row as it is stored.
    __device__ Exact store_weight(Index begin) {
        w.store(rows.weight, row, begin, rows.width, rounding, 0);
        return w.dot(w);
    }
    __device__ void store_norm(Exact mine) const {
        if (rows.inverse_norms == nullptr) return;
        const Exact norm = square_root(warp_sum(mine)), least = static_cast<Exact>(kSmallestNorm);
        // A NaN stays one: it must be seen in the next step.
        if (lane() == 0) *inverse_norm() = 1 / (norm < least ? least : norm);
    }
};

// Calls use(i) for every row that is this warp's.
template <typename Use>
__device__ inline void each_row(const Rows &rows, Use use) {
    const Index all = static_cast<Index>(gridDim.x) * warps();
#pragma unroll 1
    for (Index i = static_cast<Index>(blockIdx.x) * warps() + warp(); i < rows.count; i += all)
        use(i);
}

template <typename Exact, int kWidth>
__device__ inline void load_rows(const Rows &rows, const Memory &target) {
    using Part = Strip<Exact, kWidth>;
    each_row(rows, [&](Index i) {
        const Index row = rows.row(i);
        for (Index begin = 0; begin < rows.width; begin += Part::kLength) {
            Part part;
            part.load(rows.weight, row, begin, rows.width);
            part.store(target, i, begin, rows.width);
        }
    });
}

template <typename Exact, int kWidth>
__device__ inline void measure_rows(const Rows &rows) {
    each_row(rows, [&](Index i) {
        Worker<Exact, kWidth> worker(rows, {}, {}, i);
        Exact square = 0;
        for (Index begin = 0; begin < rows.width; begin += worker.w.kLength) {
            worker.load_weight(begin);
            square += worker.w.dot(worker.w);
        }
        worker.store_norm(square);
    });
}

template <typename Exact, int kWidth>
__device__ inline void project_gradient(const Rows &rows, const Gradient &gradient, const Memory &target) {
    each_row(rows, [&](Index i) {
        Worker<Exact, kWidth> worker(rows, gradient, {}, i);
        worker.project(Exact{0});
        worker.each_strip([&](Index begin) { worker.g.store(target, i, begin, rows.width); });
    });
}

template <typename Exact, int kWidth>
__device__ inline void step_sgd(const Rows &rows, const Gradient &gradient, const Rounding &rounding,
                                const Memory &momentum, const Policy &policy) {
    using Part = Strip<Exact, kWidth>;
    const auto rate = static_cast<Exact>(policy.rate), mu = static_cast<Exact>(policy.first);
    each_row(rows, [&](Index i) {
        Worker<Exact, kWidth> worker(rows, gradient, rounding, i);
        Exact square = 0;
        worker.project(static_cast<Exact>(policy.decay));
        worker.each_strip([&](Index begin) {
            Part &w = worker.w, &g = worker.g;
            if (momentum.values != nullptr) {
                Part m;
                m.load(momentum, worker.row, begin, rows.width);
#pragma unroll
                for (int j = 0; j < Part::kMine; ++j) {
                    m.values[j] = mu * m.values[j] + g.values[j];
                    g.values[j] = policy.nesterov ? g.values[j] + mu * m.values[j] : m.values[j];
                }
                m.store(momentum, worker.row, begin, rows.width, rounding, 1);
            }
#pragma unroll
            for (int j = 0; j < Part::kMine; ++j)
                w.values[j] -= rate * g.values[j];
            square += worker.store_weight(begin);
        });
        worker.store_norm(square);
    });
}

template <typename Exact, int kWidth>
__device__ inline void step_adamw(const Rows &rows, const Gradient &gradient, const Rounding &rounding,
                                  const Memory &first, const Memory &second, Index *steps, const Policy &policy) {
    using Part = Strip<Exact, kWidth>;
    const auto beta1 = static_cast<Exact>(policy.first), beta2 = static_cast<Exact>(policy.second);
    const auto rest1 = static_cast<Exact>(1 - policy.first), rest2 = static_cast<Exact>(1 - policy.second);
    const auto epsilon = static_cast<Exact>(policy.epsilon);
    const auto kept = static_cast<Exact>(1 - policy.rate * policy.decay);
    each_row(rows, [&](Index i) {
        Worker<Exact, kWidth> worker(rows, gradient, rounding, i);
        const Index step = steps[worker.row] + 1;
        __syncwarp(); // all have read it
        if (lane() == 0) steps[worker.row] = step;
        const Exact rate = static_cast<Exact>(policy.rate) / rest_of_power(policy.log_first, step, Exact{});
        const Exact root = 1 / square_root(rest_of_power(policy.log_second, step, Exact{}));
        Exact square = 0;
        worker.project(Exact{0});
        worker.each_strip([&](Index begin) {
            Part &w = worker.w, &g = worker.g, m, v;
            m.load(first, worker.row, begin, rows.width);
            v.load(second, worker.row, begin, rows.width);
#pragma unroll
            for (int j = 0; j < Part::kMine; ++j) {
                m.values[j] = beta1 * m.values[j] + rest1 * g.values[j];
                v.values[j] = beta2 * v.values[j] + rest2 * g.values[j] * g.values[j];
                w.values[j] = kept * w.values[j] - rate * m.values[j] / (square_root(v.values[j]) * root + epsilon);
            }
            m.store(first, worker.row, begin, rows.width, rounding, 1);
            v.store(second, worker.row, begin, rows.width, rounding, 2);
            square += worker.store_weight(begin);
        });
        worker.store_norm(square);
    });
}

template <typename Exact, int kWidth>
__device__ inline void step_adagrad(const Rows &rows, const Gradient &gradient, const Rounding &rounding, Exact *sums,
                                    const Policy &policy) {
    using Part = Strip<Exact, kWidth>;
    const auto epsilon = static_cast<Exact>(policy.epsilon);
    each_row(rows, [&](Index i) {
        Worker<Exact, kWidth> worker(rows, gradient, rounding, i);
        Exact of_gradient = 0, square = 0;
        worker.project(static_cast<Exact>(policy.decay));
        worker.each_strip([&](Index) { of_gradient += worker.g.dot(worker.g); });
        const Exact sum = sums[worker.row] + warp_sum(of_gradient) / static_cast<Exact>(rows.width);
        __syncwarp(); // all have read it
        if (lane() == 0) sums[worker.row] = sum;
        const Exact rate = static_cast<Exact>(policy.rate) / (square_root(sum) + epsilon);
        for (Index begin = 0; begin < rows.width; begin += Part::kLength) {
            if (worker.has_more_strips()) {
                worker.load_both(begin);
                worker.apply_projection();
            }
#pragma unroll
            for (int j = 0; j < Part::kMine; ++j)
                worker.w.values[j] -= rate * worker.g.values[j];
            square += worker.store_weight(begin);
        }
        worker.store_norm(square);
    });
}

template <typename Exact, int kWidth>
__device__ inline void advance_rows(const Rows &rows, const Rounding &rounding, const Memory &momentum,
                                    const double *matrices) {
    using Part = Strip<Exact, kWidth>;
    each_row(rows, [&](Index i) {
        Worker<Exact, kWidth> worker(rows, {}, rounding, i);
        const auto a = static_cast<Exact>(matrices[4 * i]), b = static_cast<Exact>(matrices[4 * i + 1]);
        const auto c = static_cast<Exact>(matrices[4 * i + 2]), d = static_cast<Exact>(matrices[4 * i + 3]);
        Exact square = 0;
        for (Index begin = 0; begin < rows.width; begin += Part::kLength) {
            Part &w = worker.w, m = {};
            worker.load_weight(begin);
            if (momentum.values != nullptr) m.load(momentum, worker.row, begin, rows.width);
#pragma unroll
            for (int j = 0; j < Part::kMine; ++j) {
                const Exact old = w.values[j];
                w.values[j] = a * old + b * m.values[j];
                m.values[j] = c * old + d * m.values[j];
            }
            if (momentum.values != nullptr) m.store(momentum, worker.row, begin, rows.width, rounding, 1);
            square += worker.store_weight(begin);
        }
        worker.store_norm(square);
    });
}

// Every kernel takes: the rows, their gradient (whose factor is a number, or float32 or float64 in memory) and the
// rounding, as row_update.h has them; up to two tensors like the rows, with their dtypes (the target; momentum; both
// moments); numbers of each row (steps, sums or matrices); and the policy, whose `first` is the momentum of SGD. What
// it does not use may be anything.
#define HYBRIDPAR_PARAMETERS                                                                                           \
    void *weight, long long dtype, long long width, long long count, const long long *indices, long long first_row,    \
        void *inverse_norms, void *gradient_values, long long gradient_dtype, double factor, const void *factor_at,    \
        long long factor_dtype, long long stochastic, long long seed, void *one_values, long long one_dtype,           \
        void *two_values, long long two_dtype, void *numbers, double rate, double decay, double epsilon, double first, \
        double second, double log_first, double log_second, long long nesterov
#define HYBRIDPAR_ROW_KERNEL(name, kBlocks, call)                                                              \
    HYBRIDPAR_KERNEL(kBlocks) name(HYBRIDPAR_PARAMETERS) {                                                     \
        const Rows rows{{weight, static_cast<DType>(dtype)}, width, count, indices, first_row, inverse_norms}; \
        [[maybe_unused]] const Gradient gradient{{gradient_values, static_cast<DType>(gradient_dtype)},        \
                                                 factor,                                                       \
                                                 factor_at,                                                    \
                                                 static_cast<DType>(factor_dtype)};                            \
        [[maybe_unused]] const Rounding rounding{stochastic != 0, static_cast<unsigned long long>(seed)};      \
        [[maybe_unused]] const Memory one{one_values, static_cast<DType>(one_dtype)};                          \
        [[maybe_unused]] const Memory two{two_values, static_cast<DType>(two_dtype)};                          \
        [[maybe_unused]] const Policy policy{                                                                  \
            rate, decay, epsilon, first, second, log_first, log_second, nesterov != 0};                        \
        call;                                                                                                  \
    }
#define HYBRIDPAR_ROW_KERNELS(suffix, Exact, kWidth, kBlocks)                                                     \
    HYBRIDPAR_ROW_KERNEL(load_##suffix, kBlocks, (load_rows<Exact, kWidth>(rows, one)))                           \
    HYBRIDPAR_ROW_KERNEL(measure_##suffix, kBlocks, (measure_rows<Exact, kWidth>(rows)))                          \
    HYBRIDPAR_ROW_KERNEL(project_##suffix, kBlocks, (project_gradient<Exact, kWidth>(rows, gradient, one)))       \
    HYBRIDPAR_ROW_KERNEL(sgd_##suffix, kBlocks, (step_sgd<Exact, kWidth>(rows, gradient, rounding, one, policy))) \
    HYBRIDPAR_ROW_KERNEL(                                                                                         \
        adamw_##suffix, kBlocks,                                                                                  \
        (step_adamw<Exact, kWidth>(rows, gradient, rounding, one, two, static_cast<Index *>(numbers), policy)))   \
    HYBRIDPAR_ROW_KERNEL(                                                                                         \
        adagrad_##suffix, kBlocks,                                                                                \
        (step_adagrad<Exact, kWidth>(rows, gradient, rounding, static_cast<Exact *>(numbers), policy)))           \
    HYBRIDPAR_ROW_KERNEL(advance_##suffix, kBlocks,                                                               \
                         (advance_rows<Exact, kWidth>(rows, rounding, one, static_cast<const double *>(numbers))))

// For vectors of one and of four elements; the last number says how many blocks a multiprocessor must have room for.
HYBRIDPAR_ROW_KERNELS(float32_1, float, 1, 1)
HYBRIDPAR_ROW_KERNELS(float32_4, float, 4, 2)
HYBRIDPAR_ROW_KERNELS(float64_1, double, 1, 1)
HYBRIDPAR_ROW_KERNELS(float64_4, double, 4, 1)

} // namespace hybridpar::cuda
