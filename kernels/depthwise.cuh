// Elements of DTYPE, and neighbouring ones as one access and as floats. The depthwise kernels and those of norms access
// neighbouring channels, the kernels of lines neighbours in a row.
#include "common.cuh"

#if DTYPE == DTYPE_FLOAT32
typedef float Element;
#else
typedef u16 Element;
#endif

__device__ __forceinline__ float element_to_float(Element x) {
#if DTYPE == DTYPE_FLOAT32
    return x;
#else
    return to_float(x);
#endif
}

__device__ __forceinline__ Element element_from_float(float x) {
#if DTYPE == DTYPE_FLOAT32
    return x;
#else
    return static_cast<Element>(pack(x, 0.0f));
#endif
}

// Pixel `index` of a row, in one instruction: left alone, the compiler keeps a 64-bit offset for each
// index in registers, or spends three instructions on it. It is a global address, which the compiler
// cannot see behind `asm`.
template <typename T>
__device__ __forceinline__ T* pixel(T* row, int index, int channels) {
    T* address;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(address) : "r"(channels * static_cast<int>(sizeof(T))), "r"(index), "l"(row));
    __builtin_assume(__isGlobal(address));
    return address;
}

template <int BYTES> struct Word;
template <> struct Word<2> { typedef u16 Type; };
template <> struct Word<4> { typedef u32 Type; };
template <> struct Word<8> { typedef uint2 Type; };
template <> struct Word<16> { typedef uint4 Type; };

// COUNT elements as memory holds them; `bits` is what one instruction loads or stores.
template <int COUNT>
struct Vector {
    typedef typename Word<COUNT * sizeof(Element)>::Type Bits;
    Bits bits;

    __device__ __forceinline__ void load(const Element* from) { bits = *reinterpret_cast<const Bits*>(from); }
    __device__ __forceinline__ void store(Element* to) const { *reinterpret_cast<Bits*>(to) = bits; }

    __device__ __forceinline__ void to_floats(float (&x)[COUNT]) const {
        if constexpr (COUNT * sizeof(Element) == 2) {
            x[0] = element_to_float(bits);
        } else {
            const u32* const words = reinterpret_cast<const u32*>(&bits);
#if DTYPE == DTYPE_FLOAT32
#pragma unroll
            for (int v = 0; v < COUNT; ++v) x[v] = __uint_as_float(words[v]);
#else
#pragma unroll
            for (int v = 0; v < COUNT; v += 2) {
                x[v] = to_float(static_cast<u16>(words[v / 2]));
                x[v + 1] = to_float(static_cast<u16>(words[v / 2] >> 16));
            }
#endif
        }
    }

    __device__ __forceinline__ void from_floats(const float (&x)[COUNT]) {
        if constexpr (COUNT * sizeof(Element) == 2) {
            bits = element_from_float(x[0]);
        } else {
            u32* const words = reinterpret_cast<u32*>(&bits);
#if DTYPE == DTYPE_FLOAT32
#pragma unroll
            for (int v = 0; v < COUNT; ++v) words[v] = __float_as_uint(x[v]);
#else
#pragma unroll
            for (int v = 0; v < COUNT; v += 2) words[v / 2] = pack(x[v], x[v + 1]);
#endif
        }
    }
};
