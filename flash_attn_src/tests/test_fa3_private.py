"""FlashAttention-3's private functions, called as other packages do."""

from __future__ import annotations

import inspect
from typing import Any

import flash_attn_interface as fa3
import pytest
import torch
from assert_close import assert_close
from fa3_tensors import DEVICE, draw, index, qkv

_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
# By position as upstream; what it called otherwise before comes after, by keyword alone.
_WINDOW = "window_size_left=-1, window_size_right=-1"
PRIVATE_SIGNATURES = {
    "_flash_attn_forward": (
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
        "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, "
        f"{_DESCALES}, softmax_scale=None, causal=False, {_WINDOW}, attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
    ),
    "_flash_attn_backward": (
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
        f"max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
        f"{_WINDOW}, softcap=0.0, deterministic=False, sm_margin=0"
    ),
}


@pytest.mark.parametrize("name", PRIVATE_SIGNATURES)
def test_private_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    words = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(words) == PRIVATE_SIGNATURES[name]


def _wanted_parts(leaves: list[torch.Tensor], dout: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """(out, lse, dq, dk, dv) of the public function."""
    out, lse = fa3.flash_attn_func(*leaves, **options, return_attn_probs=True)
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("older", [False, True], ids=["window_size_left and _right", "window_size"])
def test_private_functions_equal_the_public_function(older: bool) -> None:
    """Called as yunchang and vllm-omni do, with a window and queries that see no key."""
    leaves = [x.requires_grad_() for x in (draw(2, 9, 4, 16), *(x[:, :6] for x in qkv()[1:]))]
    dout = draw(2, 9, 4, 16, seed=3)
    out, lse, *gradients = _wanted_parts(leaves, dout, causal=True, window_size=(3, 0), softcap=2.0)
    q, k, v = (x.detach() for x in leaves)
    window = {"window_size": (3, 0)} if older else {"window_size_left": 3, "window_size_right": 0}
    given = torch.empty_like(q)
    result = fa3._flash_attn_forward(
        q=q, k=k, v=v, softmax_scale=16**-0.5, causal=True, softcap=2.0, **window, **{"out" if older else "out_": given}
    )
    assert result[0] is given
    assert lse.isneginf().any()
    for got, expected in zip(result[:2], (out, lse), strict=True):
        assert torch.equal(got, expected)
    assert [x.numel() for x in result[2:]] == [0, 0]
    buffers = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = fa3._flash_attn_backward(
        dout, q, k, v, out, lse, None, None, None, None, 9, 6, *buffers, softmax_scale=16**-0.5, softcap=2.0,
        deterministic=True, **window, **{"causal" if older else "is_causal": True},
    )  # fmt: skip
    assert softmax_d.shape == lse.shape
    for part, got, expected in zip("qkv", buffers, gradients, strict=True):
        assert_close(f"d{part}", got, expected)


def test_a_buffer_for_the_result_keeps_no_history() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    buffer = torch.empty_like(q).detach()
    for _ in range(2):
        fa3._flash_attn_forward(q, k, v, out_=buffer)
        assert not buffer.requires_grad
    assert fa3._flash_attn_forward(q, k, v)[0].requires_grad


def test_private_functions_of_packed_sequences_with_padding() -> None:
    """By position as TransformerEngine calls them: lengths of padded sequences, and how many of their rows count."""
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in qkv())
    cu_seqlens, used = (index(0, 6, 12), index(0, 9, 18)), (index(4, 6), index(9, 5))
    out, lse = fa3.flash_attn_varlen_func(q, k, v, *cu_seqlens, 6, 9, *used, causal=True, return_attn_probs=True)
    dout = draw(12, 4, 16, seed=3)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v, out = (x.detach() for x in (q, k, v, out))
    nothing = [None] * 4
    result = fa3._flash_attn_forward(
        q, k, v, *nothing, *cu_seqlens, None, *used, 6, 9, *nothing, *nothing, None, softmax_scale=0.25, causal=True,
        window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    assert torch.equal(result[0], out)
    assert torch.equal(result[1], lse)
    buffers = [torch.zeros_like(x) for x in (q, k, v)]
    fa3._flash_attn_backward(
        dout, q, k, v, out, lse, *cu_seqlens, *used, 6, 9, *buffers, softmax_scale=0.25, is_causal=True,
        window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    for part, got, expected in zip("qkv", buffers, gradients, strict=True):
        assert_close(f"d{part}", got, expected)


def test_private_backward_of_values_of_another_head_dim() -> None:
    leaves = [x.requires_grad_() for x in (draw(2, 6, 4, 24), draw(2, 9, 2, 24), draw(2, 9, 2, 16))]
    dout = draw(2, 6, 4, 16, seed=3)
    out, lse, *gradients = _wanted_parts(leaves, dout, causal=True)
    q, k, v = (x.detach() for x in leaves)
    buffers = [torch.empty_like(x) for x in (q, k, v)]
    fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=buffers[0], dk=buffers[1], dv=buffers[2], is_causal=True)
    for part, got, expected in zip("qkv", buffers, gradients, strict=True):
        assert_close(f"d{part}", got, expected)


def test_private_forward_over_a_cache() -> None:
    """As Megatron calls it: every argument that the signature names, both forms of the window."""
    q, k, v = qkv()
    pages = [x.reshape(6, 3, 2, 16) for x in (k, v)]
    table, lengths = index(*range(6)).view(2, 3), index(9, 7)
    candidates = {
        "q": q.flatten(0, 1), "k": pages[0], "v": pages[1], "cu_seqlens_q": index(0, 6, 12), "seqused_k": lengths,
        "max_seqlen_q": 6, "max_seqlen_k": 9, "page_table": table, "softmax_scale": None, "causal": True,
        "window_size": (4, 0), "window_size_left": 4, "window_size_right": 0, "num_splits": 0, "absent": None,
    }  # fmt: skip
    named = inspect.signature(fa3._flash_attn_forward).parameters
    out, lse, *_ = fa3._flash_attn_forward(**{name: x for name, x in candidates.items() if name in named})
    expected = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=True, window_size=(4, 0), return_softmax_lse=True
    )
    assert_close("out", out.view(q.shape), expected[0])
    assert_close("lse", lse, expected[1].transpose(0, 1).flatten(1))


def test_private_functions_refuse_unsupported_options() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"window_size: got \(3, 0\), wanted None with window_size_left = 2"):
        fa3._flash_attn_forward(q, k, v, window_size=(3, 0), window_size_left=2)
    with pytest.raises(NotImplementedError, match="seqused_q: wanted None"):
        fa3._flash_attn_forward(q, k, v, seqused_q=index(6, 6))
    with pytest.raises(NotImplementedError, match="page_table: wanted None with cu_seqlens_k"):
        fa3._flash_attn_forward(q, k, v, cu_seqlens_k=index(0, 9), page_table=index(0))
    with pytest.raises(ValueError, match="max_seqlen_k: got None, wanted all of them"):
        fa3._flash_attn_forward(q, k, v, cu_seqlens_q=index(0, 6), cu_seqlens_k=index(0, 9))
    with pytest.raises(ValueError, match=r"out_: got torch\.float16"):
        fa3._flash_attn_forward(q, k, v, out_=q.half())
    with pytest.raises(ValueError, match="out_, out: got both"):
        fa3._flash_attn_forward(q, k, v, out_=torch.empty_like(q), out=torch.empty_like(q))
    lse = torch.zeros(2, 4, 6, device=DEVICE)
    with pytest.raises(ValueError, match="got some, wanted all or none"):
        fa3._flash_attn_backward(q, q, k, v, q, lse, index(0, 6, 12))
    with pytest.raises(NotImplementedError, match="sequed_q, sequed_k: wanted None"):
        fa3._flash_attn_backward(q, q, k, v, q, lse, sequed_q=index(6, 6))
    with pytest.raises(ValueError, match="is_causal, causal: got True and False"):
        fa3._flash_attn_backward(q, q, k, v, q, lse, is_causal=True, causal=False)
    with pytest.raises(TypeError, match="softmax_lse: got NoneType"):
        fa3._flash_attn_backward(q, q, k, v, q, None)
