"""What flash_rocm does not serve, refused by name before any work."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

NAME = "flash_rocm"
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_STEPS = ("EXTEND", "MIXED", "DECODE", "IDLE")


def refuse_runner(runner: Any) -> None:
    """Raises NotImplementedError for a model, a cache or a server that no kernel serves."""
    parallel = get_parallel()
    features = {
        "latent attention (MLA)": runner.use_mla_backend,
        "an encoder-decoder model": runner.model_config.is_encoder_decoder,
        "speculative decoding": runner.spec_algorithm.is_speculative(),
        "attention in chunks of attention_chunk_size": runner.attention_chunk_size is not None,
        "sliding windows that keep the prompt": runner.prefill_aware_swa,
        "--enable-unified-memory": runner.kv_index_translator.is_translating,
        "--dcp-size above 1": parallel.attn_dcp_size > 1,
        "--attn-cp-size above 1": parallel.attn_cp_size > 1,
    }
    for name, is_found in features.items():
        if is_found:
            raise NotImplementedError(f"{NAME} does not serve {name}: use --attention-backend triton")
    if runner.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"--dtype: got {runner.dtype}, wanted float16 or bfloat16 for {NAME}")
    if runner.kv_cache_dtype not in (runner.dtype, *FP8):
        raise NotImplementedError(
            f"--kv-cache-dtype: got {runner.kv_cache_dtype}, wanted auto for {runner.dtype}, or fp8_e4m3, for {NAME}"
        )


def refuse_step(mode: Any, *, in_graph: bool) -> None:
    """Raises NotImplementedError for a kind of step. in_graph: a graph is captured of the whole step or replayed."""
    if mode.name not in _STEPS:
        raise NotImplementedError(f"forward_mode: got {mode.name}, wanted one of {', '.join(_STEPS)} for {NAME}")
    if in_graph and not mode.is_decode_or_idle():
        raise NotImplementedError(
            f"forward_mode: got {mode.name} in a full graph, wanted DECODE for {NAME}: use "
            "--cuda-graph-backend-prefill=breakable"
        )


def refuse_layer(layer: Any) -> None:
    """Raises NotImplementedError for a layer's kind of attention."""
    expected = {"is_cross_attention": False, "pos_encoding_mode": "NONE"}
    if layer.logit_cap:
        expected["logit_capping_method"] = "tanh"
    for name, value in expected.items():
        if getattr(layer, name) != value:
            raise NotImplementedError(f"{name}: got {getattr(layer, name)!r}, wanted {value!r} for {NAME}")
    if layer.attn_type.value != "decoder":
        raise NotImplementedError(f"attn_type: got {layer.attn_type.value}, wanted decoder for {NAME}")
    if layer.xai_temperature_len > 0:
        raise NotImplementedError(f"xai_temperature_len: got {layer.xai_temperature_len}, wanted -1 for {NAME}")


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raises NotImplementedError for an argument that a model gives to its attention and that changes the result."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: got {type(value).__name__}, wanted None for {NAME}")
