// Products of few tokens with 8-bit rows; a header of its own, plain data.
#pragma once

#include <cuda_runtime_api.h>

namespace exl3 {

// out [tokens, n] = (x [tokens, k] times codes [n, k]) * scale [n]; x and out bf16, codes e4m3 or int8, one
// contiguous row after the other, sums in fp32. Up to kByteRowsTokens tokens; k a multiple of kByteRowsUnit.
constexpr int kByteRowsTokens = 16, kByteRowsUnit = 64;
struct ByteRowsArguments {
    const void* x;
    const void* codes;
    const float* scale;
    void* out;
    int tokens, k, n;
    bool floats;  // e4m3, otherwise int8
};
int byte_rows(const ByteRowsArguments& arguments, cudaStream_t stream);

}  // namespace exl3
