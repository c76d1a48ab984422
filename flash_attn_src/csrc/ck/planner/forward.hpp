// The argument of a forward kernel.
#pragma once

#include "launch.hpp"

namespace flash_attn_ck {

template <typename Kernel>
void fill_forward(const flash_attn_ck_forward& p, flash_attn_ck_launch& launch)
{
    const Shape& s   = p.shape;
    const int group  = s.nheads / s.nheads_k;
    const auto state = seed_and_offset(s);
    const Window window(s);
    auto kargs = [&] {
        if constexpr(Kernel::kIsGroupMode)
            return Kernel::MakeKargs(
                p.q.data, p.k.data, p.v.data, s.alibi_slopes, p.random, p.lse, p.out.data, s.cu_seqlens_q, s.cu_seqlens_k,
                p.seqused_k, s.head_dim, s.head_dim, s.nheads, group, s.scale, 1.f, 1.f, s.softcap, i32(p.q.row), i32(p.k.row),
                i32(p.v.row), i32(s.alibi_batch), i32(p.random_row), i32(p.out.row), i32(p.q.head), i32(p.k.head), i32(p.v.head),
                0, i32(p.random_head), i32(s.lse_head), i32(p.out.head), window.left,
                window.right, kMaskType, 0, s.dropout_p, p.random != nullptr,
                std::make_tuple(state.first, state.second));
        else
            return Kernel::MakeKargs(
                p.q.data, p.k.data, p.v.data, s.alibi_slopes, p.random, p.lse, p.out.data, s.seqlen_q, s.seqlen_k, s.head_dim,
                s.head_dim, s.nheads, group, s.scale, 1.f, 1.f, s.softcap, i32(p.q.row), i32(p.k.row), i32(p.v.row),
                i32(s.alibi_batch), i32(p.random_row), i32(p.out.row), i32(p.q.head), i32(p.k.head), i32(p.v.head), 0,
                i32(p.random_head), i32(s.lse_head), i32(p.out.head), i32(p.q.batch), i32(p.k.batch), i32(p.v.batch), 0,
                i32(p.random_batch), i32(s.lse_batch), i32(p.out.batch), window.left,
                window.right, kMaskType, s.dropout_p, p.random != nullptr,
                std::make_tuple(state.first, state.second));
    };
    finish(launch, kargs, Kernel::GridSize(s.batch, s.nheads, s.seqlen_q, s.head_dim, p.seqused_k != nullptr), Kernel::BlockSize());
}

template <typename T, int kDim, bool kGroup, bool kMask, Bias kBias, bool kSoftcap, bool kDropout>
constexpr Row<flash_attn_ck_forward> forward_row(const char* name)
{
    using Kernel = Forward<T, kDim, kGroup, kMask, kBias, kSoftcap, kDropout>;
    return {key(std::is_same_v<T, bf16>, kDim, kGroup, kMask, kBias == Bias::alibi, kSoftcap, kDropout), name,
            sizeof(typename Kernel::Kargs), fill_forward<Kernel>};
}

} // namespace flash_attn_ck
