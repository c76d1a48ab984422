"""Which kernels exist ahead of time, what they are called, and how their arguments are typed.

Data that two readers share: the compile stage, which builds every variant of `table()`, and the run-time
lookup, which asks for one by name. Standard library only: the compile stage has no torch.
"""

from __future__ import annotations

from typing import NamedTuple

DTYPES = ("fp16", "bf16", "fp32")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)

# Operation -> the kernel's module below flash_attn.kernels, and its function.
OPS = {
    "fwd": ("forward", "attn_fwd"),
    "fwd-paged": ("forward", "attn_fwd"),
    "fwd-paged-whole": ("forward", "attn_fwd"),
    "probabilities": ("probabilities", "attn_probabilities"),
    "bwd-dkdv": ("backward_dkdv", "attn_bwd_dkdv"),
    "bwd-dq": ("backward_dq", "attn_bwd_dq"),
    "decode": ("decode", "attn_decode"),
    "decode-paged": ("decode", "attn_decode"),
    "extend": ("decode", "attn_decode"),
    "extend-paged": ("decode", "attn_decode"),
    "combine": ("combine", "attn_combine"),
    "append": ("append", "attn_append"),
    "fp8-amax": ("fp8_cast", "fp8_amax"),
    "fp8-cast": ("fp8_cast", "fp8_cast"),
    "fp8-cast-v": ("fp8_cast", "fp8_cast"),
    "fp8-fwd": ("fp8", "fp8_fwd"),
    "rotary": ("rotary", "rotary"),
    "rotary-interleaved": ("rotary", "rotary"),
    "rotary-t32": ("rotary", "rotary"),
    "rotary-interleaved-t32": ("rotary", "rotary"),
    "norm-fwd": ("norm", "norm_fwd"),
    "norm-fwd-w32": ("norm", "norm_fwd"),
    "norm-fwd-r32": ("norm", "norm_fwd"),
    "norm-bwd": ("norm", "norm_bwd"),
    "norm-bwd-w32": ("norm", "norm_bwd"),
    "norm-bwd-r32": ("norm", "norm_bwd"),
    "cross-entropy-fwd": ("cross_entropy", "cross_entropy_fwd"),
    "cross-entropy-bwd": ("cross_entropy", "cross_entropy_bwd"),
}

_NORM_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# Operations of layers, not of attention -> the blocks they are compiled for, in elements of a row.
BLOCKS = {
    **dict.fromkeys(("rotary", "rotary-interleaved", "rotary-t32", "rotary-interleaved-t32"), (64, 128, 256)),
    **dict.fromkeys(("norm-fwd", "norm-fwd-w32", "norm-fwd-r32"), _NORM_BLOCKS),
    **dict.fromkeys(("norm-bwd", "norm-bwd-w32", "norm-bwd-r32"), _NORM_BLOCKS),
    **dict.fromkeys(("cross-entropy-fwd", "cross-entropy-bwd"), (4096,)),
}

# Operation -> arguments that are fp32 whatever the variant's element type. Those with fp32 elements are the
# plain operation, so they are left out.
FP32_ARGUMENTS = {
    **dict.fromkeys(("rotary-t32", "rotary-interleaved-t32"), ("cosines", "sines")),
    **dict.fromkeys(("norm-fwd-w32", "norm-bwd-w32"), ("weight", "bias")),
    **dict.fromkeys(
        ("norm-fwd-r32", "norm-bwd-r32"),
        ("weight", "bias", "residual", "z", "dz", "dresidual"),
    ),
}

# GPU targets with matrix units for FP8, by their start, and the format of those.
FP8_FORMATS = {"gfx942": "fp8e4b8", "gfx950": "fp8e4nv", "gfx12": "fp8e4nv", "sm_90": "fp8e4nv"}

# What a kernel does to the scores: nothing, one thing, or all that the call asks for, which `any` finds out when it
# runs. Such tests within the main loop keep it from running loads under the arithmetic, so each single thing has
# kernels of its own in the types that training uses.
KINDS = ("plain", "alibi", "dropout", "softcap", "any")

# Of layers: rows of whole 16 bytes, or any. The latter take an address an element, for which registers are too few in
# larger blocks, and are too rare among norms for every one of the others.
LAYER_KINDS = ("plain", "uneven")
_UNEVEN_NORM_BLOCKS = (1024, 4096)

# The kinds of operations that do not come in all of them: they touch no scores, test for softcap when they run, or
# are too rarely called to deserve several.
_FEWER_KINDS = {
    "append": ("plain",),
    "combine": ("plain", "wide"),  # many parts of few rows
    **dict.fromkeys(("fp8-amax", "fp8-cast", "fp8-cast-v"), ("plain",)),
    "probabilities": ("any",),
    **dict.fromkeys(("decode", "decode-paged", "extend", "extend-paged", "fp8-fwd"), ("plain", "any")),
    **dict.fromkeys(BLOCKS, LAYER_KINDS),
}

# Operations with head-dim buckets of their own, as they wait for memory, which a masked column does not load, or are
# rarely called.
IN_PIECES = ("combine", "append", "fp8-amax", "fp8-cast", "fp8-cast-v")
BUCKETS = {
    **dict.fromkeys(("decode", "decode-paged", "extend", "extend-paged", "fp8-fwd"), (64, 128, 256)),
    "probabilities": (32, 64, 128, 256),
    **dict.fromkeys(IN_PIECES, (64,)),
    "combine": (128,),
}

# Argument name -> type. "T" stands for the variant's element type; what is not named here is an int32.
TYPES = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dmask"), "*T"),
    **dict.fromkeys(("k_new", "v_new", "q_turned", "cos", "sin"), "*T"),
    **dict.fromkeys(("x", "turned", "normal", "dx", "dy", "cosines", "sines", "logits", "dlogits"), "*T"),
    **dict.fromkeys(("weight", "bias", "residual", "z", "dz", "dresidual"), "*T"),
    "y": "*u8",
    **dict.fromkeys(("amax", "descale"), "*fp32"),
    **dict.fromkeys(("lse", "delta", "alibi_slopes", "partial", "partial_lse"), "*fp32"),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "*fp32"),
    **dict.fromkeys(("mean", "rstd", "dweight", "loss", "z_loss", "dloss"), "*fp32"),
    **dict.fromkeys(("cu_seqlens", "offsets"), "*i32"),
    "labels": "*i64",
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"), "*i32"),
    **dict.fromkeys(("cache_batch_idx", "rotary_seqlens"), "*i32"),
    "rng_state": "*i64",
    **dict.fromkeys(("scale", "softcap", "p_dropout", "page_inverse", "limit"), "fp32"),
    **dict.fromkeys(("sign", "eps", "shift", "smoothing", "square_scale"), "fp32"),
}

# Pointers whose rows the kernels read in 16-byte pieces. The caller guarantees their alignment.
ALIGNED = (
    *("q", "k", "v", "out", "dout", "dq", "dk", "dv", "lse", "delta"),
    *("k_new", "v_new", "q_turned", "partial", "x", "y"),
    *("turned", "cosines", "sines", "normal", "z", "dx", "dy", "dz"),
    *("residual", "dresidual", "weight", "dweight", "bias", "logits", "dlogits"),
)


class Variant(NamedTuple):
    """One compiled kernel: masks, windows, lengths and head counts are run-time arguments of all of them.

    block_d: head dims up to this one are served. kind: one of `kinds`. Of layers: the block, and one of LAYER_KINDS.
    """

    op: str
    dtype: str
    block_d: int
    kind: str

    @property
    def name(self) -> str:
        """Unique among variants: "fwd-bf16-d128", "bwd-dq-fp16-d64-softcap"."""
        shown = "" if self.kind == kinds(self.op, self.dtype)[0] else f"-{self.kind}"
        return f"{self.op}-{self.dtype}-d{self.block_d}{shown}"


def bucket(head_dim: int, op: str = "fwd") -> int:
    """The smallest head-dim bucket of an operation that holds head_dim. Raises ValueError above 256."""
    if op in IN_PIECES:
        return BUCKETS[op][0]
    for block_d in BUCKETS.get(op, HEAD_DIMS):
        if head_dim <= block_d:
            return block_d
    raise ValueError(f"head_dim {head_dim} is larger than {HEAD_DIMS[-1]}, the largest supported")


def kinds(op: str, dtype: str) -> tuple[str, ...]:
    """The kinds in which an operation exists ahead of time."""
    return _FEWER_KINDS.get(op) or (("plain", "any") if dtype == "fp32" or op.startswith("fwd-paged") else KINDS)


def blocks(op: str, kind: str) -> tuple[int, ...]:
    """The blocks that a layer's operation is compiled for, ascending."""
    return _UNEVEN_NORM_BLOCKS if kind == "uneven" and op.startswith("norm") else BLOCKS[op]


def serving(op: str, dtype: str, kind: str) -> str:
    """The kind of kernel that serves a call of a kind: its own, or the last, which does all that there is to do."""
    there = kinds(op, dtype)
    return kind if kind in there else there[-1]


def fp8_format(target: str) -> str | None:
    """The FP8 format of a target's matrix units, None where it has none."""
    return next((name for start, name in FP8_FORMATS.items() if target.startswith(start)), None)


def dtypes(op: str, target: str) -> tuple[str, ...]:
    """The element types in which an operation exists ahead of time for a target."""
    small = fp8_format(target)
    if op in ("decode", "decode-paged", "extend", "extend-paged", "append", "fp8-cast-v") and small is not None:
        return (*DTYPES, small)
    if op in FP32_ARGUMENTS or op == "fwd-paged-whole":
        return tuple(dtype for dtype in DTYPES if dtype != "fp32")
    if not op.startswith("fp8-"):
        return DTYPES
    if small is None:
        return ()
    return (small,) if op == "fp8-fwd" else DTYPES


def table(target: str) -> tuple[Variant, ...]:
    """Every ahead-of-time variant of a target, in a fixed order."""
    return tuple(
        Variant(op, dtype, block_d, kind)
        for op in OPS
        for dtype in dtypes(op, target)
        for block_d in BLOCKS.get(op) or BUCKETS.get(op, HEAD_DIMS)
        for kind in kinds(op, dtype)
        if op not in BLOCKS or block_d in blocks(op, kind)
    )


def argument_type(name: str, variant: Variant) -> str:
    """Triton's type of a variant's argument: "*bf16", "i32", "fp32"."""
    dtype = "fp32" if name in FP32_ARGUMENTS.get(variant.op, ()) else variant.dtype
    return TYPES.get(name, "i32").replace("T", dtype)


def launch_letter(type_: str) -> str:
    """The launcher's letter for an argument type: P pointer, i int32, f float32."""
    return "P" if type_.startswith("*") else {"i32": "i", "fp32": "f"}[type_]
