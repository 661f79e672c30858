// Reference that dense convolutions are checked against, in float64: plain matrix products whose elements are looked up in the
// tensors one by one. Dense layers have a hundred times the products of grouped ones, and a thread an output element
// (reference.cu) takes seconds for them; here a block computes 64 x 64 sums from tiles in shared memory.
#include "reference.cuh"

enum { TILE = 64, DEPTH = 16, SIDE = 16, EACH = TILE / SIDE, THREADS = SIDE * SIDE };

// Adds to sum[i][j] the product of row `TILE * blockIdx.x + y + SIDE * i` of the first matrix and column
// `TILE * blockIdx.y + x + SIDE * j` of the second over the terms from `begin` to `end`. The matrices are functions of
// a row (or column) and a term. In memory, neighbours are terms where `FIRST_BY_TERM` (`SECOND_BY_TERM`) says so, else
// rows (columns).
template <bool FIRST_BY_TERM, bool SECOND_BY_TERM, typename First, typename Second>
__device__ __forceinline__ void add_product(Real (&sum)[EACH][EACH], int rows, int columns, int begin, int end, First first,
                                            Second second) {
    __shared__ Real a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    const int thread = threadIdx.x, x = thread % SIDE, y = thread / SIDE;
    for (int term = begin; term < end; term += DEPTH) {
        for (int i = 0; i < EACH; ++i) {
            const int at = FIRST_BY_TERM ? y + SIDE * i : thread % TILE, t = FIRST_BY_TERM ? x : thread / TILE + THREADS / TILE * i;
            const int row = TILE * blockIdx.x + at;
            a[t][at] = row < rows && term + t < end ? first(row, term + t) : Real(0.0);
        }
        for (int i = 0; i < EACH; ++i) {
            const int at = SECOND_BY_TERM ? y + SIDE * i : thread % TILE, t = SECOND_BY_TERM ? x : thread / TILE + THREADS / TILE * i;
            const int column = TILE * blockIdx.y + at;
            b[t][at] = column < columns && term + t < end ? second(column, term + t) : Real(0.0);
        }
        __syncthreads();
        for (int t = 0; t < DEPTH; ++t)
            for (int i = 0; i < EACH; ++i)
                for (int j = 0; j < EACH; ++j) sum[i][j] += a[t][y + SIDE * i] * b[t][x + SIDE * j];
        __syncthreads();
    }
}

// Calls `take(row, column, sum)` for each of a thread's sums that is inside the matrix.
template <typename Take>
__device__ __forceinline__ void for_each_sum(const Real (&sum)[EACH][EACH], int rows, int columns, Take take) {
    for (int i = 0; i < EACH; ++i)
        for (int j = 0; j < EACH; ++j) {
            const int row = TILE * blockIdx.x + threadIdx.x / SIDE + SIDE * i, column = TILE * blockIdx.y + threadIdx.x % SIDE + SIDE * j;
            if (row < rows && column < columns) take(row, column, sum[i][j]);
        }
}

// Rows are output pixels, columns output channels, terms r, s, c.
extern "C" __global__ void __launch_bounds__(THREADS) reference_dense_out(Real* out, const Element* in, const Element* filter,
                                                                         const Element* bias, const Element* residual, SIZES) {
    Real sum[EACH][EACH] = {};
    const int pixels = n * p * q, terms = r * s * c;
    add_product<true, true>(
        sum, pixels, k, 0, terms,
        [=](int pixel, int term) {
            const int oq = pixel % q, op = pixel / q % p, on = pixel / q / p, fs = term / c % s, fr = term / c / s;
            const int y = op * stride_h - pad_h + fr * dilation_h, x = oq * stride_w - pad_w + fs * dilation_w;
            if (y < 0 || y >= h || x < 0 || x >= w) return Real(0.0);
            return real(in[((static_cast<i64>(on) * h + y) * w + x) * c + term % c]);
        },
        [=](int ok, int term) { return real(filter[static_cast<i64>(ok) * terms + term]); });
    for_each_sum(sum, pixels, k, [=](int pixel, int ok, Real total) {
        const i64 index = static_cast<i64>(pixel) * k + ok;
        if (bias) total += real(bias[ok]);
        if (residual) total += real(residual[index]);
        out[index] = activated(total);
    });
}

// Rows are input pixels, columns input channels, terms r, s, k.
extern "C" __global__ void __launch_bounds__(THREADS) reference_dense_in_grad(Real* in_grad, const Element* out_grad,
                                                                             const Element* filter, SIZES) {
    Real sum[EACH][EACH] = {};
    const int pixels = n * h * w;
    add_product<true, false>(
        sum, pixels, c, 0, r * s * k,
        [=](int pixel, int term) {
            const int x = pixel % w, y = pixel / w % h, in = pixel / w / h, fs = term / k % s, fr = term / k / s;
            const int up = y + pad_h - fr * dilation_h, uq = x + pad_w - fs * dilation_w;
            if (up < 0 || uq < 0 || up % stride_h || uq % stride_w || up / stride_h >= p || uq / stride_w >= q) return Real(0.0);
            return real(out_grad[((static_cast<i64>(in) * p + up / stride_h) * q + uq / stride_w) * k + term % k]);
        },
        [=](int ic, int term) {
            return real(filter[(static_cast<i64>(term % k) * r * s + term / k) * c + ic]);
        });
    for_each_sum(sum, pixels, c, [=](int pixel, int ic, Real total) { in_grad[static_cast<i64>(pixel) * c + ic] = total; });
}

// Rows are output channels, columns r, s, c, terms output pixels, which grid.z cuts into slices.
extern "C" __global__ void __launch_bounds__(THREADS) reference_dense_filter_grad(Real* filter_grad, const Element* out_grad,
                                                                                 const Element* in, SIZES) {
    Real sum[EACH][EACH] = {};
    const int pixels = n * p * q, columns = r * s * c, slice = ceil_div(ceil_div(pixels, gridDim.z), DEPTH) * DEPTH;
    const int begin = blockIdx.z * slice;
    add_product<false, false>(
        sum, k, columns, begin, min(pixels, begin + slice),
        [=](int ok, int pixel) { return real(out_grad[static_cast<i64>(pixel) * k + ok]); },
        [=](int column, int pixel) {
            const int oq = pixel % q, op = pixel / q % p, on = pixel / q / p, fs = column / c % s, fr = column / c / s;
            const int y = op * stride_h - pad_h + fr * dilation_h, x = oq * stride_w - pad_w + fs * dilation_w;
            if (y < 0 || y >= h || x < 0 || x >= w) return Real(0.0);
            return real(in[((static_cast<i64>(on) * h + y) * w + x) * c + column % c]);
        });
    for_each_sum(sum, k, columns, [=](int ok, int column, Real total) {
        atomicAdd(filter_grad + static_cast<i64>(ok) * columns + column, total);
    });
}
