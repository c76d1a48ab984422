// What every kernel's launch is made of: a row of the table, the argument's bytes, the values of a call.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

#include "checks.hpp"
#include "kernels.hpp"

namespace flash_attn_ck {

using fp16    = ck_tile::half_t;
using bf16    = ck_tile::bf16_t;
using index_t = ck_tile::index_t;

// What a name in the table stands for, as one number.
template <typename... Options>
constexpr uint32_t key(bool is_bf16, int dim, Options... options)
{
    uint32_t value = static_cast<uint32_t>(dim) * 2 + is_bf16;
    ((value = value * 8 + static_cast<uint32_t>(options)), ...);
    return value;
}

template <typename Parameters>
struct Row
{
    uint32_t key;
    const char* name;
    uint32_t argument_bytes;
    void (*fill)(const Parameters&, flash_attn_ck_launch&);
};

// make() returns the argument. It is constructed in the plan itself, which is zeroed: a copy of it from the stack would
// bring along its padding, and with it what the host's memory held before.
template <typename Make>
void finish(flash_attn_ck_launch& launch, Make make, dim3 grid, dim3 block)
{
    using Kargs = decltype(make());
    static_assert(sizeof(Kargs) <= FLASH_ATTN_CK_MAX_ARGUMENTS && std::is_trivially_copyable_v<Kargs>);
    static_assert(offsetof(flash_attn_ck_launch, arguments) % alignof(Kargs) == 0);
    launch.grid[0]        = grid.x;
    launch.grid[1]        = grid.y;
    launch.grid[2]        = grid.z;
    launch.block          = block.x;
    launch.argument_bytes = sizeof(Kargs);
    ::new(launch.arguments) Kargs(make());
}

inline int i32(int64_t value) { return static_cast<int>(value); }

// The window as ck_tile takes it, which adds it to lengths in 32 bits: one that hides nothing is open.
struct Window
{
    int left, right;

    explicit Window(const Shape& s)
        : left(s.window_left >= s.seqlen_k ? -1 : s.window_left), right(s.window_right >= s.seqlen_q ? -1 : s.window_right)
    {
        // ALiBi that is causal and open to the left adds slope * key where others take slope * distance: the same
        // probabilities, another log-sum-exp. A left end that no key reaches keeps it to the distance.
        if(s.alibi_slopes != nullptr && left < 0 && right >= 0)
            left = s.seqlen_k;
    }
};

// Windows are aligned to the last query and key; without a window this is not looked at, except by ALiBi.
constexpr int kMaskType = static_cast<int>(ck_tile::GenericAttentionMaskEnum::MASK_FROM_BOTTOM_RIGHT);

inline std::pair<const void*, const void*> seed_and_offset(const Shape& s)
{
    const auto* state = static_cast<const uint64_t*>(s.rng_state);
    return {state, state == nullptr ? nullptr : state + 1};
}

} // namespace flash_attn_ck
