"""FlashAttention-3's module: its signatures, and that each argument of attention does what it says."""

from __future__ import annotations

import inspect

import flash_attn
import flash_attn_interface as fa3
import pytest
import reference
import torch
from assert_close import assert_close
from fa3_tensors import DEVICE, draw, index, qkv

_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
_SPEED = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": (
        f"q, k, v, softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), attention_chunk=0, "
        f"softcap=0.0, {_SPEED}"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
        f"softmax_scale=None, causal=False, qv=None, {_DESCALES}, window_size=(-1, -1), attention_chunk=0, "
        f"softcap=0.0, {_SPEED}"
    ),
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {_DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {_DESCALES}, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
        "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
    ),
}
# The functions that take sinks, by keyword alone.
WITH_SINKS = {
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func", "flash_attn_with_kvcache",
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    own = [f"{p.name}={p.default!r}" for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert own == (["s_aux=None"] if name in WITH_SINKS else [])
    words = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(words) == SIGNATURES[name]


def test_dense_with_gradients_equals_flash_attn() -> None:
    leaves = [x.requires_grad_() for x in qkv()]
    out, lse = fa3.flash_attn_func(*leaves, causal=True, softcap=2.0, window_size=(4, 0), return_attn_probs=True)
    expected, wanted_lse, _ = flash_attn.flash_attn_func(
        *leaves, causal=True, softcap=2.0, window_size=(4, 0), return_attn_probs=True
    )
    assert torch.equal(out, expected)
    assert torch.equal(lse, wanted_lse)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, expected)), strict=True):
        assert torch.equal(ours, theirs)
    assert isinstance(fa3.flash_attn_func(*leaves), torch.Tensor)


def test_a_row_without_keys_has_lse_minus_infinity() -> None:
    q, k, v = qkv()
    out, lse = fa3.flash_attn_func(q, k[:, :4], v[:, :4], causal=True, return_attn_probs=True)
    assert not out[:, :2].any()
    assert lse[..., :2].isneginf().all()
    assert lse[..., 2:].isfinite().all()


@pytest.mark.parametrize(("dim", "dim_v"), [(24, 16), (16, 40)])
def test_values_of_another_head_dim(dim: int, dim_v: int) -> None:
    q, k, v = draw(2, 6, 4, dim), draw(2, 9, 2, dim), draw(2, 9, 2, dim_v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected, wanted_lse = reference.attention(q, k, v, causal=True)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, dout)
    dense, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert_close("lse", lse, wanted_lse)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    packed = fa3.flash_attn_varlen_func(*flat, index(0, 6, 12), index(0, 9, 18), 6, 9, causal=True)
    for name, out in (("dense", dense), ("packed", packed.view(expected.shape))):
        assert_close(name, out, expected)
        for part, got, want in zip("qkv", torch.autograd.grad(out, leaves, dout), gradients, strict=True):
            assert_close(f"{name} d{part}", got, want)


def test_packed_in_both_layouts() -> None:
    q, k, v = draw(2, 9, 4, 16), *qkv()[1:]
    expected = fa3.flash_attn_func(q, k, v, causal=True)
    joint = torch.cat([q, k, v], 2).requires_grad_()
    out = fa3.flash_attn_qkvpacked_func(joint, causal=True, num_heads_q=4)
    assert_close("heads side by side", out, expected)
    out.sum().backward()
    assert joint.grad.shape == joint.shape
    stacked = torch.stack([k, k, v], 2)
    assert_close("stacked", fa3.flash_attn_qkvpacked_func(stacked), fa3.flash_attn_func(k, k, v))


@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_used_lengths(which: str) -> None:
    """Rows beyond seqused give 0 and get no gradient. The other rows are the same as without them."""
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in qkv())
    used_q = index(4, 6) if which != "k" else None
    used_k = index(9, 5) if which != "q" else None
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, index(0, 6, 12), index(0, 9, 18), 6, 9, used_q, used_k, causal=True, return_attn_probs=True
    )
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for i in range(2):
        rows = slice(6 * i, 6 * i + (6 if used_q is None else int(used_q[i])))
        keys = slice(9 * i, 9 * i + (9 if used_k is None else int(used_k[i])))
        parts = (x.detach()[None, s] for x, s in ((q, rows), (k, keys), (v, keys)))
        expected, wanted_lse = reference.attention(*parts, causal=True)
        assert_close("out", out[rows], expected[0])
        assert_close("lse", lse[:, rows], torch.where(wanted_lse[0] == torch.inf, -torch.inf, wanted_lse[0]))
        assert not out[rows.stop : 6 * i + 6].any()
        assert lse[:, rows.stop : 6 * i + 6].isneginf().all()
        for gradient in gradients[1:]:
            assert not gradient[keys.stop : 9 * i + 9].any()


@pytest.mark.parametrize("varlen", [False, True])
def test_a_second_query(varlen: bool) -> None:
    """qv attends to the values as keys. This equals attention of q and k concatenated with qv and v."""
    q, k, _ = qkv()
    v, qv = draw(2, k.shape[1], 2, 24), draw(*q.shape[:-1], 24)
    wide_q, wide_k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    expected, lse = fa3.flash_attn_func(wide_q, wide_k, v, causal=True, softcap=3.0, return_attn_probs=True)
    assert expected.shape == qv.shape
    if varlen:
        lengths_q, lengths_k = (index(0, x.shape[1], 2 * x.shape[1]) for x in (q, k))
        rows = [x.flatten(0, 1) for x in (q, k, v, qv)]
        out, result = fa3.flash_attn_varlen_func(
            *rows[:3], lengths_q, lengths_k, q.shape[1], k.shape[1], causal=True, qv=rows[3], softcap=3.0,
            return_attn_probs=True,
        )  # fmt: skip
        out, result = out.view_as(qv), result.view(4, 2, -1).transpose(0, 1)
    else:
        out, result = fa3.flash_attn_func(q, k, v, causal=True, qv=qv, softcap=3.0, return_attn_probs=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(result, lse)
    cached = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, causal=True, softcap=3.0, num_splits=2)
    torch.testing.assert_close(cached, expected)


def test_meaningless_options_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="qv: attention with a second query has no backward"):
        fa3.flash_attn_func(q.requires_grad_(), k, v, qv=q.detach()).sum().backward()
    q = q.detach()
    with pytest.raises(ValueError, match=r"qv: got torch\.float32"):
        fa3.flash_attn_func(q, k, v, qv=q[..., :8])
    with pytest.raises(ValueError, match="v: got head_dim 520, wanted 1 to 512"):
        fa3.flash_attn_func(q, k, draw(2, 9, 2, 520))
    with pytest.raises(ValueError, match="q_descale: got a tensor, wanted None as q is"):
        fa3.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2, device=DEVICE))
    with pytest.raises(ValueError, match="num_splits: got -1"):
        fa3.flash_attn_func(q, k, v, num_splits=-1)
    with pytest.raises(ValueError, match="num_heads_q: got None"):
        fa3.flash_attn_qkvpacked_func(torch.cat([q, q], 2))
    with pytest.raises(ValueError, match="max_seqlen_q: got None"):
        fa3.flash_attn_with_kvcache(q[0], k, v, cu_seqlens_q=index(0, 3, 6))
    with pytest.raises(ValueError, match="cu_seqlens_k_new: got a tensor"):
        fa3.flash_attn_with_kvcache(q, k, v, cu_seqlens_k_new=index(0, 3, 6))
    with pytest.raises(TypeError, match="lse_partial: got"):
        fa3.flash_attn_combine(q[None], q[None, ..., 0].half())


def test_the_extension_by_position() -> None:
    q, k, v = qkv()
    gpu = fa3.flash_attn_3_gpu
    out, lse, *_ = gpu.fwd(q, k, v)
    expected = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, expected[0])
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    softmax_d, *_ = gpu.bwd(
        out, q, k, v, out, lse, dq, dk, dv, *(None,) * 6, 0.25, False, -1, -1, 0.0, False, 0
    )  # fmt: skip
    assert_close("softmax_d", softmax_d, out.square().sum(-1).transpose(1, 2))
    assert torch.equal(gpu.fwd_combine(out[None], lse.transpose(1, 2)[None], None, None)[0], out)
    used = index(9, 9)
    planned = gpu.get_scheduler_metadata(
        2, 6, 9, 4, 2, 16, 16, torch.bfloat16, used, None, None, None, None, None, None, 0, False, -1, -1, 0, False, 0,
        None, 0,
    )  # fmt: skip
    assert torch.equal(planned, fa3.get_scheduler_metadata(2, 6, 9, 4, 2, 16, used))
