// What references share: the type that they compute in, and what follows a convolution or a layer. Where there is no
// GPU, tests have them in float32, which can be interpreted.
#pragma once
#include "depthwise.cuh"

#ifndef REAL
#define REAL double
#endif
typedef REAL Real;

// Products are to be exact too, so elements are converted before they are multiplied.
__device__ __forceinline__ Real real(Element x) { return element_to_float(x); }

__device__ __forceinline__ Real activated(Real x, int activation) {
    if (activation == ACTIVATION_RELU) return x < Real(0.0) ? Real(0.0) : x;
    if (activation == ACTIVATION_SILU) return x / (Real(1.0) + exp(-x));
    if (activation == ACTIVATION_GELU) return Real(0.5) * x * (Real(1.0) + erf(x * Real(0.70710678118654752)));
    if (activation == ACTIVATION_RELU6) return fmin(fmax(x, Real(0.0)), Real(6.0));
    if (activation == ACTIVATION_HARDSWISH) return x * fmin(fmax(x + Real(3.0), Real(0.0)), Real(6.0)) / Real(6.0);
    return x;
}

// NHWC, KRSC; any stride, padding, dilation and groups. All kernels of a convolution take the same sizes.
#define SIZES                                                                                        \
    int n, int c, int h, int w, int k, int r, int s, int p, int q, int stride_h, int stride_w,       \
        int pad_h, int pad_w, int dilation_h, int dilation_w, int groups, int activation
