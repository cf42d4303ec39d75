// What the kernels take and the launch functions the bindings call. Plain data, no torch.
//
// All pointers are device pointers. `Type` codes: 0 float32, 1 float16, 2 bfloat16. Codebook codes:
// 0 3inst, 1 mcg, 2 mul1. A launch function returns the CUDA error of its launches (0 = success) or
// kUnsupported when no compiled instance covers the arguments.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace exl3 {

constexpr int kUnsupported = -1;

// How many ways the MoE decode kernels cut k: `wanted` unless zero. The same for up to eight tokens, so
// that a token's bits do not depend on its neighbours.
constexpr int moe_split(int tokens, int intermediate, int wanted) {
    return wanted > 0 ? (wanted < 16 ? wanted : 16) : tokens <= 16 && intermediate > 1024 ? 1 : 2;
}

// One packed matrix family: `experts` matrices of k x n, `parts` of them side by side (2 for
// gate/up), trellis [experts, parts, k/16, n/16, 16K], suh [experts, parts, k], svh [.., n].
struct Packed {
    const uint32_t* trellis;
    const void* suh;
    const void* svh;
    int k, n;
    int bits;      // K
    int codebook;  // see above
};

struct MoeArguments {
    const void* x;  // [tokens, hidden]
    void* out;      // [tokens, hidden]
    int x_type, out_type;
    const void* topk_ids;  // [tokens, top_k] int32 or int64
    int ids_are_64_bit;
    const float* topk_weights;  // [tokens, top_k]
    const int* expert_map;      // global expert -> local or -1; null: identity
    int tokens, top_k, experts;
    Packed w13, w2;
    int same_suh;  // gate and up share their input scales: w13.suh is [experts, 1, k]
    float limit;   // clamp of gate and up; infinity: none
    int* counters;    // moe_decode_counters of them: zero before the first call, left zero by each
    void* workspace;  // moe_decode_workspace_bytes bytes
    int split_k;      // 0: chosen from the shape
    int product;      // moe_prefill: one of the codes below
};

// Which matrix instructions moe_prefill multiplies with: what the device has, Hopper's for warpgroups,
// or those of a warp, which every device has.
constexpr int kProductOfDevice = 0, kProductOfWarpgroups = 1, kProductOfWarps = 2;

struct LinearArguments {
    const void* x;  // [tokens, k]
    void* out;      // [tokens, n]
    int x_type, out_type;
    const void* bias;  // [n] half or null
    int tokens;
    Packed w;
    int* counters;    // linear_decode_counters of them, under the same rule
    void* workspace;  // linear_decode_workspace_bytes bytes
    int split_k;
};

int64_t moe_decode_counters(int tokens, int top_k, int hidden, int intermediate);
int64_t moe_decode_workspace_bytes(int tokens, int top_k, int hidden, int intermediate, int split_k);
int moe_decode(const MoeArguments& arguments, cudaStream_t stream);

// Many tokens: the same arguments (counters unused), another workspace.
int64_t moe_prefill_workspace_bytes(int tokens, int top_k, int hidden, int intermediate, int experts,
                                    int inputs);
int moe_prefill(const MoeArguments& arguments, cudaStream_t stream);

// How many ways linear_decode may cut k: parts of few columns are small and fill the device.
constexpr int widest_split(int n) { return n <= 8448 ? 16 : 8; }

int64_t linear_decode_counters(int tokens, int n);
int64_t linear_decode_workspace_bytes(int tokens, int k, int n);
int linear_decode(const LinearArguments& arguments, cudaStream_t stream);

// Up to kMostParts packed matrices of one rate, codebook and k, and dense rows beside them, times up to
// kPartsTokens tokens; part i fills columns from column[i] of `out`. Counters and workspace are as for
// linear_decode of each part, one after the other in `workspace`.
constexpr int kMostParts = 4, kPartsTokens = 8;
struct LinearPartsArguments {
    const void* x;  // [tokens, k]
    void* out;      // [tokens, stride]
    int x_type, out_type, tokens, count;
    int64_t stride;
    Packed w[kMostParts];
    int* counters[kMostParts];
    int column[kMostParts], split_k[kMostParts];
    const void* dense;  // [dense_rows, k] in x's type (16 bits), or null
    int dense_rows, dense_column;
    int gated;    // two parts alike, gate and up: out [tokens, n] is their clamped SwiGLU
    float limit;  // of it; infinity: none
    void* workspace;
};
int linear_parts(const LinearPartsArguments& arguments, cudaStream_t stream);

// out [k, n] (or its transpose [n, k]) of any type = the dequantised matrix; rotated: the inner
// matrix only. `bits2` = 2K, so that half rates are integers.
struct DequantArguments {
    const uint32_t* trellis;
    const void* suh;
    const void* svh;
    void* out;
    int out_type, k, n, bits2, codebook, rotated;
};
int dequant(const DequantArguments& arguments, cudaStream_t stream);

// states [tiles, 256] = the encoder's closed rings for x [tiles, 256]; `table` is the codebook's 65536
// half values. The workspace holds the history of as many blocks as it has room for.
struct EncodeArguments {
    const float* x;
    const void* table;
    int* states;
    float* workspace;
    int64_t tiles, workspace_floats;
    int bits;
};
int64_t encode_workspace_floats(int64_t tiles, int bits, int blocks);
int encode(const EncodeArguments& arguments, cudaStream_t stream);

// out = had128(x * pre) * post over the last dimension; pre and post are half or null.
struct HadamardArguments {
    const void* x;
    const void* pre;
    const void* post;
    void* out;
    int x_type, out_type;
    int64_t rows;
    int width;
};
int hadamard(const HadamardArguments& arguments, cudaStream_t stream);

}  // namespace exl3
