// KIND TOKENS K N STRIDE: reads x, rows and scales from standard input, writes the product.
#include <unistd.h>

#include <vector>

#include "byte_rows.cu"

static std::vector<unsigned char> take(size_t bytes) {
    std::vector<unsigned char> taken(bytes);
    if (fread(taken.data(), 1, bytes, stdin) != bytes) exit(2);
    return taken;
}

int main(int, char** argument) {
    exl3::RowsArguments a = {};
    a.kind = static_cast<exl3::RowKind>(atoi(argument[1]));
    a.tokens = atoi(argument[2]);
    a.k = atoi(argument[3]);
    a.n = atoi(argument[4]);
    a.x_stride = atoi(argument[5]);
    const bool wide = a.kind == exl3::RowKind::kBf16;
    const auto x = take(size_t(2) * a.tokens * a.x_stride);
    const auto rows = take(size_t(wide ? 2 : 1) * a.n * a.k), scale = take(size_t(wide ? 0 : 4) * a.n);
    std::vector<uint16_t> out(size_t(a.tokens) * a.n, 0x7fff);
    a.x = x.data();
    a.rows = exl3::readable_begin = rows.data();
    exl3::readable_end = rows.data() + rows.size();
    a.scale = reinterpret_cast<const float*>(scale.data());
    a.out = out.data();
    if (exl3::byte_rows(a, nullptr) != 0) return 3;
    fwrite(out.data(), 2, out.size(), stdout);
    return 0;
}
