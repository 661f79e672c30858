// The weight and the bias of a norm: in float32, or OWN_WEIGHTS in the activations' dtype; (channels), or ADAPTIVE
// (samples, channels). Included behind what defines Element.
#pragma once

#if OWN_WEIGHTS && DTYPE != DTYPE_FLOAT32
typedef Element Weight;
__device__ __forceinline__ float weight_to_float(Weight x) { return element_to_float(x); }
__device__ __forceinline__ Weight weight_from_float(float x) { return element_from_float(x); }
#else
typedef float Weight;
__device__ __forceinline__ float weight_to_float(Weight x) { return x; }
__device__ __forceinline__ Weight weight_from_float(float x) { return x; }
#endif

// A channel's, or the neutral value where the norm has none.
__device__ __forceinline__ float weight_or(float absent, const Weight* from, i64 at) { return from ? weight_to_float(from[at]) : absent; }
