// The operators `torch.ops.glm_exl3_cuda.*`, written against libtorch's stable ABI so that one
// library serves several torch releases. Checking shapes and allocating is Python's part
// (`glm_exl3.ops.cuda_*`); here tensors become pointers and errors become exceptions.
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "api.h"
#include "byte_rows.h"

// CUDA builds of libtorch export this; CPU builds do not, and neither do their headers.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

int type_code(const Tensor& t) {
    switch (t.scalar_type()) {
        case ScalarType::Float: return 0;
        case ScalarType::Half: return 1;
        case ScalarType::BFloat16: return 2;
        default: throw std::runtime_error("glm_exl3_cuda: tensor is not float32, float16 or bfloat16");
    }
}

// The tensor's device is current while this lives: launches, attributes and queries belong to it.
class OnDeviceOf {
public:
    explicit OnDeviceOf(const Tensor& t) : mine_(t.get_device()) {
        if (cudaGetDevice(&before_) != cudaSuccess || (before_ != mine_ && cudaSetDevice(mine_) != cudaSuccess)) {
            throw std::runtime_error("glm_exl3_cuda: cannot switch to the tensor's device");
        }
    }
    ~OnDeviceOf() {
        if (before_ != mine_) cudaSetDevice(before_);
    }
    OnDeviceOf(const OnDeviceOf&) = delete;
    OnDeviceOf& operator=(const OnDeviceOf&) = delete;

    cudaStream_t stream() const {
        void* stream = nullptr;
        if (aoti_torch_get_current_cuda_stream(mine_, &stream) != 0) {
            throw std::runtime_error("glm_exl3_cuda: no current CUDA stream");
        }
        return static_cast<cudaStream_t>(stream);
    }

private:
    int before_ = 0, mine_;
};

void check(int error, const char* op) {
    if (error == 0) return;
    if (error == exl3::kUnsupported) {
        throw std::runtime_error(std::string("glm_exl3_cuda.") + op +
                                 ": no compiled kernel covers this shape, rate or codebook");
    }
    throw std::runtime_error(std::string("glm_exl3_cuda.") + op + ": " +
                             cudaGetErrorString(static_cast<cudaError_t>(error)));
}

const void* pointer(const std::optional<Tensor>& t) { return t ? t->data_ptr() : nullptr; }

exl3::Packed packed(const Tensor& trellis, const Tensor& suh, const Tensor& svh, int64_t codebook) {
    if (!trellis.is_contiguous() || !suh.is_contiguous() || !svh.is_contiguous()) {
        throw std::runtime_error("glm_exl3_cuda: packed weights must be contiguous");
    }
    exl3::Packed w = {};
    const int64_t d = trellis.dim();
    w.trellis = static_cast<const uint32_t*>(trellis.data_ptr());
    w.suh = suh.data_ptr();
    w.svh = svh.data_ptr();
    w.k = static_cast<int>(trellis.size(d - 3) * 16);
    w.n = static_cast<int>(trellis.size(d - 2) * 16);
    const int64_t last = trellis.size(d - 1);
    w.bits = last % 16 == 0 ? static_cast<int>(last / 16) : 0;
    w.codebook = static_cast<int>(codebook);
    return w;
}

exl3::MoeArguments moe_arguments(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                                 const std::optional<Tensor>& expert_map, const exl3::Packed& w13,
                                 const exl3::Packed& w2, bool same_suh, int64_t experts, double limit,
                                 const Tensor& workspace, const Tensor& out) {
    exl3::MoeArguments a = {};
    a.x = x.data_ptr();
    a.out = out.data_ptr();
    a.x_type = type_code(x);
    a.out_type = type_code(out);
    a.topk_ids = topk_ids.data_ptr();
    a.ids_are_64_bit = topk_ids.scalar_type() == ScalarType::Long;
    a.topk_weights = static_cast<const float*>(topk_weights.data_ptr());
    a.expert_map = static_cast<const int*>(pointer(expert_map));
    a.tokens = static_cast<int>(topk_ids.size(0));
    a.top_k = static_cast<int>(topk_ids.size(1));
    a.experts = static_cast<int>(experts);
    a.w13 = w13;
    a.w2 = w2;
    a.same_suh = same_suh;
    a.limit = static_cast<float>(limit);
    a.workspace = workspace.data_ptr();
    return a;
}

void moe_decode(Tensor x, Tensor topk_ids, Tensor topk_weights, std::optional<Tensor> expert_map,
                Tensor w13_trellis, Tensor w13_suh, Tensor w13_svh, int64_t w13_codebook,
                Tensor w2_trellis, Tensor w2_suh, Tensor w2_svh, int64_t w2_codebook, double limit,
                int64_t split_k, Tensor counters, Tensor workspace, Tensor out) {
    exl3::MoeArguments a = moe_arguments(
        x, topk_ids, topk_weights, expert_map, packed(w13_trellis, w13_suh, w13_svh, w13_codebook),
        packed(w2_trellis, w2_suh, w2_svh, w2_codebook), w13_suh.size(1) == 1, w13_trellis.size(0),
        limit, workspace, out);
    a.counters = static_cast<int*>(counters.data_ptr());
    a.split_k = static_cast<int>(split_k);
    const OnDeviceOf device(x);
    check(exl3::moe_decode(a, device.stream()), "moe_decode");
}

void moe_prefill(Tensor x, Tensor topk_ids, Tensor topk_weights, std::optional<Tensor> expert_map,
                 Tensor w13_trellis, Tensor w13_suh, Tensor w13_svh, int64_t w13_codebook,
                 Tensor w2_trellis, Tensor w2_suh, Tensor w2_svh, int64_t w2_codebook, double limit,
                 int64_t product, Tensor workspace, Tensor out) {
    exl3::MoeArguments a = moe_arguments(
        x, topk_ids, topk_weights, expert_map, packed(w13_trellis, w13_suh, w13_svh, w13_codebook),
        packed(w2_trellis, w2_suh, w2_svh, w2_codebook), w13_suh.size(1) == 1, w13_trellis.size(0),
        limit, workspace, out);
    a.product = static_cast<int>(product);
    const OnDeviceOf device(x);
    check(exl3::moe_prefill(a, device.stream()), "moe_prefill");
}

void linear_decode(Tensor x, Tensor trellis, Tensor suh, Tensor svh, int64_t codebook,
                   std::optional<Tensor> bias, int64_t split_k, Tensor counters, Tensor workspace,
                   Tensor out) {
    exl3::LinearArguments a = {};
    a.x = x.data_ptr();
    a.out = out.data_ptr();
    a.x_type = type_code(x);
    a.out_type = type_code(out);
    a.bias = pointer(bias);
    a.tokens = static_cast<int>(x.size(0));
    a.w = packed(trellis, suh, svh, codebook);
    a.counters = static_cast<int*>(counters.data_ptr());
    a.workspace = workspace.data_ptr();
    a.split_k = static_cast<int>(split_k);
    const OnDeviceOf device(x);
    check(exl3::linear_decode(a, device.stream()), "linear_decode");
}

// `columns` has one more than the packed parts where `dense` is given: its own.
void linear_parts(Tensor x, std::vector<Tensor> trellis, std::vector<Tensor> suh, std::vector<Tensor> svh,
                  int64_t codebook, std::optional<Tensor> dense, std::vector<int64_t> columns,
                  std::vector<int64_t> split_k, std::optional<double> limit, std::vector<Tensor> counters,
                  Tensor workspace, Tensor out) {
    exl3::LinearPartsArguments a = {};
    const size_t count = trellis.size();
    if (count < 1 || count > exl3::kMostParts || suh.size() != count || svh.size() != count ||
        split_k.size() != count || counters.size() != count || columns.size() != count + (dense ? 1 : 0)) {
        throw std::runtime_error("glm_exl3_cuda.linear_parts: lists of parts differ in length or are too long");
    }
    for (size_t i = 0; i < count; ++i) {
        a.w[i] = packed(trellis[i], suh[i], svh[i], codebook);
        a.counters[i] = static_cast<int*>(counters[i].data_ptr());
        a.column[i] = static_cast<int>(columns[i]);
        a.split_k[i] = static_cast<int>(split_k[i]);
    }
    if (dense) {
        if (!dense->is_contiguous() || type_code(*dense) != type_code(x)) {
            throw std::runtime_error("glm_exl3_cuda.linear_parts: dense rows must be contiguous, in x's type");
        }
        a.dense = dense->data_ptr();
        a.dense_rows = static_cast<int>(dense->size(0));
        a.dense_column = static_cast<int>(columns[count]);
    }
    a.x = x.data_ptr();
    a.out = out.data_ptr();
    a.x_type = type_code(x);
    a.out_type = type_code(out);
    a.tokens = static_cast<int>(x.size(0));
    a.count = static_cast<int>(count);
    a.stride = out.size(1);
    a.gated = limit ? 1 : 0;
    a.limit = limit ? static_cast<float>(*limit) : 0.0f;
    a.workspace = workspace.data_ptr();
    const OnDeviceOf device(x);
    check(exl3::linear_parts(a, device.stream()), "linear_parts");
}

void dequant(Tensor trellis, std::optional<Tensor> suh, std::optional<Tensor> svh, int64_t codebook,
             Tensor out) {
    if (!trellis.is_contiguous() || !out.is_contiguous()) {
        throw std::runtime_error("glm_exl3_cuda: trellis and out must be contiguous");
    }
    exl3::DequantArguments a = {};
    a.trellis = static_cast<const uint32_t*>(trellis.data_ptr());
    a.suh = pointer(suh);
    a.svh = pointer(svh);
    a.rotated = !suh;
    a.out = out.data_ptr();
    a.out_type = type_code(out);
    a.k = static_cast<int>(trellis.size(0) * 16);
    a.n = static_cast<int>(trellis.size(1) * 16);
    a.bits2 = static_cast<int>(trellis.size(2) / 8);
    a.codebook = static_cast<int>(codebook);
    const OnDeviceOf device(trellis);
    check(exl3::dequant(a, device.stream()), "dequant");
}

void encode(Tensor x, Tensor table, int64_t bits, Tensor workspace, Tensor states) {
    exl3::EncodeArguments a = {};
    a.x = static_cast<const float*>(x.data_ptr());
    a.table = table.data_ptr();
    a.states = static_cast<int*>(states.data_ptr());
    a.workspace = static_cast<float*>(workspace.data_ptr());
    a.tiles = x.size(0);
    a.workspace_floats = workspace.numel();
    a.bits = static_cast<int>(bits);
    const OnDeviceOf device(x);
    check(exl3::encode(a, device.stream()), "encode");
}

int64_t encode_workspace(int64_t tiles, int64_t bits, int64_t blocks) {
    return exl3::encode_workspace_floats(tiles, static_cast<int>(bits), static_cast<int>(blocks));
}

void had128(Tensor x, std::optional<Tensor> pre, std::optional<Tensor> post, Tensor out) {
    exl3::HadamardArguments a = {};
    a.x = x.data_ptr();
    a.pre = pointer(pre);
    a.post = pointer(post);
    a.out = out.data_ptr();
    a.x_type = type_code(x);
    a.out_type = type_code(out);
    a.width = static_cast<int>(x.size(x.dim() - 1));
    a.rows = a.width == 0 ? 0 : x.numel() / a.width;
    const OnDeviceOf device(x);
    check(exl3::hadamard(a, device.stream()), "had128");
}

exl3::RowsArguments rows_arguments(const Tensor& x, const Tensor& rows, exl3::RowKind kind, const Tensor& out) {
    exl3::RowsArguments a = {};
    a.floats_out = kind == exl3::RowKind::kBf16 && out.scalar_type() == ScalarType::Float;
    if (x.scalar_type() != ScalarType::BFloat16 || !(a.floats_out || out.scalar_type() == ScalarType::BFloat16)) {
        throw std::runtime_error(
            "glm_exl3_cuda: x and out of a product with rows must be bfloat16, out of bf16 rows may be float32");
    }
    a.x = x.data_ptr();
    a.rows = rows.data_ptr();
    a.out = out.data_ptr();
    a.x_stride = x.stride(0);
    a.tokens = static_cast<int>(x.size(0));
    a.k = static_cast<int>(rows.size(1));
    a.n = static_cast<int>(rows.size(0));
    a.kind = kind;
    return a;
}

void byte_rows(Tensor x, Tensor codes, Tensor scale, bool floats, Tensor out) {
    const exl3::RowKind kind = floats ? exl3::RowKind::kE4m3 : exl3::RowKind::kInt8;
    exl3::RowsArguments a = rows_arguments(x, codes, kind, out);
    a.scale = static_cast<const float*>(scale.data_ptr());
    const OnDeviceOf device(x);
    check(exl3::byte_rows(a, device.stream()), "byte_rows");
}

void dense_rows(Tensor x, Tensor weight, bool urgent, Tensor out) {
    if (weight.scalar_type() != ScalarType::BFloat16) {
        throw std::runtime_error("glm_exl3_cuda.dense_rows: weight must be bfloat16");
    }
    exl3::RowsArguments a = rows_arguments(x, weight, exl3::RowKind::kBf16, out);
    a.urgent = urgent;
    const OnDeviceOf device(x);
    check(exl3::byte_rows(a, device.stream()), "dense_rows");
}

int64_t moe_decode_counters(int64_t tokens, int64_t top_k, int64_t hidden, int64_t intermediate) {
    return exl3::moe_decode_counters(static_cast<int>(tokens), static_cast<int>(top_k),
                                     static_cast<int>(hidden), static_cast<int>(intermediate));
}

int64_t moe_decode_workspace(int64_t tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                             int64_t split_k) {
    return exl3::moe_decode_workspace_bytes(static_cast<int>(tokens), static_cast<int>(top_k),
                                            static_cast<int>(hidden), static_cast<int>(intermediate),
                                            static_cast<int>(split_k));
}

int64_t moe_prefill_workspace(int64_t tokens, int64_t top_k, int64_t hidden, int64_t intermediate,
                              int64_t experts, int64_t inputs) {
    return exl3::moe_prefill_workspace_bytes(static_cast<int>(tokens), static_cast<int>(top_k),
                                             static_cast<int>(hidden), static_cast<int>(intermediate),
                                             static_cast<int>(experts), static_cast<int>(inputs));
}

int64_t linear_decode_counters(int64_t tokens, int64_t n) {
    return exl3::linear_decode_counters(static_cast<int>(tokens), static_cast<int>(n));
}

int64_t linear_decode_workspace(int64_t tokens, int64_t k, int64_t n) {
    return exl3::linear_decode_workspace_bytes(static_cast<int>(tokens), static_cast<int>(k),
                                               static_cast<int>(n));
}

}  // namespace

STABLE_TORCH_LIBRARY(glm_exl3_cuda, m) {
    m.def("moe_decode(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, "
          "Tensor w13_trellis, Tensor w13_suh, Tensor w13_svh, int w13_codebook, Tensor w2_trellis, "
          "Tensor w2_suh, Tensor w2_svh, int w2_codebook, float limit, int split_k, "
          "Tensor(a!) counters, Tensor(b!) workspace, Tensor(c!) out) -> ()");
    m.def("moe_prefill(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, "
          "Tensor w13_trellis, Tensor w13_suh, Tensor w13_svh, int w13_codebook, Tensor w2_trellis, "
          "Tensor w2_suh, Tensor w2_svh, int w2_codebook, float limit, int product, "
          "Tensor(a!) workspace, Tensor(b!) out) -> ()");
    m.def("linear_decode(Tensor x, Tensor trellis, Tensor suh, Tensor svh, int codebook, "
          "Tensor? bias, int split_k, Tensor(a!) counters, Tensor(b!) workspace, "
          "Tensor(c!) out) -> ()");
    m.def("linear_parts(Tensor x, Tensor[] trellis, Tensor[] suh, Tensor[] svh, int codebook, Tensor? dense, "
          "int[] columns, int[] split_k, float? limit, Tensor(a!)[] counters, Tensor(b!) workspace, "
          "Tensor(c!) out) -> ()");
    m.def("dequant(Tensor trellis, Tensor? suh, Tensor? svh, int codebook, Tensor(a!) out) -> ()");
    m.def("encode(Tensor x, Tensor table, int bits, Tensor(a!) workspace, Tensor(b!) states) -> ()");
    m.def("encode_workspace(int tiles, int bits, int blocks) -> int");
    m.def("had128(Tensor x, Tensor? pre, Tensor? post, Tensor(a!) out) -> ()");
    m.def("byte_rows(Tensor x, Tensor codes, Tensor scale, bool floats, Tensor(a!) out) -> ()");
    m.def("dense_rows(Tensor x, Tensor weight, bool urgent, Tensor(a!) out) -> ()");
    m.def("moe_decode_counters(int tokens, int top_k, int hidden, int intermediate) -> int");
    m.def("moe_decode_workspace(int tokens, int top_k, int hidden, int intermediate, int split_k) "
          "-> int");
    m.def("moe_prefill_workspace(int tokens, int top_k, int hidden, int intermediate, int experts, "
          "int inputs) -> int");
    m.def("linear_decode_counters(int tokens, int n) -> int");
    m.def("linear_decode_workspace(int tokens, int k, int n) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(glm_exl3_cuda, CUDA, m) {
    m.impl("moe_decode", TORCH_BOX(&moe_decode));
    m.impl("moe_prefill", TORCH_BOX(&moe_prefill));
    m.impl("linear_decode", TORCH_BOX(&linear_decode));
    m.impl("linear_parts", TORCH_BOX(&linear_parts));
    m.impl("dequant", TORCH_BOX(&dequant));
    m.impl("encode", TORCH_BOX(&encode));
    m.impl("had128", TORCH_BOX(&had128));
    m.impl("byte_rows", TORCH_BOX(&byte_rows));
    m.impl("dense_rows", TORCH_BOX(&dense_rows));
}

STABLE_TORCH_LIBRARY_IMPL(glm_exl3_cuda, CompositeExplicitAutograd, m) {
    m.impl("moe_decode_counters", TORCH_BOX(&moe_decode_counters));
    m.impl("moe_decode_workspace", TORCH_BOX(&moe_decode_workspace));
    m.impl("encode_workspace", TORCH_BOX(&encode_workspace));
    m.impl("moe_prefill_workspace", TORCH_BOX(&moe_prefill_workspace));
    m.impl("linear_decode_counters", TORCH_BOX(&linear_decode_counters));
    m.impl("linear_decode_workspace", TORCH_BOX(&linear_decode_workspace));
}
