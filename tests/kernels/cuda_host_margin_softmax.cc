// csrc/cuda/margin_softmax.cu as a host program.
#include "cuda_host.h"

#include "../../csrc/cuda/margin_softmax.cu"

using Kernel = void (*)(HYBRIDPAR_PARAMETERS);

extern "C" void run_margin_softmax(Kernel kernel, unsigned blocks, unsigned threads, unsigned long long step,
                                   HYBRIDPAR_PARAMETERS) {
    host::launch(blocks, threads, step, [&] {
        kernel(products, classes, batch, inverse_norms, bias, scale, own_count, own_classes, own_samples, own_values,
               out, maximum, total, factors, sums, parts, segment_classes, segments);
    });
}
