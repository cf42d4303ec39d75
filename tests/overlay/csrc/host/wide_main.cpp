// Numbers k, x_type: reads x and suh, writes the rotated row and its bound by lanes of four and by lanes of sixteen.
#include "launch_decode.cuh"
#include "rotate_wide.cuh"
#include "tensors.h"

using namespace exl3;

struct Row {
    const void* x;
    const __half* suh;
    int k, type;
    float* out;
    unsigned* bound;
};

__global__ void by_four(const Row row) {
    const auto source = row_source(row.x, static_cast<Type>(row.type), [](int) { return int64_t(0); }, row.suh, row.k, 1);
    rotate_each(source, row.bound, threadIdx.x >> 5, threadIdx.x & 31, [&](int, int at, const Quad& q) {
        store_quad(row.out, Type::kFloat, at, q);
    });
}

__global__ void by_sixteen(const Row row) {
    rotate_wide({row.x, static_cast<Type>(row.type), 0, row.suh, row.k}, row.bound, threadIdx.x,
                [&](int at, const Quad(&q)[4]) {
                    for (int i = 0; i < 4; ++i) store_quad(row.out, Type::kFloat, at + wide_place(i), q[i]);
                });
}

int main(int count, char** arguments) {
    host::take_numbers(count, arguments);
    Row row = {};
    row.k = host::whole("k");
    row.type = host::whole("x_type");
    row.x = host::take(size_t(row.k) * (row.type == 0 ? 4 : 2));
    row.suh = reinterpret_cast<const __half*>(host::take(size_t(row.k) * 2));
    for (auto* kernel : {by_four, by_sixteen}) {
        row.out = reinterpret_cast<float*>(host::zeros(size_t(row.k) * 4));
        row.bound = reinterpret_cast<unsigned*>(host::zeros(4));
        if (launch(kernel, dim3(1), 0, nullptr, false, row) != 0) return 3;
        host::give(row.out, size_t(row.k) * 4);
        host::give(row.bound, 4);
    }
    return 0;
}
