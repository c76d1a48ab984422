// The arguments of the kernels that serve a cache: append, splits, their sum.
#pragma once

#include "launch.hpp"

namespace flash_attn_ck {

// split_out is (splits, batch, nheads, seqlen_q, head_dim), or (splits, nheads, total_q, head_dim); split_lse the
// same without the head dim.
struct SplitSums
{
    int64_t head, batch, split;

    explicit SplitSums(const flash_attn_ck_decode& p)
    {
        const Shape& s = p.shape;
        const bool group = s.cu_seqlens_q != nullptr;
        head             = group ? p.total_q : s.seqlen_q;
        batch            = group ? 0 : s.nheads * head;
        split            = s.nheads * head * (group ? 1 : s.batch);
    }
};

template <typename Kernel>
void fill_split(const flash_attn_ck_decode& p, flash_attn_ck_launch& launch)
{
    const Shape& s  = p.shape;
    const int group = s.nheads / s.nheads_k;
    const Window window(s);
    const SplitSums sums(p);
    const int64_t dim = s.head_dim;
    auto kargs        = [&] {
        if constexpr(Kernel::kIsGroupMode)
            return Kernel::MakeKargs(p.q.data, p.k.data, p.v.data, s.alibi_slopes, p.split_lse, p.split_out, s.batch,
                                            s.cu_seqlens_q, s.cu_seqlens_k, p.seqlens_k, s.head_dim, s.head_dim, s.nheads, group,
                                            p.num_splits, p.block_table, i32(p.block_table_batch), p.page_size, false, s.scale, 1.f,
                                            s.softcap, i32(p.q.row), i32(p.k.row), i32(p.v.row), i32(s.alibi_batch), i32(dim),
                                            i32(p.q.head), i32(p.k.head), i32(p.v.head), 0, i32(sums.head), i32(sums.head * dim),
                                            i32(p.k.batch), i32(p.v.batch), i32(sums.split), i32(sums.split * dim),
                                            window.left, window.right, kMaskType);
        else
            return Kernel::MakeKargs(p.q.data, p.k.data, p.v.data, s.alibi_slopes, p.split_lse, p.split_out, s.batch, s.seqlen_q,
                                            s.seqlen_k, p.seqlens_k, s.head_dim, s.head_dim, s.nheads, group, p.num_splits,
                                            p.block_table, i32(p.block_table_batch), p.page_size, p.cache_batch_idx, s.scale, 1.f,
                                            s.softcap, i32(p.q.row), i32(p.k.row), i32(p.v.row), i32(s.alibi_batch), i32(dim),
                                            i32(p.q.head), i32(p.k.head), i32(p.v.head), 0, i32(sums.head), i32(sums.head * dim),
                                            i32(p.q.batch), i32(p.k.batch), i32(p.v.batch), 0, i32(sums.batch),
                                            i32(sums.batch * dim), i32(sums.split), i32(sums.split * dim),
                                            window.left, window.right, kMaskType);
    };
    finish(launch, kargs, Kernel::GridSize(s.batch, s.nheads, s.nheads_k, s.seqlen_q, s.head_dim, p.num_splits), Kernel::BlockSize());
}

template <typename Kernel>
void fill_combine(const flash_attn_ck_decode& p, flash_attn_ck_launch& launch)
{
    const Shape& s = p.shape;
    const SplitSums sums(p);
    const int64_t dim = s.head_dim;
    auto kargs        = [&] {
        if constexpr(Kernel::kIsGroupMode)
            return Kernel::MakeKargs(p.split_lse, p.split_out, p.lse, p.out.data, s.batch, s.cu_seqlens_q, s.head_dim,
                                            p.num_splits, 1.f, i32(dim), i32(p.out.row), i32(sums.head), i32(sums.head * dim),
                                            i32(s.lse_head), i32(p.out.head), i32(sums.split), i32(sums.split * dim));
        else
            return Kernel::MakeKargs(p.split_lse, p.split_out, p.lse, p.out.data, s.batch, s.seqlen_q, s.head_dim, p.num_splits,
                                            1.f, i32(dim), i32(p.out.row), i32(sums.head), i32(sums.head * dim), i32(s.lse_head),
                                            i32(p.out.head), i32(sums.batch), i32(sums.batch * dim), i32(s.lse_batch),
                                            i32(p.out.batch), i32(sums.split), i32(sums.split * dim));
    };
    finish(launch, kargs, Kernel::GridSize(s.batch, s.nheads, s.seqlen_q, s.head_dim), Kernel::BlockSize());
}

template <typename Kernel>
void fill_append(const flash_attn_ck_decode& p, flash_attn_ck_launch& launch)
{
    const Shape& s = p.shape;
    auto kargs     = [&] {
        return Kernel::MakeKargs(
            p.q.data, p.k.data, p.k_new.data, p.v.data, p.v_new.data, s.seqlen_q, p.seqlens_before, p.seqlen_new, s.head_dim,
            s.head_dim, s.nheads, s.nheads / s.nheads_k, p.rotary_cos, p.rotary_sin, p.rotary_dim,
            s.window_left >= 0 || s.window_right >= 0, p.block_table, i32(p.block_table_batch), p.page_size, p.cache_batch_idx,
            i32(p.q.row), i32(p.k.row), i32(p.k_new.row), i32(p.v.row), i32(p.v_new.row), i32(p.q.head), i32(p.k.head),
            i32(p.k_new.head), i32(p.v.head), i32(p.v_new.head), i32(p.q.batch), i32(p.k.batch), i32(p.k_new.batch), i32(p.v.batch),
            i32(p.v_new.batch));
    };
    finish(launch, kargs, Kernel::GridSize(s.batch, s.nheads, s.seqlen_q, p.seqlen_new), Kernel::BlockSize());
}

template <typename T, int kDim, bool kGroup, bool kPaged, Bias kBias, bool kSoftcap>
constexpr Row<flash_attn_ck_decode> split_row(const char* name)
{
    using Kernel = Split<T, kDim, kGroup, kPaged, kBias, kSoftcap>;
    return {key(std::is_same_v<T, bf16>, kDim, kGroup, kPaged, kBias == Bias::alibi, kSoftcap), name, sizeof(typename Kernel::Kargs),
            fill_split<Kernel>};
}

template <typename T, int kDim, bool kGroup, int kLogMaxSplits>
constexpr Row<flash_attn_ck_decode> combine_row(const char* name)
{
    using Kernel = Combine<T, kDim, kGroup, kLogMaxSplits>;
    return {key(std::is_same_v<T, bf16>, kDim, kGroup, kLogMaxSplits), name, sizeof(typename Kernel::Kargs), fill_combine<Kernel>};
}

template <typename T, int kDim, bool kPaged, Rotary kRotary>
constexpr Row<flash_attn_ck_decode> append_row(const char* name)
{
    using Kernel = Append<T, kDim, kPaged, kRotary>;
    return {key(std::is_same_v<T, bf16>, kDim, kPaged, static_cast<int>(kRotary)), name, sizeof(typename Kernel::Kargs),
            fill_append<Kernel>};
}

} // namespace flash_attn_ck
