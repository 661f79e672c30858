// Depthwise convolution of unit stride, gradient of the filter and of the bias, NHWC, on tensor cores
// (sm_80 and later).
//
//   filter_grad[c, r, s] = sum over n, p, q of out_grad[n, p, q, c] * in[n, p + r - pad_h, q + s - pad_w, c]
//   bias_grad[c]         = sum over n, p, q of out_grad[n, p, q, c]
//
// Within one channel and one filter row, 16 input columns of 16 strips times 8 gradient columns of the
// same strips make a 16 x 8 matrix; tap s of the filter's gradient is the sum of its diagonal x - q = s, and the
// others are computed and dropped. So filters are up to 9 wide.
//
//                    strip 0 ... 15                     q = 0 ... 7
//        column 0  |               |    strip 0   |                |         | s0              |
//               :  |      in       |  x       :   |    out_grad    |    =    | s1 s0           |
//              15  |               |         15   |                |         | s2 s1 s0        |  S = 3
//                                                                            |    :  :  .      |
//
// Strips, planes in shared memory, what a thread copies when, and the config (BLOCK_C, STRIPS, WARP_C,
// WARP_STRIPS, RUN, ROWS, STAGES, MIN_BLOCKS) are those of depthwise_banded.cu; S <= 9, and HAS_BIAS adds a
// product with ones. A block goes through tiles of STRIPS strips, which `splits` blocks share, and walks
// down each. Input row i meets the R gradient rows that it overlaps, a sliding window of fragments in registers:
//
//        input row i ----+---- gradient row i      --> sums of filter row 0    (entered by this row)
//                        +---- gradient row i - 1  --> sums of filter row 1
//                        +---- gradient row i - 2  --> sums of filter row 2    (leaves after it)
//
// Steps run through from one tile to the next, so that loads are always under way. At the end the
// block adds the sums of its diagonals and of the warps of a channel, and the blocks add their sums as
// `reduction` says:
//
//   DIRECT       one block has all: it writes the result
//   TWO_KERNELS  each writes its sums to `partials`; depthwise_wgrad_sum adds them up in a fixed order
//   ATOMIC       each adds its sums atomically to `sums`, and the last block to finish writes the result;
//                a ticket for each tile of channels, behind the sums, tells which that is
//
// All but ATOMIC give the same bits every time. Sums and tickets are zero before the launch and after it.
//
// Compile-time, beside the config: R x S, DTYPE, HAS_BIAS.
//
// Parts:
//   block   BLOCK_C channels of a split of the tiles of STRIPS strips
//   warp    WARP_C channels of WARP_STRIPS strips; its 16 x 8 matrices of all R filter rows stay in registers
//   thread  fragments of mma.m16n8k16, and items of 8 channels by two columns of the copies
//
// Bound: bytes, as in depthwise_banded.cu: 16 R multiply-adds of tensor cores a gradient pixel, half of them dropped
// or more.
//
// Instructions: mma sums over pixels in its inner extent, so that one instruction adds 16 of them for every tap of a
// filter row; float32 multiply-adds would take R S. ldmatrix.trans turns planes into fragments of both operands.
//
// Share of the floor:
//   depthwise_banded_wgrad on NVIDIA H100 80GB HBM3, 2026-11-23
//      74% of bytes: n=128 c=48 h=96 w=96 k=48 r=5 s=5 padding=2 groups=48 direction=wgrad
//      80% of bytes: n=128 c=768 h=32 w=32 k=768 r=7 s=7 padding=3 groups=768 direction=wgrad deterministic=true
//      84% of bytes: n=63 c=576 h=38 w=57 k=576 r=3 s=3 padding=1 groups=576 direction=wgrad
#include "depthwise_banded.cuh"

constexpr int UNITS = RUN + 1;          // eights of input columns of a run; 16 bytes each in a plane
constexpr int IN_X = 8 * RUN + S - 1;   // input columns that a run needs; the others stay zero
constexpr int SUMS = R * S + HAS_BIAS;  // of a channel

typedef Planes<UNITS, IN_X, IDLE ? IDLE + 1 : 0> In;  // idle strips are zeros, so add nothing
typedef Planes<RUN, 8 * RUN, IDLE> Grad;

constexpr int STAGE = In::STAGE + Grad::STAGE;  // bytes of a step's pairs as they come from memory
constexpr int MATRIX = 16 * 9;  // floats of a 16 x 8 matrix in shared memory, on whose diagonals banks differ

// Bytes of two steps' planes of either kind and of what is copied ahead; and of what replaces them after
// the last step, a matrix a warp and the sums.
enum {
    PLANES = 2 * (In::BUFFER + Grad::BUFFER) + STAGES * STAGE,
    RESULTS = 4 * (THREADS / 32 * MATRIX + STRIPS / WARP_STRIPS * BLOCK_C * SUMS),
    SMEM_BYTES = PLANES > RESULTS ? PLANES : RESULTS
};

static_assert(S <= 9, "a diagonal has eight elements");
static_assert(In::ITEMS <= 16, "validity bits are kept in one word");
static_assert(SMEM_BYTES == HOST_SMEM_BYTES, "the host gives a block so much shared memory");

// Like load_matrix_x4 of common.cuh, but each 8x8 matrix is transposed.
__device__ __forceinline__ void load_transposed_x4(u32 (&d)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed_x2(u32 (&d)[2], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
                 : "=r"(d[0]), "=r"(d[1]) : "r"(from) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) depthwise_banded_wgrad(
    u16* __restrict__ filter_grad, u16* __restrict__ bias_grad, const u16* __restrict__ out_grad,
    const u16* __restrict__ in, float* sums, float* partials, int n, int c, int h, int w, int p, int q,
    int pad_h, int pad_w, int band_rows, int bands, int q_tiles, int c_tiles, int tiles, int splits,
    int reduction) {
    extern __shared__ __align__(16) u8 shared[];
    u8* const in_shared = shared;
    u8* const grad_shared = in_shared + 2 * In::BUFFER;
    u8* const stages = grad_shared + 2 * Grad::BUFFER;

    // ---- Position of the block
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int c_tile = blockIdx.x % c_tiles, split = blockIdx.x / c_tiles;
    const int c0 = c_tile * BLOCK_C;

    // With one band, the input rows below the image add nothing; but the bias needs every gradient row.
    const int all = band_rows + R - 1;
    const int rows = bands == 1 ? min(all, max(h + pad_h, HAS_BIAS ? p : 1)) : all;
    const int tile_steps = ceil_div(rows, ROWS);
    const int steps = (tiles - split + splits - 1) / splits * tile_steps;

    // ---- Items of this thread
    // The tile and step that are loaded next, and the positions of this thread's items in that tile.
    int load_tile = split, load_step = 0;
    const u16 *in_step = in, *grad_step = out_grad;  // its rows, of the tile's first image
    int in_offset[In::ITEMS], in_y[In::ITEMS], grad_offset[Grad::ITEMS], grad_row[Grad::ITEMS], grad_rows[Grad::ITEMS];
    u32 in_valid = 0, grad_valid = 0;  // two columns an item
    auto enter_tile = [&] {
        const int run0 = load_tile * RUNS, image0 = run0 / q_tiles / bands;
        in_step = in + static_cast<i64>(image0) * h * w * c + c0;
        grad_step = out_grad + static_cast<i64>(image0) * p * q * c + c0;
        const auto place = [&](int item, int pairs) {
            return place_of(item, pairs, run0, image0, n, c - c0, band_rows, bands, q_tiles);
        };
        in_valid = grad_valid = 0;
#pragma unroll
        for (int l = 0; l < In::ITEMS; ++l) {
            const Place at = place(l, In::PAIRS);
            const int x = at.q0 - pad_w + 2 * at.pair;
            in_y[l] = at.p0 - pad_h + at.row;
            in_offset[l] = ((at.image * h + in_y[l]) * w + x) * c + 8 * at.piece;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                in_valid |= static_cast<u32>(at.valid && 2 * at.pair + i < IN_X && x + i >= 0 && x + i < w) << (2 * l + i);
        }
#pragma unroll
        for (int l = 0; l < Grad::ITEMS; ++l) {
            const Place at = place(l, Grad::PAIRS);
            const int x = at.q0 + 2 * at.pair;
            grad_row[l] = at.row;
            grad_rows[l] = at.valid ? min(band_rows, p - at.p0) : 0;
            grad_offset[l] = ((at.image * p + at.p0 + at.row) * q + x) * c + 8 * at.piece;
#pragma unroll
            for (int i = 0; i < 2; ++i) grad_valid |= static_cast<u32>(at.valid && x + i < q) << (2 * l + i);
        }
    };
    int in_to[In::ITEMS], grad_to[Grad::ITEMS];
#pragma unroll
    for (int l = 0; l < In::ITEMS; ++l) {
        const Place at = place_of(l, In::PAIRS, 0, 0, n, c, 1, 1, 1);
        in_to[l] = at.row * In::ROW + at.piece * In::GROUP + at.run * In::PITCH + at.pair * 4;
    }
#pragma unroll
    for (int l = 0; l < Grad::ITEMS; ++l) {
        const Place at = place_of(l, Grad::PAIRS, 0, 0, n, c, 1, 1, 1);
        grad_to[l] = at.row * Grad::ROW + at.piece * Grad::GROUP + at.run * Grad::PITCH + at.pair * 4;
    }

    // ---- Copies: device memory, stages, planes
    auto load = [&](int step, u8* stage) {
        if (step < steps) {
            if (load_step == 0) enter_tile();
            const int row = load_step * ROWS;
#pragma unroll
            for (int l = 0; l < In::ITEMS; ++l)
                if (is_item(l, In::TOTAL)) {
                    const u32 y = row + in_y[l];
                    In::copy(stage, l, in_step + in_offset[l], c, y < h ? in_valid >> 2 * l : 0);
                }
#pragma unroll
            for (int l = 0; l < Grad::ITEMS; ++l)
                if (is_item(l, Grad::TOTAL))
                    Grad::copy(stage + In::STAGE, l, grad_step + grad_offset[l], c,
                               row + grad_row[l] < grad_rows[l] ? grad_valid >> 2 * l : 0);
            in_step += static_cast<i64>(ROWS * w) * c;
            grad_step += static_cast<i64>(ROWS * q) * c;
            if (++load_step == tile_steps) {
                load_step = 0;
                load_tile += splits;
            }
        }
        copy_async_commit();
    };
    auto put = [&](int step, const u8* stage) {
        copy_async_wait<STAGES - 1>();  // for what this thread itself has copied
#pragma unroll
        for (int l = 0; l < In::ITEMS; ++l)
            if (is_item(l, In::TOTAL)) In::put(in_shared + step % 2 * In::BUFFER + in_to[l], stage, l);
#pragma unroll
        for (int l = 0; l < Grad::ITEMS; ++l)
            if (is_item(l, Grad::TOTAL)) Grad::put(grad_shared + step % 2 * Grad::BUFFER + grad_to[l], stage + In::STAGE, l);
    };

#pragma unroll
    for (int step = 0; step < STAGES; ++step) load(step, stages + step * STAGE);
    if (2 * In::PAIRS < 8 * UNITS || IDLE) {  // columns that are read, but that nothing is ever put into
        for (int e = tid; e < 2 * (In::BUFFER + (IDLE ? Grad::BUFFER : 0)) / 16; e += THREADS)
            reinterpret_cast<uint4*>(in_shared)[e] = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    put(0, stages);
    load(STAGES, stages);
    __syncthreads();

    // ---- Fragments
    // Fragment layouts are those of the PTX manual, "Matrix Fragments for mma.m16n8k16": in both operands
    // the sum runs over strips, which are the rows of what ldmatrix fetches and transposes.
    const int channel0 = warp % (BLOCK_C / WARP_C) * WARP_C, warp_n = warp / (BLOCK_C / WARP_C);
    const u32 in_planes = shared_address(in_shared) + channel0 / 8 * In::GROUP + channel0 % 8 * In::CHANNEL;
    const u32 grad_planes = shared_address(grad_shared) + channel0 / 8 * Grad::GROUP + channel0 % 8 * Grad::CHANNEL;
    u32 in_from[TILES], grad_from[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const int strip = warp_n * WARP_STRIPS + tile * 16;
        in_from[tile] = in_planes + In::strip(strip + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 16;
        grad_from[tile] = grad_planes + (strip + lane % 16) * 16;
    }
    constexpr u32 ONES = DTYPE == DTYPE_BFLOAT16 ? 0x3F803F80 : 0x3C003C00;
    const u32 ones[4] = {ONES, ONES, ONES, ONES};

    // ---- Products of a row
    float acc[WARP_C][R][4] = {}, bias_acc[WARP_C][4] = {};
    u32 window[WARP_C][R][TILES][2];
    int step_of_tile = 0;
    auto compute = [&](int step, auto phase) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int t = decltype(phase)::first_row + row;
#pragma unroll
            for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    u32 a[4];
                    load_transposed_x4(a, in_from[tile] + step % 2 * In::BUFFER + row * In::ROW + channel * In::CHANNEL);
                    u32 (&b)[2] = window[channel][ring(0, t)][tile];
                    load_transposed_x2(b, grad_from[tile] + step % 2 * Grad::BUFFER + row * Grad::ROW + channel * Grad::CHANNEL);
#pragma unroll
                    for (int r = 0; r < R; ++r) {
                        const u32 (&b)[2] = window[channel][ring(r, t)][tile];
                        mma_k16(acc[channel][r], a, b[0], b[1]);
                    }
                    if (HAS_BIAS) mma_k16(bias_acc[channel], ones, b[0], b[1]);
                }
        }
    };
    auto clear_window = [&] {
#pragma unroll
        for (int channel = 0; channel < WARP_C; ++channel)
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int i = 0; i < 2; ++i)  // volatile: else the compiler selects between old and new in every step
                        asm volatile("mov.b32 %0, 0;" : "=r"(window[channel][r][tile][i]));
    };

    // ---- Steps
    u8* stage = stages + (STAGES > 1 ? STAGE : 0);  // of the next step
    const auto exchange = [&](int step) {
        if (step + 1 < steps) {
            put(step + 1, stage);
            load(step + 1 + STAGES, stage);
        }
        stage = stage == stages + (STAGES - 1) * STAGE ? stages : stage + STAGE;
    };
    const bool exchanges_first = warp / 4 % 2 == 0;
    int phase = 0;
    for (int step = 0; step < steps; ++step) {
        if (step > 0) __syncthreads();
        if (exchanges_first) exchange(step);
        if (step_of_tile == 0) clear_window();
        step_of_tile = step_of_tile + 1 == tile_steps ? 0 : step_of_tile + 1;
        in_phase(phase, [&](auto constant) { compute(step, constant); });
        phase = phase + 1 == PERIOD ? 0 : phase + 1;
        if (!exchanges_first) exchange(step);
    }

    // ---- Sums of the block
    // The sums of a warp's diagonals, then of the warps of a channel, in shared memory.
    __syncthreads();
    float* const matrix = reinterpret_cast<float*>(shared) + warp * MATRIX;
    float* const block_sums = reinterpret_cast<float*>(shared) + THREADS / 32 * MATRIX;
#pragma unroll
    for (int channel = 0; channel < WARP_C; ++channel) {
        float* const to = block_sums + (warp_n * BLOCK_C + channel0 + channel) * SUMS;
#pragma unroll
        for (int r = 0; r < R + HAS_BIAS; ++r) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                matrix[(lane / 4 + e / 2 * 8) * 9 + lane % 4 * 2 + e % 2] = r < R ? acc[channel][r < R ? r : 0][e] : bias_acc[channel][e];
            __syncwarp();
            if (lane < (r < R ? S : 1)) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; ++j) sum += matrix[(r < R ? lane + j : 0) * 9 + j];
                to[r * S + lane] = sum;
            }
            __syncwarp();
        }
    }
    __syncthreads();

    // ---- Sums of the blocks
    const int filter_elements = c * R * S, elements = filter_elements + (HAS_BIAS ? c : 0);
    const auto element_of = [&](int o) {
        const int channel = c0 + o / SUMS, tap = o % SUMS;
        return tap < R * S ? channel * R * S + tap : filter_elements + channel;
    };
    const auto write = [&](int element, float value) {
        const u16 rounded = static_cast<u16>(pack(value, 0.0f));
        if (element < filter_elements) filter_grad[element] = rounded;
        else bias_grad[element - filter_elements] = rounded;
    };
    const int count = min(BLOCK_C, c - c0) * SUMS;
    for (int o = tid; o < count; o += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < STRIPS / WARP_STRIPS; ++other) sum += block_sums[other * BLOCK_C * SUMS + o];
        const int element = element_of(o);
        if (reduction == DIRECT) write(element, sum);
        else if (reduction == ATOMIC) atomicAdd(sums + element, sum);
        else partials[static_cast<i64>(split) * elements + element] = sum;
    }
    if (reduction != ATOMIC) return;

    u32& is_last = *reinterpret_cast<u32*>(shared);
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        u32* const tickets = reinterpret_cast<u32*>(sums + elements);
        is_last = atomicInc(tickets + c_tile, splits - 1) == splits - 1;  // the last one leaves it zero again
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int o = tid; o < count; o += THREADS) {
        const int element = element_of(o);
        write(element, __ldcg(sums + element));
        sums[element] = 0.0f;
    }
}
