// Depthwise convolution of unit stride with a large filter, gradient of the filter and of the bias, NHWC, on
// tensor cores (sm_80 and later).
//
//   filter_grad[c, r, s] = sum over n, p, q of out_grad[n, p, q, c] * in[n, p + r - pad_h, q + s - pad_w, c]
//   bias_grad[c]         = sum over n, p, q of out_grad[n, p, q, c]
//
// Within one channel and one input row i, all of filter_grad is one product: of a matrix whose row s is the input
// row from column s on, and a matrix whose column r is gradient row i - r:
//
//                q = 0 ... 15                          r = 0 ... 7
//    s = 0  | in0 in1 ... in15 |                  |  row   row         row  |
//    s = 1  | in1 in2 ... in16 |     q = 0 ... 15 |   i    i-1   ...   i-7  |     =   | filter_grad[s][r] |
//      :    |  :   :       :   |  x               |                         |
//   s = 15  | in15     ... in30|                  |  of the gradient        |
//
// Neither matrix is stored. A fragment of the first is read from the input row, two columns a word. For that, the
// first eight of its 16 rows are the even s and the others the odd s, whose words are made of two; a fragment is
// the same for all q and s of one sum. ldmatrix fetches the second from gradient rows, the last one first. All
// accumulators together are the filter, with S rounded up to 16 and R to 8.
//
// The layer's sizes are run-time arguments. Compile-time: the filter's size R x S, DTYPE, HAS_BIAS, which adds
// a product with ones, and the config:
//
//   BLOCK_C     channels of a block, a warp each
//   VEC         channels that one instruction loads or stores
//   UNITS       eights of gradient columns of a tile
//   PART        input rows that are brought in at once
//   MIN_BLOCKS  blocks that a multiprocessor must hold: bounds the registers
//
// A tile is a band of gradient rows of an image, 8 UNITS columns wide. `splits` blocks share the tiles of their
// channels. A block walks down the input rows that its tile meets; rows of padding are left out. Between two
// barriers it brings in the next PART rows of the input and of the gradient, into planes of one channel each; the
// gradient's are a ring with room for what PART steps read:
//
//   [channel][row % RING][column] of the gradient, [channel][row of the part][column] of the input
//
// Then its warps multiply, and other blocks of the multiprocessor meanwhile. The blocks add their sums as
// `reduction` says:
//
//   DIRECT       one block has all: it writes the result
//   TWO_KERNELS  each writes its sums to `partials`; depthwise_wgrad_sum adds them up in a fixed order
//
// Both give the same bits every time.
//
// Parts:
//   block   BLOCK_C channels, a warp each, and a split of the tiles
//   warp    the whole filter of one channel, in registers
//   thread  fragments of mma.m16n8k16, and accesses of VEC channels
//
// Bound: the tensor cores: S rounded up to 16 times R rounded up to 8 multiply-adds a gradient pixel, 1,024 for
// 31x31; bytes below some 16x16.
//
// Instructions: mma, whose 16 x 8 results are 16 filter columns by 8 filter rows: none is dropped but by rounding up.
// The first operand is read by plain words, since its rows overlap by one column, which ldmatrix, with rows of 16
// bytes, cannot do.
//
// Share of the floor:
//   depthwise_large_wgrad on NVIDIA H200, 2026-11-28
//      10% of bytes: n=32 c=332 h=28 w=28 k=332 r=5 s=49 padding=2x24 groups=332 dtype=bfloat16 direction=wgrad
//      12% of bytes: n=32 c=80 h=56 w=56 k=80 r=17 s=17 padding=8 groups=80 direction=wgrad
//      12% of bytes: n=2 c=124 h=200 w=200 k=124 r=5 s=51 padding=2x25 groups=124 dtype=bfloat16 direction=wgrad
#include "depthwise_large.cuh"

constexpr int TILES_S = (S + 15) / 16, TILES_R = (R + 7) / 8;  // tiles of a product
constexpr int PRODUCTS = (UNITS + 1) / 2;       // of 16 columns in a row; the last may be of 8
constexpr int BLOCKS = PRODUCTS + TILES_S - 1;  // fragments of the input row
constexpr int IN_PAIRS = 8 * (BLOCKS + 1);      // pairs of columns that these are read from
constexpr int IN_CHANNEL = PART * IN_PAIRS * 4;                  // bytes
constexpr int IN_GROUP = 8 * IN_CHANNEL + 128 / GROUPS;          // neighbouring chunks meet no bank twice
constexpr int RING = 8 * TILES_R + PART - 1;                     // gradient rows
constexpr int GRAD_PITCH = 16 * (UNITS | 1);                     // ldmatrix meets no bank twice
constexpr int GRAD_CHANNEL = RING * GRAD_PITCH;
constexpr int GRAD_GROUP = 8 * GRAD_CHANNEL + 128 / GROUPS;

// ldmatrix may read eight columns behind the last gradient row, which are then not used; the input is there.
enum { SMEM_BYTES = GROUPS * (GRAD_GROUP + IN_GROUP) };

static_assert(SMEM_BYTES == HOST_SMEM_BYTES, "the host gives a block so much shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_large_wgrad(
    u16* __restrict__ filter_grad, u16* __restrict__ bias_grad, const u16* __restrict__ out_grad,
    const u16* __restrict__ in, float* sums, float* partials, int n, int c, int h, int w, int p, int q,
    int pad_h, int pad_w, int band_rows, int bands, int q_tiles, int c_tiles, int tiles, int splits,
    int reduction) {
    extern __shared__ __align__(16) u8 shared[];
    u8* const in_shared = shared + GROUPS * GRAD_GROUP;

    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int c0 = blockIdx.x % c_tiles * BLOCK_C, split = blockIdx.x / c_tiles;
    const int channels = min(BLOCK_C, c - c0);

    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16".
    const u32 grad_plane = shared_address(shared) + warp / 8 * GRAD_GROUP + warp % 8 * GRAD_CHANNEL + lane / 8 % 2 * 16;
    const u32* const in_plane = reinterpret_cast<const u32*>(in_shared + warp / 8 * IN_GROUP + warp % 8 * IN_CHANNEL) +
                                lane / 4 + lane % 4;
    constexpr u32 ONES = DTYPE == DTYPE_BFLOAT16 ? 0x3F803F80 : 0x3C003C00;
    const u32 ones[4] = {ONES, ONES, ONES, ONES};
    float acc[TILES_S][TILES_R][4] = {}, bias_acc[4] = {};
    const auto multiply = [&](int product, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        if (2 * product + 1 < UNITS) mma_k16(d, a, b0, b1);
        else mma_k8(d, a, b0);
    };

    for (int tile = split; tile < tiles; tile += splits) {
        const int q0 = tile % q_tiles * (8 * UNITS), p0 = tile / q_tiles % bands * band_rows;
        const int image = tile / q_tiles / bands;
        const int rows = min(band_rows, p - p0);
        // Rows are counted from p0. Input row i is row i - top of the image; the bias needs every gradient row.
        const int top = pad_h - p0, left = pad_w - q0;
        const int first = HAS_BIAS ? 0 : max(top, 0);
        const int last = max(min(rows + R - 1, h + top), HAS_BIAS ? rows : 0);
        // Where gradient row `first - (8 * TILES_R - 1)` is the first of the ring.
        const int ring_start = 8 * TILES_R - 1 - first;

        const auto put_grad = [&](int from, int to) {
            const u16* const image_grad = out_grad + (static_cast<i64>(image) * p + p0) * q * c + c0;
#pragma unroll 2
            for (int item = tid; item < (to - from) * 4 * UNITS * GROUPS; item += THREADS) {
                const int piece = item % GROUPS, pair = item / GROUPS % (4 * UNITS), row = from + item / GROUPS / (4 * UNITS);
                uint4 pixels[2];
                load_pair(pixels, image_grad + static_cast<i64>(row) * q * c + 8 * piece, q0 + 2 * pair, q, c,
                          row >= 0 && row < rows ? channels - 8 * piece : 0);
                put_pair<GRAD_CHANNEL>(shared + piece * GRAD_GROUP + (row + ring_start) % RING * GRAD_PITCH + pair * 4, pixels);
            }
        };
        const auto put_in = [&](int from) {
            const u16* const image_in = in + static_cast<i64>(image) * h * w * c + c0;
#pragma unroll 2
            for (int item = tid; item < PART * IN_PAIRS * GROUPS; item += THREADS) {
                const int piece = item % GROUPS, pair = item / GROUPS % IN_PAIRS, row = item / GROUPS / IN_PAIRS;
                const int y = from + row - top;
                uint4 pixels[2];
                load_pair(pixels, image_in + static_cast<i64>(y) * w * c + 8 * piece, 2 * pair - left, w, c,
                          y >= 0 && y < h ? channels - 8 * piece : 0);
                put_pair<IN_CHANNEL>(in_shared + piece * IN_GROUP + (row * IN_PAIRS + pair) * 4, pixels);
            }
        };

        for (int part = first; part < last; part += PART) {
            __syncthreads();
            put_grad(part == first ? part - (8 * TILES_R - 1) : part, part + PART);
            put_in(part);
            __syncthreads();
            // The gradient row that this lane points ldmatrix to, for the first 16 filter rows.
            int slot = (part + ring_start + RING - lane / 16 * 8 - lane % 8) % RING;
            const int steps = min(PART, last - part);
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                u32 a[BLOCKS][4];
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const u32* const words = in_plane + step * IN_PAIRS + 8 * block + 4 * half;
                        a[block][2 * half] = words[0];
                        a[block][2 * half + 1] = __byte_perm(words[0], words[1], 0x5432);  // one column further
                    }
#pragma unroll
                for (int tile_r = 0; tile_r < TILES_R; tile_r += 2) {
                    const int row = slot - 8 * tile_r;
                    const u32 from = grad_plane + (row < 0 ? row + RING : row) * GRAD_PITCH;
#pragma unroll
                    for (int product = 0; product < PRODUCTS; ++product) {
                        u32 b[4];
                        if (tile_r + 1 < TILES_R) load_matrix_x4(b, from + 32 * product);
                        else load_matrix_x2(b, from + 32 * product);
#pragma unroll
                        for (int tile_s = 0; tile_s < TILES_S; ++tile_s) {
                            multiply(product, acc[tile_s][tile_r], a[product + tile_s], b[0], b[1]);
                            if (tile_r + 1 < TILES_R)
                                multiply(product, acc[tile_s][tile_r + 1 < TILES_R ? tile_r + 1 : 0], a[product + tile_s], b[2], b[3]);
                        }
                        if (HAS_BIAS && tile_r == 0) multiply(product, bias_acc, ones, b[0], b[1]);
                    }
                }
                slot = slot + 1 == RING ? 0 : slot + 1;
            }
        }
    }

    if (warp >= channels) return;
    const int channel = c0 + warp, filter_elements = c * R * S, elements = filter_elements + (HAS_BIAS ? c : 0);
    const auto write = [&](int element, float value) {
        const u16 rounded = static_cast<u16>(pack(value, 0.0f));
        if (reduction == TWO_KERNELS) partials[static_cast<i64>(split) * elements + element] = value;
        else if (element < filter_elements) filter_grad[element] = rounded;
        else bias_grad[element - filter_elements] = rounded;
    };
#pragma unroll
    for (int tile_s = 0; tile_s < TILES_S; ++tile_s)
#pragma unroll
        for (int tile_r = 0; tile_r < TILES_R; ++tile_r)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int s = 16 * tile_s + lane / 4 * 2 + e / 2, r = 8 * tile_r + lane % 4 * 2 + e % 2;
                if (r < R && s < S) write((channel * R + r) * S + s, acc[tile_s][tile_r][e]);
            }
    if (HAS_BIAS && lane == 0) write(filter_elements + channel, bias_acc[0]);
}
