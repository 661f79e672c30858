// The reference of batch norm, in float64. A block has 32 channels and goes through all of their rows, 32 at a
// time; it is launched for one output at a time, whose number is that of confpred/problem/norm.py.
#include "reference.cuh"

enum { OUT, MEAN, INVSTD, NEW_RUNNING_MEAN, NEW_RUNNING_VAR, IN_GRAD, RESIDUAL_GRAD, WEIGHT_GRAD, BIAS_GRAD };
enum { SIDE = 32 };

// The sum over a block's rows, of each of its columns.
__device__ Real column_sum(Real mine) {
    __shared__ Real sums[SIDE][SIDE + 1];
    __syncthreads();
    sums[threadIdx.y][threadIdx.x] = mine;
    __syncthreads();
    Real sum = 0;
    for (int y = 0; y < SIDE; ++y) sum += sums[y][threadIdx.x];
    return sum;
}

#define ROWS(row) int row = threadIdx.y; row < own; row += SIDE

extern "C" __global__ void __launch_bounds__(SIDE* SIDE) reference_batch_norm(
    Real* reference, const Element* in, const float* weight, const float* bias, const Element* residual,
    const float* running_mean, const float* running_var, const float* eps, const float* momentum, int rows, int channels,
    int output) {
    const int c = blockIdx.x * SIDE + threadIdx.x, own = c < channels ? rows : 0;
    const Real count = rows;
    Real mean, variance;
    if (FROZEN) {
        mean = c < channels ? running_mean[c] : 0;
        variance = c < channels ? running_var[c] : 1;
    } else {
        Real sum = 0;
        for (ROWS(row)) sum += real(in[static_cast<i64>(row) * channels + c]);
        mean = column_sum(sum) / count;
        sum = 0;
        for (ROWS(row)) {
            const Real apart = real(in[static_cast<i64>(row) * channels + c]) - mean;
            sum += apart * apart;
        }
        variance = column_sum(sum) / count;
    }
    if (!own) return;
    const Real invstd = Real(1) / sqrt(variance + *eps);
    if (output == OUT) {
        const Real scale = invstd * (weight ? weight[c] : 1), offset = bias ? bias[c] : 0;
        for (ROWS(row)) {
            const i64 at = static_cast<i64>(row) * channels + c;
            reference[at] = activated((real(in[at]) - mean) * scale + offset + (residual ? real(residual[at]) : 0));
        }
        return;
    }
    if (FROZEN || threadIdx.y) return;
    const Real factor = *momentum;
    if (output == MEAN) reference[c] = mean;
    if (output == INVSTD) reference[c] = invstd;
    if (output == NEW_RUNNING_MEAN) reference[c] = (1 - factor) * running_mean[c] + factor * mean;
    if (output == NEW_RUNNING_VAR) reference[c] = (1 - factor) * running_var[c] + factor * variance * count / (count - 1);
}

// Frozen: `mean` and `invstd` are the running mean and variance.
extern "C" __global__ void __launch_bounds__(SIDE* SIDE) reference_batch_norm_backward(
    Real* reference, const Element* out_grad, const Element* in, const float* weight, const float* bias,
    const Element* residual, const float* mean, const float* invstd, const float* eps, int rows, int channels, int output) {
    const int c = blockIdx.x * SIDE + threadIdx.x, own = c < channels ? rows : 0;
    const float centre = own ? mean[c] : 0.0f, given = own ? invstd[c] : 1.0f;
    const float deviation = FROZEN ? rsqrtf(given + *eps) : given, factor = weight && own ? weight[c] : 1.0f;
    const float scale = __fmul_rn(factor, deviation), offset = bias && own ? bias[c] : 0.0f;
    const Real inverse = FROZEN ? Real(1) / sqrt(static_cast<Real>(given) + *eps) : static_cast<Real>(given);
    const Real exact = inverse * factor, count = rows;
    auto gradient = [&](i64 at) {
        const float x = element_to_float(in[at]);
        float rounded = __fmaf_rn(x - centre, scale, offset);
        Real z = (static_cast<Real>(x) - centre) * exact + offset;
        if (residual) {
            rounded = __fadd_rn(rounded, element_to_float(residual[at]));
            z += real(residual[at]);
        }
        return real(out_grad[at]) * Exact<ACTIVATION>::slope(z, rounded);
    };
    auto distance = [&](i64 at) { return (real(in[at]) - centre) * inverse; };
    Real sum = 0, product = 0;
    for (ROWS(row)) {
        const i64 at = static_cast<i64>(row) * channels + c;
        sum += gradient(at);
        product += gradient(at) * distance(at);
    }
    sum = column_sum(sum);
    product = column_sum(product);
    if (!own) return;
    for (ROWS(row)) {
        const i64 at = static_cast<i64>(row) * channels + c;
        if (output == RESIDUAL_GRAD) reference[at] = gradient(at);
        if (output == IN_GRAD) reference[at] = exact * (FROZEN ? gradient(at) : gradient(at) - sum / count - distance(at) * product / count);
    }
    if (threadIdx.y) return;
    if (output == WEIGHT_GRAD) reference[c] = product;
    if (output == BIAS_GRAD) reference[c] = sum;
}
