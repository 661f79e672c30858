// The reference of convolution in one, two or three dimensions, in float64: any stride, padding, dilation and groups.
// Tensors are channels last (N, D, H, W, C; filter K, T, R, S, C / groups), or channels first. One thread computes an
// element, or a slice of its sum: slow, but simple enough to be trusted.
#include "reference.cuh"

#define SIZES_ND                                                                                             \
    int n, int c, int d, int h, int w, int k, int t, int r, int s, int z, int p, int q, int groups,          \
        int stride_d, int stride_h, int stride_w, int pad_d, int pad_h, int pad_w, int dilation_d,           \
        int dilation_h, int dilation_w, int channels_first

// An element's offset in an image of `depth` x `height` x `width` positions and `channels` channels.
struct Place {
    int image, channel, d, h, w;
};

__device__ Place place_of(i64 index, int channels, int depth, int height, int width, int channels_first) {
    Place at;
    if (!channels_first) at.channel = index % channels, index /= channels;
    at.w = index % width, index /= width;
    at.h = index % height, index /= height;
    at.d = index % depth, index /= depth;
    if (channels_first) at.channel = index % channels, index /= channels;
    at.image = index;
    return at;
}

__device__ i64 index_of(Place at, int channels, int depth, int height, int width, int channels_first) {
    i64 index = at.image;
    if (channels_first) index = index * channels + at.channel;
    index = ((index * depth + at.d) * height + at.h) * width + at.w;
    return channels_first ? index : index * channels + at.channel;
}

// Which position of the output reads `in` at a tap; -1 for none.
__device__ int reader_of(int in, int tap, int stride, int pad, int dilation, int count) {
    const int reached = in + pad - tap * dilation;
    return reached < 0 || reached % stride || reached / stride >= count ? -1 : reached / stride;
}

#define FOR_EACH_TAP                      \
    for (int ft = 0; ft < t; ++ft)        \
        for (int fr = 0; fr < r; ++fr)    \
            for (int fs = 0; fs < s; ++fs)

extern "C" __global__ void reference_conv_out(Real* out, const Element* in, const Element* filter, const Element* bias,
                                              const Element* residual, SIZES_ND) {
    const i64 index = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    if (index >= static_cast<i64>(n) * z * p * q * k) return;
    const Place to = place_of(index, k, z, p, q, channels_first);
    const int width = c / groups, group = to.channel / (k / groups);
    Real sum = bias ? real(bias[to.channel]) : 0.0;
    if (residual) sum += real(residual[index]);
    FOR_EACH_TAP {
        Place from = {to.image, 0, to.d * stride_d - pad_d + ft * dilation_d, to.h * stride_h - pad_h + fr * dilation_h,
                      to.w * stride_w - pad_w + fs * dilation_w};
        if (from.d < 0 || from.d >= d || from.h < 0 || from.h >= h || from.w < 0 || from.w >= w) continue;
        for (int i = 0; i < width; ++i) {
            from.channel = group * width + i;
            sum += real(in[index_of(from, c, d, h, w, channels_first)]) *
                   real(filter[index_of({to.channel, i, ft, fr, fs}, width, t, r, s, channels_first)]);
        }
    }
    out[index] = activated(sum);
}

// Sums what reaches an input element over the output elements that read it; the result of a transposed convolution.
extern "C" __global__ void reference_conv_in_grad(Real* in_grad, const Element* out_grad, const Element* filter,
                                                  const Element* bias, const Element* residual, SIZES_ND) {
    const i64 index = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    if (index >= static_cast<i64>(n) * d * h * w * c) return;
    const Place to = place_of(index, c, d, h, w, channels_first);
    const int width = c / groups, out_width = k / groups, group = to.channel / width;
    Real sum = bias ? real(bias[to.channel]) : 0.0;
    if (residual) sum += real(residual[index]);
    FOR_EACH_TAP {
        Place from = {to.image, 0, reader_of(to.d, ft, stride_d, pad_d, dilation_d, z),
                      reader_of(to.h, fr, stride_h, pad_h, dilation_h, p), reader_of(to.w, fs, stride_w, pad_w, dilation_w, q)};
        if (from.d < 0 || from.h < 0 || from.w < 0) continue;
        for (int i = group * out_width; i < (group + 1) * out_width; ++i) {
            from.channel = i;
            sum += real(out_grad[index_of(from, k, z, p, q, channels_first)]) *
                   real(filter[index_of({i, to.channel % width, ft, fr, fs}, width, t, r, s, channels_first)]);
        }
    }
    in_grad[index] = activated(sum);
}

// Positions of the output that slice blockIdx.y sums over, of all images.
#define SLICE(place)                                                                                        \
    const i64 places = static_cast<i64>(n) * z * p * q, slice = (places + gridDim.y - 1) / gridDim.y;       \
    for (i64 place = blockIdx.y * slice; place < min(places, (blockIdx.y + 1) * slice); ++place)

extern "C" __global__ void reference_conv_filter_grad(Real* filter_grad, const Element* out_grad, const Element* in,
                                                      SIZES_ND) {
    const i64 index = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    const int width = c / groups;
    if (index >= static_cast<i64>(k) * t * r * s * width) return;
    const Place tap = place_of(index, width, t, r, s, channels_first);  // its image is the filter
    Real sum = 0.0;
    SLICE(place) {
        Place to = place_of(place, 1, z, p, q, 0);
        to.channel = tap.image;
        const Place from = {to.image, tap.image / (k / groups) * width + tap.channel,
                            to.d * stride_d - pad_d + tap.d * dilation_d, to.h * stride_h - pad_h + tap.h * dilation_h,
                            to.w * stride_w - pad_w + tap.w * dilation_w};
        if (from.d < 0 || from.d >= d || from.h < 0 || from.h >= h || from.w < 0 || from.w >= w) continue;
        sum += real(out_grad[index_of(to, k, z, p, q, channels_first)]) * real(in[index_of(from, c, d, h, w, channels_first)]);
    }
    atomicAdd(filter_grad + index, sum);
}

extern "C" __global__ void reference_conv_bias_grad(Real* bias_grad, const Element* out_grad, SIZES_ND) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= k) return;
    Real sum = 0.0;
    SLICE(place) {
        Place to = place_of(place, 1, z, p, q, 0);
        to.channel = channel;
        sum += real(out_grad[index_of(to, k, z, p, q, channels_first)]);
    }
    atomicAdd(bias_grad + channel, sum);
}
