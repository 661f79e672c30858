// What every kernel is checked against: a plain convolution in float64, and the comparison.
// One thread an output element; slow, and simple enough to be believed.
#include "common.cuh"

// A number in [-1, 1) from a counter, by the finaliser of MurmurHash3 (public domain).
__device__ __forceinline__ float uniform(u32 x) {
    x ^= x >> 16; x *= 0x85ebca6bu; x ^= x >> 13; x *= 0xc2b2ae35u; x ^= x >> 16;
    return static_cast<int>(x) * (1.0f / 2147483648.0f);
}

extern "C" __global__ void fill_random(u16* out, i64 count, u32 seed) {
    for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < count; i += static_cast<i64>(gridDim.x) * blockDim.x)
        out[i] = static_cast<u16>(pack(uniform(static_cast<u32>(i) ^ static_cast<u32>(i >> 32) * 0x9e3779b9u ^ seed), 0.0f));
}

// NHWC, KRSC; any stride, padding, dilation and groups.
extern "C" __global__ void reference_fprop(
    double* out, const u16* in, const u16* filter, const u16* bias, int activation, int n, int c, int h,
    int w, int k, int r, int s, int p, int q, int stride_h, int stride_w, int pad_h, int pad_w,
    int dilation_h, int dilation_w, int groups) {
    const i64 index = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    if (index >= static_cast<i64>(n) * p * q * k) return;
    const int ok = index % k, oq = index / k % q, op = index / k / q % p, on = index / k / q / p;
    const int width = c / groups, group = ok / (k / groups);
    double sum = bias ? to_float(bias[ok]) : 0.0;
    for (int fr = 0; fr < r; ++fr)
        for (int fs = 0; fs < s; ++fs) {
            const int y = op * stride_h - pad_h + fr * dilation_h, x = oq * stride_w - pad_w + fs * dilation_w;
            if (y < 0 || y >= h || x < 0 || x >= w) continue;
            const u16* pixel = in + ((static_cast<i64>(on) * h + y) * w + x) * c + group * width;
            const u16* taps = filter + ((static_cast<i64>(ok) * r + fr) * s + fs) * width;
            for (int i = 0; i < width; ++i) sum += static_cast<double>(to_float(pixel[i])) * to_float(taps[i]);
        }
    if (activation == ACTIVATION_RELU) sum = sum < 0.0 ? 0.0 : sum;
    if (activation == ACTIVATION_SILU) sum = sum / (1.0 + exp(-sum));
    if (activation == ACTIVATION_GELU) sum = 0.5 * sum * (1.0 + erf(sum * 0.70710678118654752));
    out[index] = sum;
}

// totals: squared error, squared reference, elements outside |out - ref| <= relative * |ref| + absolute
// (NaN is outside: an element that was never written keeps the poison and fails).
extern "C" __global__ void compare(double* totals, const u16* out, const double* reference, i64 count,
                                   double relative, double absolute) {
    double error = 0.0, norm = 0.0, outside = 0.0;
    for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < count; i += static_cast<i64>(gridDim.x) * blockDim.x) {
        const double expected = reference[i], difference = to_float(out[i]) - expected;
        error += difference * difference;
        norm += expected * expected;
        if (!(fabs(difference) <= relative * fabs(expected) + absolute)) outside += 1.0;
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        error += __shfl_down_sync(~0u, error, lane);
        norm += __shfl_down_sync(~0u, norm, lane);
        outside += __shfl_down_sync(~0u, outside, lane);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(totals, error);
        atomicAdd(totals + 1, norm);
        atomicAdd(totals + 2, outside);
    }
}
