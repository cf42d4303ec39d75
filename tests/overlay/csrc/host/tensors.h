// What the test programs read and write: numbers by name on the command line, tensors on standard streams.
#pragma once

#include <cstdlib>
#include <map>
#include <string>

#include "ptx.cuh"

namespace host {

inline std::map<std::string, double> numbers;

// Takes NAME=NUMBER from the command line.
inline void take_numbers(int count, char** arguments) {
    for (int i = 1; i < count; ++i) {
        const std::string text = arguments[i];
        const size_t equals = text.find('=');
        if (equals == std::string::npos) continue;
        numbers[text.substr(0, equals)] = std::strtod(text.c_str() + equals + 1, nullptr);
    }
}

inline double number(const char* name) {
    const auto found = numbers.find(name);
    if (found == numbers.end()) {
        std::fprintf(stderr, "no %s=NUMBER on the command line\n", name);
        std::exit(2);
    }
    return found->second;
}

inline int whole(const char* name) { return static_cast<int>(number(name)); }

// Memory of the device: all NaN, and so for some bytes behind its end.
inline unsigned char* allocate(size_t bytes) {
    const size_t all = (bytes + kGuardBytes + 255) / 256 * 256;
    auto* made = static_cast<unsigned char*>(std::aligned_alloc(256, all));
    std::memset(made, 0xff, all);
    readable.push_back({made, made + bytes});
    return made;
}

inline unsigned char* zeros(size_t bytes) {
    return static_cast<unsigned char*>(std::memset(allocate(bytes), 0, bytes));
}

// The next tensor of standard input, null where it is empty.
inline unsigned char* take(size_t bytes) {
    if (bytes == 0) return nullptr;
    unsigned char* taken = allocate(bytes);
    if (fread(taken, 1, bytes, stdin) != bytes) std::exit(2);
    return taken;
}

inline void give(const void* from, size_t bytes) {
    for (const Range& range : readable) {
        for (int i = 0; i < kGuardBytes; ++i) {
            if (range.end[i] != 0xff) stop("a write behind the end of a tensor, by", i);
        }
    }
    fwrite(from, 1, bytes, stdout);
}

}  // namespace host
