// Adds up the sums that `splits` blocks of depthwise_wgrad left in `partials`, in a fixed order, and
// writes the gradients of the filter (filter_elements of them) and of the bias, which follow it.
// A warp takes 32 neighbouring elements; its block's warps divide the splits.
#include "depthwise.cuh"

constexpr int WARPS = 8;
enum { THREADS = 32 * WARPS, COLUMNS = 32 };  // of a block; columns are neighbouring elements

// Sizes that launches count on, as confpred/families/common.py (`sum_step`) has it.
static_assert(THREADS == HOST_THREADS && THREADS * sizeof(float) == HOST_SMEM_BYTES, "the host launches other blocks");
static_assert(COLUMNS == HOST_COLUMNS, "the host launches a block for so many elements");

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_wgrad_sum(
    Element* __restrict__ filter_grad, Element* __restrict__ bias_grad, const float* __restrict__ partials,
    int filter_elements, int elements, int splits) {
    extern __shared__ __align__(16) float shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int element = blockIdx.x * COLUMNS + lane;
    float sum = 0.0f;
    if (element < elements)
        for (int split = warp; split < splits; split += WARPS) sum += partials[static_cast<i64>(split) * elements + element];
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (warp != 0 || element >= elements) return;
    for (int other = 1; other < WARPS; ++other) sum += shared[32 * other + lane];
    if (element < filter_elements) filter_grad[element] = element_from_float(sum);
    else bias_grad[element - filter_elements] = element_from_float(sum);
}
