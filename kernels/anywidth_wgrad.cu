// Grouped convolution of any group width, gradient of the filter and of the bias, NHWC, on tensor cores (sm_80 and
// later).
//
//   filter_grad[k, r, s, c] = sum over n, p, q of out_grad[n, p, q, k] * in[n, p * stride - pad + r * dilation, q ..., c]
//   bias_grad[k]            = sum over n, p, q of out_grad[n, p, q, k]
//
// where k and c run over the same group, which has GOUT and GIN channels, any two numbers.
//
// The layer's other sizes are run-time arguments. Compile-time: GIN, GOUT, the filter R x S, DOWN and STEP of each axis
// (inputs from one position to the next, and from one tap to the next), DTYPE, HAS_BIAS, and the config:
//
//   BLOCK_N, BLOCK_P, BLOCK_Q   images, rows and columns of a tile of `out_grad`
//   BLOCK_G                     groups of a block
//   BLOCK_K, BLOCK_C            channels of `out_grad` and of `in` of each of them, at most: a group is cut in equal parts
//   WARPS_K, WARPS_U            how the warps of a group divide the channels of `out_grad`, and the units
//   STAGES                      tiles in flight in shared memory
//
// The sum over the pixels of a tile is a matrix product. A *unit* is a tap with 8 channels of `in`: a tile of 8 columns
// of the product, for which the pixels of `in` are read from shared memory at the offset of the tap.
//
//      out_grad: tile            in: tile + halo             sums, in registers
//      k 0 ... 15                unit 0  unit 1              unit 0   unit 1  ...
//      +-------+ pixel 0         +-------------+             +--------+--------+
//      |       |                 | +-------+   |      -->    | 16 x 8 | 16 x 8 |   k 0 ... 15
//      +-------+ pixel 15        | |       |   |             +--------+--------+
//      transposed by ldmatrix    +-------------+
//
// Several blocks (`splits`) may share a sum, each with tiles of its own. Then each writes its sums to `partials`, and
// depthwise_wgrad_sum adds them up in a fixed order. So the bits are the same every time.
//
// Parts:
//   block   parts of BLOCK_G groups of the filter, and a split of the tiles of pixels
//   warp    of one group WARP_K tiles of 16 channels of `out_grad` by WARP_U units, in registers
//   thread  fragments of mma.m16n8k16, and its share of the copies
//
// Bound: bytes for narrow groups, the tensor cores for wide ones, as in anywidth.cu. A fragment of `in` is of one
// unit alone, so it serves no more than the WARP_K products of a warp.
//
// Instructions: both operands have pixels as rows, and the sum runs over pixels, so that ldmatrix.trans makes
// fragments of either without a transposed copy. mma.sync and cp.async as in anywidth.cu.
//
// Share of the floor:
//   anywidth_wgrad on NVIDIA H200, 2026-11-28
//      26% of arithmetic: n=128 c=768 h=40 w=40 k=768 r=3 s=3 stride=2 padding=1 groups=6 direction=wgrad
//      32% of arithmetic: n=64 c=4096 h=28 w=28 k=4096 r=3 s=3 stride=2 padding=1 groups=32 direction=wgrad
//      33% of arithmetic: n=128 c=512 h=20 w=20 k=1024 r=3 s=3 padding=1 groups=2 direction=wgrad deterministic=true
#include "anywidth.cuh"

typedef InputTile<R, S> In;

constexpr int IN_PIECES = (GIN + 7) / 8, OUT_PIECES = (GOUT + 7) / 8;  // of 8 channels, of a group
constexpr int C_BLOCKS = ceil_div(IN_PIECES, BLOCK_C / 8), K_BLOCKS = ceil_div(OUT_PIECES, BLOCK_K / 8);
constexpr int PIECES = ceil_div(IN_PIECES, C_BLOCKS);          // of a block's group
constexpr int K_TILES = ceil_div(OUT_PIECES, 2 * K_BLOCKS);    // of 16 channels
constexpr int UNITS = R * S * PIECES;
constexpr int WARP_K = ceil_div(K_TILES, WARPS_K), WARP_U = ceil_div(UNITS, WARPS_U);
constexpr int IN_VECTOR = vector_of(GIN), OUT_VECTOR = vector_of(GOUT);  // channels that are copied at once
constexpr int IN_VECTORS = PIECES * 8 / IN_VECTOR, OUT_VECTORS = K_TILES * 16 / OUT_VECTOR;  // of a block's group

constexpr int GROUP_WARPS = WARPS_K * WARPS_U;
constexpr int WARPS = BLOCK_G * GROUP_WARPS, THREADS = 32 * WARPS;
// Odd numbers of chunks of 16 bytes: ldmatrix meets no bank twice.
constexpr int PIXEL_BYTES = 16 * (BLOCK_G * PIECES | 1), GRAD_BYTES = 16 * (BLOCK_G * K_TILES * 2 | 1);
constexpr int TILE_BYTES = In::COUNT * PIXEL_BYTES;
constexpr int STAGE_BYTES = TILE_BYTES + PIXELS * GRAD_BYTES;
enum { SMEM_BYTES = STAGES * STAGE_BYTES };

static_assert(PIXELS % 16 == 0, "a step of the tensor cores takes 16 pixels");
static_assert(BLOCK_C % 8 == 0 && BLOCK_K % 16 == 0, "channels come in pieces of 8 and tiles of 16");
static_assert(THREADS == HOST_THREADS && SMEM_BYTES == HOST_SMEM_BYTES, "the host launches other blocks");
static_assert(K_BLOCKS == HOST_K_BLOCKS && C_BLOCKS == HOST_C_BLOCKS, "the host cuts groups otherwise");

// Blocks count parts of groups fastest, then groups, then splits; a tile's number counts columns fastest, then rows and
// images.
extern "C" __global__ void __launch_bounds__(THREADS) anywidth_wgrad(
    u16* __restrict__ filter_grad, u16* __restrict__ bias_grad, const u16* __restrict__ out_grad,
    const u16* __restrict__ in, float* partials, int n, int h, int w, int p, int q, int groups, int pad_h, int pad_w,
    int in_step_h, int in_step_w, int group_blocks, int p_tiles, int q_tiles, int tiles, int tiles_a_split, int splits) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 stages = shared_address(shared);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_g = warp / GROUP_WARPS, warp_k = warp / WARPS_U % WARPS_K, warp_u = warp % WARPS_U;
    const int part = blockIdx.x % (K_BLOCKS * C_BLOCKS * group_blocks), split = blockIdx.x / (K_BLOCKS * C_BLOCKS * group_blocks);
    const int c0 = part % C_BLOCKS * PIECES * 8, k0 = part / C_BLOCKS % K_BLOCKS * K_TILES * 16;  // within each group
    const int g0 = part / (K_BLOCKS * C_BLOCKS) * BLOCK_G;
    const int first_tile = split * tiles_a_split, steps = min(first_tile + tiles_a_split, tiles) - first_tile;
    const int in_channels = groups * GIN, out_channels = groups * GOUT;

    const auto load_step = [&](int step, int slot) {
        int tile = first_tile + step;
        const int q0 = tile % q_tiles * BLOCK_Q;
        tile /= q_tiles;
        const int p0 = tile % p_tiles * BLOCK_P, n0 = tile / p_tiles * BLOCK_N;
        const int y0 = p0 * DOWN_H * in_step_h - pad_h, x0 = q0 * DOWN_W * in_step_w - pad_w;
        const u32 to = stages + slot * STAGE_BYTES;
        const auto in_column = [&](int place, int vector) {
            const int x = x0 + In::column(place) * in_step_w, g = vector / IN_VECTORS, channel = c0 + vector % IN_VECTORS * IN_VECTOR;
            const bool valid = x >= 0 && x < w && g0 + g < groups && channel < GIN;
            return valid ? x * in_channels + (g0 + g) * GIN + channel : -1;
        };
        const auto in_row = [&](int r) -> i64 {
            const int image = n0 + r / In::H, y = y0 + r % In::H * in_step_h;
            return image < n && y >= 0 && y < h ? (static_cast<i64>(image) * h + y) * w * in_channels : -1;
        };
        visit_tile<BLOCK_N * In::H, In::W, BLOCK_G * IN_VECTORS, 2 * IN_VECTOR, PIXEL_BYTES, In::W * PIXEL_BYTES, WARPS>(
            in_column, in_row, [&](int at, i64 element, bool inside) {
                copy_channels<IN_VECTOR>(to + at, inside ? in + element : in, inside);
            });
        const auto grad_column = [&](int position, int vector) {
            const int x = q0 + position, g = vector / OUT_VECTORS, channel = k0 + vector % OUT_VECTORS * OUT_VECTOR;
            return x < q && g0 + g < groups && channel < GOUT ? x * out_channels + (g0 + g) * GOUT + channel : -1;
        };
        const auto grad_row = [&](int r) -> i64 {
            const int image = n0 + r / BLOCK_P, y = p0 + r % BLOCK_P;
            return image < n && y < p ? (static_cast<i64>(image) * p + y) * q * out_channels : -1;
        };
        visit_tile<BLOCK_N * BLOCK_P, BLOCK_Q, BLOCK_G * OUT_VECTORS, 2 * OUT_VECTOR, GRAD_BYTES, BLOCK_Q * GRAD_BYTES, WARPS>(
            grad_column, grad_row, [&](int at, i64 element, bool inside) {
                copy_channels<OUT_VECTOR>(to + TILE_BYTES + at, inside ? out_grad + element : out_grad, inside);
            });
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) load_step(s, s);
        copy_async_commit();  // an empty group keeps the count of pending groups in step
    }

    // Fragments are transposed: a lane names a pixel, and eight lanes a matrix. For the gradient, each second eight name the
    // next 8 channels; for the input, each second eight name the next 8 pixels, and the upper half of the lanes the next unit.
    const int grad_pixel = lane % 8 + lane / 16 * 8, in_pixel = lane % 16;
    const u32 grad_from = TILE_BYTES + warp_g * K_TILES * 32 + lane / 8 % 2 * 16;
    // Tiles and units past the last one compute it again, and are not stored.
    u32 unit_from[WARP_U];
#pragma unroll
    for (int i = 0; i < WARP_U; ++i) {
        const int unit = min(warp_u * WARP_U + i, UNITS - 1), tap = unit / PIECES;
        const int at = tap / S * STEP_H * In::W + In::place(tap % S * STEP_W);
        unit_from[i] = at * PIXEL_BYTES + (warp_g * PIECES + unit % PIECES) * 16;
    }

    float acc[WARP_K][WARP_U][4] = {}, bias[WARP_K][4] = {};
    const bool sums_bias = HAS_BIAS && c0 == 0 && warp_u == 0;
    const u32 one = DTYPE == DTYPE_BFLOAT16 ? 0x3f803f80 : 0x3c003c00;
    for (int step = 0; step < steps; ++step) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load_step(step + STAGES - 1, (step + STAGES - 1) % STAGES);
        copy_async_commit();
        const u32 stage = stages + step % STAGES * STAGE_BYTES;
#pragma unroll 1
        for (int m = 0; m < PIXELS; m += 16) {
            u32 a[WARP_K][4];
#pragma unroll
            for (int t = 0; t < WARP_K; ++t) {
                const int tile = min(warp_k * WARP_K + t, K_TILES - 1);
                load_transposed_x4(a[t], stage + grad_from + (m + grad_pixel) * GRAD_BYTES + tile * 32);
                if (sums_bias) mma_k16(bias[t], a[t], one, one);
            }
            const u32 in_at = stage + In::first(m + in_pixel) * PIXEL_BYTES;
#pragma unroll
            for (int i = 0; i < WARP_U; i += 2) {
                u32 b[4];  // of units i and i + 1
                if (i + 1 < WARP_U) load_transposed_x4(b, in_at + (lane < 16 ? unit_from[i] : unit_from[i + 1 < WARP_U ? i + 1 : i]));
                else load_transposed_x2(b, in_at + unit_from[i]);
#pragma unroll
                for (int t = 0; t < WARP_K; ++t) {
                    mma_k16(acc[t][i], a[t], b[0], b[1]);
                    if (i + 1 < WARP_U) mma_k16(acc[t][i + 1 < WARP_U ? i + 1 : i], a[t], b[2], b[3]);
                }
            }
        }
    }

    // Sums go where they lie in the result, as they are or, if the block has all of them, rounded.
    if (g0 + warp_g >= groups) return;
    const i64 filter_elements = static_cast<i64>(out_channels) * (R * S) * GIN;
    float* const mine = partials + split * (filter_elements + (HAS_BIAS ? out_channels : 0));
    const auto write = [&](u16* to, i64 from, i64 element, float sum) {
        if (splits == 1) to[element] = static_cast<u16>(pack(sum, 0.0f));
        else mine[from + element] = sum;
    };
#pragma unroll
    for (int t = 0; t < WARP_K; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tile = warp_k * WARP_K + t, k = k0 + tile * 16 + lane / 4 + 8 * half;
            if (tile >= K_TILES || k >= GOUT) continue;
            const int channel = (g0 + warp_g) * GOUT + k;
#pragma unroll
            for (int i = 0; i < WARP_U; ++i) {
                const int unit = warp_u * WARP_U + i, c = c0 + unit % PIECES * 8 + lane % 4 * 2;
                if (unit >= UNITS) break;
                const i64 first = (static_cast<i64>(channel) * (R * S) + unit / PIECES) * GIN + c;
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (c + e < GIN) write(filter_grad, 0, first + e, acc[t][i][2 * half + e]);
            }
            if (sums_bias && lane % 4 == 0) write(bias_grad, filter_elements, channel, bias[t][2 * half]);
        }
}
