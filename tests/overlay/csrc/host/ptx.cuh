// Stands in for the machine instructions when a kernel is compiled for the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <deque>
#include <vector>

namespace host {

// Global memory that kernels may read past the type system, 16 bytes at once.
struct Range {
    const unsigned char *begin, *end;
};
inline std::vector<Range> readable;

inline const void* checked_16(const void* global) {
    const auto* from = static_cast<const unsigned char*>(global);
    if (reinterpret_cast<uintptr_t>(from) % 16 != 0) stop("16 bytes read at no multiple of 16 but at", long(from));
    for (const Range& range : readable) {
        if (from >= range.begin && from + 16 <= range.end) return from;
    }
    stop("16 bytes read outside of all tensors, at", long(from));
}

// Copies arrive when the thread waits for them, and until then the target is NaN.
struct Copy {
    unsigned char* to;
    const void* from;
};
inline std::vector<Copy> open_group[kThreads];
inline std::deque<std::vector<Copy>> groups[kThreads];

// An element of a word of operands.
inline float half_in(uint32_t word, int i) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (16 * i))));
}
inline float bf16_in(uint32_t word, int i) { return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u); }
inline float unsigned_in(uint32_t word, int i) { return static_cast<float>(uint8_t(word >> (8 * i))); }
inline float signed_in(uint32_t word, int i) { return static_cast<float>(int8_t(word >> (8 * i))); }

template <int Width>
struct Operands {
    float a[4][Width], b[2][Width];
};

// mma.m16n8 with `Width` elements a word. Lane l holds rows l / 4 and l / 4 + 8 of a and column l / 4 of b, and of
// each the elements from Width (l % 4) and from Width (4 + l % 4) along k; of d the columns 2 (l % 4) and
// 2 (l % 4) + 1 of both rows.
template <int Width, typename D, typename Left, typename Right>
void multiply(D (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Left left, Right right) {
    Operands<Width> mine;
    for (int i = 0; i < Width; ++i) {
        for (int word = 0; word < 4; ++word) mine.a[word][i] = left(a[word], i);
        for (int word = 0; word < 2; ++word) mine.b[word][i] = right(b[word], i);
    }
    const auto all = show(mine);
    for (int at = 0; at < 4; ++at) {
        const int row = lane() / 4 + 8 * (at / 2), column = 2 * (lane() % 4) + at % 2;
        double sum = d[at];
        for (int quarter = 0; quarter < 4; ++quarter) {
            const Operands<Width>&of_row = all[row % 8 * 4 + quarter], &of_column = all[column * 4 + quarter];
            for (int half = 0; half < 2; ++half) {
                const float *x = of_row.a[row / 8 + 2 * half], *y = of_column.b[half];
                for (int i = 0; i < Width; ++i) sum += double(x[i]) * y[i];
            }
        }
        d[at] = static_cast<D>(sum);
    }
}

}  // namespace host

namespace exl3 {

inline uint32_t shared_address(const void* pointer) {
    const ptrdiff_t at = static_cast<const unsigned char*>(pointer) - shared;
    if (at < 0 || at > static_cast<ptrdiff_t>(host::dynamic_bytes)) host::stop("no address of shared memory", at);
    return static_cast<uint32_t>(at);
}

inline void copy_async_16(uint32_t to, const void* global) {
    if (to % 16 != 0 || to + 16 > host::dynamic_bytes) host::stop("16 bytes copied to shared memory at", to);
    std::memset(shared + to, 0xff, 16);
    host::open_group[host::running].push_back({shared + to, host::checked_16(global)});
}

inline void copy_async_commit() {
    host::groups[host::running].push_back(std::move(host::open_group[host::running]));
    host::open_group[host::running].clear();
}

template <int Pending>
void copy_async_wait() {
    auto& groups = host::groups[host::running];
    for (; groups.size() > Pending; groups.pop_front()) {
        for (const host::Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
    }
}

inline uint4 load_once_16(const void* global) { return *static_cast<const uint4*>(host::checked_16(global)); }

inline void mma_16x8x16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                        uint32_t b1) {
    host::multiply<2>(d, {a0, a1, a2, a3}, {b0, b1}, host::half_in, host::half_in);
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    host::multiply<2>(d, a, {b0, b1}, host::bf16_in, host::bf16_in);
}

inline void mma_u8_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    host::multiply<4>(d, {a0, a1, a2, a3}, {b0, b1}, host::unsigned_in, host::signed_in);
}

inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out = 0;
    for (int i = 0; i < 2; ++i) {
        const float exact = std::fmaf(host::bf16_in(a, i), host::bf16_in(b, i), host::bf16_in(c, i));
        out |= uint32_t(__float2bfloat16_rn(exact).bits) << (16 * i);
    }
    return out;
}

inline void double_halves(uint32_t pair, uint32_t& first, uint32_t& second) {
    first = __byte_perm(pair, 0, 0x1010);
    second = __byte_perm(pair, 0, 0x3232);
}

inline void fence_device() {}
inline void wait_for_previous_kernel() {}
inline void allow_next_kernel() {}

}  // namespace exl3
