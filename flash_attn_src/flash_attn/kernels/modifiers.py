"""The options of a call as data: those that have kernels of their own, and who honours them. Standard library only.

The manifest of a store has the doors that choose between its kernels, so the Rust crate reads what Python reads.
"""

from __future__ import annotations

from typing import NamedTuple


class Modifier(NamedTuple):
    """A score modifier. option: its name in `flash_attn.call.options`. kind: of the kernels that have it alone.

    flag: of a modifier with a number for each head, which takes the slot `alibi_slopes`; 0 for other modifiers. A bit
    that no number of `flags` has; kernels and manifests know it by its name in `BITS`. Its formula and the
    derivative of its formula are in `scores`.
    """

    option: str
    kind: str
    flag: int = 0


MODIFIERS = (
    Modifier("alibi_slopes", "alibi", 1 << 4),
    Modifier("dropout_p", "dropout"),
    Modifier("softcap", "softcap"),
)
# Those of which a call may have one: they share a slot.
PER_HEAD = tuple(row for row in MODIFIERS if row.flag)
BITS = {f"HAS_{row.option.upper()}": row.flag for row in PER_HEAD}


class Permissions(NamedTuple):
    """who: for messages. serves: the fields of a call, and of its options, that it honours."""

    who: str
    serves: frozenset[str]


_MASK = "softmax_scale causal window_size"
_RESULT = "deterministic return_softmax out"
_PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_PAGES = "seqused_k leftpad_k block_table"
_CACHE = (
    "k v cache_seqlens cache_batch_idx block_table rotary_cos rotary_sin rotary_interleaved out num_splits sm_margin"
)
_FLASH_3 = "cu_seqlens_q max_seqlen_q cu_seqlens_k_new rotary_seqlens cache_leftpad max_seqlen_k"


def _row(who: str, *serves: str) -> Permissions:
    return Permissions(who, frozenset(" ".join(serves).split()))


# An option, or another field of a call, that a row does not name is refused there.
DOORS = {
    "triton": _row(
        "this project's kernels",
        *(_MASK, _RESULT, _PACKED, _PAGES),
        "softcap dropout_p alibi_slopes s_aux attn_bias mask",
    ),
    "triton-bias": _row("a kernel with attn_bias", _MASK, _RESULT, "softcap s_aux attn_bias"),
    "triton-mask": _row("a kernel with a mask", _MASK, _RESULT, "softcap dropout_p alibi_slopes s_aux mask"),
    "probabilities": _row(
        "return_attn_probs", _MASK, _RESULT, _PACKED, "seqused_k leftpad_k softcap dropout_p alibi_slopes s_aux"
    ),
    "torch": _row(
        "the path for a CPU",
        *(_MASK, _RESULT, _PACKED, _PAGES),
        "softcap dropout_p alibi_slopes s_aux attn_bias mask",
    ),
    "ck-fwd": _row(
        "Composable Kernel", _MASK, _RESULT, _PACKED, "seqused_k block_table softcap dropout_p alibi_slopes"
    ),
    "ck-bwd": _row("Composable Kernel", _MASK, _RESULT, _PACKED, "dropout_p alibi_slopes s_aux"),
    "ck-cache": _row("Composable Kernel", _MASK, _CACHE, "max_seqlen_q max_seqlen_k softcap alibi_slopes"),
    "asm-fwd": _row("AMD's assembly", _MASK, _RESULT, _PACKED),
    # softmax_lse, which a backward gets, holds the sinks.
    "asm-bwd": _row("AMD's assembly", _MASK, "return_softmax out s_aux", _PACKED),
    # The calls for which the table of the fastest kernels was measured.
    "measured-fwd": _row("the table of the fastest kernels", _MASK, _RESULT, _PACKED),
    "measured-bwd": _row("the table of the fastest kernels", _MASK, _RESULT, _PACKED, "s_aux"),
    "split-kv": _row("attention in splits of the keys", _MASK, _RESULT, _PACKED, _PAGES, "softcap alibi_slopes s_aux"),
    "cache": _row(
        "attention over a cache", _MASK, _CACHE, _FLASH_3, "softcap alibi_slopes s_aux attention_chunk descales qv"
    ),
    "cache-whole": _row("a kernel of whole sequences", _MASK, _CACHE, _FLASH_3, "softcap alibi_slopes s_aux"),
    "fp8": _row(
        "attention in FP8", _MASK, _PACKED, "deterministic return_softmax descales softcap dropout_p alibi_slopes"
    ),
    "int8": _row("attention with INT8 queries and keys", _MASK, "deterministic out"),
    "second-derivative": _row(
        "attention by PyTorch's operations", _MASK, _RESULT, "softcap alibi_slopes s_aux attn_bias mask"
    ),
    "upstream-fwd": _row("upstream's operator", _MASK, _PACKED, "return_softmax out block_table softcap alibi_slopes"),
    "upstream-bwd": _row("upstream's operator", _MASK, _RESULT, _PACKED, "softcap dropout_p alibi_slopes s_aux"),
}
