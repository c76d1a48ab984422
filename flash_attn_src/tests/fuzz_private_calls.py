"""Valid calls of functions below the public ones that clients call: private functions and the extension's."""

from __future__ import annotations

from typing import Any

import flash_attn_2_cuda as extension
import torch
from flash_attn.attention import api_2_6
from flash_attn.attention import operators as custom_ops
from fuzz_tensors import DEVICE, floats, ints

LENGTHS = {"max_seqlen_q": 3, "max_seqlen_k": 5}


def _ends() -> dict[str, torch.Tensor]:
    return {"cu_seqlens_q": ints(0, 3, 6), "cu_seqlens_k": ints(0, 5, 9)}


def _inputs(varlen: bool) -> dict[str, torch.Tensor]:
    q, k = ((6,), (9,)) if varlen else ((2, 3), (2, 5))
    return {"q": floats(*q, 4, 8), "k": floats(*k, 2, 8), "v": floats(*k, 2, 8)}


def _gradients(varlen: bool, end: str = "") -> dict[str, torch.Tensor]:
    """The arguments of a backward, in order. `end`: the suffix of the extension's names for gradients."""
    inputs = _inputs(varlen)
    q = inputs["q"]
    return {
        "dout": torch.randn_like(q), **inputs, "out": torch.randn_like(q),
        "softmax_lse": floats(4, 6) if varlen else floats(2, 4, 3),
        **{f"d{name}{end}": torch.empty_like(x) for name, x in inputs.items()},
    }  # fmt: skip


def _state() -> torch.Tensor:
    return ints(5, 7, dtype=torch.int64)


def _options(release: str) -> dict[str, Any]:
    window = {"window_size": (-1, -1)} if release == "2.6" else {"window_size_left": -1, "window_size_right": -1}
    return {"dropout_p": 0.1, "softmax_scale": 0.3, "causal": False, **window, "softcap": 0.0,
            "alibi_slopes": floats(4).abs()}  # fmt: skip


def _extended(**more: Any) -> dict[str, Any]:
    """The options of an extension's function."""
    return {"p_dropout": 0.1, "softmax_scale": 0.3, **more, "is_causal": False, "window_size_left": -1,
            "window_size_right": -1, "softcap": 0.0}  # fmt: skip


def _forward(release: str) -> dict[str, Any]:
    return {**_inputs(False), **_options(release), "return_softmax": False}


def _varlen_forward(release: str) -> dict[str, Any]:
    newer = {} if release == "2.6" else {"zero_tensors": False}
    return {
        **_inputs(True), **_ends(), **LENGTHS, **_options(release), "return_softmax": False, "block_table": None,
        "leftpad_k": ints(1, 0), "seqused_k": ints(4, 4), **newer,
    }  # fmt: skip


def _paged_forward(release: str) -> dict[str, Any]:
    pages = {"k": floats(4, 16, 2, 8), "v": floats(4, 16, 2, 8), "block_table": ints(1, 3)[:, None]}
    return {**_varlen_forward(release), **pages, "dropout_p": 0.0}


def _backward(release: str) -> dict[str, Any]:
    return {**_gradients(False), **_options(release), "deterministic": False, "rng_state": _state()}


def _varlen_backward(release: str) -> dict[str, Any]:
    newer = {} if release == "2.6" else {"zero_tensors": False}
    return {**_gradients(True), **_ends(), **LENGTHS, **_options(release), "deterministic": False,
            "rng_state": _state(), **newer}  # fmt: skip


# Custom ops: torch's dispatcher refuses wrong types, and takes any int for a bool.
OPS = {
    "_flash_attn_forward": (custom_ops._flash_attn_forward, lambda: _forward("2.8")),
    "_flash_attn_varlen_forward": (custom_ops._flash_attn_varlen_forward, lambda: _varlen_forward("2.8")),
    "_flash_attn_varlen_forward, paged": (custom_ops._flash_attn_varlen_forward, lambda: _paged_forward("2.8")),
    "_flash_attn_backward": (custom_ops._flash_attn_backward, lambda: _backward("2.8")),
    "_flash_attn_varlen_backward": (custom_ops._flash_attn_varlen_backward, lambda: _varlen_backward("2.8")),
    "_wrapped_flash_attn_forward": (custom_ops._wrapped_flash_attn_forward, lambda: _forward("2.8")),
    "_wrapped_flash_attn_backward": (custom_ops._wrapped_flash_attn_backward, lambda: _backward("2.8")),
    "_wrapped_flash_attn_varlen_forward": (
        custom_ops._wrapped_flash_attn_varlen_forward, lambda: _varlen_forward("2.8")
    ),
    "_wrapped_flash_attn_varlen_backward": (
        custom_ops._wrapped_flash_attn_varlen_backward, lambda: _varlen_backward("2.8")
    ),
}  # fmt: skip
OF_2_6 = {
    "2.6 _flash_attn_forward": (api_2_6._flash_attn_forward, lambda: _forward("2.6")),
    "2.6 _flash_attn_varlen_forward": (api_2_6._flash_attn_varlen_forward, lambda: _varlen_forward("2.6")),
    "2.6 _flash_attn_varlen_forward, paged": (api_2_6._flash_attn_varlen_forward, lambda: _paged_forward("2.6")),
    "2.6 _flash_attn_backward": (api_2_6._flash_attn_backward, lambda: _backward("2.6")),
    "2.6 _flash_attn_varlen_backward": (api_2_6._flash_attn_varlen_backward, lambda: _varlen_backward("2.6")),
}
EXTENSION = {
    "fwd": (
        extension.fwd,
        lambda: {
            **_inputs(False), "out_": floats(2, 3, 4, 8), "alibi_slopes_": floats(4).abs(), **_extended(),
            "return_softmax": False, "gen_": torch.Generator(DEVICE),
        },
    ),
    "varlen_fwd": (
        extension.varlen_fwd,
        lambda: {
            **_inputs(True), "out_": floats(6, 4, 8), **_ends(), "seqused_k": ints(4, 4), "leftpad_k_": ints(1, 0),
            "block_table_": None, "alibi_slopes_": floats(4).abs(), **LENGTHS, **_extended(zero_tensors=False),
            "return_softmax": False, "gen_": torch.Generator(DEVICE),
        },
    ),
    "varlen_fwd, paged": (
        extension.varlen_fwd,
        lambda: {
            "q": floats(6, 4, 8), "k": floats(4, 16, 2, 8), "v": floats(4, 16, 2, 8), "out_": None, **_ends(),
            "seqused_k": None, "leftpad_k_": None, "block_table_": ints(1, 3)[:, None], "alibi_slopes_": None,
            **LENGTHS, **_extended(zero_tensors=False), "p_dropout": 0.0, "return_softmax": False,
        },
    ),
    "bwd": (
        extension.bwd,
        lambda: {
            **_gradients(False, "_"), "alibi_slopes_": floats(4).abs(), **_extended(), "deterministic": False,
            "gen_": torch.Generator(DEVICE), "rng_state": _state(),
        },
    ),
    "varlen_bwd": (
        extension.varlen_bwd,
        lambda: {
            **_gradients(True, "_"), **_ends(), "alibi_slopes_": floats(4).abs(), **LENGTHS,
            **_extended(zero_tensors=False), "deterministic": False, "gen_": torch.Generator(DEVICE),
            "rng_state": _state(),
        },
    ),
    "fwd_kvcache": (
        extension.fwd_kvcache,
        lambda: {
            "q": floats(2, 1, 4, 8), "kcache": floats(3, 9, 2, 8), "vcache": floats(3, 9, 2, 8),
            "k_": floats(2, 1, 2, 8), "v_": floats(2, 1, 2, 8), "seqlens_k_": ints(4, 5), "rotary_cos_": floats(9, 4),
            "rotary_sin_": floats(9, 4), "cache_batch_idx_": ints(2, 0), "leftpad_k_": ints(1, 0),
            "block_table_": None, "alibi_slopes_": floats(4).abs(), "out_": floats(2, 1, 4, 8), "softmax_scale": 0.3,
            "is_causal": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
            "is_rotary_interleaved": True, "num_splits": 0,
        },
    ),
    "fwd_kvcache, paged": (
        extension.fwd_kvcache,
        lambda: {
            "q": floats(2, 1, 4, 8), "kcache": floats(4, 16, 2, 8), "vcache": floats(4, 16, 2, 8), "k_": None,
            "v_": None, "seqlens_k_": ints(4, 5), "rotary_cos_": None, "rotary_sin_": None, "cache_batch_idx_": None,
            "leftpad_k_": None, "block_table_": ints(1, 3)[:, None], "alibi_slopes_": None, "out_": None,
            "softmax_scale": 0.3, "is_causal": False, "window_size_left": -1, "window_size_right": -1,
            "softcap": 0.0, "is_rotary_interleaved": True, "num_splits": 0,
        },
    ),
}  # fmt: skip
CALLS = OPS | OF_2_6 | EXTENSION
# What errors call an argument of the extension: the public function's name of it.
NAMES = {
    "p_dropout": "dropout_p", "is_causal": "causal", "return_softmax": "return_attn_probs", "kcache": "k_cache",
    "vcache": "v_cache", "seqlens_k_": "cache_seqlens", "leftpad_k_": "cache_leftpad",
    "is_rotary_interleaved": "rotary_interleaved", "window_size_left": "window_size",
    "window_size_right": "window_size",
}  # fmt: skip
_BOOLS = ("causal", "return_softmax", "deterministic", "zero_tensors")
# (function, argument, change), with None for any argument: changes that make another right call.
LEFT_OUT = {
    *((function, f"window_size_{side}", change) for function in CALLS for side in ("left", "right")
      for change in ("negative", "huge")),
    *((function, "rng_state", change) for function in CALLS for change in ("negative", "huge", "decreasing")),
    *((function, argument, "negative") for function in CALLS for argument in ("seqused_k", "seqlens_k_")),
    *((function, argument, "every second") for function in CALLS for argument in ("block_table", "block_table_")),
    # Pages say where the keys are, and seqused_k how many: cu_seqlens_k says neither.
    *((function, "cu_seqlens_k", change) for function in CALLS if "varlen_forward, paged" in function
      for change in ("huge", "decreasing")),
    # Rows outside every sequence, more pages.
    *((function, argument, "one row more") for function in CALLS for argument in ("q", "k", "v")
      if "varlen_f" in function),
    *((function, argument, change) for function in OPS for argument in _BOOLS for change in ("two", "nothing")),
}  # fmt: skip
