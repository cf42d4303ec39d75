// `torch.ops.glm_exl3_cuda.seam`, a fragment of the library that bindings.cpp defines. Shapes and dtypes are
// Python's part (`glm_exl3.fused.mhc_seam`); what would make the kernel read astray is checked here.
#include <cstdint>
#include <stdexcept>
#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "api.h"
#include "seam.h"

// CUDA builds of libtorch export this; CPU builds do not, and neither do their headers.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error("glm_exl3_cuda.seam: " + why); }

// The data of a contiguous tensor of `count` numbers at a multiple of `bytes`.
void* data(const Tensor& t, const char* name, ScalarType type, int64_t count, uintptr_t bytes) {
    void* at = t.data_ptr();
    if (t.scalar_type() != type || t.numel() != count || !t.is_contiguous()) {
        refuse(std::string(name) + " must be contiguous, of " + std::to_string(count) +
               (type == ScalarType::Float ? " float32" : " bfloat16"));
    }
    if (reinterpret_cast<uintptr_t>(at) % bytes != 0) {
        refuse(std::string(name) + " must lie at a multiple of " + std::to_string(bytes) + " bytes");
    }
    return at;
}

// The tensor's device is current while this lives.
class OnDevice {
public:
    explicit OnDevice(int mine) : mine_(mine) {
        if (cudaGetDevice(&before_) != cudaSuccess || (before_ != mine_ && cudaSetDevice(mine_) != cudaSuccess)) {
            refuse("cannot switch to the tensor's device");
        }
    }
    ~OnDevice() {
        if (before_ != mine_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int before_ = 0, mine_;
};

void seam(Tensor x, Tensor streams, Tensor post, Tensor comb, Tensor fn, Tensor scale, Tensor base, Tensor norm_weight,
          double rms_eps, double pre_eps, double sinkhorn_eps, double post_multiplier, double norm_eps,
          int64_t iterations, int64_t blocks, Tensor new_streams, Tensor post_out, Tensor comb_out,
          Tensor block_input) {
    const auto floats = [](const Tensor& t, const char* name, int64_t count, uintptr_t bytes = 4) {
        return static_cast<float*>(data(t, name, ScalarType::Float, count, bytes));
    };
    const auto halves = [](const Tensor& t, const char* name, int64_t count) {
        return data(t, name, ScalarType::BFloat16, count, 4);
    };
    const int64_t tokens = x.size(0), hidden = x.size(1);
    exl3::SeamArguments a = {};
    a.x = halves(x, "x", tokens * hidden);
    a.streams = halves(streams, "streams", tokens * 4 * hidden);
    a.post = floats(post, "post", tokens * 4);
    a.comb = floats(comb, "comb", tokens * 16);
    a.fn = floats(fn, "fn", 24 * 4 * hidden, 16);
    a.scale = floats(scale, "scale", 3);
    a.base = floats(base, "base", 24);
    a.norm_weight = halves(norm_weight, "norm_weight", hidden);
    a.new_streams = halves(new_streams, "new_streams", tokens * 4 * hidden);
    a.post_out = floats(post_out, "post_out", tokens * 4);
    a.comb_out = floats(comb_out, "comb_out", tokens * 16, 16);
    a.block_input = halves(block_input, "block_input", tokens * hidden);
    a.tokens = static_cast<int>(tokens);
    a.hidden = static_cast<int>(hidden);
    a.iterations = static_cast<int>(iterations);
    a.rms_eps = static_cast<float>(rms_eps);
    a.pre_eps = static_cast<float>(pre_eps);
    a.sinkhorn_eps = static_cast<float>(sinkhorn_eps);
    a.post_multiplier = static_cast<float>(post_multiplier);
    a.norm_eps = static_cast<float>(norm_eps);
    a.blocks = static_cast<int>(blocks);
    const OnDevice device(x.get_device());
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(x.get_device(), &stream) != 0) refuse("no current CUDA stream");
    const int error = exl3::seam(a, static_cast<cudaStream_t>(stream));
    if (error == exl3::kUnsupported) {
        refuse("hidden size " + std::to_string(hidden) + " on this device in " + std::to_string(blocks) +
               " blocks a token; needs 256 times a power of two up to 16 and compute capability 9");
    }
    if (error != 0) refuse(cudaGetErrorString(static_cast<cudaError_t>(error)));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(glm_exl3_cuda, m) {
    m.def("seam(Tensor x, Tensor streams, Tensor post, Tensor comb, Tensor fn, Tensor scale, Tensor base, "
          "Tensor norm_weight, float rms_eps, float pre_eps, float sinkhorn_eps, float post_multiplier, "
          "float norm_eps, int iterations, int blocks, Tensor(a!) new_streams, Tensor(b!) post_out, "
          "Tensor(c!) comb_out, Tensor(d!) block_input) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(glm_exl3_cuda, CUDA, m) { m.impl("seam", TORCH_BOX(&seam)); }
