// C entry points over the peer's decoder; see test_oracle.py.
#include "quant/exl3_dq.cuh"

namespace {

template <int bits, int cb, bool half_rate>
void tile(const std::uint32_t* words, std::uint16_t* out) {
    for (int lane = 0; lane < 32; ++lane) {
        FragB low, high;
        dq_dispatch<bits, cb, half_rate>(words, lane * 8, low, high);
        const half2 pairs[4] = {low[0], low[1], high[0], high[1]};
        for (int pair = 0; pair < 4; ++pair) {
            out[lane * 8 + 2 * pair] = bits_of(pairs[pair].x);
            out[lane * 8 + 2 * pair + 1] = bits_of(pairs[pair].y);
        }
    }
}

template <int cb>
int tile_of(int last_dim, const std::uint32_t* words, std::uint16_t* out) {
    switch (last_dim) {
        case 16: tile<1, cb, false>(words, out); return 0;
        case 32: tile<2, cb, false>(words, out); return 0;
        case 48: tile<3, cb, false>(words, out); return 0;
        case 64: tile<4, cb, false>(words, out); return 0;
        case 80: tile<5, cb, false>(words, out); return 0;
        case 96: tile<6, cb, false>(words, out); return 0;
        case 112: tile<7, cb, false>(words, out); return 0;
        case 128: tile<8, cb, false>(words, out); return 0;
        case 24: tile<1, cb, true>(words, out); return 0;
        case 40: tile<2, cb, true>(words, out); return 0;
        case 56: tile<3, cb, true>(words, out); return 0;
        default: return 1;
    }
}

}  // namespace

extern "C" {

// Weight of every state: codebook 0 = 3inst, 1 = mcg, 2 = mul1; out uint16 [65536], fp16 bits.
void oracle_table(int codebook, std::uint16_t* out) {
    for (std::uint32_t state = 0; state < 65536; ++state) {
        const half weight = codebook == 0   ? decode_3inst<0>(state)
                            : codebook == 1 ? decode_3inst<1>(state)
                                            : decode_3inst<2>(state);
        out[state] = bits_of(weight);
    }
}

// One tile: words uint32 [last_dim / 2] -> out uint16 [256] in element order; 0 on success.
int oracle_tile(int codebook, int last_dim, const std::uint32_t* words, std::uint16_t* out) {
    switch (codebook) {
        case 0: return tile_of<0>(last_dim, words, out);
        case 1: return tile_of<1>(last_dim, words, out);
        case 2: return tile_of<2>(last_dim, words, out);
        default: return 1;
    }
}
}
