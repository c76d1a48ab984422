"""Attention modules that use flash_attn, compared with reference modules:

every projection, and generation step by step.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    _update_kv_cache,
    get_alibi_slopes,
)
from flash_attn.utils.generation import InferenceParams


def test_alibi_slopes() -> None:
    assert get_alibi_slopes(4) == [0.25, 0.0625, 0.015625, 0.00390625]
    six = get_alibi_slopes(6)
    assert six[:4] == get_alibi_slopes(4)
    assert six[4:] == [0.5, 0.125]
    assert all(math.isclose(a / b, 2.0) for a, b in zip(get_alibi_slopes(8), get_alibi_slopes(8)[1:], strict=False))


@pytest.mark.parametrize("scale", [None, 0.3, 0.0])
def test_inner_modules_agree(scale: float | None) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 3, 4, 8)
    q, kv = torch.randn(2, 7, 4, 8), torch.randn(2, 9, 2, 2, 8)
    for causal in (False, True):
        expected = SelfAttention(softmax_scale=scale)(qkv, causal=causal)
        assert_close("out", FlashSelfAttention(softmax_scale=scale)(qkv, causal=causal), expected)
        expected = CrossAttention(causal, scale)(q, kv)
        assert_close("out", FlashCrossAttention(causal, scale)(q, kv), expected)


def test_the_causal_mask_ends_at_the_last_key_that_is_not_padding() -> None:
    """Each sequence of a padded batch as if alone; without padding, as without a mask."""
    torch.manual_seed(6)
    q, kv = torch.randn(3, 3, 4, 8), torch.randn(3, 6, 2, 2, 8)
    lengths = torch.tensor([4, 6, 3])
    mask = torch.arange(6) < lengths[:, None]
    for kind in (mask, mask.int()):
        out = CrossAttention(causal=True)(q, kv, key_padding_mask=kind)
        for index, length in enumerate(lengths.tolist()):
            expected = FlashCrossAttention(causal=True)(q[index : index + 1], kv[index : index + 1, :length])
            assert_close("out", out[index : index + 1], expected)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_equal_a_padded_batch(causal: bool) -> None:
    torch.manual_seed(1)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    qkv = torch.randn(2, 5, 3, 2, 8)
    flat, indices, cu_seqlens, longest = unpad_input(qkv, mask)[:4]
    out = FlashSelfAttention(causal)(flat, cu_seqlens=cu_seqlens, max_seqlen=longest)
    expected = SelfAttention(causal)(qkv, key_padding_mask=mask.bool()) * mask[:, :, None, None]
    assert_close("out", pad_input(out, indices, 2, 5), expected)
    crossed = FlashCrossAttention(causal)(flat[:, 0], flat[:, 1:], None, cu_seqlens, longest, cu_seqlens, longest)
    assert_close("out", crossed, out)


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, grouped": {"causal": True, "num_heads_kv": 2},
    "rotary": {"causal": True, "rotary_emb_dim": 4},
    "rotary, grouped, interleaved": {"num_heads_kv": 1, "rotary_emb_dim": 8, "rotary_emb_interleaved": True},
    "xpos": {"causal": True, "rotary_emb_dim": 8, "rotary_emb_scale_base": 64},
    "convolution": {"causal": True, "dwconv": True},
    "convolution, grouped": {"dwconv": True, "num_heads_kv": 2},
    "cross": {"cross_attn": True},
    "checkpointing": {"checkpointing": True, "softmax_scale": 0.5},
    "no bias": {"qkv_proj_bias": False, "out_proj_bias": False},
}


@pytest.mark.parametrize("model", MODELS)
def test_flash_equals_plain(model: str) -> None:
    """The same parameters, outputs and gradients with and without flash_attn."""
    torch.manual_seed(2)
    plain = MHA(32, 4, **MODELS[model])
    flash = MHA(32, 4, **MODELS[model], use_flash_attn=True)
    flash.load_state_dict(plain.state_dict())
    x = torch.randn(2, 6, 32)
    call = {"x_kv": torch.randn(2, 9, 32), "mixer_subset": slice(0, 3)} if model == "cross" else {}
    expected, got = plain(x, **call), flash(x, **call)
    assert_close("out", got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    for (name, a), b in zip(flash.named_parameters(), plain.parameters(), strict=True):
        assert_close(name, a.grad, b.grad)


def test_options_of_flash_alone() -> None:
    torch.manual_seed(3)
    x = torch.randn(1, 12, 32)
    local = MHA(32, 4, causal=True, use_flash_attn=True, window_size=(3, 0))
    assert_close("out", local(x)[:, 8:], local(x[:, 5:])[:, 3:])
    biased = MHA(32, 4, use_flash_attn=True, use_alibi=True)
    assert "inner_attn.alibi_slopes" not in biased.state_dict()
    plain = MHA(32, 4, use_flash_attn=True)
    plain.load_state_dict(biased.state_dict())
    assert not torch.allclose(plain(x), biased(x))
    out, residual = MHA(32, 4, return_residual=True)(x)
    assert out.shape == x.shape
    assert residual is x


def test_packed_rows_through_the_projections() -> None:
    torch.manual_seed(4)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    x = torch.randn(2, 4, 32)
    flat, indices, cu_seqlens, longest = unpad_input(x, mask)[:4]
    for heads_kv in (4, 2):
        flash = MHA(32, 4, num_heads_kv=heads_kv, use_flash_attn=True)
        plain = MHA(32, 4, num_heads_kv=heads_kv)
        plain.load_state_dict(flash.state_dict())
        out = flash(flat, cu_seqlens=cu_seqlens, max_seqlen=longest)
        expected = plain(x, key_padding_mask=mask.bool())
        assert_close("out", out, expected.flatten(0, 1)[indices])


@pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])
@pytest.mark.parametrize("model", ["causal, grouped", "rotary", "xpos"])
def test_generation_equals_the_whole(model: str, flash: bool) -> None:
    torch.manual_seed(5)
    module = MHA(32, 4, **{**MODELS[model], "causal": True}, use_flash_attn=flash, layer_idx=3).eval()
    x = torch.randn(2, 8, 32)
    params = InferenceParams(max_seqlen=16, max_batch_size=4)
    with torch.no_grad():
        expected = module(x)
        parts = []
        for step in (x[:, :5], x[:, 5:6], x[:, 6:8]):
            parts.append(module(step, inference_params=params))
            params.seqlen_offset += step.shape[1]
        got = torch.cat(parts, 1)
        if model != "xpos":  # its scales are relative to the middle of the table, which has another length here
            assert_close("out", got, expected)
        assert params.key_value_memory_dict[3].shape == (4, 16, 2, module.num_heads_kv, 8)
        if not flash:
            return
        params.lengths_per_sample = torch.full((2,), 8, dtype=torch.int32)
        one = torch.randn(2, 1, 32)
        got = module(one, inference_params=params)
        if model != "xpos":
            assert_close("out", got, module(torch.cat((x, one), 1))[:, -1:])


@pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])
def test_generation_of_a_part_of_the_batch(flash: bool) -> None:
    """Steps of half the sequences each, in the rows of one cache from batch_size_offset on."""
    torch.manual_seed(7)
    module = MHA(32, 4, causal=True, rotary_emb_dim=8, use_flash_attn=flash, layer_idx=0).eval()
    x, one = torch.randn(4, 5, 32), torch.randn(4, 1, 32)
    params = InferenceParams(max_seqlen=8, max_batch_size=4)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        parts = []
        for params.batch_size_offset in (2, 0):
            parts.insert(0, module(tokens[params.batch_size_offset :][:2], inference_params=params))
        return torch.cat(parts)

    with torch.no_grad():
        assert_close("out", step(x), module(x))
        params.seqlen_offset = 5
        assert_close("out", step(one), module(torch.cat((x, one), 1))[:, -1:])
        if flash:
            params.lengths_per_sample = torch.tensor([5, 2, 3, 4], dtype=torch.int32)
            got = step(one)
            for index, length in enumerate(params.lengths_per_sample.tolist()):
                alone = torch.cat((x[index, :length], one[index]))[None]
                assert_close("out", got[index], module(alone)[0, -1:])
        params.batch_size_offset = 3
        with pytest.raises(ValueError, match=r"x: got shape \(2, 1, 32\), wanted at most 1 sequences of 3 tokens"):
            module(one[:2], inference_params=params)
        params.batch_size_offset = 0
        with pytest.raises(ValueError, match=r"x: got shape \(4, 4, 32\), wanted at most 4 sequences of 3 tokens"):
            module(x[:, :4], inference_params=params)
        params.batch_size_offset = -1
        with pytest.raises(ValueError, match="batch_size_offset: got -1"):
            module(one, inference_params=params)
    params.reset(6, 3)
    assert (params.max_seqlen, params.max_batch_size, params.seqlen_offset) == (6, 3, 0)
    assert params.lengths_per_sample is None or not params.lengths_per_sample.any()
    assert list(params.key_value_memory_dict) == [0]


def test_errors() -> None:
    for options, error, match in (
        ({"num_heads_kv": 3}, ValueError, "num_heads: got 4, wanted a multiple of 3"),
        ({"use_alibi": True}, ValueError, "use_alibi: needs use_flash_attn"),
        ({"window_size": (3, 3)}, ValueError, "window_size: needs use_flash_attn"),
        ({"fused_bias_fc": True}, NotImplementedError, "fused_bias_fc: got True"),
        ({"cross_attn": True, "rotary_emb_dim": 4}, ValueError, "rotary_emb_dim: got 4, wanted 0 with cross_attn"),
    ):
        with pytest.raises(error, match=match):
            MHA(32, 4, **options)
    x = torch.zeros(1, 3, 32)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    for module, call, match in (
        (MHA(32, 4), {"x": torch.zeros(1, 3, 16)}, "x: got shape"),
        (MHA(32, 4), {"x_kv": x}, "x_kv, mixer_subset"),
        (MHA(32, 4, use_flash_attn=True), {"key_padding_mask": torch.ones(1, 3)}, "key_padding_mask: got a tensor"),
        (MHA(32, 4), {"cu_seqlens": ends, "max_seqlen": 3}, "cu_seqlens: got a tensor, wanted None with use_flash"),
        (MHA(32, 4, use_flash_attn=True), {"cu_seqlens": ends}, "max_seqlen: got None"),
        (MHA(32, 4), {"inference_params": SimpleNamespace(key_value_memory_dict={})}, "layer_idx: got None"),
        (MHA(32, 4, dwconv=True), {"inference_params": SimpleNamespace()}, "inference_params: got .*, wanted None"),
    ):
        with pytest.raises(ValueError, match=match):
            module(**{"x": x, **call})
    with pytest.raises(ValueError, match="cu_seqlens, max_seqlen: got only one"):
        FlashSelfAttention()(torch.zeros(3, 3, 2, 8), cu_seqlens=ends)
    with pytest.raises(ValueError, match="max_seqlen, max_seqlen_k: got None"):
        FlashCrossAttention()(torch.zeros(3, 2, 8), torch.zeros(3, 2, 2, 8), cu_seqlens=ends, cu_seqlens_k=ends)


def test_a_cache_takes_keys_and_values() -> None:
    params = InferenceParams(max_seqlen=4, max_batch_size=3, batch_size_offset=1)
    first, second = torch.randn(2, 2, 2, 1, 4), torch.randn(2, 1, 2, 1, 4)
    assert torch.equal(_update_kv_cache(first, params, 7), first)
    params.seqlen_offset = 2
    assert torch.equal(_update_kv_cache(second, params, 7), torch.cat([first, second], 1))
    assert params.key_value_memory_dict[7].shape == (3, 4, 2, 1, 4)
    for wrong in (first[:, :1].expand(-1, 3, -1, -1, -1), torch.randn(3, 1, 2, 1, 4)):
        with pytest.raises(ValueError, match="wanted at most 2 sequences of 2 tokens, as inference_params says"):
            _update_kv_cache(wrong, params, 7)
