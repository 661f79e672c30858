// Softmax of each row of a (rows, columns) matrix, or its logarithm.
//
//   out[i, j] = exp(y), or y where LOG is 1;   y = in[i, j] - max[i] - log(sum over k of exp(in[i, k] - max[i]))
//
// The row's largest element, max, keeps exp from overflowing. DTYPE is that of both tensors; sums are in float32. The
// config:
//
//   ROW_THREADS   threads that share a row: up to a warp, or whole warps that are then a block
//   VECTOR        neighbouring elements that a thread loads and stores at once
//   PIECES        vectors of its row that a thread keeps in registers; 0: none, it reads them twice
//
//   thread      0      1      2      3      0      1      2      3      ROW_THREADS 4,
//            |vector|vector|vector|vector|vector|vector|vector|      |  PIECES 2 for 7 vectors
//   piece    '----------- 0 -----------' '----------- 1 -----------'
//
// Parts:
//   block   ROW_THREADS x blockDim.y threads
//   row     ROW_THREADS neighbouring threads, within a warp or several
//   thread  PIECES vectors, their largest element and the sum of exp
//
// Bound: bytes, each tensor crosses memory once; a row that is read twice is in L2 the second time.
typedef long long i64;

#define DTYPE_FLOAT16 0
#define DTYPE_BFLOAT16 1
#define DTYPE_FLOAT32 2
#if DTYPE == DTYPE_FLOAT32
typedef float Element;
__device__ __forceinline__ float load(Element x) { return x; }
__device__ __forceinline__ Element store(float x) { return x; }
#elif DTYPE == DTYPE_BFLOAT16
typedef unsigned short Element;
__device__ __forceinline__ float load(Element x) { return __uint_as_float(static_cast<unsigned>(x) << 16); }
__device__ __forceinline__ Element store(float x) {
    Element rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
}
#else
typedef unsigned short Element;
__device__ __forceinline__ float load(Element x) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x));
    return value;
}
__device__ __forceinline__ Element store(float x) {
    Element rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
}
#endif

#ifdef VECTOR  // a config; without one, the reference below is compiled
constexpr int STRIDE = ROW_THREADS * VECTOR;  // from one piece of a thread to its next
constexpr int LANES = ROW_THREADS < 32 ? ROW_THREADS : 32;  // of a warp, that share a row
constexpr int WARPS = ROW_THREADS / LANES;                  // that share a row
constexpr float LEAST = -3.402823466e38f;  // a finite start: two infinities have no difference

struct alignas(VECTOR * sizeof(Element)) Vector {
    Element at[VECTOR];
};

// Some elements of a row: the largest, and the sum of exp(element - max).
struct Total {
    float max, sum;

    // Make `largest` the maximum, which is at least as large.
    __device__ __forceinline__ void raise(float largest) {
        sum *= __expf(max - largest);
        max = largest;
    }
    __device__ __forceinline__ void add(const Vector& vector) {
        float largest = max;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) largest = fmaxf(largest, load(vector.at[e]));
        raise(largest);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum += __expf(load(vector.at[e]) - max);
    }
};

// The total of `COUNT` neighbouring lanes, in each of them.
template <int COUNT>
__device__ __forceinline__ Total total_of_lanes(Total total) {
    float largest = total.max;
#pragma unroll
    for (int lane = COUNT / 2; lane > 0; lane /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lane));
    total.raise(largest);
#pragma unroll
    for (int lane = COUNT / 2; lane > 0; lane /= 2) total.sum += __shfl_xor_sync(~0u, total.sum, lane);
    return total;
}

// The total of the threads of a row, in each of them.
__device__ __forceinline__ Total total_of_row(Total total) {
    total = total_of_lanes<LANES>(total);
    if (WARPS > 1) {
        __shared__ Total of_warp[WARPS];
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = total;
        __syncthreads();
        total = total_of_lanes<WARPS>(of_warp[threadIdx.x % WARPS]);
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(1024) softmax(
    Element* __restrict__ out, const Element* __restrict__ in, int rows, int columns) {
    // A row of threads past the matrix takes part in the shuffles of its warp with the last row.
    const i64 row = blockIdx.x * static_cast<i64>(blockDim.y) + threadIdx.y;
    const i64 start = (row < rows ? row : rows - 1) * columns;
    const int first = threadIdx.x * VECTOR;

    Vector kept[PIECES ? PIECES : 1];
    Total total = {LEAST, 0.0f};
    auto read = [&](int column) { return *reinterpret_cast<const Vector*>(in + start + column); };
    if (PIECES) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)  // all loads before the first sum waits for one
            if (first + piece * STRIDE < columns) kept[piece] = read(first + piece * STRIDE);
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (first + piece * STRIDE < columns) total.add(kept[piece]);
    } else {
#pragma unroll 4
        for (int column = first; column < columns; column += STRIDE) total.add(read(column));
    }
    total = total_of_row(total);
    const float log_sum = logf(total.sum);
    if (row >= rows) return;

    auto write = [&](int column, const Vector& vector) {
        Vector result;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const float y = load(vector.at[e]) - total.max - log_sum;
            result.at[e] = store(LOG ? y : __expf(y));
        }
        *reinterpret_cast<Vector*>(out + start + column) = result;
    };
    if (PIECES) {
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
            if (first + piece * STRIDE < columns) write(first + piece * STRIDE, kept[piece]);
    } else {
#pragma unroll 4
        for (int column = first; column < columns; column += STRIDE) write(column, read(column));
    }
}

#else

// What every config is checked against: one thread a row, in float64.
extern "C" __global__ void reference_softmax(double* out, const Element* in, int rows, int columns) {
    const i64 row = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
    if (row >= rows) return;
    in += row * columns;
    double max = load(in[0]), sum = 0.0;
    for (int j = 1; j < columns; ++j) max = fmax(max, static_cast<double>(load(in[j])));
    for (int j = 0; j < columns; ++j) sum += exp(load(in[j]) - max);
    const double log_sum = log(sum);
    for (int j = 0; j < columns; ++j) {
        const double y = load(in[j]) - max - log_sum;
        out[row * columns + j] = LOG ? y : exp(y);
    }
}
#endif
