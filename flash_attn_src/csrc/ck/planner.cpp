// The host side of the Composable Kernel backend: from a call's parameters to launches. ck_tile's own MakeKargs and
// GridSize make the argument and the grid.
#include "flash_attn_ck.h"

#include <cstdio>
#include <cstring>

#include "planner/backward.hpp"
#include "planner/decode.hpp"
#include "planner/forward.hpp"

namespace flash_attn_ck {
namespace {

// ---- the table ----

// The build writes a file for each operation: a line ROW(name, template arguments...) for every kernel of it.
#define ROW(name, ...) forward_row<__VA_ARGS__>(name),
constexpr Row<flash_attn_ck_forward> kForward[] = {
#include "fwd.inc"
};
#undef ROW

#define ROW(name, ...) backward_row<__VA_ARGS__>(name),
constexpr Row<flash_attn_ck_backward> kBackward[] = {
#include "dqdkdv.inc"
};
#undef ROW

#define ROW(name, ...) dot_row<__VA_ARGS__>(name),
constexpr Row<flash_attn_ck_backward> kDot[] = {
#include "dot.inc"
};
#undef ROW

#define ROW(name, ...) convert_row<__VA_ARGS__>(name),
constexpr Row<flash_attn_ck_backward> kConvert[] = {
#include "convert.inc"
};
#undef ROW

#define ROW(name, ...) split_row<__VA_ARGS__>(name),
constexpr Row<flash_attn_ck_decode> kSplit[] = {
#include "splitkv.inc"
};
#undef ROW

#define ROW(name, ...) combine_row<__VA_ARGS__>(name),
constexpr Row<flash_attn_ck_decode> kCombine[] = {
#include "combine.inc"
};
#undef ROW

#define ROW(name, ...) append_row<__VA_ARGS__>(name),
constexpr Row<flash_attn_ck_decode> kAppend[] = {
#include "appendkv.inc"
};
#undef ROW

// Adds the launch of the row with this key. The checks let no call through that has none; a table that lacks one all
// the same is told, too.
template <typename Parameters, size_t kRows>
void add(Checker& check, flash_attn_ck_plan& plan, const Row<Parameters> (&rows)[kRows], uint32_t wanted, const Parameters& p,
         const char* what)
{
    if(!check.ok())
        return;
    for(const auto& row : rows)
    {
        if(row.key != wanted)
            continue;
        auto& launch = plan.launches[plan.count++];
        std::snprintf(launch.kernel, sizeof(launch.kernel), "%s", row.name);
        row.fill(p, launch);
        return;
    }
    check.require(false, FLASH_ATTN_CK_UNSUPPORTED, "%s: no kernel for this combination of options", what);
}

int forward_bucket(int head_dim)
{
    for(int dim : {32, 64, 96, 128, 192})
        if(head_dim <= dim)
            return dim;
    return 256;
}

void start(flash_attn_ck_plan& plan) { std::memset(&plan, 0, sizeof(plan)); }

int end(const Checker& check, flash_attn_ck_plan& plan)
{
    if(!check.ok())
        plan.count = 0;
    return check.status();
}

} // namespace
} // namespace flash_attn_ck

using namespace flash_attn_ck;

int flash_attn_ck_version(void) { return FLASH_ATTN_CK_VERSION; }

int flash_attn_ck_plan_forward(const flash_attn_ck_forward* parameters, flash_attn_ck_plan* plan)
{
    const auto& p  = *parameters;
    const Shape& s = p.shape;
    start(*plan);
    Checker check(*plan);
    const bool group = s.cu_seqlens_q != nullptr;
    check.shape(s, false);
    check.require(group == (s.cu_seqlens_k != nullptr), FLASH_ATTN_CK_INVALID, "cu_seqlens_k: goes together with cu_seqlens_q");
    check.require(p.seqused_k == nullptr || group, FLASH_ATTN_CK_INVALID, "seqused_k: is for cu_seqlens only");
    check.tensor("q", p.q, s.seqlen_q, s, !group);
    check.tensor("k", p.k, s.seqlen_k, s, !group);
    check.tensor("v", p.v, s.seqlen_k, s, !group);
    check.tensor("out", p.out, s.seqlen_q, s, !group);
    check.pointer("lse", p.lse);
    check.require(p.random == nullptr || s.dropout_p > 0, FLASH_ATTN_CK_INVALID, "random: is for dropout only");
    for(const int64_t stride : {p.random_batch, p.random_head, p.random_row})
        check.require(p.random == nullptr || (stride >= 0 && stride <= INT32_MAX), FLASH_ATTN_CK_UNSUPPORTED,
                      "random: a stride of %lld is not from 0 to 2^31 - 1", (long long)stride);
    if(p.random != nullptr && check.ok())
        check.require(s.seqlen_q * p.random_row <= INT32_MAX, FLASH_ATTN_CK_UNSUPPORTED,
                      "random: one head of it is 2^31 bytes or more");
    const bool features = s.alibi_slopes != nullptr || s.softcap > 0 || s.dropout_p > 0;
    const bool mask     = features || s.window_left >= 0 || s.window_right >= 0;
    add(check, *plan, kForward,
        key(s.dtype, forward_bucket(s.head_dim), group, mask, s.alibi_slopes != nullptr, s.softcap > 0, s.dropout_p > 0), p,
        "forward");
    return end(check, *plan);
}

int64_t flash_attn_ck_backward_workspace(const flash_attn_ck_backward* parameters)
{
    flash_attn_ck_plan plan;
    Checker check(plan);
    check.shape(parameters->shape, true);
    check.rows(parameters->total_q);
    if(!check.ok())
        return 0;
    const DqSum sum(*parameters);
    return sum.splits * sum.split * 4;
}

int flash_attn_ck_plan_backward(const flash_attn_ck_backward* parameters, flash_attn_ck_plan* plan)
{
    const auto& p  = *parameters;
    const Shape& s = p.shape;
    start(*plan);
    Checker check(*plan);
    const bool group = s.cu_seqlens_q != nullptr;
    check.shape(s, true);
    check.require(s.softcap == 0, FLASH_ATTN_CK_UNSUPPORTED, "softcap: the backward has none");
    check.require(group == (s.cu_seqlens_k != nullptr), FLASH_ATTN_CK_INVALID, "cu_seqlens_k: goes together with cu_seqlens_q");
    check.require(!group || p.total_q > 0, FLASH_ATTN_CK_INVALID, "total_q: %lld is not above 0", (long long)p.total_q);
    check.rows(p.total_q);
    const struct
    {
        const char* name;
        const Tensor& tensor;
        int64_t rows;
    } tensors[] = {{"q", p.q, s.seqlen_q},       {"k", p.k, s.seqlen_k},   {"v", p.v, s.seqlen_k},   {"out", p.out, s.seqlen_q},
                   {"dout", p.dout, s.seqlen_q}, {"dq", p.dq, s.seqlen_q}, {"dk", p.dk, s.seqlen_k}, {"dv", p.dv, s.seqlen_k}};
    for(const auto& [name, tensor, rows] : tensors)
        check.tensor(name, tensor, rows, s, !group);
    check.pointer("lse", p.lse);
    check.pointer("delta", p.delta);
    check.pointer("dq_sum", p.dq_sum);
    if(check.ok())
    {
        const DqSum sum(p);
        check.require(s.seqlen_q * sum.row * 4 <= INT32_MAX, FLASH_ATTN_CK_UNSUPPORTED,
                      "dq_sum: one sequence of it is 2^31 bytes or more");
        check.require(!p.deterministic || sum.split <= INT32_MAX, FLASH_ATTN_CK_UNSUPPORTED,
                      "deterministic: one part of dq_sum has 2^31 elements or more");
    }
    const bool bf16 = s.dtype == FLASH_ATTN_CK_BF16, deterministic = p.deterministic != 0;
    add(check, *plan, kDot, key(bf16, s.head_dim, group), p, "backward");
    add(check, *plan, kBackward, key(bf16, s.head_dim, group, s.alibi_slopes != nullptr, s.dropout_p > 0, deterministic), p, "backward");
    add(check, *plan, kConvert, key(bf16, s.head_dim, group, deterministic), p, "backward");
    return end(check, *plan);
}

int flash_attn_ck_plan_decode(const flash_attn_ck_decode* parameters, flash_attn_ck_plan* plan)
{
    const auto& p  = *parameters;
    const Shape& s = p.shape;
    start(*plan);
    Checker check(*plan);
    const bool group = s.cu_seqlens_q != nullptr, paged = p.block_table != nullptr, append = p.k_new.data != nullptr;
    check.shape(s, true);
    check.require(s.dropout_p == 0, FLASH_ATTN_CK_INVALID, "dropout_p: a cache is read without dropout");
    check.require(group == (s.cu_seqlens_k != nullptr), FLASH_ATTN_CK_INVALID, "cu_seqlens_k: goes together with cu_seqlens_q");
    check.require(!group || paged, FLASH_ATTN_CK_INVALID, "cu_seqlens_q: is for block_table only, without it the forward serves");
    check.require(!group || p.total_q > 0, FLASH_ATTN_CK_INVALID, "total_q: %lld is not above 0", (long long)p.total_q);
    check.rows(p.total_q);
    check.require(!(paged && p.cache_batch_idx != nullptr), FLASH_ATTN_CK_INVALID, "cache_batch_idx: not together with block_table");
    check.require(!paged || p.page_size > 0, FLASH_ATTN_CK_INVALID, "page_size: %d is not above 0", p.page_size);
    check.require(!paged || p.page_size % 128 == 0, FLASH_ATTN_CK_UNSUPPORTED, "page_size: %d is not a multiple of 128", p.page_size);
    check.require(!paged || (p.block_table_batch >= 0 && p.block_table_batch <= INT32_MAX), FLASH_ATTN_CK_INVALID,
                  "block_table_batch: %lld is not from 0 to 2^31 - 1", (long long)p.block_table_batch);
    check.require(p.num_splits >= 1 && p.num_splits <= FLASH_ATTN_CK_MAX_SPLITS, FLASH_ATTN_CK_INVALID,
                  "num_splits: %d is not from 1 to %d", p.num_splits, FLASH_ATTN_CK_MAX_SPLITS);
    check.tensor("q", p.q, s.seqlen_q, s, !group);
    check.tensor("k", p.k, paged ? p.page_size : s.seqlen_k, s, true);
    check.tensor("v", p.v, paged ? p.page_size : s.seqlen_k, s, true);
    check.tensor("out", p.out, s.seqlen_q, s, !group);
    check.pointer("lse", p.lse);
    check.pointer("split_out", p.split_out);
    check.pointer("split_lse", p.split_lse);
    if(check.ok())
        check.require(p.num_splits * SplitSums(p).split <= INT32_MAX / s.head_dim, FLASH_ATTN_CK_UNSUPPORTED,
                      "num_splits: split_out has 2^31 elements or more");
    if(check.ok())
    {
        const int64_t span = ((p.num_splits - 1) * SplitSums(p).split + s.seqlen_q) * s.head_dim * 4;
        check.require(span <= INT32_MAX, FLASH_ATTN_CK_UNSUPPORTED,
                      "num_splits: one sequence of a head spans %lld bytes of split_out, 2^31 or more", (long long)span);
    }
    auto rotary = Rotary::none;
    if(append)
    {
        check.require(!group, FLASH_ATTN_CK_INVALID, "k_new: not together with cu_seqlens_q");
        check.require(p.seqlen_new > 0, FLASH_ATTN_CK_INVALID, "seqlen_new: %d is not above 0", p.seqlen_new);
        check.pointer("seqlens_before", p.seqlens_before);
        check.pointer("seqlens_k", p.seqlens_k);
        check.tensor("k_new", p.k_new, p.seqlen_new, s, true);
        check.tensor("v_new", p.v_new, p.seqlen_new, s, true);
        if(p.rotary_dim != 0)
        {
            rotary = p.rotary_interleaved ? Rotary::interleaved : Rotary::half;
            check.require(p.rotary_dim > 0 && p.rotary_dim <= s.head_dim && p.rotary_dim % 16 == 0, FLASH_ATTN_CK_INVALID,
                          "rotary_dim: %d is not a multiple of 16 up to head_dim = %d", p.rotary_dim, s.head_dim);
            check.pointer("rotary_cos", p.rotary_cos);
            check.pointer("rotary_sin", p.rotary_sin);
        }
    }
    check.require(append || p.rotary_dim == 0, FLASH_ATTN_CK_INVALID, "rotary_dim: is for k_new only");
    const bool bf16 = s.dtype == FLASH_ATTN_CK_BF16;
    if(append)
        add(check, *plan, kAppend, key(bf16, s.head_dim, paged, static_cast<int>(rotary)), p, "append");
    add(check, *plan, kSplit, key(bf16, s.head_dim, group, paged, s.alibi_slopes != nullptr, s.softcap > 0), p, "decode");
    add(check, *plan, kCombine, key(bf16, s.head_dim, group, p.num_splits <= 16 ? 4 : 7), p, "decode");
    return end(check, *plan);
}

namespace {
template <typename Parameters, size_t kRows>
const char* nth(const Row<Parameters> (&rows)[kRows], uint32_t& index, uint32_t* argument_bytes)
{
    if(index >= kRows)
    {
        index -= kRows;
        return nullptr;
    }
    *argument_bytes = rows[index].argument_bytes;
    return rows[index].name;
}
} // namespace

const char* flash_attn_ck_kernel(uint32_t index, uint32_t* argument_bytes)
{
    const char* name = nth(kForward, index, argument_bytes);
    name             = name != nullptr ? name : nth(kBackward, index, argument_bytes);
    name             = name != nullptr ? name : nth(kDot, index, argument_bytes);
    name             = name != nullptr ? name : nth(kConvert, index, argument_bytes);
    name             = name != nullptr ? name : nth(kSplit, index, argument_bytes);
    name             = name != nullptr ? name : nth(kCombine, index, argument_bytes);
    return name != nullptr ? name : nth(kAppend, index, argument_bytes);
}
