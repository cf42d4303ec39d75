// moe | linear | parts and numbers by name: reads tensors, writes the output, then the counters.
#include "api.h"
#include "tensors.h"

using namespace exl3;
using host::number;
using host::take;
using host::whole;

constexpr int kSizes[] = {4, 2, 2};  // by type

static Packed packed(int k, int n, size_t experts, size_t parts, size_t inputs) {
    Packed w = {};
    w.k = k;
    w.n = n;
    w.bits = whole("bits");
    w.codebook = whole("codebook");
    w.trellis = reinterpret_cast<const uint32_t*>(take(experts * parts * k * n * w.bits / 8));
    w.suh = take(experts * inputs * k * 2);
    w.svh = take(experts * parts * n * 2);
    return w;
}

static int* counters(size_t count) { return reinterpret_cast<int*>(host::zeros(count * 4)); }

// Runs one of the entry points with memory for the output of `numbers` and for scratch.
template <typename Arguments>
static int run(int (*entry)(const Arguments&, cudaStream_t), Arguments& a, size_t numbers, size_t workspace_bytes,
               const int* counters, size_t count) {
    a.out_type = whole("out_type");
    a.out = host::allocate(numbers * kSizes[a.out_type]);
    a.workspace = host::allocate(workspace_bytes);
    if (const int error = entry(a, nullptr)) {
        std::fprintf(stderr, "the launch returned %d\n", error);
        return 3;
    }
    host::give(a.out, numbers * kSizes[a.out_type]);
    host::give(counters, count * 4);
    return 0;
}

static int moe() {
    MoeArguments a = {};
    a.tokens = whole("tokens");
    a.top_k = whole("top_k");
    a.experts = whole("experts");
    a.x_type = whole("x_type");
    a.ids_are_64_bit = whole("long_ids");
    a.same_suh = whole("same_suh");
    a.split_k = whole("split_k");
    a.limit = static_cast<float>(number("limit"));
    const int hidden = whole("hidden"), intermediate = whole("intermediate");
    const size_t pairs = size_t(a.tokens) * a.top_k, numbers = size_t(a.tokens) * hidden;
    a.x = take(numbers * kSizes[a.x_type]);
    a.topk_ids = take(pairs * (a.ids_are_64_bit ? 8 : 4));
    a.topk_weights = reinterpret_cast<const float*>(take(pairs * 4));
    a.expert_map = reinterpret_cast<const int*>(take(size_t(4) * whole("mapped")));
    a.w13 = packed(hidden, intermediate, a.experts, 2, a.same_suh ? 1 : 2);
    a.w2 = packed(intermediate, hidden, a.experts, 1, 1);
    const size_t count = moe_decode_counters(a.tokens, a.top_k, hidden, intermediate);
    a.counters = counters(count);
    const size_t bytes = moe_decode_workspace_bytes(a.tokens, a.top_k, hidden, intermediate, a.split_k);
    return run(moe_decode, a, numbers, bytes, a.counters, count);
}

static int linear() {
    LinearArguments a = {};
    a.tokens = whole("tokens");
    a.x_type = whole("x_type");
    a.split_k = whole("split_k");
    const int k = whole("k"), n = whole("n");
    const size_t count = linear_decode_counters(a.tokens, n);
    a.x = take(size_t(a.tokens) * k * kSizes[a.x_type]);
    a.w = packed(k, n, 1, 1, 1);
    a.bias = take(size_t(whole("bias")) * n * 2);
    a.counters = counters(count);
    return run(linear_decode, a, size_t(a.tokens) * n, linear_decode_workspace_bytes(a.tokens, k, n), a.counters,
               count);
}

// Parts of n0, n1, .. columns side by side, dense rows after them.
static int parts() {
    LinearPartsArguments a = {};
    a.tokens = whole("tokens");
    a.x_type = whole("x_type");
    a.count = whole("parts");
    a.gated = whole("gated");
    a.limit = static_cast<float>(number("limit"));
    a.dense_rows = whole("dense_rows");
    const int k = whole("k");
    a.x = take(size_t(a.tokens) * k * kSizes[a.x_type]);
    size_t bytes = 0, count = 0;
    for (int i = 0; i < a.count; ++i) {
        const int n = whole(("n" + std::to_string(i)).c_str());
        a.w[i] = packed(k, n, 1, 1, 1);
        a.split_k[i] = whole("split_k");
        a.column[i] = a.dense_column;
        a.dense_column += n;
        bytes += linear_decode_workspace_bytes(a.tokens, k, n);
        count += linear_decode_counters(a.tokens, n);
    }
    int* counter = counters(count);
    for (int i = 0; i < a.count; ++i) a.counters[i] = counter + a.column[i] / 128;
    a.dense = take(size_t(a.dense_rows) * k * 2);
    a.stride = a.gated ? a.w[0].n : a.dense_column + a.dense_rows;
    return run(linear_parts, a, a.tokens * a.stride, bytes, counter, count);
}

int main(int count, char** arguments) {
    host::take_numbers(count, arguments);
    host::backwards = whole("backwards") != 0;
    const std::string what = arguments[1];
    return what == "moe" ? moe() : what == "linear" ? linear() : parts();
}
