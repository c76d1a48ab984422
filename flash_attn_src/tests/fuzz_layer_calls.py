"""Valid calls of operations other than attention, and of modules: constructors, then forwards."""

from __future__ import annotations

from typing import Any

import flash_attention_amd as amd
import torch
from flash_attn import bert_padding
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.ops import rms_norm
from flash_attn.ops.triton import layer_norm
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.utils.generation import InferenceParams
from fuzz_tensors import DEVICE, flags, floats, ints


def _amd(**more: Any) -> dict[str, Any]:
    return {"q": floats(2, 3, 4, 8), "k": floats(2, 5, 2, 8), "v": floats(2, 5, 2, 8), **more}


def _norm(**more: Any) -> dict[str, Any]:
    return {
        "x": floats(3, 8), "weight": floats(8), "bias": floats(8), "residual": floats(3, 8), "x1": floats(3, 8),
        "weight1": floats(8), "bias1": floats(8), "eps": 1e-5, "dropout_p": 0.1, "rowscale": floats(3),
        "prenorm": False, **more,
    }  # fmt: skip


def _reference() -> dict[str, Any]:
    return _norm(zero_centered_weight=False, dropout_mask=flags(3, 8), dropout_mask1=flags(3, 8), upcast=False)


def _inner(**more: Any) -> dict[str, Any]:
    return {"causal": False, "softmax_scale": 0.3, "attention_dropout": 0.1, **more}


def _flash_inner() -> dict[str, Any]:
    return _inner(window_size=(-1, -1), alibi_slopes=floats(4).abs(), deterministic=False)


def _mha(**options: Any) -> MHA:
    return MHA(32, 4, device=DEVICE, **options)


def _params() -> InferenceParams:
    return InferenceParams(max_seqlen=9, max_batch_size=2)


PADDING = {
    "index_first_axis": (
        bert_padding.index_first_axis,
        lambda: {"x": floats(5, 2), "indices": ints(4, 0, 2, dtype=torch.int64)},
    ),
    "index_put_first_axis": (
        bert_padding.index_put_first_axis,
        lambda: {"values": floats(3, 2), "indices": ints(4, 0, 2, dtype=torch.int64), "first_axis_dim": 6},
    ),
    "index_first_axis_residual": (
        bert_padding.index_first_axis_residual,
        lambda: {"x": floats(5, 2), "indices": ints(4, 0, 2, dtype=torch.int64)},
    ),
    "unpad_input": (
        bert_padding.unpad_input,
        lambda: {
            "hidden_states": floats(2, 3, 4), "attention_mask": ints(1, 1, 0, 1, 0, 0).view(2, 3),
            "unused_mask": ints(0, 0, 1, 0, 1, 0).view(2, 3),
        },
    ),
    "unpad_input_for_concatenated_sequences": (
        bert_padding.unpad_input_for_concatenated_sequences,
        lambda: {
            "hidden_states": floats(2, 4, 3), "attention_mask_in_length": ints(2, 1, 0, 0, 4, 0, 0, 0).view(2, 4)
        },
    ),
    "pad_input": (
        bert_padding.pad_input,
        lambda: {"hidden_states": floats(3, 4), "indices": ints(0, 1, 3, dtype=torch.int64), "batch": 2, "seqlen": 3},
    ),
}  # fmt: skip
NORMS = {
    "layer_norm_linear_fn": (
        layer_norm.layer_norm_linear_fn,
        lambda: {
            "x": floats(3, 8), "norm_weight": floats(8), "norm_bias": floats(8), "linear_weight": floats(5, 8),
            "linear_bias": floats(5), "residual": floats(3, 8), "eps": 1e-5, "prenorm": False,
            "residual_in_fp32": False, "is_rms_norm": False,
        },
    ),
    "layer_norm_ref": (layer_norm.layer_norm_ref, _reference),
    "rms_norm_ref": (layer_norm.rms_norm_ref, _reference),
    "rms_norm": (rms_norm.rms_norm, lambda: {"x": floats(3, 8), "weight": floats(8), "epsilon": 1e-5}),
    "dropout_add_rms_norm": (
        rms_norm.dropout_add_rms_norm,
        lambda: {
            "x0": floats(3, 8), "residual": floats(3, 8), "weight": floats(8), "bias": floats(8), "dropout_p": 0.1,
            "epsilon": 1e-5, "rowscale": floats(3), "layerscale": floats(8), "prenorm": False,
            "residual_in_fp32": False, "return_dropout_mask": False,
        },
    ),
    "dropout_add_rms_norm_subset": (
        rms_norm.dropout_add_rms_norm_subset,
        lambda: {
            "x0": floats(3, 8), "residual": floats(3, 8), "weight": floats(8), "bias": floats(8), "dropout_p": 0.1,
            "epsilon": 1e-5, "layerscale": floats(8), "x0_subset": torch.tensor([1, 2, 3], device=DEVICE),
            "out_subset": torch.tensor([1, 2, 3], device=DEVICE), "rowscale_const": 1.0, "out_numrows": 3,
            "prenorm": False, "residual_in_fp32": False, "return_dropout_mask": False,
        },
    ),
    "dropout_add_rms_norm_parallel_residual": (
        rms_norm.dropout_add_rms_norm_parallel_residual,
        lambda: {
            "x0": floats(3, 8), "x1": floats(3, 8), "residual": floats(3, 8), "weight0": floats(8),
            "bias0": floats(8), "weight1": floats(8), "bias1": floats(8), "dropout_p": 0.1, "epsilon": 1e-5,
            "prenorm": False, "residual_in_fp32": False, "return_dropout_mask": False,
        },
    ),
    "RMSNorm": (
        layer_norm.RMSNorm,
        lambda: {"hidden_size": 8, "eps": 1e-5, "dropout_p": 0.1, "zero_centered_weight": False},
    ),
    "RMSNorm.forward": (
        layer_norm.RMSNorm(8, device=DEVICE).forward,
        lambda: {"x": floats(3, 8), "residual": floats(3, 8), "prenorm": False, "residual_in_fp32": False},
    ),
    "ops.rms_norm.RMSNorm": (rms_norm.RMSNorm, lambda: {"hidden_size": 8, "eps": 1e-5}),
    "ops.rms_norm.RMSNorm.forward": (rms_norm.RMSNorm(8, device=DEVICE).forward, lambda: {"x": floats(3, 8)}),
    "DropoutAddRMSNorm": (
        rms_norm.DropoutAddRMSNorm,
        lambda: {"hidden_size": 8, "prenorm": False, "p": 0.1, "eps": 1e-5, "residual_in_fp32": False},
    ),
    "DropoutAddRMSNorm.forward": (
        rms_norm.DropoutAddRMSNorm(8, device=DEVICE).forward,
        lambda: {"x0": floats(3, 8), "residual": floats(3, 8)},
    ),
}  # fmt: skip
LAYERS = {
    "apply_rotary": (
        apply_rotary,
        lambda: {
            "x": floats(2, 3, 4, 8), "cos": floats(7, 2), "sin": floats(7, 2), "seqlen_offsets": 4,
            "interleaved": False, "inplace": False, "conjugate": False,
        },
    ),
    "apply_rotary, varlen": (
        apply_rotary,
        lambda: {
            "x": floats(6, 4, 8), "cos": floats(7, 2), "sin": floats(7, 2), "seqlen_offsets": ints(1, 4),
            "cu_seqlens": ints(0, 3, 6), "max_seqlen": 3,
        },
    ),
    "RotaryEmbedding": (
        RotaryEmbedding, lambda: {"dim": 4, "base": 10000.0, "interleaved": False, "scale_base": 512.0}
    ),
    "RotaryEmbedding.forward": (
        RotaryEmbedding(4, device=DEVICE).forward,
        lambda: {"qkv": floats(2, 3, 6, 8), "seqlen_offset": 4, "max_seqlen": 9, "num_heads_q": 2},
    ),
    "RotaryEmbedding.forward, kv": (
        RotaryEmbedding(4, device=DEVICE).forward,
        lambda: {
            "qkv": floats(2, 3, 4, 8), "kv": floats(2, 3, 2, 2, 8), "seqlen_offset": ints(4, 2), "max_seqlen": 9
        },
    ),
    "CrossEntropyLoss": (
        CrossEntropyLoss,
        lambda: {
            "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.1, "logit_scale": 1.0,
            "lse_square_scale": 0.0, "inplace_backward": False, "process_group": None, "return_z_loss": False,
        },
    ),
    "CrossEntropyLoss.forward": (
        CrossEntropyLoss().forward,
        lambda: {
            "input": floats(3, 7), "target": ints(6, 0, 2, dtype=torch.int64), "precomputed_lse": floats(3)
        },
    ),
}  # fmt: skip
ATTENTION = {
    "amd.flash_attn_func": (
        amd.flash_attn_func, lambda: _amd(dropout_p=0.1, causal=False, return_attn_probs=False)
    ),
    "amd.FlashAttention": (amd.FlashAttention, lambda: {"dropout": 0.1, "causal": False}),
    "amd.FlashAttention.forward": (amd.FlashAttention().forward, lambda: _amd(mask=flags(2, 5))),
    "amd.FlashAttentionInterface.apply": (
        amd.FlashAttentionInterface.apply, lambda: _amd(dropout_p=0.1, causal=False)
    ),
    "get_alibi_slopes": (get_alibi_slopes, lambda: {"nheads": 6}),
    "FlashSelfAttention": (FlashSelfAttention, _flash_inner),
    "FlashSelfAttention.forward": (
        FlashSelfAttention().forward,
        lambda: {"qkv": floats(6, 3, 4, 8), "causal": False, "cu_seqlens": ints(0, 3, 6), "max_seqlen": 3},
    ),
    "FlashCrossAttention": (FlashCrossAttention, _flash_inner),
    "FlashCrossAttention.forward": (
        FlashCrossAttention().forward,
        lambda: {
            "q": floats(6, 4, 8), "kv": floats(9, 2, 2, 8), "causal": False, "cu_seqlens": ints(0, 3, 6),
            "max_seqlen": 3, "cu_seqlens_k": ints(0, 5, 9), "max_seqlen_k": 5,
        },
    ),
    "SelfAttention": (SelfAttention, _inner),
    "SelfAttention.forward": (
        SelfAttention().forward,
        lambda: {"qkv": floats(2, 3, 3, 4, 8), "causal": False, "key_padding_mask": flags(2, 3)},
    ),
    "CrossAttention": (CrossAttention, _inner),
    "CrossAttention.forward": (
        CrossAttention().forward,
        lambda: {
            "q": floats(2, 3, 4, 8), "kv": floats(2, 5, 2, 2, 8), "causal": False, "key_padding_mask": flags(2, 5)
        },
    ),
    "MHA": (
        MHA,
        lambda: {
            "embed_dim": 32, "num_heads": 4, "num_heads_kv": 2, "cross_attn": False, "qkv_proj_bias": True,
            "out_proj_bias": True, "dropout": 0.1, "softmax_scale": 0.3, "causal": False, "layer_idx": 0,
            "dwconv": False, "rotary_emb_dim": 4, "rotary_emb_base": 10000.0, "rotary_emb_scale_base": 512.0,
            "rotary_emb_interleaved": False, "use_alibi": False, "window_size": (-1, -1), "fused_bias_fc": False,
            "use_flash_attn": True, "return_residual": False, "checkpointing": False,
        },
    ),
    "MHA.forward": (_mha().forward, lambda: {"x": floats(2, 3, 32), "key_padding_mask": flags(2, 3)}),
    "MHA.forward, cross": (
        _mha(cross_attn=True, use_flash_attn=True).forward,
        lambda: {"x": floats(2, 3, 32), "x_kv": floats(2, 5, 32), "mixer_subset": ints(0, 2, dtype=torch.int64)},
    ),
    "MHA.forward, varlen": (
        _mha(use_flash_attn=True).forward,
        lambda: {"x": floats(6, 32), "cu_seqlens": ints(0, 3, 6), "max_seqlen": 3},
    ),
    "MHA.forward, generation": (
        _mha(use_flash_attn=True, layer_idx=0, causal=True).forward,
        lambda: {"x": floats(2, 3, 32), "inference_params": _params()},
    ),
    "MHA.allocate_inference_cache": (
        _mha().allocate_inference_cache, lambda: {"batch_size": 2, "max_seqlen": 9, "dtype": torch.float16}
    ),
}  # fmt: skip
CALLS = PADDING | NORMS | LAYERS | ATTENTION
# What errors call an argument that is handed on: the name that the function behind has for it.
NAMES = {
    "input": "logits", "target": "labels", "seqlen_offset": "seqlen_offsets", "epsilon": "eps", "x0": "x",
    "weight0": "weight", "bias0": "bias", "norm_weight": "weight", "norm_bias": "bias",
}  # fmt: skip
_ROWS = ("one row more", "one column more")
_ANY_TYPE = ("complex", "quarter precision", "int", "bool", "another float")
# Functions and their argument -> changes that make another right call.
_RIGHT: dict[tuple[tuple[str, ...], str], tuple[str, ...]] = {
    (("index_first_axis", "index_first_axis_residual"), "x"): (*_ROWS, *_ANY_TYPE),
    (("index_first_axis", "index_first_axis_residual"), "indices"): ("one element more", "every second"),
    (("index_put_first_axis",), "values"): ("one column more", *_ANY_TYPE),
    (("index_put_first_axis", "pad_input"), "indices"): ("every second",),
    (("unpad_input", "unpad_input_for_concatenated_sequences", "pad_input"), "hidden_states"): (
        "one column more", *_ANY_TYPE
    ),
    (("unpad_input",), "attention_mask"): ("float", "int16", "every second"),
    (("unpad_input",), "unused_mask"): ("float", "int16", "every second"),
    (("unpad_input_for_concatenated_sequences",), "attention_mask_in_length"): ("int16", "every second"),
    (("rms_norm", "ops.rms_norm.RMSNorm.forward"), "x"): ("one dimension more", "one row more"),
    (("dropout_add_rms_norm_subset",), "x0"): ("one dimension more", "one row more"),
    (("dropout_add_rms_norm_subset",), "x0_subset"): ("one dimension more", "every second"),
    (("dropout_add_rms_norm_subset",), "out_subset"): ("one dimension more", "every second"),
    (("dropout_add_rms_norm_subset",), "residual"): ("one dimension more",),
    (("dropout_add_rms_norm_subset",), "rowscale_const"): ("negative",),
    (("layer_norm_fn", "rms_norm_fn", "layer_norm_ref", "rms_norm_ref", "dropout_add_rms_norm"), "rowscale"): (
        "one dimension more",
    ),
    (("apply_rotary", "apply_rotary, varlen"), "x"): _ROWS,
    (("apply_rotary, varlen",), "seqlen_offsets"): ("every second",),
    (("RotaryEmbedding.forward",), "qkv"): (*_ROWS, "another float", "another device"),  # its tables follow qkv
    (("RotaryEmbedding.forward, kv",), "qkv"): ("one column more",),
    (("RotaryEmbedding.forward, kv",), "kv"): ("one column more",),
    (("RotaryEmbedding.forward, kv",), "seqlen_offset"): ("negative", "every second"),
    (("CrossEntropyLoss",), "ignore_index"): ("negative",),
    (("CrossEntropyLoss.forward",), "input"): ("one column more", "another float"),
    (("CrossEntropyLoss.forward",), "target"): ("int16", "every second"),
    # Heads and device are known in the forward.
    (("FlashSelfAttention", "FlashCrossAttention"), "alibi_slopes"): (*_ROWS, "another float", "another device"),
    (("FlashSelfAttention.forward", "SelfAttention.forward"), "qkv"): (*_ROWS, "another float"),
    (("FlashSelfAttention.forward", "MHA.forward, varlen"), "cu_seqlens"): ("one element more",),
    (("FlashCrossAttention.forward",), "q"): ("one row more",),
    (("FlashCrossAttention.forward",), "kv"): ("one row more",),
    (("MHA.forward, varlen",), "x"): ("one row more",),
    (("MHA.forward, cross",), "mixer_subset"): (
        "a list", "numpy", "another device", "one element more", "every second", "negative"
    ),
}  # fmt: skip
# Invalid calls for which PyTorch raises the error: its own layers with wrong tensors, operations that it lacks for a
# dtype.
_TORCH_SAYS = {
    *((function, argument, change) for function in CALLS if function.startswith("MHA.forward")
      for argument in ("x", "x_kv") for change in ("another float", "another device")),
    *(("dropout_add_rms_norm_subset", argument, change) for argument in ("x0_subset", "out_subset")
      for change in ("negative", "huge", "decreasing")),
    ("index_put_first_axis", "values", "quarter precision"),
    ("pad_input", "hidden_states", "quarter precision"),
}  # fmt: skip
# Invalid values inside of a tensor. PyTorch asserts on the GPU, after which the process cannot use the GPU.
_ASSERTED = {(function, "x", "one dimension more") for function in ("index_first_axis", "index_first_axis_residual")}
LEFT_OUT = _TORCH_SAYS | (_ASSERTED if DEVICE == "cuda" else set()) | {
    (function, argument, change)
    for (functions, argument), changes in _RIGHT.items() for function in functions for change in changes
} | {(function, None, "another float") for function in NORMS}  # fmt: skip
