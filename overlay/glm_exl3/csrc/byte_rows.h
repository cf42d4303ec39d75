// Products of few tokens with rows of e4m3, int8 or bf16; a header of its own, plain data.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace exl3 {

enum class RowKind { kE4m3, kInt8, kBf16 };

// out [tokens, n] = x [tokens, k] times rows [n, k], 8-bit rows times scale [n] as well; x and out bf16, out of bf16
// rows also fp32; sums in fp32. Up to kRowsTokens tokens; rows are contiguous, one after the other, and whole units of
// kRowsUnitBytes; rows of x begin x_stride elements apart, each at a multiple of 16 bytes.
constexpr int kRowsTokens = 16, kRowsUnitBytes = 64;
struct RowsArguments {
    const void* x;
    const void* rows;
    const float* scale;  // of 8-bit rows
    void* out;
    int64_t x_stride;
    int tokens, k, n;
    RowKind kind;
    bool floats_out, urgent;  // urgent: as in launch_as
};
int byte_rows(const RowsArguments& arguments, cudaStream_t stream);

}  // namespace exl3
