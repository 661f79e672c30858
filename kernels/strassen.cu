// All work between the seven half-size products of Strassen's algorithm, in one pass: a product's suffix,
// bias, activation, and the prefix of the next product.
//
// Matrices are cut into quarters, 11 12 over 21 22, each half_rows x half_columns and filled up with zeros. For
// C = A B, of activations A and transposed weights B,
//
//   M1 = (A11 + A22)(B11 + B22)    M2 = (A21 + A22) B11    M3 = A11 (B12 - B22)    M4 = A22 (B21 - B11)
//   M5 = (A11 + A12) B22           M6 = (A21 - A11)(B11 + B12)                     M7 = (A12 - A22)(B21 + B22)
//
//   C11 = M1 + M4 - M5 + M7    C12 = M3 + M5    C21 = M2 + M4    C22 = M1 - M2 + M3 + M6
//
// FROM     what is read: MATRIX, or PRODUCTS: M1 to M7, each half_rows x half_columns
// TO       what is written: MATRIX, or LEFT or RIGHT: the seven left factors, or the right ones, these of the
//          weights as they are (features after x features before), so that quarters 12 and 21 are exchanged
//
// Arithmetic is in float32, rounded once. A thread owns VECTOR neighbouring columns of all quarters, so that
// every value is read once and written once:
//
//      |<- half_columns ->|
//   ---+------------------+------------------+
//    ^ |  .. [t] ..       |  .. [t] ..       |    thread t: the same position in each quarter
//      |        11        |        12        |
//   ---+------------------+------------------+
//      |  .. [t] ..       |  .. [t] ..       |
//      |        21        |        22        |
//      +------------------+------------------+
//
// Compile-time: DTYPE, FROM, TO, VECTOR, THREADS, ALIGNED (rows of matrices are whole vectors), ACTIVATION, HAS_BIAS.
//
// Parts:
//   block   THREADS neighbouring positions
//   thread  VECTOR columns of the same position in each quarter
//   warp    no part of its own
//
// Bound: bytes, for this kernel. The shares are of the whole chain of layers, so of the products between these
// kernels, by cuBLAS; they count the FLOP of ordinary products, of which Strassen's algorithm saves an eighth.
//
// Instructions: loads and stores of 16 bytes and float32 additions: all sums that need a value are made from
// registers, so that each is read and written once.
//
// Share of the floor:
//   linear_strassen on NVIDIA H100 80GB HBM3, 2026-11-25
//      14% of bytes: batch=16 inputs=12544 hidden=1024 outputs=1024 layers=2
//      27% of bytes: batch=32 inputs=4096 hidden=4096 outputs=4096 layers=4
//      53% of arithmetic: batch=2048 inputs=3072 hidden=4096 outputs=10 layers=4 last=false
#include "depthwise.cuh"

#define MATRIX 0
#define PRODUCTS 1
#define LEFT 2
#define RIGHT 3

typedef float Floats[VECTOR];

// Columns from `column` on of a matrix's row; zero where that is outside. A matrix is ALIGNED if each row is a
// multiple of VECTOR elements.
__device__ __forceinline__ void read(Floats& x, const Element* from, int row, int column, int rows, int columns) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) x[v] = 0.0f;
    if (row >= rows || column >= columns) return;
    from += static_cast<i64>(row) * columns + column;
    if (ALIGNED) {
        Vector<VECTOR> vector;
        vector.load(from);
        vector.to_floats(x);
    } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
            if (column + v < columns) x[v] = element_to_float(from[v]);
    }
}

__device__ __forceinline__ void write(const Floats& x, Element* to, int row, int column, int rows, int columns) {
    if (row >= rows || column >= columns) return;
    to += static_cast<i64>(row) * columns + column;
    if (ALIGNED) {
        Vector<VECTOR> vector;
        vector.from_floats(x);
        vector.store(to);
    } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
            if (column + v < columns) to[v] = element_from_float(x[v]);
    }
}

// Starts count units of 16 bytes. `rows` and `columns` are those of the whole matrix.
extern "C" __global__ void __launch_bounds__(THREADS) strassen(
    Element* to, const Element* from, const Element* __restrict__ bias, int to_start, int from_start, int rows, int columns,
    int half_rows, int half_columns) {
    const i64 index = blockIdx.x * static_cast<i64>(THREADS) + threadIdx.x;
    const int vectors = half_columns / VECTOR;
    if (index >= static_cast<i64>(half_rows) * vectors) return;
    const int row = index / vectors, column = index % vectors * VECTOR;
    to += static_cast<i64>(to_start) * (16 / sizeof(Element));
    from += static_cast<i64>(from_start) * (16 / sizeof(Element));
    const i64 quarter = static_cast<i64>(half_rows) * half_columns, place = static_cast<i64>(row) * half_columns + column;

    Floats x[2][2];
    if (FROM == MATRIX) {
#pragma unroll
        for (int down = 0; down < 2; ++down)
#pragma unroll
            for (int across = 0; across < 2; ++across)
                read(x[down][across], from, row + down * half_rows, column + across * half_columns, rows, columns);
    } else {
        Floats m[7], offset[2];
#pragma unroll
        for (int i = 0; i < 7; ++i) {
            Vector<VECTOR> vector;
            vector.load(from + i * quarter + place);
            vector.to_floats(m[i]);
        }
#pragma unroll
        for (int across = 0; across < 2; ++across)
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                const int at = column + across * half_columns + v;
                offset[across][v] = HAS_BIAS && at < columns ? element_to_float(bias[at]) : 0.0f;
            }
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            x[0][0][v] = m[0][v] + m[3][v] - m[4][v] + m[6][v];
            x[0][1][v] = m[2][v] + m[4][v];
            x[1][0][v] = m[1][v] + m[3][v];
            x[1][1][v] = m[0][v] - m[1][v] + m[2][v] + m[5][v];
        }
#pragma unroll
        for (int down = 0; down < 2; ++down)
#pragma unroll
            for (int across = 0; across < 2; ++across)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    const bool inside = row + down * half_rows < rows && column + across * half_columns + v < columns;
                    const float sum = x[down][across][v] + offset[across][v];
                    x[down][across][v] = inside ? activate<ACTIVATION>(sum) : 0.0f;  // zeros stay: the activation of 0 need not be
                }
    }

    if (TO == MATRIX) {
#pragma unroll
        for (int down = 0; down < 2; ++down)
#pragma unroll
            for (int across = 0; across < 2; ++across)
                write(x[down][across], to, row + down * half_rows, column + across * half_columns, rows, columns);
        return;
    }
    Floats sums[7];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        const float a = x[0][0][v], d = x[1][1][v];
        const float b = x[0][1][v], c = x[1][0][v];
        if (TO == LEFT) {
            sums[0][v] = a + d;
            sums[1][v] = c + d;
            sums[2][v] = a;
            sums[3][v] = d;
            sums[4][v] = a + b;
            sums[5][v] = c - a;
            sums[6][v] = b - d;
        } else {
            sums[0][v] = a + d;
            sums[1][v] = a;
            sums[2][v] = c - d;
            sums[3][v] = b - a;
            sums[4][v] = d;
            sums[5][v] = a + c;
            sums[6][v] = b + d;
        }
    }
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        Vector<VECTOR> vector;
        vector.from_floats(sums[i]);
        vector.store(to + i * quarter + place);
    }
}
