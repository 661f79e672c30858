// References that every kernel is checked against: plain convolutions in float64 (dense ones: reference_dense.cu), and the
// comparison.
// One thread computes an output element, or a slice of its sum: slow, but simple enough to be trusted.
#include "reference.cuh"

// A number in [-1, 1) from a counter, by the finaliser of MurmurHash3 (public domain).
__device__ __forceinline__ float uniform(u32 x) {
    x ^= x >> 16; x *= 0x85ebca6bu; x ^= x >> 13; x *= 0xc2b2ae35u; x ^= x >> 16;
    return static_cast<int>(x) * (1.0f / 2147483648.0f);
}

#define FOR_EACH(i, count) \
    for (i64 i = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; i < count; i += static_cast<i64>(gridDim.x) * blockDim.x)

extern "C" __global__ void fill_random(Element* out, i64 count, u32 seed, float scale, float center) {
    FOR_EACH(i, count) out[i] = element_from_float(center + scale * uniform(static_cast<u32>(i) ^ static_cast<u32>(i >> 32) * 0x9e3779b9u ^ seed));
}

extern "C" __global__ void reference_out(Real* out, const Element* in, const Element* filter, const Element* bias,
                                         const Element* residual, SIZES) {
    const i64 index = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    if (index >= static_cast<i64>(n) * p * q * k) return;
    const int ok = index % k, oq = index / k % q, op = index / k / q % p, on = index / k / q / p;
    const int width = c / groups, group = ok / (k / groups);
    Real sum = bias ? real(bias[ok]) : 0.0;
    if (residual) sum += real(residual[index]);
    for (int fr = 0; fr < r; ++fr)
        for (int fs = 0; fs < s; ++fs) {
            const int y = op * stride_h - pad_h + fr * dilation_h, x = oq * stride_w - pad_w + fs * dilation_w;
            if (y < 0 || y >= h || x < 0 || x >= w) continue;
            const Element* pixel = in + ((static_cast<i64>(on) * h + y) * w + x) * c + group * width;
            const Element* taps = filter + ((static_cast<i64>(ok) * r + fr) * s + fs) * width;
            for (int i = 0; i < width; ++i) sum += real(pixel[i]) * real(taps[i]);
        }
    out[index] = activated(sum);
}

// Sums what reaches an input element over the output elements that read it.
extern "C" __global__ void reference_in_grad(Real* in_grad, const Element* out_grad, const Element* filter, SIZES) {
    const i64 index = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    if (index >= static_cast<i64>(n) * h * w * c) return;
    const int ic = index % c, x = index / c % w, y = index / c / w % h, in = index / c / w / h;
    const int width = c / groups, out_width = k / groups, group = ic / width;
    Real sum = 0.0;
    for (int fr = 0; fr < r; ++fr)
        for (int fs = 0; fs < s; ++fs) {
            const int up = y + pad_h - fr * dilation_h, uq = x + pad_w - fs * dilation_w;
            if (up < 0 || uq < 0 || up % stride_h || uq % stride_w || up / stride_h >= p || uq / stride_w >= q) continue;
            const Element* pixel = out_grad + ((static_cast<i64>(in) * p + up / stride_h) * q + uq / stride_w) * k;
            for (int i = group * out_width; i < (group + 1) * out_width; ++i)
                sum += real(pixel[i]) * real(filter[((static_cast<i64>(i) * r + fr) * s + fs) * width + ic % width]);
        }
    in_grad[index] = sum;
}

// Elements in the order r, s, c within the group, k, so that neighbouring threads read neighbouring
// channels; grid.y cuts the output pixels that each element sums over.
extern "C" __global__ void reference_filter_grad(Real* filter_grad, const Element* out_grad, const Element* in, SIZES) {
    const i64 index = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    const int width = c / groups;
    if (index >= static_cast<i64>(k) * r * s * width) return;
    const int ok = index % k, ic = index / k % width, fs = index / k / width % s, fr = index / k / width / s;
    const int channel = ok / (k / groups) * width + ic;
    const i64 pixels = static_cast<i64>(n) * p * q;
    const i64 slice = (pixels + gridDim.y - 1) / gridDim.y, end = min(pixels, (blockIdx.y + 1) * slice);
    Real sum = 0.0;
    for (i64 pixel = blockIdx.y * slice; pixel < end; ++pixel) {
        const int oq = pixel % q, op = pixel / q % p, on = pixel / q / p;
        const int y = op * stride_h - pad_h + fr * dilation_h, x = oq * stride_w - pad_w + fs * dilation_w;
        if (y < 0 || y >= h || x < 0 || x >= w) continue;
        sum += real(out_grad[pixel * k + ok]) * real(in[((static_cast<i64>(on) * h + y) * w + x) * c + channel]);
    }
    atomicAdd(filter_grad + ((static_cast<i64>(ok) * r + fr) * s + fs) * width + ic, sum);
}

extern "C" __global__ void reference_bias_grad(Real* bias_grad, const Element* out_grad, SIZES) {
    const int ok = blockIdx.x * blockDim.x + threadIdx.x;
    if (ok >= k) return;
    const i64 pixels = static_cast<i64>(n) * p * q;
    const i64 slice = (pixels + gridDim.y - 1) / gridDim.y, end = min(pixels, (blockIdx.y + 1) * slice);
    Real sum = 0.0;
    for (i64 pixel = blockIdx.y * slice; pixel < end; ++pixel) sum += real(out_grad[pixel * k + ok]);
    atomicAdd(bias_grad + ok, sum);
}

__device__ __forceinline__ void add_up(Real* totals, Real a, Real b, Real c) {
    for (int lane = 16; lane > 0; lane /= 2) {
        a += __shfl_down_sync(~0u, a, lane);
        b += __shfl_down_sync(~0u, b, lane);
        c += __shfl_down_sync(~0u, c, lane);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(totals, a);
        atomicAdd(totals + 1, b);
        atomicAdd(totals + 2, c);
    }
}

// totals: squared error, squared reference, elements outside |out - ref| <= relative * |ref| + absolute
// (NaN is outside: an element that was never written keeps the poison and fails).
extern "C" __global__ void compare(Real* totals, const Element* out, const Real* reference, i64 count,
                                   Real relative, Real absolute) {
    Real error = 0.0, norm = 0.0, outside = 0.0;
    FOR_EACH(i, count) {
        const Real expected = reference[i], difference = real(out[i]) - expected;
        error += difference * difference;
        norm += expected * expected;
        if (!(fabs(difference) <= relative * fabs(expected) + absolute)) outside += 1.0;
    }
    add_up(totals, error, norm, outside);
}

// The first total is the number of words that are not zero.
extern "C" __global__ void count_nonzero(Real* totals, const u32* words, i64 count) {
    Real found = 0.0;
    FOR_EACH(i, count) found += words[i] != 0;
    add_up(totals, found, 0.0, 0.0);
}
