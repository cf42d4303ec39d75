// Picks the compiled instance of the decode kernels and sizes their workspaces.
#include <algorithm>

#include "api.h"
#include "instances.h"

namespace exl3 {

template <int K, Codebook C>
int gate_up_instance(const MoeArguments&, cudaStream_t);
template <int K, Codebook C>
int down_instance(const MoeArguments&, cudaStream_t);
template <int K, Codebook C>
int linear_instance(const LinearArguments&, cudaStream_t);

namespace {

bool fits(const Packed& w) { return w.k % 128 == 0 && w.n % 128 == 0 && w.k > 0 && w.n > 0; }

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

int64_t moe_decode_counters(int tokens, int top_k, int hidden, int intermediate) {
    return static_cast<int64_t>(tokens) * top_k * (intermediate / 128) +
           static_cast<int64_t>(tokens) * (hidden / 128);
}

int64_t moe_decode_workspace_bytes(int tokens, int top_k, int hidden, int intermediate, int split_k) {
    const int64_t pairs = static_cast<int64_t>(tokens) * top_k;
    const int split = moe_split(tokens, intermediate, split_k);
    return aligned(pairs * (intermediate / 128) * 4) + aligned(pairs * intermediate * 2) +
           aligned(pairs * hidden * split * 4) +
           aligned(pairs * hidden * 4) + aligned(pairs * split * 8) +
           pairs * intermediate * 2 * split * 4;
}

int moe_decode(const MoeArguments& a, cudaStream_t stream) {
    if (!fits(a.w13) || !fits(a.w2) || a.tokens <= 0 || a.top_k <= 0) return kUnsupported;
    const int error = with_instance(a.w13.bits, a.w13.codebook, [&](auto k, auto c) {
        return gate_up_instance<decltype(k)::value, decltype(c)::value>(a, stream);
    });
    if (error != 0) return error;
    return with_instance(a.w2.bits, a.w2.codebook, [&](auto k, auto c) {
        return down_instance<decltype(k)::value, decltype(c)::value>(a, stream);
    });
}

int64_t linear_decode_counters(int tokens, int n) {
    return static_cast<int64_t>((tokens + 7) / 8) * (n / 128);
}

int64_t linear_decode_workspace_bytes(int tokens, int k, int n) {
    const int64_t rows = tokens <= 8 ? 8 : tokens <= 16 ? 16 : (tokens + 31) / 32 * 32;
    return aligned(tokens * widest_split(n) * 4) + aligned(static_cast<int64_t>(tokens) * k * 2) +
           rows * n * std::min(widest_split(n), std::max(k / 128, 1)) * 4;
}

int linear_decode(const LinearArguments& a, cudaStream_t stream) {
    if (!fits(a.w) || a.tokens <= 0) return kUnsupported;
    return with_instance(a.w.bits, a.w.codebook, [&](auto k, auto c) {
        return linear_instance<decltype(k)::value, decltype(c)::value>(a, stream);
    });
}

}  // namespace exl3
