// Reads tiles of K bits from standard input, writes for each lane its eight hashes, then for each of
// them the word the product takes (pair of halves, or 1024 + byte sum).
#include <cstdio>
#include <vector>

#include "codec.cuh"

using namespace exl3;

template <Codebook C, int K>
int run() {
    std::vector<uint32_t> tile(8 * K);
    while (fread(tile.data(), 4, tile.size(), stdin) == tile.size()) {
        for (int lane = 0; lane < 32; ++lane) {
            const LaneMap<K> map(lane);
            uint32_t x[8], words[8];
            lane_hashes<C, K>(load_window<K>(tile.data(), map), x);
            for (int j = 0; j < 8; ++j) {
                words[j] = C == Codebook::kMul1 ? byte_sum_half(x[j]) : pair_word(x[j]);
            }
            fwrite(x, 4, 8, stdout);
            fwrite(words, 4, 8, stdout);
        }
    }
    return 0;
}

template <Codebook C>
int rate(int bits) {
    switch (bits) {
        case 2: return run<C, 2>();
        case 3: return run<C, 3>();
        case 4: return run<C, 4>();
        case 5: return run<C, 5>();
        case 6: return run<C, 6>();
    }
    return 1;
}

int main(int, char** argument) {
    const int bits = argument[2][0] - '0';
    switch (argument[1][0]) {
        case '0': return rate<Codebook::kInst3>(bits);
        case '1': return rate<Codebook::kMcg>(bits);
        case '2': return rate<Codebook::kMul1>(bits);
    }
    return 1;
}
