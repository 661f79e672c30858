// Activations beyond the first six, which are in common.cuh and batch_norm.cuh: measurements know kernels by the tokens
// there. An activation is its number, one more than the last one's, and a struct with its formula and its slope, both in
// float32. NaN stays NaN. A kernel that is compiled for one of these has this text in front (confpred/cuda/compiler.py),
// and all others stay as they are.
#pragma once

template <int KIND> struct Activation;

// Kernels call the struct of their activation; one that lacks a member does not compile.
#if ACTIVATION > 5
template <int KIND> __device__ __forceinline__ float activate(float x);
template <> __device__ __forceinline__ float activate<ACTIVATION>(float x) { return Activation<ACTIVATION>::value(x); }
template <int KIND> __device__ __forceinline__ float slope(float z);
template <> __device__ __forceinline__ float slope<ACTIVATION>(float z) { return Activation<ACTIVATION>::slope(z); }
#endif
