// Numbers kind, tokens, k, n, stride, floats (of the result): reads x, rows and scales, writes the product.
#include "byte_rows.h"
#include "tensors.h"

using host::whole;

int main(int count, char** arguments) {
    host::take_numbers(count, arguments);
    exl3::RowsArguments a = {};
    a.kind = static_cast<exl3::RowKind>(whole("kind"));
    a.tokens = whole("tokens");
    a.k = whole("k");
    a.n = whole("n");
    a.x_stride = whole("stride");
    a.floats_out = whole("floats") != 0;
    const bool wide = a.kind == exl3::RowKind::kBf16;
    const size_t out_bytes = size_t(a.floats_out ? 4 : 2) * a.tokens * a.n;
    a.x = host::take(size_t(2) * a.tokens * a.x_stride);
    a.rows = host::take(size_t(wide ? 2 : 1) * a.n * a.k);
    a.scale = reinterpret_cast<const float*>(host::take(size_t(wide ? 0 : 4) * a.n));
    a.out = host::allocate(out_bytes);
    if (exl3::byte_rows(a, nullptr) != 0) return 3;
    host::give(a.out, out_bytes);
    return 0;
}
