#pragma once

#include <cstdint>

namespace hybridpar {

// The final mixing of SplitMix64 (Steele et al. 2014).
inline std::uint64_t mixed(std::uint64_t state) {
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
    return state ^ (state >> 31);
}

} // namespace hybridpar
