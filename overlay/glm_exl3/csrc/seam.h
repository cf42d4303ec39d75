// The seam between two blocks of an mHC layer in one launch; a header of its own, plain data.
#pragma once

#include <cuda_runtime_api.h>

namespace exl3 {

// New streams, the next block's mixing weights and its normalised input, as in `glm_exl3.ref.mhc`, of four
// streams. bf16: x and block_input [tokens, hidden], streams and new_streams [tokens, 4, hidden], norm_weight
// [hidden]. fp32: post and post_out [tokens, 4], comb and comb_out [tokens, 4, 4], fn [24, 4 * hidden], scale [3],
// base [24]. fn, scale, base and norm_weight are the model's: they are read before the kernel ahead in the stream
// has ended. fn and comb_out lie at multiples of 16 bytes, all else at multiples of 4; hidden is 256 times 1, 2, 4, 8
// or 16.
struct SeamArguments {
    const void* x;
    const void* streams;
    const float* post;
    const float* comb;
    const float* fn;
    const float* scale;
    const float* base;
    const void* norm_weight;
    void* new_streams;
    float* post_out;
    float* comb_out;
    void* block_input;
    int tokens, hidden, iterations;
    float rms_eps, pre_eps, sinkhorn_eps, post_multiplier, norm_eps;
    int blocks;  // most blocks a token may take, a power of two; 0: as many as serve best
};

// kUnsupported also where there are no clusters: before compute capability 9.
int seam(const SeamArguments& arguments, cudaStream_t stream);

}  // namespace exl3
