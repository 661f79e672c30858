// Copies the input patch of each output pixel into a row, so that a convolution becomes a product of matrices.
//
//   rows[pixel][g][r][s][c] = in[n][p * stride_h - pad_h + r * dilation_h][q * stride_w - ...][g * width + c]
//
// or zero where that is outside of the image; in is N H W C, pixel = n, p, q of `images` images from `first`
// on, and width = C / groups. It is bound by memory. A thread owns VECTOR neighbouring channels of a row and
// divides once to know where in the patch they are; then it walks over pixels, with IN_FLIGHT of them under
// way:
//
//                 columns: the vectors of a row
//               block 0          block 1   (y)
//   pixel 0   [t0 t1 t2 ..]    [t0 t1 ..]       threads: x along a row, y over pixels
//   pixel 1   [t0 t1 t2 ..]    [t0 t1 ..]
//     ..             blocks (x) take turns
//
// Compile-time: DTYPE, VECTOR, IN_FLIGHT, THREADS (of a block).
//
// Parts:
//   block   columns (y) of pixels in turns (x)
//   thread  VECTOR channels of one position in the filter, of every pixel that is its turn
//   warp    no part of its own
//
// Bound: bytes, it writes R S times what it reads. The shares are of the layer, so with the product that follows, by
// cuBLAS, whose floor is arithmetic.
//
// Instructions: plain loads and stores of 16 bytes: pixels that outputs share come from the L1 and L2 caches, so shared
// memory would only add a copy.
//
// Share of the floor:
//   im2col on NVIDIA H100 80GB HBM3, 2026-11-25
//       9% of arithmetic: n=12 c=64 h=368 w=656 k=64 r=3 s=3 padding=1
//      32% of arithmetic: n=42 c=512 h=46 w=46 k=256 r=3 s=3 padding=1 bias=true activation=relu
//      57% of arithmetic: n=1 c=64 h=360 w=640 k=64 r=3 s=3 padding=1 dtype=float32 direction=dgrad
#include "depthwise.cuh"

extern "C" __global__ void __launch_bounds__(THREADS) im2col(
    Element* __restrict__ scratch, const Element* __restrict__ in, int first, int images, int c, int h, int w, int r, int s,
    int p, int q, int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, int groups) {
    const int width = c / groups, vectors = width / VECTOR;
    const int columns = groups * r * s * vectors;
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    const int tap = column / vectors % (r * s), group = column / vectors / (r * s);
    const int channel = group * width + column % vectors * VECTOR;
    const int down = tap / s * dilation_h - pad_h, across = tap % s * dilation_w - pad_w;
    in += static_cast<i64>(first) * h * w * c + channel;
    scratch += static_cast<i64>(column) * VECTOR;
    const i64 row = static_cast<i64>(columns) * VECTOR;

    const int pixels = images * p * q, step = gridDim.x * blockDim.y;
    for (int pixel = blockIdx.x * blockDim.y + threadIdx.y; pixel < pixels; pixel += IN_FLIGHT * step) {
        Vector<VECTOR> found[IN_FLIGHT];
#pragma unroll
        for (int f = 0; f < IN_FLIGHT; ++f) {
            const int at = pixel + f * step;
            found[f].bits = {};
            if (at >= pixels) continue;
            const int y = at / q % p * stride_h + down, x = at % q * stride_w + across;
            if (y < 0 || y >= h || x < 0 || x >= w) continue;
            found[f].load(in + ((static_cast<i64>(at / (p * q)) * h + y) * w + x) * c);
        }
#pragma unroll
        for (int f = 0; f < IN_FLIGHT; ++f)
            if (pixel + f * step < pixels) found[f].store(scratch + (pixel + f * step) * row);
    }
}

// The way back, of gradients: each element of an image sums what its copies in the rows of all patches hold,
//
//   in_grad[n][y][x][g * width + c] = sum of rows[pixel][g][r][s][c] over the pixels and r, s that read y, x
//
// in float32, rounded once. A thread owns VECTOR neighbouring channels of one element of an image.
extern "C" __global__ void __launch_bounds__(THREADS) col2im(
    Element* __restrict__ in_grad, const Element* __restrict__ scratch, int first, int images, int c, int h, int w, int r, int s,
    int p, int q, int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, int groups) {
    const int width = c / groups;
    const int channel = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
    if (channel >= c) return;
    in_grad += static_cast<i64>(first) * h * w * c;
    scratch += static_cast<i64>(channel / width) * r * s * width + channel % width;
    const i64 row = static_cast<i64>(r) * s * c;

    const int elements = images * h * w, step = gridDim.x * blockDim.y;
    for (int at = blockIdx.x * blockDim.y + threadIdx.y; at < elements; at += step) {
        const int image = at / (h * w), y = at / w % h + pad_h, x = at % w + pad_w;
        float sums[VECTOR] = {};
        for (int i = 0; i < r; ++i) {
            const int down = y - i * dilation_h;
            if (down < 0 || down % stride_h || down / stride_h >= p) continue;
            for (int j = 0; j < s; ++j) {
                const int across = x - j * dilation_w;
                if (across < 0 || across % stride_w || across / stride_w >= q) continue;
                const i64 pixel = (static_cast<i64>(image) * p + down / stride_h) * q + across / stride_w;
                Vector<VECTOR> part;
                float values[VECTOR];
                part.load(scratch + pixel * row + (i * s + j) * width);
                part.to_floats(values);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) sums[v] += values[v];
            }
        }
        Vector<VECTOR> result;
        result.from_floats(sums);
        result.store(in_grad + static_cast<i64>(at) * c + channel);
    }
}
