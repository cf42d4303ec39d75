// Many tokens of routed experts: order of the launches and choice of instances.
#include "instances.h"
#include "prefill.cuh"

namespace exl3 {

int prefill_before(const MoeArguments&, const PrefillScratch&, cudaStream_t);
int prefill_after(const MoeArguments&, const PrefillScratch&, cudaStream_t);
template <int K, Codebook C>
int prefill_gate_up_instance(const MoeArguments&, const PrefillScratch&, cudaStream_t);
template <int K, Codebook C>
int prefill_down_instance(const MoeArguments&, const PrefillScratch&, cudaStream_t);
template <int K, Codebook C>
int mma_gate_up_instance(const MoeArguments&, const PrefillScratch&, cudaStream_t);
template <int K, Codebook C>
int mma_down_instance(const MoeArguments&, const PrefillScratch&, cudaStream_t);

namespace {

// Warpgroups multiply on compute capability 9.x alone.
int product_of_device() {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9 ? kProductOfWarpgroups : kProductOfWarps;
}

}  // namespace

int64_t moe_prefill_workspace_bytes(int tokens, int top_k, int hidden, int intermediate, int experts,
                                    int inputs) {
    int64_t total = 0;
    const int64_t pairs = static_cast<int64_t>(tokens) * top_k;
    carve_prefill(nullptr, pairs, hidden, intermediate, experts, inputs, has_narrow_tiles(pairs, experts),
                  &total);
    return total;
}

int moe_prefill(const MoeArguments& a, cudaStream_t stream) {
    const int device = product_of_device();
    if (a.product == kProductOfWarpgroups && device != kProductOfWarpgroups) return kUnsupported;
    const bool warps = (a.product == kProductOfDevice ? device : a.product) == kProductOfWarps;
    int64_t total = 0;
    const int64_t pairs = static_cast<int64_t>(a.tokens) * a.top_k;
    const PrefillScratch s = carve_prefill(a.workspace, pairs, a.w13.k, a.w13.n, a.experts, a.same_suh ? 1 : 2,
                                           !warps && has_narrow_tiles(pairs, a.experts), &total);
    if (const int error = prefill_before(a, s, stream)) return error;
    const int gate_up = with_instance(a.w13.bits, a.w13.codebook, [&](auto k, auto c) {
        if (warps) return mma_gate_up_instance<decltype(k)::value, decltype(c)::value>(a, s, stream);
        return prefill_gate_up_instance<decltype(k)::value, decltype(c)::value>(a, s, stream);
    });
    if (gate_up != 0) return gate_up;
    const int down = with_instance(a.w2.bits, a.w2.codebook, [&](auto k, auto c) {
        if (warps) return mma_down_instance<decltype(k)::value, decltype(c)::value>(a, s, stream);
        return prefill_down_instance<decltype(k)::value, decltype(c)::value>(a, s, stream);
    });
    return down != 0 ? down : prefill_after(a, s, stream);
}

}  // namespace exl3
