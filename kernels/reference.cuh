// Parts of the references: the type that they compute in, and what follows a convolution or a layer. Where there is no
// GPU, tests have them in float32, which can be interpreted.
#pragma once
#include "depthwise.cuh"
#include "activations.cuh"

#ifndef REAL
#define REAL double
#endif
typedef REAL Real;
#ifndef ACTIVATION  // of a kernel that computes none
#define ACTIVATION ACTIVATION_NONE
#endif

// Products are to be exact too, so elements are converted before they are multiplied.
__device__ __forceinline__ Real real(Element x) { return element_to_float(x); }

// The activations in full: each is a struct with its formula, and its slope at z. `rounded` is z as kernels compute it:
// where the slope jumps, it decides. One that is not here, or lacks a member, does not compile.
template <int KIND> struct Exact;
template <> struct Exact<ACTIVATION_NONE> {
    static __device__ Real value(Real x) { return x; }
    static __device__ Real slope(Real, float) { return 1; }
};
template <> struct Exact<ACTIVATION_RELU> {
    static __device__ Real value(Real x) { return x < 0 ? 0 : x; }
    static __device__ Real slope(Real, float rounded) { return rounded <= 0.0f ? 0 : 1; }
};
template <> struct Exact<ACTIVATION_SILU> {
    static __device__ Real sigmoid(Real x) { return 1 / (1 + exp(-x)); }
    static __device__ Real value(Real x) { return x / (1 + exp(-x)); }
    static __device__ Real slope(Real z, float) { return sigmoid(z) * (1 + z * (1 - sigmoid(z))); }
};
template <> struct Exact<ACTIVATION_GELU> {
    static __device__ Real share(Real x) { return Real(0.5) * (1 + erf(x * Real(0.70710678118654752))); }
    static __device__ Real value(Real x) { return x * share(x); }
    static __device__ Real slope(Real z, float) { return share(z) + z * Real(0.39894228040143268) * exp(-z * z / 2); }
};
template <> struct Exact<ACTIVATION_RELU6> {
    static __device__ Real value(Real x) { return x < 0 ? 0 : x > 6 ? 6 : x; }
    static __device__ Real slope(Real, float rounded) { return rounded <= 0.0f || rounded >= 6.0f ? 0 : 1; }
};
template <> struct Exact<ACTIVATION_HARDSWISH> {
    static __device__ Real value(Real x) { return x * fmin(fmax(x + 3, Real(0)), Real(6)) / 6; }
    static __device__ Real slope(Real z, float rounded) { return rounded <= -3.0f ? 0 : rounded < 3.0f ? z / 3 + Real(0.5) : 1; }
};
template <int PERCENT> struct ExactLeaky {
    static __device__ Real value(Real x) { return x > 0 ? x : x * PERCENT / 100; }
    static __device__ Real slope(Real, float rounded) { return rounded > 0.0f ? Real(1) : Real(PERCENT) / 100; }
};
template <> struct Exact<ACTIVATION_LEAKY_RELU> : ExactLeaky<1> {};
template <> struct Exact<ACTIVATION_LEAKY_RELU_10> : ExactLeaky<10> {};
template <> struct Exact<ACTIVATION_LEAKY_RELU_20> : ExactLeaky<20> {};

__device__ __forceinline__ Real activated(Real x) { return Exact<ACTIVATION>::value(x); }

// NHWC, KRSC; any stride, padding, dilation and groups. All kernels of a convolution take the same sizes.
#define SIZES                                                                                        \
    int n, int c, int h, int w, int k, int r, int s, int p, int q, int stride_h, int stride_w,       \
        int pad_h, int pad_w, int dilation_h, int dilation_w, int groups
