// Backward layer norm and RMS norm with their activation (row_norm.cuh has the layout). The normalised row is never
// stored: its activation's argument is computed again. With d, the gradient before the activation times the weight, and
// normalised = (in - mean) * invstd, or in * invstd for RMS norm,
//
//   in_grad = invstd * (d - mean of d - normalised * mean of (d * normalised))        RMS norm: without the mean of d
//
// A thread has the same channels of every row, so it adds up their gradients of weight and bias in registers. The sums of
// a block's rows meet in shared memory, and those of the blocks in `scratch`, (blocks, AFFINE, channels), where
// row_norm_sum.cu adds them up.
//
// Compile-time, beside what row_norm.cuh lists: DTYPE, ACTIVATION, HAS_RESIDUAL, CENTRED (a mean is subtracted),
// OWN_WEIGHTS (weights in DTYPE), STREAM (tensors of more than 32 MiB, of which an L2 cache keeps little). HELD is set,
// too, but only row_norm.cu reads it.
//
// Parts:
//   block   THREADS / LANES rows at once, and further rows; and sums for the gradients of weight and bias, of its
//           columns over all of its rows
//   row     LANES neighbouring threads, within a warp or several
//   thread  ACCESSES accesses of VECTOR channels, in registers
//
// Bound: bytes, each tensor crosses memory once; the blocks' sums are some percent more.
//
// Instructions: as in row_norm.cu. The sums over rows stay in registers and leave a block once: atomic additions
// would not give the same bits every time.
//
// Share of the floor:
//   row_norm_backward on NVIDIA H200, 2026-11-27
//      75% of bytes: n=65536 p=1 c=180 dtype=float32 direction=backward
//      83% of bytes: n=16384 p=1 c=3200 direction=backward affine=weight weights=float16 centred=false
//      86% of bytes: n=1597440 p=1 c=96 dtype=bfloat16 activation=silu direction=backward affine=weight centred=false
#include "row_norm.cuh"

constexpr int WIDTH = LANES > 32 ? LANES : 32;  // a warp, whose rows shuffles add up, or the several warps of one row
constexpr int WIDTHS = THREADS / WIDTH;
// Floats that all but the first WIDTH threads hand over at a time; before, sums of rows have the same shared memory.
enum { HANDED = AFFINE ? (WIDTHS - 1) * LANES * VECTOR : 0, FLOATS = HANDED > SUMS_FLOATS ? HANDED : SUMS_FLOATS };
static_assert(FLOATS * sizeof(float) == HOST_SMEM_BYTES, "the host sizes shared memory otherwise");

// Leaves the sums over a block's rows with the threads of its first row, for VECTOR channels of each.
__device__ __forceinline__ void add_rows(float (&values)[VECTOR]) {
#pragma unroll
    for (int apart = LANES; apart < 32; apart *= 2)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] += __shfl_xor_sync(~0u, values[v], apart);
    if (WIDTHS == 1) return;
    const int number = threadIdx.x / WIDTH, lane = threadIdx.x % WIDTH;
    __syncthreads();
    if (number > 0 && lane < LANES)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) shared[((number - 1) * VECTOR + v) * LANES + lane] = values[v];
    __syncthreads();
    if (threadIdx.x >= LANES) return;
#pragma unroll 4
    for (int other = 0; other < WIDTHS - 1; ++other)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) values[v] += shared[(other * VECTOR + v) * LANES + lane];
}

// A row's mean, 0 for RMS norm, and 1 over its standard deviation (invstd), as forward stored them.
struct Statistics {
    float centre, deviation;

    __device__ __forceinline__ void load(const float* mean, const float* invstd, const Lane& lane, int row) {
        centre = CENTRED && row < lane.rows ? mean[row] : 0.0f;
        deviation = row < lane.rows ? invstd[row] : 0.0f;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) row_norm_backward(
    Element* __restrict__ in_grad, Element* __restrict__ residual_grad, const Element* __restrict__ out_grad,
    const Element* __restrict__ in, const Weight* __restrict__ weight, const Weight* __restrict__ bias,
    const Element* __restrict__ residual, const float* __restrict__ mean, const float* __restrict__ invstd,
    float* __restrict__ scratch, int rows, int channels) {
    const Element* const from[] = {in, out_grad, residual};
    Lane lane(rows, channels);
    Row<2 + HAS_RESIDUAL> row, next;
    Statistics own, later;
    if (AHEAD) {
        row.load(from, lane, lane.row);
        own.load(mean, invstd, lane, lane.row);
    }
    const float share = 1.0f / static_cast<float>(channels);
    float grads[AFFINE ? AFFINE : 1][ACCESSES][VECTOR] = {};
    int turn = 0;
    for (int block_row = blockIdx.x * AT_ONCE; block_row < rows; block_row += lane.step, lane.row += lane.step) {
        (AHEAD ? next : row).load(from, lane, AHEAD ? lane.row + lane.step : lane.row);
        (AHEAD ? later : own).load(mean, invstd, lane, AHEAD ? lane.row + lane.step : lane.row);
        const float centre = own.centre, deviation = own.deviation;
        const bool is_row = lane.row < rows;
        float x[ACCESSES][VECTOR], d[ACCESSES][VECTOR], sums[1 + CENTRED] = {};
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            if (!lane.has(a)) continue;
            float more[VECTOR], weights[VECTOR], offset[VECTOR];
            row.of[0][a].to_floats(x[a]);
            row.of[1][a].to_floats(d[a]);
            if (HAS_RESIDUAL) row.of[1 + HAS_RESIDUAL][a].to_floats(more);  // [2], or a legal index that goes unused
            load_weights(weights, weight, 1.0f, AFFINE > 0, lane, a);
            load_weights(offset, bias, 0.0f, AFFINE > 1 && ACTIVATION != ACTIVATION_NONE, lane, a);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                x[a][v] -= centre;
                if (ACTIVATION != ACTIVATION_NONE) {
                    float z = argument(x[a][v], __fmul_rn(weights[v], deviation), offset[v]);
                    if (HAS_RESIDUAL) z = __fadd_rn(z, more[v]);
                    d[a][v] *= slope<ACTIVATION>(z);
                }
                x[a][v] *= deviation;
            }
            if (HAS_RESIDUAL) {
                Access result;
                result.from_floats(d[a]);
                if (is_row) store_last(residual_grad + lane.offset(a, lane.row), result);
            }
            float product = 0.0f, sum = 0.0f;  // one of each for each access: additions need not wait for one another
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                if (AFFINE > 0) grads[0][a][v] += d[a][v] * x[a][v];
                if (AFFINE > 1) grads[AFFINE / 2][a][v] += d[a][v];  // [1]
                d[a][v] *= weights[v];  // from here on the d of the formula
                product += d[a][v] * x[a][v];
                sum += d[a][v];
            }
            sums[0] += product;
            if (CENTRED) sums[CENTRED] += sum;  // [1]
        }
        add_row(sums, turn);
        const float factor = sums[0] * share, constant = CENTRED ? sums[CENTRED] * share : 0.0f;
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            if (!lane.has(a) || !is_row) continue;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) d[a][v] = deviation * (d[a][v] - constant - x[a][v] * factor);
            Access result;
            result.from_floats(d[a]);
            store_last(in_grad + lane.offset(a, lane.row), result);
        }
        if (!AHEAD) continue;
        row = next;
        own = later;
    }
#pragma unroll
    for (int i = 0; i < AFFINE; ++i)
#pragma unroll
        for (int a = 0; a < ACCESSES; ++a) {
            add_rows(grads[i][a]);
            float* const to = scratch + (static_cast<i64>(blockIdx.x) * AFFINE + i) * channels + lane.channel(a);
            if (threadIdx.x < LANES && lane.has(a)) put(to, grads[i][a]);
        }
}
