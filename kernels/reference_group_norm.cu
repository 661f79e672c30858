// The reference of norms over groups of channels, in float64. Activations are (samples, pixels, channels). A block has a
// sample and group, or, for gradients of weights, 32 channels and all of their pixels. It is launched for one output at
// a time, whose number is that of confpred/problem/norm_of_groups.py.
#include "reference.cuh"
#include "norm_weights.cuh"

enum { OUT, MEAN, INVSTD, IN_GRAD, RESIDUAL_GRAD, WEIGHT_GRAD, BIAS_GRAD };
enum { SIDE = 32, GROUP_THREADS = SIDE * SIDE / 4 };

// The sum of what the threads of a block have.
__device__ Real block_sum(Real mine) {
    __shared__ Real sums[GROUP_THREADS];
    __syncthreads();
    sums[threadIdx.x] = mine;
    for (int half = GROUP_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}

// A block's group: where its elements are in the tensor, and their channels among the parameters.
struct Group {
    int sample, first, pixels, channels, width;

    __device__ Group(int pixels, int channels, int groups)
        : sample(blockIdx.x / groups), first(blockIdx.x % groups * (channels / groups)), pixels(pixels), channels(channels),
          width(channels / groups) {}
    __device__ i64 count() const { return static_cast<i64>(pixels) * width; }
    __device__ int channel(i64 i) const { return first + static_cast<int>(i % width); }
    __device__ i64 at(i64 i) const { return (static_cast<i64>(sample) * pixels + i / width) * channels + channel(i); }
    __device__ i64 parameter(i64 i) const { return (ADAPTIVE ? static_cast<i64>(sample) * channels : 0) + channel(i); }
};
#define ELEMENTS(i) i64 i = threadIdx.x; i < own.count(); i += GROUP_THREADS

extern "C" __global__ void __launch_bounds__(GROUP_THREADS) reference_norm(
    Real* reference, const Element* in, const Weight* weight, const Weight* bias, const Element* residual,
    const float* eps, int samples, int pixels, int channels, int groups, int output) {
    const Group own(pixels, channels, groups);
    const Real count = own.count();
    Real mean = 0, sum = 0;
    if (CENTRED) {
        for (ELEMENTS(i)) sum += real(in[own.at(i)]);
        mean = block_sum(sum) / count;
    }
    sum = 0;
    for (ELEMENTS(i)) {
        const Real apart = real(in[own.at(i)]) - mean;
        sum += apart * apart;
    }
    const Real invstd = Real(1) / sqrt(block_sum(sum) / count + *eps);
    if (output == OUT) {
        for (ELEMENTS(i)) {
            const i64 at = own.at(i), parameter = own.parameter(i);
            const Real scale = invstd * weight_or(1.0f, weight, parameter), offset = weight_or(0.0f, bias, parameter);
            reference[at] = activated((real(in[at]) - mean) * scale + offset + (residual ? real(residual[at]) : 0));
        }
    } else if (threadIdx.x == 0) {
        reference[blockIdx.x] = output == MEAN ? mean : invstd;
    }
}

// The gradient before the activation. Where its slope jumps, the argument decides as kernels round it.
struct Before {
    float centre, scale, offset;
    Real exact;

    __device__ Before(const Weight* weight, const Weight* bias, i64 parameter, float centre, float invstd) : centre(centre) {
        const float factor = weight_or(1.0f, weight, parameter);
        scale = __fmul_rn(factor, invstd);
        offset = weight_or(0.0f, bias, parameter);
        exact = static_cast<Real>(invstd) * factor;
    }
    __device__ Real gradient(const Element* out_grad, const Element* in, const Element* residual, i64 at) const {
        const float x = element_to_float(in[at]);
        float rounded = __fmaf_rn(x - centre, scale, offset);
        Real z = (static_cast<Real>(x) - centre) * exact + offset;
        if (residual) {
            rounded = __fadd_rn(rounded, element_to_float(residual[at]));
            z += real(residual[at]);
        }
        return real(out_grad[at]) * Exact<ACTIVATION>::slope(z, rounded);
    }
};

#define BACKWARD_PARAMETERS                                                                                     \
    Real *reference, const Element *out_grad, const Element *in, const Weight *weight, const Weight *bias,      \
        const Element *residual, const float *mean, const float *invstd, int samples, int pixels, int channels, \
        int groups, int output

extern "C" __global__ void __launch_bounds__(GROUP_THREADS) reference_norm_backward(BACKWARD_PARAMETERS) {
    const Group own(pixels, channels, groups);
    const float centre = mean ? mean[blockIdx.x] : 0.0f, deviation = invstd[blockIdx.x];
    const Real count = own.count();
    auto gradient = [&](i64 i) {
        return Before(weight, bias, own.parameter(i), centre, deviation).gradient(out_grad, in, residual, own.at(i));
    };
    auto distance = [&](i64 i) { return (real(in[own.at(i)]) - centre) * deviation; };
    Real sum = 0, product = 0;
    for (ELEMENTS(i)) {
        const Real weighted = gradient(i) * weight_or(1.0f, weight, own.parameter(i));
        sum += weighted;
        product += weighted * distance(i);
    }
    sum = mean ? block_sum(sum) / count : 0;
    product = block_sum(product) / count;
    for (ELEMENTS(i)) {
        const Real before = gradient(i), weighted = before * weight_or(1.0f, weight, own.parameter(i));
        reference[own.at(i)] = output == RESIDUAL_GRAD ? before : deviation * (weighted - sum - distance(i) * product);
    }
}

extern "C" __global__ void __launch_bounds__(SIDE* SIDE) reference_norm_weights(BACKWARD_PARAMETERS) {
    __shared__ Real sums[SIDE][SIDE + 1];
    const int c = blockIdx.x * SIDE + threadIdx.x, width = channels / groups;
    Real sum = 0;
    for (int sample = 0; sample < samples; ++sample) {
        if (ADAPTIVE) sum = 0;
        if (c < channels) {
            const int group = sample * groups + c / width;
            const i64 parameter = (ADAPTIVE ? static_cast<i64>(sample) * channels : 0) + c;
            const float centre = mean ? mean[group] : 0.0f, deviation = invstd[group];
            const Before before(weight, bias, parameter, centre, deviation);
            for (int pixel = threadIdx.y; pixel < pixels; pixel += SIDE) {
                const i64 at = (static_cast<i64>(sample) * pixels + pixel) * channels + c;
                const Real d = before.gradient(out_grad, in, residual, at);
                sum += output == WEIGHT_GRAD ? d * (real(in[at]) - centre) * deviation : d;
            }
        }
        if (!ADAPTIVE && sample < samples - 1) continue;
        __syncthreads();
        sums[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.y || c >= channels) continue;
        Real all = 0;
        for (int y = 0; y < SIDE; ++y) all += sums[y][threadIdx.x];
        reference[(ADAPTIVE ? static_cast<i64>(sample) * channels : 0) + c] = all;
    }
}
