// The attention kernels of Composable Kernel as this package compiles them, each a type made from a few options.
// Both sides read this file: the device side for the kernels themselves, the planner for their arguments and grids.
//
// Options that no caller could ever turn off are not options here: the log-sum-exp is always stored, sequence
// lengths are always padded, V is row-major. A head dim is exact (the callers pad tensors), except in the forward,
// whose kernels mask a shorter one at no cost.
#pragma once

#include <cassert> // ck_tile uses assert() and leaves it to its includer

#include "ck_tile/core.hpp"
#include "ck_tile/ops/epilogue.hpp"
#include "ck_tile/ops/fmha.hpp"
#include "ck_tile/ops/fmha/block/variants.hpp"

namespace flash_attn_ck {

using ck_tile::sequence;

enum class Bias { none, alibi };
enum class Rotary { none, interleaved, half };

template <Bias kBias>
inline constexpr auto kBiasEnum =
    kBias == Bias::alibi ? ck_tile::BlockAttentionBiasEnum::ALIBI : ck_tile::BlockAttentionBiasEnum::NO_BIAS;

// A mask also serves calls without one: its window is then open on both sides.
template <bool kMask>
using Mask = ck_tile::SimplifiedGenericAttentionMask<kMask>;

template <bool kSoftcap>
using Variant = ck_tile::ComposedAttention<kSoftcap ? ck_tile::LOGITS_SOFT_CAP : 0u, CK_TILE_FMHA_FWD_FAST_EXP2>;

// ---- forward ----

// Block: queries, keys, head dim a step of Q K', head dim of V, keys a step of P V, whole head dim of Q.
template <int kDim, int kKeys = 128>
struct ForwardTile // 128, 192, 256
{
    using Block                     = sequence<128, kKeys, 32, kDim, 32, kDim>;
    using Warps                     = sequence<4, 1, 1>;
    static constexpr int kOccupancy = kDim == 192 ? 1 : -1; // -1: the pipeline's own choice
};
template <int kKeys>
struct ForwardTile<96, kKeys>
{
    using Block                     = sequence<128, kKeys, 32, 128, 32, 96>;
    using Warps                     = sequence<4, 1, 1>;
    static constexpr int kOccupancy = -1;
};
template <int kKeys>
struct ForwardTile<64, kKeys>
{
    using Block                     = sequence<128, 64, 32, 64, 32, 64>;
    using Warps                     = sequence<4, 1, 1>;
    static constexpr int kOccupancy = -1;
};
template <int kKeys>
struct ForwardTile<32, kKeys>
{
    using Block                     = sequence<128, 64, 16, 32, 32, 32>;
    using Warps                     = sequence<2, 1, 1>;
    static constexpr int kOccupancy = -1;
};

template <typename T, int kDim, bool kGroup, bool kMask, Bias kBias, bool kSoftcap, bool kDropout>
struct ForwardKernel
{
    // Half the keys, half the registers of the scores: otherwise some would wait in memory.
    using Tile    = ForwardTile<kDim, kDim <= 128 && (kDropout || kBias == Bias::alibi) ? 64 : 128>;
    // With dropout three blocks of head dim 64 on a compute unit would leave too few registers.
    static constexpr int kOccupancy = kDropout && kDim == 64 ? 2 : Tile::kOccupancy;
    using Warp    = sequence<32, 32, 16>;
    using Shape   = ck_tile::TileFmhaShape<typename Tile::Block, typename Tile::Warps, Warp, typename Tile::Warps, Warp, true>;
    using Traits  = ck_tile::TileFmhaTraits<true, true, true, true, kSoftcap, kBiasEnum<kBias>, false, true, kDropout, false, kOccupancy>;
    using Problem = ck_tile::BlockFmhaPipelineProblem<T, T, T, float, float, T, uint8_t, float, T, float, T, Shape, kGroup,
                                                      Variant<kSoftcap>, Mask<kMask>, Traits>;
    using type    = ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync<Problem>,
                                        ck_tile::Default2DEpilogue<ck_tile::Default2DEpilogueProblem<float, T, true, true>>>;
};
template <typename T, int kDim, bool kGroup, bool kMask, Bias kBias, bool kSoftcap, bool kDropout>
using Forward = typename ForwardKernel<T, kDim, kGroup, kMask, kBias, kSoftcap, kDropout>::type;

// ---- backward ----

// Block: queries, keys, steps of the five products (Q K', P' dO, dO V', dS' Q, dS K), head dims of Q and V.
template <int kDim>
struct BackwardTile;
template <>
struct BackwardTile<32>
{
    using Block                   = sequence<32, 128, 32, 32, 32, 32, 64, 32, 32>;
    using WarpsOfDq               = sequence<2, 2, 1>;
    static constexpr int kKeys    = 128;
};
template <>
struct BackwardTile<64>
{
    using Block                   = sequence<32, 128, 64, 32, 64, 32, 32, 64, 64>;
    using WarpsOfDq               = sequence<1, 4, 1>;
    static constexpr int kKeys    = 128;
};
template <>
struct BackwardTile<128>
{
    using Block                   = sequence<16, 128, 128, 16, 128, 16, 32, 128, 128>;
    using WarpsOfDq               = sequence<1, 4, 1>;
    static constexpr int kKeys    = 128;
};
template <>
struct BackwardTile<256>
{
    using Block                   = sequence<16, 64, 256, 16, 256, 16, 32, 256, 256>;
    using WarpsOfDq               = sequence<1, 4, 1>;
    static constexpr int kKeys    = 64;
};

template <typename T, int kDim, bool kGroup, Bias kBias, bool kDropout, bool kDeterministic>
struct BackwardKernel
{
    using Tile       = BackwardTile<kDim>;
    using WarpsOfS   = sequence<1, 4, 1>;
    using WarpsOfDkv = sequence<4, 1, 1>;
    using WarpOfS    = sequence<16, 16, 32>;
    using WarpOfDkv  = sequence<16, 16, 16>;
    using Shape  = ck_tile::TileFmhaBwdShape<typename Tile::Block, WarpsOfS, WarpOfS, WarpsOfDkv, WarpOfDkv, WarpsOfS, WarpOfS,
                                            WarpsOfDkv, WarpOfDkv, typename Tile::WarpsOfDq, WarpOfS>;
    using Traits = ck_tile::TileFmhaTraits<true, true, false, false, false, kBiasEnum<kBias>, false, false, false, false, 1>;
    // The tiles are of 16 x 16 warps, and so must be the pattern of the random numbers.
    using Dropout  = ck_tile::BlockDropoutBwd<kDropout, !kDropout, false>;
    using Problem  = ck_tile::BlockFmhaBwdPipelineProblem<T, T, T, T, float, float, float, T, uint8_t, T, T, T, T, T, T, Shape,
                                                         kGroup, kDeterministic, Mask<true>, Dropout, Traits>;
    using Epilogue = ck_tile::Default2DEpilogue<ck_tile::Default2DEpilogueProblem<float, T, true, false>>;
    using type =
        ck_tile::FmhaBwdDQDKDVKernel<ck_tile::BlockFmhaBwdDQDKDVPipelineKRKTRVRIGLP<Problem>, Epilogue, Epilogue>;
};
template <typename T, int kDim, bool kGroup, Bias kBias, bool kDropout, bool kDeterministic>
using Backward = typename BackwardKernel<T, kDim, kGroup, kBias, kDropout, kDeterministic>::type;

// rowsum(dO * O), scaled for dropout.
template <typename T, int kDim, bool kGroup>
using BackwardDot = ck_tile::FmhaBwdOGradDotOKernel<ck_tile::BlockFmhaBwdOGradDotO<
    ck_tile::BlockFmhaBwdOGradDotOPipelineProblem<T, T, float, 64, kDim, kGroup, ck_tile::TileFmhaBwdOGradDotOTraits<true, false, 2>>>>;

// dQ from its fp32 sums: one of them, or where the result has to be reproducible, one for each block of keys.
template <typename T, int kDim, bool kGroup, bool kDeterministic>
using BackwardConvert = ck_tile::FmhaBwdConvertQGradKernel<ck_tile::BlockFmhaBwdConvertQGrad<
    ck_tile::BlockFmhaBwdConvertQGradPipelineProblem<float, T, 256, 64, BackwardTile<kDim>::kKeys, kDim, kGroup, kDeterministic,
                                                     ck_tile::TileFmhaBwdConvertQGradTraits<true, false, 2>>>>;

// ---- decoding ----

template <int kDim>
struct SplitTile
{
    using Block = sequence<64, 128, 32, kDim, 32, kDim>;
    using Warps = sequence<4, 1, 1>;
};
template <>
struct SplitTile<32>
{
    using Block = sequence<32, 64, 16, 32, 32, 32>;
    using Warps = sequence<2, 1, 1>;
};
template <>
struct SplitTile<64>
{
    using Block = sequence<64, 64, 32, 64, 32, 64>;
    using Warps = sequence<4, 1, 1>;
};

template <typename T, int kDim, bool kGroup, bool kPaged, Bias kBias, bool kSoftcap>
struct SplitKernel
{
    using Tile    = SplitTile<kDim>;
    using Warp    = sequence<16, 16, 16>;
    using Shape   = ck_tile::TileFmhaShape<typename Tile::Block, typename Tile::Warps, Warp, typename Tile::Warps, Warp, true>;
    using Traits  = ck_tile::TileFmhaFwdSplitKVTraits<true, true, false, false, kSoftcap, kBiasEnum<kBias>, false, true, false,
                                                     kPaged, true>;
    using Problem = ck_tile::BlockFmhaFwdSplitKVPipelineProblem<T, T, T, float, float, T, float, T, float, float, Shape, kGroup,
                                                                Variant<kSoftcap>, Mask<true>, Traits>;
    using type    = ck_tile::FmhaFwdSplitKVKernel<ck_tile::BlockFmhaFwdSplitKVPipelineQRKSVS<Problem>,
                                               ck_tile::Default2DEpilogue<ck_tile::Default2DEpilogueProblem<float, float, false, false>>>;
};
template <typename T, int kDim, bool kGroup, bool kPaged, Bias kBias, bool kSoftcap>
using Split = typename SplitKernel<T, kDim, kGroup, kPaged, kBias, kSoftcap>::type;

template <typename T, int kDim, bool kGroup, int kLogMaxSplits>
using Combine = ck_tile::FmhaFwdSplitKVCombineKernel<
    ck_tile::BlockFmhaFwdSplitKVCombinePipeline<ck_tile::BlockFmhaSplitKVCombinePipelineProblem<
        float, float, T, kDim, kGroup, 32, ck_tile::TileFmhaFwdSplitKVCombineTraits<true, false, true, false, kLogMaxSplits, -1>>>,
    ck_tile::Default2DEpilogue<ck_tile::Default2DEpilogueProblem<float, T, false, false>>>;

template <Rotary kRotary>
inline constexpr auto kRotaryEnum = kRotary == Rotary::none          ? ck_tile::RotaryEmbeddingEnum::NONE
                                    : kRotary == Rotary::interleaved ? ck_tile::RotaryEmbeddingEnum::INTERLEAVED
                                                                     : ck_tile::RotaryEmbeddingEnum::HALF_ROTATED;

// With rotation the pipeline wants the head dim of Q and K padded.
template <typename T, int kDim, bool kPaged, Rotary kRotary>
using Append = ck_tile::FmhaFwdAppendKVKernel<ck_tile::BlockFmhaFwdAppendKVPipeline<ck_tile::BlockFmhaFwdAppendKVPipelineProblem<
    T, T, T, 64, 64, kDim, kDim, true, kRotaryEnum<kRotary>, kPaged,
    ck_tile::TileFmhaFwdAppendKVTraits<true, true, kRotary != Rotary::none, false, -1>>>>;

} // namespace flash_attn_ck
