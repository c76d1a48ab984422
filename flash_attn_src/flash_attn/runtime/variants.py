"""Which kernels exist ahead of time, what they are called, and how their arguments are typed.

Data that two readers share: the compile stage, which builds every variant of `table()`, and the run-time
lookup, which asks for one by name. Standard library only: the compile stage has no torch.
"""

from __future__ import annotations

from typing import NamedTuple

DTYPES = ("fp16", "bf16", "fp32")
HEAD_DIMS = (32, 64, 128, 256)

# Operation -> the kernel's module below flash_attn.kernels, and its function.
OPS = {
    "fwd": ("forward", "attn_fwd"),
    "fwd-paged": ("forward", "attn_fwd"),
    "probabilities": ("probabilities", "attn_probabilities"),
    "bwd-delta": ("backward", "attn_bwd_delta"),
    "bwd-dkdv": ("backward", "attn_bwd_dkdv"),
    "bwd-dq": ("backward", "attn_bwd_dq"),
}

# What a kernel can do to the scores: nothing, ALiBi and dropout, or softcap besides. Each kind holds more values
# a score than the one before.
KINDS = ("plain", "extra", "softcap")

# Operations of one kind alone: they touch no scores, or are too rarely called to deserve several.
ONE_KIND = {"bwd-delta": "plain", "fwd-paged": "softcap", "probabilities": "softcap"}

# Argument name -> type. "T" stands for the variant's element type; what is not named here is an int32.
TYPES = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dmask"), "*T"),
    **dict.fromkeys(("lse", "delta", "alibi_slopes"), "*fp32"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table"), "*i32"),
    "rng_state": "*i64",
    **dict.fromkeys(("scale", "softcap", "p_dropout"), "fp32"),
}

# Pointers whose rows the kernels read in 16-byte pieces. The caller guarantees their alignment.
ALIGNED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "lse", "delta")


class Variant(NamedTuple):
    """One compiled kernel: masks, windows, lengths and head counts are run-time arguments of all of them.

    block_d: head dims up to this one are served. kind: one of KINDS.
    """

    op: str
    dtype: str
    block_d: int
    kind: str

    @property
    def name(self) -> str:
        """Unique among variants: "fwd-bf16-d128", "bwd-dq-fp16-d64-softcap"."""
        shown = "" if self.kind == ONE_KIND.get(self.op, "plain") else f"-{self.kind}"
        return f"{self.op}-{self.dtype}-d{self.block_d}{shown}"


def bucket(head_dim: int) -> int:
    """The smallest head-dim bucket that holds head_dim. Raises ValueError above 256."""
    for block_d in HEAD_DIMS:
        if head_dim <= block_d:
            return block_d
    raise ValueError(f"head_dim {head_dim} is larger than {HEAD_DIMS[-1]}, the largest supported")


def table() -> tuple[Variant, ...]:
    """Every ahead-of-time variant, in a fixed order."""
    return tuple(
        Variant(op, dtype, block_d, kind)
        for op in OPS
        for dtype in DTYPES
        for block_d in HEAD_DIMS
        for kind in ((ONE_KIND[op],) if op in ONE_KIND else KINDS)
    )


def argument_type(name: str, dtype: str) -> str:
    """Triton's type of a kernel argument: "*bf16", "i32", "fp32"."""
    return TYPES.get(name, "i32").replace("T", dtype)


def launch_letter(type_: str) -> str:
    """The launcher's letter for an argument type: P pointer, i int32, f float32."""
    return "P" if type_.startswith("*") else {"i32": "i", "fp32": "f"}[type_]
