// Gradient of a grouped convolution's filter, NHWC, on tensor cores (sm_80 and later).
//
//   filter_grad[k, r, s, c] = sum over n, p, q of out_grad[n, p, q, k] * in[n, y, x, c]
//   bias_grad[k]            = sum over n, p, q of out_grad[n, p, q, k]
//   y = p * stride_h - pad_h + r * dilation_h,  x = q * stride_w - pad_w + s * dilation_w
//
// where k and c run over the same group of GW channels. A gradient row or channel, below, is one of out_grad; an input
// row or channel is one of `in`. The layer's sizes are run-time arguments. Compile-time: the filter R x S, GW,
// STRIDE_H, STRIDE_W, DILATION_W (stride and dilation without their common factor), DTYPE, HAS_BIAS, and the config:
//
//   BLOCK_N, BLOCK_Q   images and output columns of a block's tile: one *pixel row* is
//                      BLOCK_N * BLOCK_Q output pixels, cut in 16-pixel tiles for the tensor cores
//   BLOCK_K, WARP_K    gradient channels of a block and of a warp
//   WARPS_M            how many warps share the pixel tiles
//   STAGES             steps in shared memory: one that is multiplied, the others in flight
//
// The sum over pixels is the inner extent of the tensor-core product, 16 pixels at a time, so both
// operands are read transposed from [pixel][channel] rows (ldmatrix.trans). The 16 x 8 products:
//
//   GW >= 16   16 input channels of one filter tap  x  8 gradient channels
//   GW <= 8    8 input channels of two neighbouring taps  x  the 8 gradient channels of the same
//              numbers; of groups narrower than 8 only the blocks on the diagonal are kept. Where S is
//              odd, the last tap of a row is multiplied the other way: 8 gradient channels of two
//              gradient rows  x  8 input channels.
//
// A block walks down its slice of gradient rows. A step brings in one gradient row, whose fragments
// then stay in a circular buffer of registers, and the STRIDE_H input rows that its filter rows 0 to
// STRIDE_H - 1 meet; each input row is loaded into fragments once and meets all the gradient rows that it
// overlaps. Input rows are counted from the first one of the padding here, and STRIDE_H = 1, R = 3:
//
//        input row i ----+---- gradient row i      --> filter row 0   (brought in by this step)
//                        +---- gradient row i - 1  --> filter row 1
//                        +---- gradient row i - 2  --> filter row 2   (for the last time)
//
// After an image's last gradient row come `flush` steps without one, for the input rows that it still
// meets, and so that the next image finds the buffer empty: gradient rows that are not there are zeros. The
// accumulators stay in registers from the first step to the last.
//
// A vertical dilation changes only which rows follow one another: the rows that a dilated filter touches form a
// lattice, and on it the filter is not dilated. One gradient image is `phases` such lattices, walked one after another.
//
// Zeros outside of the images, and behind the last pixel of a tile, are multiplied, too: an infinity or NaN may make
// NaN of sums that it is no part of, of its group.
//
// The blocks' sums are added in one of four ways, `reduction`:
//   DIRECT       there is one block for each tile of the filter (BLOCK_K gradient channels): it writes the result;
//   TWO_KERNELS  every block writes its sums to `scratch`, and another kernel (grouped_wgrad_sum.cu) adds them;
//   LAST_BLOCK   the same, but the tile's last block adds them, in the order of the blocks;
//   ATOMIC       every block adds its sums to those in `zeroed`, in the order of their arrival, so that the
//                result is not repeatable to the bit; the tile's last block writes the result and clears the sums.
// `scratch` is (blocks of a tile, sums of the filter and then of the bias), `zeroed` a ticket for each tile and then
// such sums.
//
// Parts:
//   block   BLOCK_K gradient channels, down a slice of rows, BLOCK_N images by BLOCK_Q columns wide
//   warp    WARP_K of these channels by 16 input channels (up to GW = 8: by those of the same numbers, at two taps
//           together), over WARP_TILES tiles of 16 pixels
//   thread  fragments of mma.m16n8k16, and parts of 16 bytes of the copies
//
// Bound: bytes up to groups of 32 channels or so, as in grouped_rows.cu.
//
// Instructions: mma sums 16 pixels at once in its inner extent; ldmatrix.trans turns rows of channels into its
// operands. red.add.v4 (sm_90) adds four sums by one instruction in the L2 cache.
//
// Share of the floor:
//   grouped_wgrad on NVIDIA H100 80GB HBM3, 2026-11-23
//      74% of bytes: n=128 c=48 h=96 w=96 k=48 r=5 s=5 padding=2 groups=48 direction=wgrad
//      87% of bytes: n=96 c=96 h=120 w=120 k=96 r=3 s=3 stride=2 padding=1 groups=6 direction=wgrad
//                    deterministic=true
//      90% of bytes: n=20 c=1024 h=48 w=48 k=1024 r=3 s=3 padding=1 groups=1024 direction=wgrad deterministic=true
#include "common.cuh"

constexpr bool NARROW = GW <= 8;
constexpr int BLOCK_C = GW > BLOCK_K ? GW : BLOCK_K;  // input channels of a block: whole groups
constexpr int WARP_N = WARP_K / 8;                    // tensor-core tiles of 8 gradient channels
constexpr int WARPS_C = NARROW ? 1 : GW / 16;         // warps that share gradient channels: 16 input channels each
constexpr int WARPS_K = BLOCK_K / WARP_K;
// Warps that divide the filter's columns, WARP_S each, where the registers of one do not hold all of a large filter.
constexpr int WARPS_S = !NARROW && R * S > 27 ? 2 : 1, WARP_S = (S + WARPS_S - 1) / WARPS_S;
constexpr int THREADS = 32 * WARPS_K * WARPS_C * WARPS_S * WARPS_M;
constexpr int LIVE = (R + STRIDE_H - 1) / STRIDE_H;   // gradient rows that an input row overlaps
constexpr int M = BLOCK_N * BLOCK_Q;
constexpr int M_TILES = (M + 15) / 16;
constexpr int WARP_TILES = M_TILES / WARPS_M;
// An odd number of 16-byte chunks a pixel: ldmatrix meets no bank twice.
constexpr int IN_CHUNKS = BLOCK_C / 8, IN_PIXEL = 16 * (IN_CHUNKS | 1);
constexpr int GRAD_CHUNKS = BLOCK_K / 8, GRAD_PIXEL = 16 * (GRAD_CHUNKS | 1);
constexpr int ROW_X = (BLOCK_Q - 1) * STRIDE_W + (S - 1) * DILATION_W + 1;  // input columns of BLOCK_Q outputs
constexpr int IN_BYTES = BLOCK_N * ROW_X * IN_PIXEL;
constexpr int GRAD_BYTES = M_TILES * 16 * GRAD_PIXEL;
constexpr int STAGE_BYTES = STRIDE_H * IN_BYTES + GRAD_BYTES;
constexpr int IN_COPIES = BLOCK_N * ROW_X * IN_CHUNKS, GRAD_COPIES = M * GRAD_CHUNKS;  // of 16 bytes
constexpr int IN_LOADS = (IN_COPIES + THREADS - 1) / THREADS, GRAD_LOADS = (GRAD_COPIES + THREADS - 1) / THREADS;
// Products of a warp: [r][tap or pair of taps][gradient tile], with TAPS taps or pairs for a filter row. Where S is odd
// and GW narrow, those of the last tap are extra: [i][pair of the filter rows that input row i of a step
// meets][gradient tile].
constexpr int TAPS = NARROW ? S / 2 : WARP_S;
constexpr bool LAST_TAP = NARROW && S % 2;
constexpr int ROW_PAIRS = (LIVE + 1) / 2;
// The block's sums in shared memory, [r][s][k][c] and behind them those of the bias, in parts of four.
constexpr int TAP_VECTORS = BLOCK_K * GW / 4;
constexpr int FILTER_VECTORS = R * S * TAP_VECTORS;
constexpr int VECTORS = FILTER_VECTORS + (HAS_BIAS ? BLOCK_K / 4 : 0);
// Shared memory holds the stages, and after the last step the sums in place of them.
enum { SMEM_BYTES = STAGES * STAGE_BYTES > VECTORS * 16 ? STAGES * STAGE_BYTES : VECTORS * 16 };

static_assert(M_TILES % WARPS_M == 0 && BLOCK_K % WARP_K == 0, "warps must divide the tile");
static_assert(NARROW || GW % WARP_K == 0, "a warp's gradient channels share one group's input");
static_assert(IN_LOADS <= 32 && GRAD_LOADS <= 32, "validity bits are kept in one word");
static_assert(STAGES * STRIDE_H <= 32, "so are the rows in flight");

// Sizes that launches count on, as confpred/families/grouped/grouped_wgrad.py works it out.
static_assert(THREADS == HOST_THREADS && SMEM_BYTES == HOST_SMEM_BYTES, "the host launches other blocks");

// Loads 8x8 matrices of 16-bit elements transposed; each lane names one 16-byte row.
__device__ __forceinline__ void load_transposed_x4(u32 (&d)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed_x2(u32 (&d)[2], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(d[0]), "=r"(d[1]) : "r"(from) : "memory");
}

// Adds to four floats of other blocks, too, in the L2 cache.
__device__ __forceinline__ void add_at_l2(float* to, float4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#else
    const float element[4] = {x.x, x.y, x.z, x.w};
    for (int e = 0; e < 4; ++e) asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(to + e), "f"(element[e]) : "memory");
#endif
}
// Reads what other blocks wrote: from L2, where this multiprocessor's L1 may be stale.
__device__ __forceinline__ float4 load_from_l2(const float* from) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];\n" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
    return x;
}

// Visits the calling thread's vectors of the block's sums: visit(index, offset in global memory). There
// the sums of all blocks together are [r][s][k][c of its group], then the bias.
template <typename Visit>
__device__ __forceinline__ void each_vector(int k0, int c, const Visit& visit) {
    const int tap_elements = c * GW;
    for (int v = threadIdx.x; v < VECTORS; v += THREADS) {
        if (v < FILTER_VECTORS) {
            const int element = k0 * GW + v % TAP_VECTORS * 4;
            if (element < tap_elements) visit(v, v / TAP_VECTORS * tap_elements + element);
        } else {
            const int k = k0 + (v - FILTER_VECTORS) * 4;
            if (k < c) visit(v, R * S * tap_elements + k);
        }
    }
}

// `n` images of h x w pixels of `in` and p x q of `out_grad`, both of `c` channels. In this order:
//   row_step, column_step   distances of neighbouring input rows of a lattice, and of neighbouring columns of a tile
//   phases, phase_step      lattices of a gradient image (1 or 2), and input rows from the first one to the second one
//   rows                    gradient rows of a lattice; the second one may lack the last of them
//   flush                   steps without a gradient row behind each lattice
//   slice_rows, slices      gradient rows of a block, which may begin and end within a lattice; how many such slices
//                           all lattices of all images make, if BLOCK_N images count as one
//   q_tiles, k_tiles        blocks that divide the columns, and the channels
//   reduction               one of the four ways above
extern "C" __global__ void __launch_bounds__(THREADS) grouped_wgrad(
    u16* __restrict__ filter_grad, u16* __restrict__ bias_grad, const u16* __restrict__ out_grad,
    const u16* __restrict__ in, float* scratch, u8* zeroed, int n, int c, int h, int w, int p, int q, int pad_h, int pad_w,
    int row_step, int column_step, int phases, int phase_step, int rows, int flush, int slice_rows, int slices, int q_tiles, int k_tiles,
    int reduction) {
    extern __shared__ __align__(16) u8 shared[];
    const u32 stages = shared_address(shared);

    // ---- Position of the block
    const int tid = threadIdx.x, lane = tid % 32;
    int warp = tid / 32;
    const int warp_c = warp % WARPS_C; warp /= WARPS_C;
    const int warp_k = warp % WARPS_K; warp /= WARPS_K;
    const int warp_s = warp % WARPS_S; warp /= WARPS_S;
    const int warp_m = warp;

    // Neighbouring blocks take neighbouring channels, then columns, then slices: what they share of
    // a DRAM page or of a halo is then still in L2.
    // The `parts` blocks of one k_tile have sums of the same tile of the filter.
    const int k_tile = blockIdx.x % k_tiles, part = blockIdx.x / k_tiles, parts = q_tiles * slices;
    const int k0 = k_tile * BLOCK_K, c0 = GW > BLOCK_K ? k0 / GW * GW : k0;
    const int q0 = part % q_tiles * BLOCK_Q;
    const int first_row = part / q_tiles * slice_rows;  // counted over all lattices, one after another

    // ---- Copies
    // This thread's copies of each step: parts of 16 bytes, always of the same channels: IN_CHUNKS and GRAD_CHUNKS
    // divide THREADS.
    const int in_piece = tid % IN_CHUNKS, grad_piece = tid % GRAD_CHUNKS;
    const int first_x = q0 * STRIDE_W * column_step - pad_w;
    int in_offset[IN_LOADS], grad_offset[GRAD_LOADS];
#pragma unroll
    for (int l = 0; l < IN_LOADS; ++l) {
        const int pixel = tid / IN_CHUNKS + l * (THREADS / IN_CHUNKS);
        in_offset[l] = (pixel / ROW_X * h * w + first_x + pixel % ROW_X * column_step) * c;
    }
#pragma unroll
    for (int l = 0; l < GRAD_LOADS; ++l) {
        const int pixel = tid / GRAD_CHUNKS + l * (THREADS / GRAD_CHUNKS);
        grad_offset[l] = (pixel / BLOCK_Q * p * q + q0 + pixel % BLOCK_Q) * c;
    }

    // ---- Loads of a step
    // The lattice that is being loaded: its first image `n0` and its `phase`. In it, the next `row`; `row_end`, where
    // the rows that this block sums end (those before `rows_inside` are in the image); `row_flushed`, where the steps
    // without a row end; `y`, the next input row. A slice that ends within a lattice needs LIVE - 1 steps without a
    // row, as its gradient rows still meet the input rows of those that follow.
    const int last_row = min(first_row + slice_rows, (n + BLOCK_N - 1) / BLOCK_N * phases * rows);
    const int lattices = (last_row - 1) / rows - first_row / rows + 1;
    int n0 = first_row / rows / phases * BLOCK_N, phase = first_row / rows % phases, row = first_row % rows;
    int rows_left = last_row - first_row, row_end, rows_inside, row_flushed, y;
    const int steps = rows_left + (lattices - 1) * flush + (last_row % rows == 0 ? flush : LIVE - 1);
    int steps_left = steps;
    const i64 in_pitch = static_cast<i64>(row_step) * w * c, grad_pitch = static_cast<i64>(phases) * q * c;
    const u16 *in_row, *grad_row;
    u32 in_valid, grad_valid;
    auto enter_lattice = [&]() {
        row_end = min(rows, row + rows_left);
        rows_left -= row_end - row;
        row_flushed = row_end + (row_end == rows ? flush : LIVE - 1);
        rows_inside = min(row_end, phases == 1 ? p : (p - phase + 1) / 2);  // `phases` is 1 or 2
        y = phase * phase_step - pad_h + row * STRIDE_H * row_step;
        in_row = in + (static_cast<i64>(n0) * h + y) * w * c + c0 + 8 * in_piece;
        grad_row = out_grad + (static_cast<i64>(n0) * p + phase + row * phases) * q * c + k0 + 8 * grad_piece;
        in_valid = grad_valid = 0;
#pragma unroll
        for (int l = 0; l < IN_LOADS; ++l) {
            const int pixel = tid / IN_CHUNKS + l * (THREADS / IN_CHUNKS);
            const int image = pixel / ROW_X, x = first_x + pixel % ROW_X * column_step;
            const bool valid = c0 + 8 * in_piece < c && image < BLOCK_N && n0 + image < n && x >= 0 && x < w;
            in_valid |= static_cast<u32>(valid) << l;
        }
#pragma unroll
        for (int l = 0; l < GRAD_LOADS; ++l) {
            const int pixel = tid / GRAD_CHUNKS + l * (THREADS / GRAD_CHUNKS);
            const int image = pixel / BLOCK_Q, column = q0 + pixel % BLOCK_Q;
            const bool valid = k0 + 8 * grad_piece < c && image < BLOCK_N && n0 + image < n && column < q;
            grad_valid |= static_cast<u32>(valid) << l;
        }
    };

    u32 inside = 0;  // a bit for each input row in flight: does it take part? The last step's are lowest.
    auto load_step = [&](int slot) {
        inside <<= STRIDE_H;
        if (steps_left > 0) {
            --steps_left;
            const u32 to = stages + slot * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < STRIDE_H; ++i) {
                // Past the last gradient row, only rows that its filter taps still reach take part.
                if (y >= 0 && y < h && (row < row_end || (row - row_end + 1) * STRIDE_H + i < R)) {
                    inside |= 1u << i;
#pragma unroll
                    for (int l = 0; l < IN_LOADS; ++l)
                        if ((l + 1) * THREADS <= IN_COPIES || tid + l * THREADS < IN_COPIES) {
                            const bool valid = in_valid >> l & 1;
                            copy_async_16(to + i * IN_BYTES + (tid / IN_CHUNKS + l * (THREADS / IN_CHUNKS)) * IN_PIXEL + in_piece * 16,
                                          valid ? in_row + in_offset[l] : in, valid);
                        }
                }
                y += row_step;
                in_row += in_pitch;
            }
#pragma unroll
            for (int l = 0; l < GRAD_LOADS; ++l)
                if ((l + 1) * THREADS <= GRAD_COPIES || tid + l * THREADS < GRAD_COPIES) {
                    const bool valid = row < rows_inside && (grad_valid >> l & 1);
                    copy_async_16(to + STRIDE_H * IN_BYTES + (tid / GRAD_CHUNKS + l * (THREADS / GRAD_CHUNKS)) * GRAD_PIXEL + grad_piece * 16,
                                  valid ? grad_row + grad_offset[l] : out_grad, valid);
                }
            grad_row += grad_pitch;
            if (++row == row_flushed) {
                if (++phase == phases) {
                    phase = 0;
                    n0 += BLOCK_N;
                }
                row = 0;
                enter_lattice();
            }
        }
        copy_async_commit();  // an empty group keeps the count of pending groups in step
    };
    enter_lattice();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) load_step(s);

    // ---- Fragments
    // Gradient pixels that pad the last tile are zeros in all stages, and nothing is copied there.
    if (M % 16)
        for (int e = tid; e < STAGES * (16 - M % 16) * GRAD_CHUNKS; e += THREADS) {
            const int slot = e / GRAD_CHUNKS / (16 - M % 16), pixel = M + e / GRAD_CHUNKS % (16 - M % 16);
            *reinterpret_cast<uint4*>(shared + slot * STAGE_BYTES + STRIDE_H * IN_BYTES + pixel * GRAD_PIXEL + e % GRAD_CHUNKS * 16) =
                make_uint4(0, 0, 0, 0);
        }

    // Where this lane's rows of each fragment start. Lanes 0-7 and 16-23 name the 16 pixels of the first 8
    // input channels, lanes 8-15 and 24-31 those of the next tap or of the next 8 channels. In the
    // gradient and the last tap, lanes 0-15 name the 16 pixels; in the gradient, lanes 16-31 name those
    // of the next 8 channels.
    const int first_s = warp_s * WARP_S;
    const int in_channel = NARROW ? warp_k * WARP_K : warp_c * 16 + (GW > BLOCK_K ? 0 : warp_k * WARP_K / GW * GW);
    u32 in_from[WARP_TILES], last_from[WARP_TILES], grad_from[WARP_TILES];
#pragma unroll
    for (int t = 0; t < WARP_TILES; ++t) {
        auto in_pixel = [&](int m) {
            m += (warp_m * WARP_TILES + t) * 16;
            const int pixel = m < M ? m / BLOCK_Q * ROW_X + m % BLOCK_Q * STRIDE_W : 0;  // else any: its gradient is zero
            return stages + pixel * IN_PIXEL + 2 * in_channel;
        };
        in_from[t] = in_pixel(lane % 8 + lane / 16 * 8) + first_s * DILATION_W * IN_PIXEL +
                     lane / 8 % 2 * (NARROW ? DILATION_W * IN_PIXEL : 16);
        last_from[t] = in_pixel(lane % 16) + (S - 1) * DILATION_W * IN_PIXEL;
        grad_from[t] = stages + STRIDE_H * IN_BYTES + ((warp_m * WARP_TILES + t) * 16 + lane % 16) * GRAD_PIXEL +
                       2 * warp_k * WARP_K + (WARP_N > 1 ? lane / 16 * 16 : 0);
    }

    // ---- Steps
    float acc[R][TAPS ? TAPS : 1][WARP_N][4] = {};
    float last[LAST_TAP ? STRIDE_H : 1][ROW_PAIRS][WARP_N][4] = {};
    float bias[WARP_N][4] = {};
    u32 gradient[LIVE][WARP_TILES][WARP_N][2] = {};
    const bool sums_bias = HAS_BIAS && warp_c == 0 && warp_s == 0;
    // The bias's gradient is a product with ones, of which all 16 rows are the same.
    const u32 one = DTYPE == DTYPE_BFLOAT16 ? 0x3f803f80 : 0x3c003c00, ones[4] = {one, one, one, one};

    int slot = 0;
    for (int first = 0; first < steps; first += LIVE) {
#pragma unroll
        for (int j = 0; j < LIVE; ++j) {  // unrolled, so that the circular buffer's indices are constants
            if (first + j >= steps) break;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            load_step(slot == 0 ? STAGES - 1 : slot - 1);
            const u32 in_inside = inside >> (STAGES - 1) * STRIDE_H;  // of the step that is multiplied

#pragma unroll
            for (int t = 0; t < WARP_TILES; ++t) {
#pragma unroll
                for (int nt = 0; nt < WARP_N; nt += 2) {
                    const u32 from = grad_from[t] + slot * STAGE_BYTES + nt * 16;
                    if (nt + 1 < WARP_N) {
                        u32 d[4];
                        load_transposed_x4(d, from);
#pragma unroll
                        for (int e = 0; e < 4; ++e) gradient[j][t][nt + e / 2][e % 2] = d[e];
                    } else {
                        load_transposed_x2(gradient[j][t][nt], from);
                    }
                }
                if (sums_bias)
#pragma unroll
                    for (int nt = 0; nt < WARP_N; ++nt) mma_k16(bias[nt], ones, gradient[j][t][nt][0], gradient[j][t][nt][1]);
            }
#pragma unroll
            for (int i = 0; i < STRIDE_H; ++i) {
                if (!(in_inside >> i & 1)) continue;  // a row of padding
#pragma unroll
                for (int t = 0; t < WARP_TILES; ++t) {
                    const u32 row_from = slot * STAGE_BYTES + i * IN_BYTES;
#pragma unroll
                    for (int it = 0; it < (NARROW ? WARP_N : 1); ++it) {  // a narrow gradient tile has its own input
#pragma unroll
                        for (int tap = 0; tap < TAPS; ++tap)
                            if (WARPS_S * WARP_S == S || first_s + tap < S) {
                                u32 a[4];
                                load_transposed_x4(a, in_from[t] + row_from + it * 16 + (NARROW ? 2 : 1) * tap * DILATION_W * IN_PIXEL);
#pragma unroll
                                for (int r = i; r < R; r += STRIDE_H)
#pragma unroll
                                    for (int nt = NARROW ? it : 0; nt < (NARROW ? it + 1 : WARP_N); ++nt) {
                                        // The gradient row that came r / STRIDE_H steps ago.
                                        const auto& b = gradient[(j - r / STRIDE_H + LIVE) % LIVE][t][nt];
                                        mma_k16(acc[r][tap][nt], a, b[0], b[1]);
                                    }
                            }
                        if (LAST_TAP) {
                            // A lane's words of B, for 8 columns, are those of 8 rows of A. So gradients serve as A
                            // here: those of filter row r, and of the next one that this input row meets.
                            u32 b[2];
                            load_transposed_x2(b, last_from[t] + row_from + it * 16);
#pragma unroll
                            for (int r = i; r < R; r += 2 * STRIDE_H) {
                                const bool pair = r + STRIDE_H < R;
                                const auto& low = gradient[(j - r / STRIDE_H + LIVE) % LIVE][t][it];
                                const auto& high = gradient[(j - r / STRIDE_H - 1 + 2 * LIVE) % LIVE][t][it];
                                const u32 a[4] = {low[0], pair ? high[0] : 0, low[1], pair ? high[1] : 0};
                                mma_k16(last[i][r / STRIDE_H / 2][it], a, b[0], b[1]);
                            }
                        }
                    }
                }
            }
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
    }
    copy_async_wait<0>();
    __syncthreads();

    // ---- Sums of the block
    // The warps that share channels add their sums in shared memory, one after another. `add` leaves out what is not in
    // the filter: columns from S on, and products of different groups.
    float* const tile = reinterpret_cast<float*>(shared);
    const int row0 = lane / 4, column0 = lane % 4 * 2;  // of the products, "Matrix Fragments for mma.m16n8k16"
    for (int m = 0; m < WARPS_M; ++m) {
        auto add = [&](int r, int s, int k, int channel, float x) {
            if (s >= S || (GW < 8 && k / GW % (8 / GW) != channel / GW)) return;
            float& sum = tile[((r * S + s) * BLOCK_K + k) * GW + (GW < 8 ? channel % GW : channel)];
            sum = m == 0 ? x : sum + x;
        };
        if (warp_m == m) {
#pragma unroll
            for (int nt = 0; nt < WARP_N; ++nt)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int high = e / 2, k = warp_k * WARP_K + nt * 8;  // high: rows 8-15 of a product
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int tap = 0; tap < TAPS; ++tap) {
                            if (NARROW) add(r, 2 * tap + high, k + column0 + e % 2, row0, acc[r][tap][nt][e]);
                            else add(r, first_s + tap, k + column0 + e % 2, warp_c * 16 + row0 + 8 * high, acc[r][tap][nt][e]);
                        }
                    if (LAST_TAP)
#pragma unroll
                        for (int r = 0; r < R; ++r)
                            if (r / STRIDE_H % 2 == high)
                                add(r, S - 1, k + row0, column0 + e % 2, last[r % STRIDE_H][r / STRIDE_H / 2][nt][e]);
                    if (sums_bias && row0 == 0 && high == 0) {
                        float& sum = tile[4 * FILTER_VECTORS + k + column0 + e];
                        sum = m == 0 ? bias[nt][e] : sum + bias[nt][e];
                    }
                }
        }
        __syncthreads();
    }

    // ---- Sums of the blocks
    const int elements = R * S * c * GW + (HAS_BIAS ? c : 0);
    const float4* const vectors = reinterpret_cast<const float4*>(shared);
    // Writes four of the results, of which vector v of the block has the sums.
    auto write = [&](int v, float4 x) {
        const u32 packed[2] = {pack(x.x, x.y), pack(x.z, x.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const u16 value = static_cast<u16>(packed[e / 2] >> 16 * (e % 2));
            const int element = k0 * GW + v % TAP_VECTORS * 4 + e;
            if (v < FILTER_VECTORS) filter_grad[(element / GW * (R * S) + v / TAP_VECTORS) * GW + element % GW] = value;
            else bias_grad[k0 + (v - FILTER_VECTORS) * 4 + e] = value;
        }
    };
    if (reduction == DIRECT) {
        each_vector(k0, c, [&](int v, int) { write(v, vectors[v]); });
        return;
    }
    u32* const tickets = reinterpret_cast<u32*>(zeroed);
    float* const sums = reinterpret_cast<float*>(zeroed + (k_tiles + 3) / 4 * 16);
    if (reduction == ATOMIC) {
        each_vector(k0, c, [&](int v, int offset) { add_at_l2(sums + offset, vectors[v]); });
    } else {
        float* const mine = scratch + static_cast<i64>(part) * elements;
        each_vector(k0, c, [&](int v, int offset) { *reinterpret_cast<float4*>(mine + offset) = vectors[v]; });
        if (reduction == TWO_KERNELS) return;
    }

    // The last block of a tile to draw a ticket knows that the others' sums are in memory. The counter wraps to
    // zero by itself.
    volatile u32* const ticket = reinterpret_cast<u32*>(shared);
    __threadfence();
    __syncthreads();
    if (tid == 0) *ticket = atomicInc(&tickets[k_tile], parts - 1);
    __syncthreads();
    if (*ticket != parts - 1) return;
    __threadfence();
    each_vector(k0, c, [&](int v, int offset) {
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (reduction == ATOMIC) {
            total = load_from_l2(sums + offset);
            *reinterpret_cast<float4*>(sums + offset) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else {
#pragma unroll 8
            for (int i = 0; i < parts; ++i) {
                const float4 x = load_from_l2(scratch + static_cast<i64>(i) * elements + offset);
                total = make_float4(total.x + x.x, total.y + x.y, total.z + x.z, total.w + x.w);
            }
        }
        write(v, total);
    });
}
