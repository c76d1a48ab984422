"""Operations: one row each, with everything that the compile stage and the run time need to know about a kernel.

The compile stage builds every variant of every row (`variants.table`), and a call asks for one variant by name.
Standard library only: the compile stage has no torch.
"""

from __future__ import annotations

from dataclasses import replace

from flash_attn.kernels.flags import PAGE_PER_BLOCK, PAGE_PER_KEY
from flash_attn.kernels.operation import (
    DTYPES,
    FORWARD_KINDS,
    HALVES,
    KINDS,
    LAYER_KINDS,
    SIZES_OF_KINDS,
    Int8Operation,
    Operation,
)
from flash_attn.kernels.value_dims import LATENT_DIM, VALUE_DIMS

_LENGTHS = "cu_seqlens_q cu_seqlens_k seqused_k leftpad_k"
_MASK = "tiles tile_counts key_ranges ids_q ids_k hidden_queries"
_BLOCKS = {"*i32": f"{_LENGTHS} {_MASK}", "*u8": "block_mask"}
_STRIDES = ("stride_sb", "stride_sh", "stride_sm")
_LISTS = (
    *_MASK.split(), "block_mask", "lists_b", "lists_h", "list_length", "block_q", "block_k",
    "ranges_b", "ranges_h", "ids_qb", "ids_kb", "hidden_b", "hidden_h",
)  # fmt: skip
_BIAS = dict.fromkeys(("bias", *_STRIDES), ("bias",)) | dict.fromkeys(_LISTS, ())
_SCORES = {"*i64": "rng_state", "fp32": "scale softcap p_dropout"}
_OF_TILE = (
    "VEC BLOCK_M BLOCK_N BLOCK_D BLOCK_D_TAIL VALUE_DIM BLOCK_K SCORE_MOD NUM_XCDS ROUND_HALF_UP DROPOUT_BITS_SHARED "
    "USE_ANCHOR_DOT"
)
_TILE = tuple(_OF_TILE.split())

_FORWARD = Operation(
    name="fwd",
    module="forward",
    function="attn_fwd",
    types={
        "*T": "q k v out bias",
        "*fp32": "lse alibi_slopes sinks",
        **_BLOCKS,
        "*i32": f"{_LENGTHS} block_table {_MASK}",
        **_SCORES,
    },
    aligned=("q", "k", "v", "out", "lse"),
    constants=(*_TILE, "BREAK_DOT_CHAIN", "ASYNC_COPY", "NUM_PARTIAL_SUMS", "WEIGHT_SHIFT", "LAZY_RESCALE"),
    fixed={"PAGE_MODE": 0, "HAS_MASK": False},
    kinds=FORWARD_KINDS,
    fp32_kinds=("plain", "bias", "any"),
    sizes_of_kind=SIZES_OF_KINDS,
    kinds_of_argument={"sinks": ("sink", "bias", "blocks", "any"), **_BIAS},
    has_separate_outputs=True,
    tuning="table",
)
_FORWARD_PAGED = replace(
    _FORWARD,
    name="fwd-paged",
    fixed={"PAGE_MODE": PAGE_PER_KEY, "HAS_MASK": False},
    kinds=("plain", "sink", "any"),
    fp32_kinds=("plain", "any"),
    tile_of="fwd",
)
_FORWARD_PAGED_WHOLE = replace(
    _FORWARD_PAGED,
    name="fwd-paged-whole",
    fixed={"PAGE_MODE": PAGE_PER_BLOCK, "HAS_MASK": False},
    dtypes=HALVES,
    fp32_kinds=None,
)
# For debugging only, so all kinds share one kernel.
_PROBABILITIES = Operation(
    name="probabilities",
    module="probabilities",
    function="attn_probabilities",
    types={"*T": "q k dmask", "*fp32": "lse alibi_slopes", "*i32": _LENGTHS, **_SCORES},
    aligned=("q", "k", "lse"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "BLOCK_K", "DROPOUT_BITS_SHARED"),
    sizes=(32, 64, 128, 256, 512),
    kinds=("any",),
    tuning="fixed",
)
_BACKWARD_DKDV = Operation(
    name="bwd-dkdv",
    module="backward_dkdv",
    function="attn_bwd_dkdv",
    types={
        "*T": "q k v dout dk dv bias",
        "*fp32": "lse delta alibi_slopes norms",
        **_BLOCKS,
        **_SCORES,
    },
    aligned=("q", "k", "v", "dout", "dk", "dv", "lse", "delta"),
    constants=(*_TILE, "USE_PEELING", "WEIGHT_SHIFT", "DK_APART"),
    fixed={"HAS_MASK": False},
    range_arguments=("norms",),
    kinds=KINDS,
    fp32_kinds=("plain", "bias", "any"),
    sizes_of_kind=SIZES_OF_KINDS,
    kinds_of_argument=_BIAS,
    has_separate_outputs=True,
    tuning="table",
)
_BACKWARD_DQ = replace(
    _BACKWARD_DKDV,
    name="bwd-dq",
    module="backward_dq",
    function="attn_bwd_dq",
    types={
        "*T": "q k v out dout dq bias",
        "*fp32": "lse delta alibi_slopes sinks norms",
        **_BLOCKS,
        **_SCORES,
    },
    aligned=("q", "k", "v", "out", "dout", "dq", "lse", "delta"),
    constants=(*_TILE, "WEIGHT_SHIFT"),
    kinds_of_argument={"sinks": ("bias",), **_BIAS},
)
_BACKWARD_BIAS = Operation(
    name="bwd-dbias",
    module="backward_dbias",
    function="attn_bwd_dbias",
    types={"*T": "q k v dout bias dbias", "*fp32": "lse delta norms", "fp32": "scale softcap"},
    aligned=("q", "k", "v", "dout", "lse", "delta"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "BLOCK_K", "USE_ANCHOR_DOT", "WEIGHT_SHIFT"),
    range_arguments=("norms",),
    sizes=(64, 128, 256, 512),
    kinds=("bias",),
    has_separate_outputs=True,
    tuning="fixed",
)
_BACKWARD_DIAGONALS = replace(
    _BACKWARD_BIAS,
    name="bwd-ddiagonals",
    function="attn_bwd_ddiagonals",
    types={"*T": "q k v dout bias", "*fp32": "lse delta norms sums", "fp32": "scale softcap"},
)

_BACKWARD_NORMS = Operation(
    name="bwd-norms",
    module="backward_norms",
    function="attn_bwd_norms",
    types={"*T": "dout v", "*fp32": "norms", "*i32": "cu_seqlens_q cu_seqlens_k"},
    aligned=("dout", "v"),
    constants=("VEC", "BLOCK_M", "BLOCK_D"),
    dtypes=("fp16",),
    needs_range=True,
    sizes=(64,),
    in_pieces=True,
    kinds=("plain",),
    tuning="fixed",
)


def _with_value_dims(row: Operation) -> Operation:
    """The operation for values with a head dim of their own, for which only plain calls have a kernel of their own."""
    return replace(
        row, name=f"{row.name}-v", value_dims=VALUE_DIMS, sizes=tuple(VALUE_DIMS), kinds=("plain", "any"),
        fp32_kinds=None, sizes_of_kind={}, tile_of=row.name,
    )  # fmt: skip


def _for_blocks(row: Operation) -> Operation:
    """The operation for attention with a mask. Kind `blocks` has no other option than sinks."""
    kinds = ("blocks", "any")
    return replace(
        row, name=f"sparse-{row.name}", sizes=(64, 128, 256), kinds=kinds, fp32_kinds=("any",), sizes_of_kind={},
        fixed={**row.fixed, "HAS_MASK": True}, tile_of=row.name,
        kinds_of_argument={**row.kinds_of_argument, "bias": (), **dict.fromkeys((*_STRIDES, *_LISTS), kinds)},
    )  # fmt: skip


# A mask has no element type, so the kernel's name has any.
_SPARSE_LISTS = Operation(
    name="sparse-lists",
    module="tile_lists",
    function="list_tiles",
    types={"*i32": _MASK, "*u8": "block_mask"},
    aligned=(),
    constants=("BLOCK_N",),
    dtypes=("fp16",),
    sizes=(64,),
    in_pieces=True,
    kinds=("plain",),
    has_separate_outputs=True,
    tuning="fixed",
)
_BLOCK_LISTS = replace(
    _SPARSE_LISTS,
    name="block-lists",
    module="block_lists",
    function="mark_blocks",
    types={"*i32": "counts indices full_counts full_indices", "*u8": "seen"},
)
_NARROW_IDS = replace(
    _SPARSE_LISTS,
    name="narrow-ids",
    module="narrow_ids",
    function="narrow_ids",
    types={"*i32": "narrow", "*i64": "ids keys"},
)
# Microbenchmarks: `plain` is one wave, `wide` has four.
_PROBE = Operation(
    name="probe",
    module="probe",
    function="probe",
    types={"*T": "x", "*i32": "table", "*fp32": "out"},
    aligned=("x", "table", "out"),
    constants=("BLOCK_M",),
    dtypes=("fp16",),
    sizes=(64,),
    in_pieces=True,
    kinds=("plain", "wide"),
    has_separate_outputs=True,
    tuning="fixed",
)
# Decoding waits for memory. It does not load masked columns, so few sizes are enough.
_DECODE = Operation(
    name="decode",
    module="decode",
    function="attn_decode",
    types={
        "*T": "q k v out",
        "*fp32": "lse partial partial_lse alibi_slopes q_descale k_descale v_descale sinks",
        "*i32": f"{_LENGTHS} block_table",
        "fp32": "scale softcap page_inverse",
    },
    aligned=("q", "k", "v", "out", "lse", "partial"),
    constants=(
        *(
            "VEC",
            "BLOCK_M",
            "BLOCK_N",
            "BLOCK_D",
            "BLOCK_V",
            "BLOCK_K",
            "HAS_SCORE_MOD",
            "USE_SINKS",
            "ROUND_HALF_UP",
            "BREAK_DOT_CHAIN",
        ),
        "WEIGHT_SHIFT",
        "HAS_CAST",
    ),
    fixed={"PAGE_MODE": PAGE_PER_BLOCK, "HAS_LATENT_QUERY": False},
    dtypes=(*DTYPES, "fp8"),
    sizes=(64, 128, 256, 512),
    kinds=("plain", "sink", "any"),
    fp32_kinds=("plain", "any"),
    sizes_of_kind={"sink": (64, 128, 256)},
    kinds_of_argument={"sinks": ("sink", "any")},
    has_separate_outputs=True,
    tuning="table",
)
_DECODE_PAGED = replace(
    _DECODE, name="decode-paged", fixed={"PAGE_MODE": PAGE_PER_KEY, "HAS_LATENT_QUERY": False}, tile_of="decode"
)
_EXTEND = replace(_DECODE, name="extend")
_EXTEND_PAGED = replace(_DECODE_PAGED, name="extend-paged", tile_of="extend")
# Multi-head latent attention: keys of up to LATENT_DIM columns, and values that are keys of a second query too.
_LATENT = replace(
    _DECODE,
    name="latent",
    constants=tuple(name for name in _DECODE.constants if name != "BLOCK_D"),
    fixed={"PAGE_MODE": PAGE_PER_BLOCK, "HAS_LATENT_QUERY": True, "BLOCK_D": LATENT_DIM},
    dtypes=(*DTYPES, "fp8"),
    sizes=(512,),
    kinds=("plain", "any"),
    sizes_of_kind={},
)
_LATENT_PAGED = replace(
    _LATENT, name="latent-paged", fixed=_LATENT.fixed | {"PAGE_MODE": PAGE_PER_KEY}, tile_of="latent"
)
_LATENT_EXTEND = replace(_LATENT, name="latent-extend")
_LATENT_EXTEND_PAGED = replace(_LATENT_PAGED, name="latent-extend-paged", tile_of="latent-extend")
# `wide`: few rows with many splits.
_COMBINE = Operation(
    name="combine",
    module="combine",
    function="attn_combine",
    types={"*fp32": "partial lse partial_lse", "*T": "out"},
    aligned=("partial", "lse", "out"),
    constants=("BLOCK_N", "BLOCK_D"),
    sizes=(128,),
    in_pieces=True,
    kinds=("plain", "wide"),
    tuning="fixed",
)
_SUM = Operation(
    name="sum",
    module="sums",
    function="attn_sum",
    types={"*fp32": "partial", "*T": "out"},
    aligned=(),
    constants=("BLOCK_M", "BLOCK_D"),
    sizes=(128,),
    in_pieces=True,
    kinds=("plain",),
    has_separate_outputs=True,
    tuning="fixed",
)
# T is the element type of the sinks.
_BACKWARD_SINKS = replace(
    _SUM,
    name="bwd-dsinks",
    function="attn_bwd_dsinks",
    types={"*fp32": "lse delta", "*T": "sinks dsinks"},
    constants=("BLOCK_M",),
)
_APPEND = Operation(
    name="append",
    module="append",
    function="attn_append",
    types={
        "*T": "k_new v_new k v q q_turned cos sin",
        "*i32": "cu_seqlens_q cu_seqlens_k seqused_k block_table cache_batch_idx rotary_seqlens",
    },
    aligned=("k_new", "v_new", "k", "v", "q", "q_turned"),
    constants=("VEC", "BLOCK_M", "BLOCK_D"),
    dtypes=(*DTYPES, "fp8"),
    sizes=(64,),
    in_pieces=True,
    kinds=("plain",),
    tuning="fixed",
)

_FP8_AMAX = Operation(
    name="fp8-amax",
    module="fp8_cast",
    function="fp8_amax",
    types={"*T": "x", "*fp32": "amax", "*i32": "cu_seqlens_q"},
    aligned=("x",),
    constants=("VEC", "BLOCK_M", "BLOCK_D"),
    needs_fp8=True,
    sizes=(64,),
    in_pieces=True,
    kinds=("plain",),
    tuning="fixed",
)
_FP8_CAST = replace(
    _FP8_AMAX,
    name="fp8-cast",
    function="fp8_cast",
    types={"*T": "x", "*u8": "y", "*fp32": "amax descale", "*i32": "cu_seqlens_q", "fp32": "limit"},
    aligned=("x", "y"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "USE_FNUZ", "HAS_CAST"),
    fixed={"USE_TRANSPOSE": False},
)
_FP8_CAST_V = replace(_FP8_CAST, name="fp8-cast-v", fixed={"USE_TRANSPOSE": True}, dtypes=(*DTYPES, "fp8"))
_FP8_FORWARD = Operation(
    name="fp8-fwd",
    module="fp8",
    function="fp8_fwd",
    types={
        "*T": "q k v out",
        "*fp32": "lse q_descale k_descale v_descale alibi_slopes",
        "*i32": "cu_seqlens_q cu_seqlens_k seqused_k",
        **_SCORES,
    },
    aligned=("q", "k", "v", "out", "lse"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "HAS_SCORE_MOD", "NUM_XCDS", "DROPOUT_BITS_SHARED", "HAS_CAST"),
    dtypes=("fp8",),
    needs_fp8=True,
    sizes=(64, 128, 256),
    kinds=("plain", "any"),
    has_separate_outputs=True,
    tuning="table",
)

_INT8_CAST_Q = Int8Operation(
    name="int8-cast-q",
    module="int8_cast",
    function="int8_cast",
    types={"*T": "x", "*fp32": "mean scales", "*i8": "y"},
    aligned=("x", "y"),
    constants=("VEC", "BLOCK_M", "BLOCK_D"),
    dtypes=HALVES,
    sizes=(64, 128),
    kinds=("plain",),
    tuning="fixed",
)
_INT8_CAST_K = replace(_INT8_CAST_Q, name="int8-cast-k")
_INT8_FORWARD = Int8Operation(
    name="int8-fwd",
    module="int8",
    function="int8_fwd",
    types={"*i8": "q k", "*T": "v out", "*fp32": "lse q_scales k_scales", "fp32": "scale"},
    aligned=("q", "k", "v", "out", "lse"),
    constants=("VEC", "BLOCK_M", "BLOCK_N", "BLOCK_D", "NUM_XCDS", "ROUND_HALF_UP"),
    dtypes=HALVES,
    sizes=(64, 128),
    kinds=("plain",),
    has_separate_outputs=True,
    tuning="table",
)

# Operations whose tables or weights are fp32. They do not exist for fp32 elements, for which they would equal the plain
# operations: tables of cosines in fp32 (t32), weights in fp32 (w32), weights and residual in fp32 (r32).
_ROTARY = Operation(
    name="rotary",
    module="rotary",
    function="rotary",
    types={"*T": "x turned cosines sines", "*i32": "cu_seqlens offsets", "fp32": "sign"},
    aligned=("x", "turned", "cosines", "sines"),
    constants=("UNIT", "BLOCK_M", "BLOCK_D"),
    fixed={"USE_INTERLEAVED": False},
    sizes=(64, 128, 256),
    kinds=LAYER_KINDS,
    tuning="layers",
)
_ROTARY_INTERLEAVED = replace(_ROTARY, name="rotary-interleaved", fixed={"USE_INTERLEAVED": True})
_TABLES_32 = {"fp32_arguments": ("cosines", "sines"), "dtypes": HALVES}
_NORM_FORWARD = Operation(
    name="norm-fwd",
    module="norm",
    function="norm_fwd",
    types={"*T": "x residual weight bias normal z", "*fp32": "mean rstd", "fp32": "eps shift"},
    aligned=("x", "residual", "weight", "bias", "normal", "z"),
    constants=("UNIT", "BLOCK_M", "BLOCK_N", "HAS_LONG_ROWS"),
    sizes=(64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    sizes_of_kind={"uneven": (1024, 4096)},
    kinds=LAYER_KINDS,
    tuning="layers",
)
_NORM_BACKWARD = replace(
    _NORM_FORWARD,
    name="norm-bwd",
    function="norm_bwd",
    types={"*T": "z weight dy dz dx dresidual", "*fp32": "mean rstd dweight", "fp32": "shift"},
    aligned=("z", "weight", "dy", "dz", "dx", "dresidual", "dweight"),
    constants=("UNIT", "BLOCK_M", "BLOCK_N", "HAS_LONG_ROWS", "USE_PREFETCH"),
)
_WEIGHTS_32 = {"fp32_arguments": ("weight", "bias"), "dtypes": HALVES}
_RESIDUAL_32 = {"fp32_arguments": ("weight", "bias", "residual", "z", "dz", "dresidual"), "dtypes": HALVES}
_LOSS_FORWARD = Operation(
    name="cross-entropy-fwd",
    module="cross_entropy",
    function="cross_entropy_fwd",
    types={
        "*T": "logits",
        "*fp32": "lse loss z_loss",
        "*i64": "labels",
        "fp32": "smoothing scale square_scale",
    },
    aligned=("logits", "lse"),
    constants=("UNIT", "BLOCK_N"),
    sizes=(4096,),
    kinds=LAYER_KINDS,
    tuning="layers",
)
_LOSS_BACKWARD = replace(
    _LOSS_FORWARD,
    name="cross-entropy-bwd",
    function="cross_entropy_bwd",
    types=_LOSS_FORWARD.types | {"*T": "logits dlogits", "*fp32": "lse dloss"},
    aligned=("logits", "dlogits", "lse"),
)

OPERATIONS: dict[str, Operation] = {
    row.name: row
    for row in (
        _FORWARD,
        _FORWARD_PAGED,
        _FORWARD_PAGED_WHOLE,
        _PROBABILITIES,
        _BACKWARD_DKDV,
        _BACKWARD_DQ,
        *map(_with_value_dims, (_FORWARD, _FORWARD_PAGED, _FORWARD_PAGED_WHOLE, _BACKWARD_DKDV, _BACKWARD_DQ)),
        *map(_for_blocks, (_FORWARD, _BACKWARD_DKDV, _BACKWARD_DQ)),
        _SPARSE_LISTS,
        _BLOCK_LISTS,
        _NARROW_IDS,
        _PROBE,
        _BACKWARD_BIAS,
        _BACKWARD_DIAGONALS,
        _BACKWARD_NORMS,
        _DECODE,
        _DECODE_PAGED,
        _EXTEND,
        _EXTEND_PAGED,
        _LATENT,
        _LATENT_PAGED,
        _LATENT_EXTEND,
        _LATENT_EXTEND_PAGED,
        _COMBINE,
        _SUM,
        _BACKWARD_SINKS,
        _APPEND,
        _FP8_AMAX,
        _FP8_CAST,
        _FP8_CAST_V,
        _FP8_FORWARD,
        _INT8_CAST_Q,
        _INT8_CAST_K,
        _INT8_FORWARD,
        _ROTARY,
        _ROTARY_INTERLEAVED,
        replace(_ROTARY, name="rotary-t32", **_TABLES_32),
        replace(_ROTARY_INTERLEAVED, name="rotary-interleaved-t32", **_TABLES_32),
        _NORM_FORWARD,
        replace(_NORM_FORWARD, name="norm-fwd-w32", **_WEIGHTS_32),
        replace(_NORM_FORWARD, name="norm-fwd-r32", **_RESIDUAL_32),
        _NORM_BACKWARD,
        replace(_NORM_BACKWARD, name="norm-bwd-w32", **_WEIGHTS_32),
        replace(_NORM_BACKWARD, name="norm-bwd-r32", **_RESIDUAL_32),
        _LOSS_FORWARD,
        _LOSS_BACKWARD,
    )
}
