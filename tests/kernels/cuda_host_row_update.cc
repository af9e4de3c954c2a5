// csrc/cuda/row_update.cu as a host program.
#include "cuda_host.h"

#include "../../csrc/cuda/row_update.cu"

using Kernel = void (*)(HYBRIDPAR_PARAMETERS);

extern "C" void run_row_update(Kernel kernel, unsigned blocks, unsigned threads, unsigned long long step,
                               HYBRIDPAR_PARAMETERS) {
    host::launch(blocks, threads, step, [&] {
        kernel(weight, dtype, width, count, indices, first_row, inverse_norms, gradient_values, gradient_dtype, factor,
               factor_at, factor_dtype, stochastic, seed, one_values, one_dtype, two_values, two_dtype, numbers, rate,
               decay, epsilon, first, second, log_first, log_second, nesterov);
    });
}
