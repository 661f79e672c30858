// Activations beyond the first six, which are in common.cuh and batch_norm.cuh: measurements know kernels by the tokens
// there. An activation is its number, one more than the last one's, and a struct with its formula and its slope, both in
// float32. NaN stays NaN. A kernel that is compiled for one of these has this text in front (confpred/cuda/compiler.py),
// and all others stay as they are.
#pragma once

template <int KIND> struct Activation;

#define ACTIVATION_LEAKY_RELU 6
#define ACTIVATION_LEAKY_RELU_10 7
#define ACTIVATION_LEAKY_RELU_20 8
template <int PERCENT> struct Leaky {
    static constexpr float SLOPE = PERCENT / 100.0f;
    static __device__ float value(float x) { return x > 0.0f ? x : SLOPE * x; }
    static __device__ float slope(float z) { return z > 0.0f ? 1.0f : SLOPE; }
};
template <> struct Activation<ACTIVATION_LEAKY_RELU> : Leaky<1> {};
template <> struct Activation<ACTIVATION_LEAKY_RELU_10> : Leaky<10> {};
template <> struct Activation<ACTIVATION_LEAKY_RELU_20> : Leaky<20> {};

// Kernels call the struct of their activation; one that lacks a member does not compile.
#if ACTIVATION > 5
template <int KIND> __device__ __forceinline__ float activate(float x);
template <> __device__ __forceinline__ float activate<ACTIVATION>(float x) { return Activation<ACTIVATION>::value(x); }
template <int KIND> __device__ __forceinline__ float slope(float z);
template <> __device__ __forceinline__ float slope<ACTIVATION>(float z) { return Activation<ACTIVATION>::slope(z); }
#endif
