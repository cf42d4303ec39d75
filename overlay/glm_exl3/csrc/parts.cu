// Checks a call of several matrices and picks its compiled instance.
#include "api.h"
#include "instances.h"

namespace exl3 {

template <int K, Codebook C>
int parts_instance(const LinearPartsArguments&, cudaStream_t);

namespace {

bool alike(const Packed& a, const Packed& b) {
    return a.bits == b.bits && a.codebook == b.codebook && a.k == b.k;
}

bool covers(const LinearPartsArguments& a) {
    if (a.count < 1 || a.count > kMostParts || a.tokens < 1 || a.tokens > kPartsTokens) return false;
    for (int i = 0; i < a.count; ++i) {
        const Packed& w = a.w[i];
        if (!alike(w, a.w[0]) || w.k <= 0 || w.n <= 0 || w.k % 128 != 0 || w.n % 128 != 0) return false;
    }
    if (a.dense != nullptr && (a.x_type == 0 || a.x_type != a.out_type)) return false;
    return a.gated == 0 || (a.count == 2 && a.w[0].n == a.w[1].n && a.dense == nullptr);
}

}  // namespace

int linear_parts(const LinearPartsArguments& a, cudaStream_t stream) {
    if (!covers(a)) return kUnsupported;
    return with_instance(a.w[0].bits, a.w[0].codebook, [&](auto k, auto c) {
        return parts_instance<decltype(k)::value, decltype(c)::value>(a, stream);
    });
}

}  // namespace exl3
