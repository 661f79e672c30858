// Adds up the gradients of weight and bias that `blocks` blocks of row_norm_backward left in `scratch`, in a fixed
// order. A block has 32 neighbouring elements, one of each lane, and its warps divide the blocks:
//
//   scratch[blocks][elements]    float32; `elements` are those of the weight (channels) and, behind them, of the bias
//
// Few channels make few blocks, so a thread has AT_ONCE loads under way: all of its share of 288 blocks.
#include "depthwise.cuh"

enum { WARPS = 32, THREADS = 32 * WARPS, COLUMNS = 32, AT_ONCE = 9 };
static_assert(THREADS == HOST_THREADS && COLUMNS == HOST_COLUMNS, "the host launches other blocks");

extern "C" __global__ void __launch_bounds__(THREADS) row_norm_sum(
    Element* __restrict__ weight_grad, Element* __restrict__ bias_grad, const float* __restrict__ scratch,
    int channels, int elements, int blocks) {
    __shared__ float sums[WARPS][COLUMNS];
    const int lane = threadIdx.x % COLUMNS, warp = threadIdx.x / COLUMNS;
    const int element = blockIdx.x * COLUMNS + lane;
    float sum = 0.0f;
    for (int first = warp; first < blocks; first += AT_ONCE * WARPS) {
        float found[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int block = first + i * WARPS;
            found[i] = block < blocks && element < elements ? scratch[static_cast<i64>(block) * elements + element] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sum += found[i];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || element >= elements) return;
#pragma unroll
    for (int other = 1; other < WARPS; ++other) sum += sums[other][lane];
    if (element < channels) weight_grad[element] = element_from_float(sum);
    else bias_grad[element - channels] = element_from_float(sum);
}
