// Dense convolution of volumes, gradient of the filter and of the bias, NDHWC, on tensor cores (sm_80 and later).
//
//   filter_grad[k, t, r, s, c] = sum over n, z, p, q of out_grad[n, z, p, q, k]
//                                * in[n, z * stride - pad + t, p * stride - pad + r, q * stride - pad + s, c]
//   bias_grad[k]               = sum over n, z, p, q of out_grad[n, z, p, q, k]
//
// The layer's sizes are run-time arguments. Compile-time: the filter TAPS_D x R x S, the strides STRIDE_D, STRIDE_H and
// STRIDE_W, DTYPE, HAS_BIAS, and the config:
//
//   BLOCK_P, BLOCK_Q   rows and columns of a tile of a plane of `out_grad`
//   BLOCK_K, BLOCK_C   channels of `out_grad` and of `in` of a block
//   WARPS_K, WARPS_U   how the warps divide the channels of `out_grad`, and the units
//
// (The config also has bands and splits, which the host makes a launch of.)
//
// The sum over the pixels of a tile is a matrix product. A *unit* is a row and a column of the filter with 8 channels of
// `in`: a tile of 8 columns of the product for each of the filter's planes, for which the pixels of `in` are read from
// shared memory at the offset of the tap.
//
// A block walks down a band of planes with the same tile of each. An input plane's part, with the halo around it, comes
// into a ring of shared memory once and stays there for all planes of `out_grad` that it meets. What the next plane
// needs is brought while one is multiplied. Then the block goes on to its next tile.
//
// Several blocks (`splits`) may share a sum, each with tiles of its own. Then each writes its sums to `partials`, and
// depthwise_wgrad_sum adds them up in a fixed order. So the bits are the same every time.
//
// Zeros stand for pixels outside of the images, and are multiplied, too: an infinity or NaN near a border may make NaN
// of sums that it is no part of.
//
// Parts:
//   block   BLOCK_K by BLOCK_C channels of the filter, and a split of the tiles
//   warp    WARP_K tiles of 16 channels of `out_grad` by WARP_U units of each plane of the filter, in registers
//   thread  fragments of mma.m16n8k16, and parts of 16 bytes of the copies
//
// Bound: shared memory and the tensor cores, about alike, at 32 channels; shared memory below.
//
// Instructions: both operands have pixels as rows, and the sum runs over pixels, so that ldmatrix.trans makes fragments
// of either without a transposed copy. mma.sync and cp.async as in dense_volume.cu.
//
// Share of the floor:
//   dense_volume_wgrad on NVIDIA H200, 2026-11-30
//      25% of arithmetic: n=2 c=16 d=96 h=96 w=96 k=16 t=3 r=3 s=3 rank=3 padding=1 dtype=bfloat16 direction=wgrad
//                         bias=true
//      43% of bytes: n=2 c=8 d=32 h=256 w=320 k=16 t=3 r=3 s=3 rank=3 stride=2 padding=1 dtype=bfloat16
//                    direction=wgrad
//      43% of arithmetic: n=4 c=32 d=80 h=96 w=80 k=64 t=3 r=3 s=3 rank=3 padding=1 dtype=bfloat16 direction=wgrad
//                         deterministic=true
#include "common.cuh"
#include "transposed.cuh"

constexpr int PIECES = BLOCK_C / 8, K_TILES = BLOCK_K / 16;
constexpr int UNITS = R * S * PIECES;
constexpr int WARP_K = ceil_div(K_TILES, WARPS_K), WARP_U = ceil_div(UNITS, WARPS_U);
constexpr int THREADS = 32 * WARPS_K * WARPS_U;
constexpr int PIXELS = BLOCK_P * BLOCK_Q;
constexpr int TILE_H = STRIDE_H * (BLOCK_P - 1) + R, TILE_W = STRIDE_W * (BLOCK_Q - 1) + S;
constexpr int TILE_PIXELS = TILE_H * TILE_W;
constexpr int RING = TAPS_D + STRIDE_D;  // input planes that a plane of `out_grad` and the next one meet

// Odd numbers of chunks of 16 bytes: ldmatrix meets no bank twice.
constexpr int PIXEL_BYTES = 16 * (PIECES | 1), GRAD_BYTES = 16 * (2 * K_TILES | 1);
constexpr int PLANE_BYTES = TILE_PIXELS * PIXEL_BYTES, GRAD_PLANE_BYTES = PIXELS * GRAD_BYTES;
enum { SMEM_BYTES = RING * PLANE_BYTES + 2 * GRAD_PLANE_BYTES };

static_assert(PIXELS % 16 == 0, "a step of the tensor cores takes 16 pixels");
static_assert(BLOCK_C % 8 == 0 && BLOCK_K % 16 == 0, "channels come in pieces of 8 and tiles of 16");
static_assert(THREADS == HOST_THREADS && SMEM_BYTES == HOST_SMEM_BYTES, "the host launches other blocks");

// `d`, `h`, `w`, `c` are the sizes of `in`, and `z`, `p`, `q`, `k` of `out_grad`. Blocks count parts of the filter
// fastest (c_blocks, then k_blocks), then splits. A tile's number counts columns fastest (q_tiles), then rows (p_tiles),
// bands of band_planes planes, and images.
extern "C" __global__ void __launch_bounds__(THREADS) dense_volume_wgrad(
    u16* __restrict__ filter_grad, u16* __restrict__ bias_grad, const u16* __restrict__ out_grad,
    const u16* __restrict__ in, float* partials, int d, int h, int w, int c, int z, int p, int q, int k, int pad_d,
    int pad_h, int pad_w, int c_blocks, int k_blocks, int p_tiles, int q_tiles, int bands, int band_planes, int tiles,
    int splits) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 in_shared = shared_address(shared), grad_shared = in_shared + RING * PLANE_BYTES;

    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int warp_k = warp / WARPS_U, warp_u = warp % WARPS_U;
    const int c0 = blockIdx.x % c_blocks * BLOCK_C, k0 = blockIdx.x / c_blocks % k_blocks * BLOCK_K;
    const int split = blockIdx.x / (c_blocks * k_blocks);

    // Fragments are transposed: a lane names a pixel, and eight lanes a matrix. For the gradient, each second eight name
    // the next 8 channels; for the input, each second eight name the next 8 pixels, and the upper half of the lanes the
    // next unit.
    const int grad_pixel = lane % 8 + lane / 16 * 8, in_pixel = lane % 16;
    // Tiles and units past the last one compute it again, and are not stored.
    u32 grad_from[WARP_K], unit_from[WARP_U];
#pragma unroll
    for (int i = 0; i < WARP_K; ++i)
        grad_from[i] = grad_shared + grad_pixel * GRAD_BYTES + min(warp_k * WARP_K + i, K_TILES - 1) * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < WARP_U; ++i) {
        const int unit = min(warp_u * WARP_U + i, UNITS - 1), tap = unit / PIECES;
        unit_from[i] = in_shared + (tap / S * TILE_W + tap % S) * PIXEL_BYTES + unit % PIECES * 16;
    }

    float acc[TAPS_D][WARP_K][WARP_U][4] = {}, bias[WARP_K][4] = {};
    const bool sums_bias = HAS_BIAS && c0 == 0 && warp_u == 0;
    const u32 one = DTYPE == DTYPE_BFLOAT16 ? 0x3f803f80 : 0x3c003c00;
    for (int tile = split; tile < tiles; tile += splits) {
        int rest = tile;
        const int q0 = rest % q_tiles * BLOCK_Q;
        rest /= q_tiles;
        const int p0 = rest % p_tiles * BLOCK_P;
        rest /= p_tiles;
        const int first_plane = rest % bands * band_planes, end_plane = min(first_plane + band_planes, z);
        const int image = rest / bands;
        const int y0 = p0 * STRIDE_H - pad_h, x0 = q0 * STRIDE_W - pad_w;

        // Of `in`, counted from the first one of the padding; all before it that are still to be met are brought.
        int next_plane = first_plane * STRIDE_D;
        const auto bring_planes = [&](int at) {
            for (next_plane = max(next_plane, at * STRIDE_D); next_plane < at * STRIDE_D + TAPS_D; ++next_plane) {
                const int number = next_plane - pad_d;
                const bool inside = number >= 0 && number < d;
                const u16* const plane = in + (static_cast<i64>(image) * d + number) * h * w * c + c0;
                const u32 to = in_shared + next_plane % RING * PLANE_BYTES;
                for (int e = tid; e < TILE_PIXELS * PIECES; e += THREADS) {
                    const int piece = e % PIECES, pixel = e / PIECES;
                    const int y = y0 + pixel / TILE_W, x = x0 + pixel % TILE_W;
                    const bool valid = inside && y >= 0 && y < h && x >= 0 && x < w && c0 + 8 * piece < c;
                    const u16* const from = plane + (static_cast<i64>(y) * w + x) * c + 8 * piece;
                    copy_async_16(to + pixel * PIXEL_BYTES + 16 * piece, valid ? from : in, valid);
                }
            }
            const u16* const plane = out_grad + (static_cast<i64>(image) * z + at) * p * q * k + k0;
            const u32 to = grad_shared + at % 2 * GRAD_PLANE_BYTES;
            for (int e = tid; e < PIXELS * 2 * K_TILES; e += THREADS) {
                const int piece = e % (2 * K_TILES), pixel = e / (2 * K_TILES);
                const int y = p0 + pixel / BLOCK_Q, x = q0 + pixel % BLOCK_Q;
                const bool valid = y < p && x < q && k0 + 8 * piece < k;
                const u16* const from = plane + (static_cast<i64>(y) * q + x) * k + 8 * piece;
                copy_async_16(to + pixel * GRAD_BYTES + 16 * piece, valid ? from : out_grad, valid);
            }
        };
        __syncthreads();  // all warps are done with the tile before
        bring_planes(first_plane);
        copy_async_commit();

        for (int at = first_plane; at < end_plane; ++at) {
            copy_async_wait<0>();
            __syncthreads();
            if (at + 1 < end_plane) bring_planes(at + 1);
            copy_async_commit();

            u32 plane_from[TAPS_D];  // the input plane that each of the filter meets
#pragma unroll
            for (int t = 0; t < TAPS_D; ++t) plane_from[t] = (at * STRIDE_D + t) % RING * PLANE_BYTES;
            const u32 grad_plane = at % 2 * GRAD_PLANE_BYTES;
#pragma unroll 1
            for (int m = 0; m < PIXELS; m += 16) {
                u32 a[WARP_K][4];
#pragma unroll
                for (int i = 0; i < WARP_K; ++i) {
                    load_transposed_x4(a[i], grad_from[i] + grad_plane + m * GRAD_BYTES);
                    if (sums_bias) mma_k16(bias[i], a[i], one, one);
                }
                const int y = (m + in_pixel) / BLOCK_Q * STRIDE_H, x = (m + in_pixel) % BLOCK_Q * STRIDE_W;
                const u32 in_at = (y * TILE_W + x) * PIXEL_BYTES;
#pragma unroll
                for (int t = 0; t < TAPS_D; ++t) {
                    const u32 plane_at = in_at + plane_from[t];
#pragma unroll
                    for (int i = 0; i < WARP_U; i += 2) {
                        const int next = i + 1 < WARP_U ? i + 1 : i;
                        u32 b[4];  // of units i and i + 1
                        if (next > i) load_transposed_x4(b, plane_at + (lane < 16 ? unit_from[i] : unit_from[next]));
                        else load_transposed_x2(b, plane_at + unit_from[i]);
#pragma unroll
                        for (int tile_k = 0; tile_k < WARP_K; ++tile_k) {
                            mma_k16(acc[t][tile_k][i], a[tile_k], b[0], b[1]);
                            if (next > i) mma_k16(acc[t][tile_k][next], a[tile_k], b[2], b[3]);
                        }
                    }
                }
            }
        }
    }

    // Sums go where they lie in the result, as they are or, if the block has all of them, rounded.
    const i64 filter_elements = static_cast<i64>(k) * (TAPS_D * R * S) * c;
    float* const mine = partials + split * (filter_elements + (HAS_BIAS ? k : 0));
    const auto write = [&](u16* to, i64 from, i64 element, float sum) {
        if (splits == 1) to[element] = static_cast<u16>(pack(sum, 0.0f));
        else mine[from + element] = sum;
    };
#pragma unroll
    for (int i = 0; i < WARP_K; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tile_k = warp_k * WARP_K + i, channel = k0 + tile_k * 16 + lane / 4 + 8 * half;
            if (tile_k >= K_TILES || channel >= k) continue;
#pragma unroll
            for (int t = 0; t < TAPS_D; ++t)
#pragma unroll
                for (int j = 0; j < WARP_U; ++j) {
                    const int unit = warp_u * WARP_U + j, first = c0 + unit % PIECES * 8 + lane % 4 * 2;
                    if (unit >= UNITS || first >= c) continue;
                    const i64 element = (static_cast<i64>(channel * TAPS_D + t) * (R * S) + unit / PIECES) * c + first;
#pragma unroll
                    for (int e = 0; e < 2; ++e) write(filter_grad, 0, element + e, acc[t][i][j][2 * half + e]);
                }
            if (sums_bias && lane % 4 == 0) write(bias_grad, filter_elements, channel, bias[i][2 * half]);
        }
}
