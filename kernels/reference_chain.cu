// Reference that chains of linear layers are checked against: in float64, a block computes one row of the output, and a
// warp a feature at a time. Rows of features before and after a layer lie in shared memory.
#include "reference.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) reference_chain(
    Real* reference, const Element* in, const Element* weight0, const Element* weight1, const Element* weight2,
    const Element* weight3, const Element* weight4, const Element* weight5, const Element* weight6, const Element* weight7,
    const Element* bias0, const Element* bias1, const Element* bias2, const Element* bias3, const Element* bias4,
    const Element* bias5, const Element* bias6, const Element* bias7, int inputs, int hidden, int outputs, int layers,
    int last, int widest) {
    const Element* const weights[] = {weight0, weight1, weight2, weight3, weight4, weight5, weight6, weight7};
    const Element* const biases[] = {bias0, bias1, bias2, bias3, bias4, bias5, bias6, bias7};
    extern __shared__ Real rows[];
    for (int i = threadIdx.x; i < inputs; i += THREADS) rows[i] = real(in[static_cast<i64>(blockIdx.x) * inputs + i]);
    __syncthreads();
    const int lane = threadIdx.x % 32;
    for (int layer = 0; layer < layers; ++layer) {
        const int before = layer ? hidden : inputs, after = layer == layers - 1 ? outputs : hidden;
        const Real* const from = rows + layer % 2 * widest;
        Real* const to = rows + (layer + 1) % 2 * widest;
        for (int feature = threadIdx.x / 32; feature < after; feature += THREADS / 32) {
            const Element* const weight = weights[layer] + static_cast<i64>(feature) * before;
            Real sum = 0;
            for (int i = lane; i < before; i += 32) sum += from[i] * real(weight[i]);
            for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_down_sync(~0u, sum, apart);
            if (lane) continue;
            if (biases[layer]) sum += real(biases[layer][feature]);
            to[feature] = layer < layers - 1 || last ? activated(sum) : sum;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < outputs; i += THREADS) reference[static_cast<i64>(blockIdx.x) * outputs + i] = rows[layers % 2 * widest + i];
}
