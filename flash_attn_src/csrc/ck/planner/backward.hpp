// The arguments of the three kernels of a backward.
#pragma once

#include "launch.hpp"

namespace flash_attn_ck {

// dq_sum is (splits, rows, nheads, head_dim): sums of one block of keys each, or of all of them.
struct DqSum
{
    int64_t splits, rows, row, batch, split;

    explicit DqSum(const flash_attn_ck_backward& p)
    {
        const Shape& s    = p.shape;
        const int64_t keys = s.head_dim == 256 ? BackwardTile<256>::kKeys : BackwardTile<128>::kKeys;
        splits = p.deterministic ? (int64_t(s.seqlen_k) + keys - 1) / keys : 1;
        rows   = s.cu_seqlens_q != nullptr ? p.total_q : int64_t(s.batch) * s.seqlen_q;
        row    = int64_t(s.nheads) * s.head_dim;
        batch  = s.cu_seqlens_q != nullptr ? 0 : s.seqlen_q * row;
        split  = rows * row;
    }
};
static_assert(BackwardTile<32>::kKeys == BackwardTile<128>::kKeys && BackwardTile<64>::kKeys == BackwardTile<128>::kKeys);

template <typename Kernel>
void fill_backward(const flash_attn_ck_backward& p, flash_attn_ck_launch& launch)
{
    const Shape& s   = p.shape;
    const int group  = s.nheads / s.nheads_k;
    const auto state = seed_and_offset(s);
    const Window window(s);
    const DqSum sum(p);
    const int split = p.deterministic ? i32(sum.split) : 0;
    auto kargs      = [&] {
        if constexpr(Kernel::kIsGroupMode)
            return Kernel::MakeKargs(
                p.q.data, p.k.data, p.v.data, s.alibi_slopes, p.lse, p.dout.data, p.delta, nullptr, p.dk.data, p.dv.data, nullptr,
                p.dq_sum, s.cu_seqlens_q, s.cu_seqlens_k, nullptr, s.head_dim, s.head_dim, s.nheads, group, s.scale, i32(p.q.row),
                i32(p.k.row), i32(p.v.row), i32(s.alibi_batch), 0, i32(p.dout.row), i32(sum.row), i32(p.dk.row), i32(p.dv.row), 0,
                i32(p.q.head), i32(p.k.head), i32(p.v.head), 0, 0, i32(p.dout.head), i32(s.lse_head), s.head_dim, i32(p.dk.head),
                i32(p.dv.head), 0, split, window.left, window.right, kMaskType,
                s.dropout_p, std::make_tuple(state.first, state.second));
        else
            return Kernel::MakeKargs(
                p.q.data, p.k.data, p.v.data, s.alibi_slopes, p.lse, p.dout.data, p.delta, nullptr, p.dk.data, p.dv.data, nullptr,
                p.dq_sum, s.seqlen_q, s.seqlen_k, s.head_dim, s.head_dim, s.nheads, group, s.scale, i32(p.q.row), i32(p.k.row),
                i32(p.v.row), i32(s.alibi_batch), 0, i32(p.dout.row), i32(sum.row), i32(p.dk.row), i32(p.dv.row), 0,
                i32(p.q.head), i32(p.k.head), i32(p.v.head), 0, 0, i32(p.dout.head), i32(s.lse_head), s.head_dim, i32(p.dk.head),
                i32(p.dv.head), 0, i32(p.q.batch), i32(p.k.batch), i32(p.v.batch), 0, 0, i32(p.dout.batch), i32(s.lse_batch),
                i32(sum.batch), i32(p.dk.batch), i32(p.dv.batch), 0, split, window.left,
                window.right, kMaskType, s.dropout_p, std::make_tuple(state.first, state.second));
    };
    finish(launch, kargs, Kernel::GridSize(s.batch, s.nheads, s.seqlen_k), Kernel::BlockSize());
}

template <typename Kernel>
void fill_dot(const flash_attn_ck_backward& p, flash_attn_ck_launch& launch)
{
    const Shape& s     = p.shape;
    const float undrop = 1.f - s.dropout_p;
    auto kargs         = [&] {
        if constexpr(Kernel::kIsGroupMode)
            return Kernel::MakeKargs(p.out.data, p.dout.data, p.delta, undrop, s.cu_seqlens_q, s.head_dim, i32(p.dout.row),
                                             i32(p.out.row), i32(p.dout.head), i32(p.out.head), i32(s.lse_head));
        else
            return Kernel::MakeKargs(p.out.data, p.dout.data, p.delta, undrop, s.seqlen_q, s.head_dim, i32(p.dout.row),
                                             i32(p.out.row), i32(p.dout.head), i32(p.out.head), i32(s.lse_head), i32(p.dout.batch),
                                             i32(p.out.batch), i32(s.lse_batch));
    };
    finish(launch, kargs, Kernel::GridSize(s.batch, s.nheads, s.seqlen_q), Kernel::BlockSize());
}

template <typename Kernel>
void fill_convert(const flash_attn_ck_backward& p, flash_attn_ck_launch& launch)
{
    const Shape& s = p.shape;
    const DqSum sum(p);
    const int split = p.deterministic ? i32(sum.split) : 0;
    auto kargs      = [&] {
        if constexpr(Kernel::kIsGroupMode)
            return Kernel::MakeKargs(p.dq_sum, p.dq.data, s.cu_seqlens_q, s.cu_seqlens_k, s.head_dim, i32(p.dq.row), i32(sum.row),
                                          i32(p.dq.head), s.head_dim, split);
        else
            return Kernel::MakeKargs(p.dq_sum, p.dq.data, s.seqlen_q, s.seqlen_k, s.head_dim, i32(p.dq.row), i32(sum.row),
                                          i32(p.dq.head), s.head_dim, i32(p.dq.batch), i32(sum.batch), split);
    };
    finish(launch, kargs, Kernel::GridSize(s.batch, s.nheads, s.seqlen_q), Kernel::BlockSize());
}

template <typename T, int kDim, bool kGroup, Bias kBias, bool kDropout, bool kDeterministic>
constexpr Row<flash_attn_ck_backward> backward_row(const char* name)
{
    using Kernel = Backward<T, kDim, kGroup, kBias, kDropout, kDeterministic>;
    return {key(std::is_same_v<T, bf16>, kDim, kGroup, kBias == Bias::alibi, kDropout, kDeterministic), name,
            sizeof(typename Kernel::Kargs), fill_backward<Kernel>};
}

template <typename T, int kDim, bool kGroup>
constexpr Row<flash_attn_ck_backward> dot_row(const char* name)
{
    using Kernel = BackwardDot<T, kDim, kGroup>;
    return {key(std::is_same_v<T, bf16>, kDim, kGroup), name, sizeof(typename Kernel::Kargs), fill_dot<Kernel>};
}

template <typename T, int kDim, bool kGroup, bool kDeterministic>
constexpr Row<flash_attn_ck_backward> convert_row(const char* name)
{
    using Kernel = BackwardConvert<T, kDim, kGroup, kDeterministic>;
    return {key(std::is_same_v<T, bf16>, kDim, kGroup, kDeterministic), name, sizeof(typename Kernel::Kargs), fill_convert<Kernel>};
}

} // namespace flash_attn_ck
