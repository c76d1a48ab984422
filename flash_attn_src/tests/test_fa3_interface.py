"""FlashAttention-3's module: its signatures, and that each argument does what it says."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import flash_attn
import flash_attn_interface as fa3
import pytest
import reference
import torch
from assert_close import assert_close
from flash_attn import backends
from flash_attn.layers import rotary_functions
from small_calls import Late, in_one_graph

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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


@pytest.mark.parametrize("name", PRIVATE_SIGNATURES)
def test_private_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    words = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(words) == PRIVATE_SIGNATURES[name]


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _qkv() -> tuple[torch.Tensor, ...]:
    return _draw(2, 6, 4, 16), _draw(2, 9, 2, 16, seed=1), _draw(2, 9, 2, 16, seed=2)


def _index(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def test_dense_with_gradients_equals_flash_attn() -> None:
    leaves = [x.requires_grad_() for x in _qkv()]
    out, lse = fa3.flash_attn_func(*leaves, causal=True, softcap=2.0, window_size=(4, 0), return_attn_probs=True)
    wanted, wanted_lse, _ = flash_attn.flash_attn_func(
        *leaves, causal=True, softcap=2.0, window_size=(4, 0), return_attn_probs=True
    )
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, wanted)), strict=True):
        assert torch.equal(ours, theirs)
    assert isinstance(fa3.flash_attn_func(*leaves), torch.Tensor)


def test_a_row_without_keys_has_lse_minus_infinity() -> None:
    q, k, v = _qkv()
    out, lse = fa3.flash_attn_func(q, k[:, :4], v[:, :4], causal=True, return_attn_probs=True)
    assert not out[:, :2].any()
    assert lse[..., :2].isneginf().all()
    assert lse[..., 2:].isfinite().all()


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_attention_chunk(num_splits: int) -> None:
    q, k, v = _qkv()
    out = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=4, num_splits=num_splits)
    for row in range(6):
        place = row + 3
        keys = slice(place // 4 * 4, place + 1)
        wanted, _ = reference.attention(q[:, row, None], k[:, keys], v[:, keys])
        assert_close(f"row {row}", out[:, row, None], wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [3, 4, 100, (1 << 31) - 1])
@pytest.mark.parametrize("lengths", [(6, 9), (9, 6), (5, 0), (1, 8)], ids=str)
def test_attention_chunk_has_gradients_dense_and_packed(causal: bool, chunk: int, lengths: tuple[int, int]) -> None:
    """Against each row's own chunk of keys; the queries before key 0 see none."""
    seqlen_q, seqlen_k = lengths
    q, k, v = _draw(2, seqlen_q, 4, 16), _draw(2, seqlen_k, 2, 16), _draw(2, seqlen_k, 2, 16)
    dout = _draw(2, seqlen_q, 4, 16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rows = []
    for row in range(seqlen_q):
        place = row + seqlen_k - seqlen_q
        keys = slice(0, 0)
        if place >= 0:
            keys = slice(place // chunk * chunk, place + 1 if causal else (place // chunk + 1) * chunk)
        found = reference.attention(q[:, row, None], k[:, keys], v[:, keys])[0] if place >= 0 else q[:, row, None] * 0
        rows.append(found)
    wanted = torch.cat(rows, 1)
    gradients = torch.autograd.grad(wanted, leaves, dout, allow_unused=True)
    options = {"causal": causal, "attention_chunk": chunk, "return_attn_probs": True}
    dense, lse = fa3.flash_attn_func(q, k, v, **options)
    cu_seqlens = _index(0, seqlen_q, 2 * seqlen_q), _index(0, seqlen_k, 2 * seqlen_k)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed, packed_lse = fa3.flash_attn_varlen_func(*flat, *cu_seqlens, seqlen_q, seqlen_k, **options)
    assert lse.shape == (2, 4, seqlen_q)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)
    for name, out in (("dense", dense), ("packed", packed.view(q.shape))):
        assert_close(name, out, wanted)
        for part, got, want in zip("qkv", torch.autograd.grad(out, leaves, dout), gradients, strict=True):
            assert_close(f"{name} d{part}", got, torch.zeros_like(got) if want is None else want)


@pytest.mark.parametrize(("dim", "dim_v"), [(24, 16), (16, 40)])
def test_values_of_another_head_dim(dim: int, dim_v: int) -> None:
    q, k, v = _draw(2, 6, 4, dim), _draw(2, 9, 2, dim), _draw(2, 9, 2, dim_v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = reference.attention(q, k, v, causal=True)
    dout = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, dout)
    dense, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert_close("lse", lse, wanted_lse)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    packed = fa3.flash_attn_varlen_func(*flat, _index(0, 6, 12), _index(0, 9, 18), 6, 9, causal=True)
    for name, out in (("dense", dense), ("packed", packed.view(wanted.shape))):
        assert_close(name, out, wanted)
        for part, got, want in zip("qkv", torch.autograd.grad(out, leaves, dout), gradients, strict=True):
            assert_close(f"{name} d{part}", got, want)


def test_packed_in_both_layouts() -> None:
    q, k, v = _draw(2, 9, 4, 16), *_qkv()[1:]
    wanted = fa3.flash_attn_func(q, k, v, causal=True)
    joint = torch.cat([q, k, v], 2).requires_grad_()
    out = fa3.flash_attn_qkvpacked_func(joint, causal=True, num_heads_q=4)
    assert_close("heads side by side", out, wanted)
    out.sum().backward()
    assert joint.grad.shape == joint.shape
    stacked = torch.stack([k, k, v], 2)
    assert_close("stacked", fa3.flash_attn_qkvpacked_func(stacked), fa3.flash_attn_func(k, k, v))


@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_used_lengths(which: str) -> None:
    """Rows beyond seqused give 0 and get no gradient; the others are as if the rest were not there."""
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in _qkv())
    used_q = _index(4, 6) if which != "k" else None
    used_k = _index(9, 5) if which != "q" else None
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, _index(0, 6, 12), _index(0, 9, 18), 6, 9, used_q, used_k, causal=True, return_attn_probs=True
    )
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for i in range(2):
        rows = slice(6 * i, 6 * i + (6 if used_q is None else int(used_q[i])))
        keys = slice(9 * i, 9 * i + (9 if used_k is None else int(used_k[i])))
        parts = (x.detach()[None, s] for x, s in ((q, rows), (k, keys), (v, keys)))
        wanted, wanted_lse = reference.attention(*parts, causal=True)
        assert_close("out", out[rows], wanted[0])
        assert_close("lse", lse[:, rows], torch.where(wanted_lse[0] == torch.inf, -torch.inf, wanted_lse[0]))
        assert not out[rows.stop : 6 * i + 6].any()
        assert lse[:, rows.stop : 6 * i + 6].isneginf().all()
        for gradient in gradients[1:]:
            assert not gradient[keys.stop : 9 * i + 9].any()


def test_kvcache_arguments_of_version_3() -> None:
    """Packed queries, packed new keys and rotary places of their own, one sequence at a time."""
    caches = [_draw(2, 32, 2, 16, seed=i) for i in (3, 4)]
    alone = [cache.clone() for cache in caches]
    q, k, v = _draw(5, 4, 16), _draw(3, 2, 16, seed=5), _draw(3, 2, 16, seed=6)
    angles = torch.rand(64, 4, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False}
    out, lse, *rest = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=_index(7, 20), cu_seqlens_q=_index(0, 2, 5), cu_seqlens_k_new=_index(0, 1, 3),
        max_seqlen_q=3, rotary_seqlens=_index(40, 2), causal=True, return_softmax_lse=True, **rotary,
    )  # fmt: skip
    assert lse.shape == (4, 5)
    assert [x.numel() for x in rest] == [0, 0]
    alone_as = [(slice(0, 2), slice(0, 1), 7, 40), (slice(2, 5), slice(1, 3), 20, 2)]
    for i, (rows, new, length, origin) in enumerate(alone_as):
        wanted = fa3.flash_attn_with_kvcache(
            q[None, rows], *(cache[i, None] for cache in alone), k[None, new], v[None, new], cache_seqlens=length,
            rotary_seqlens=_index(origin), causal=True, **rotary,
        )  # fmt: skip
        assert_close("out", out[rows], wanted[0])
    for cache, wanted_cache in zip(caches, alone, strict=True):
        assert torch.equal(cache, wanted_cache)


def test_pages_and_metadata() -> None:
    q, k, v = _qkv()
    pages = [x.reshape(6, 3, 2, 16) for x in (k, v)]
    table = _index(*range(6)).view(2, 3)
    lengths = _index(9, 9)
    metadata = fa3.get_scheduler_metadata(2, 6, 9, 4, 2, 16, lengths)
    out = fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, page_table=table, scheduler_metadata=metadata)
    assert_close("out", out, fa3.flash_attn_func(q, k, v))
    assert metadata.dtype is torch.int32
    assert int(fa3.get_scheduler_metadata(2, 6, 9, 4, 2, 16, lengths, num_splits=5)) == 5


def test_metadata_splits_what_would_leave_units_idle() -> None:
    def parts(batch: int, *shape: int, **options: int) -> int:
        return int(fa3.get_scheduler_metadata(batch, *shape, 128, _index(*[0] * batch), **options))

    assert parts(1, 1, 64, 8, 1) == 1 < parts(1, 1, 1 << 16, 8, 1)
    assert parts(1, 1, 64, 8, 1, max_seqlen_k_new=1 << 16) > 1
    assert parts(1 << 14, 1, 1 << 16, 8, 1) == parts(1, 1 << 12, 1 << 16, 64, 1) == 1  # for all GPUs of today
    with pytest.raises(ValueError, match="num_heads_q: got 4, wanted a multiple of num_heads_kv = 0"):
        parts(1, 1, 64, 4, 0)


def test_cache_batch_idx_chooses_rows_of_the_page_table() -> None:
    q, k, v = _qkv()
    options = {"cache_seqlens": _index(9, 9), "page_table": _index(*range(6)).view(2, 3)}
    pages = [x.reshape(6, 3, 2, 16) for x in (k, v)]
    out = fa3.flash_attn_with_kvcache(q, *pages, **options, cache_batch_idx=_index(1, 0))
    assert_close("out", out, fa3.flash_attn_func(q, k.flip(0), v.flip(0)))
    for wrong in ((-1, 0), (0, 2)):
        with pytest.raises(ValueError, match=r"cache_batch_idx: got \[.*\], wanted 0 to 1, rows of page_table"):
            fa3.flash_attn_with_kvcache(q, *pages, **options, cache_batch_idx=_index(*wrong))
    options["page_table"] = [[0, 1, 2]]
    with pytest.raises(TypeError, match="page_table: got list, wanted an int32 tensor"):
        fa3.flash_attn_with_kvcache(q, *pages, **options, cache_batch_idx=_index(0, 0))


@pytest.mark.parametrize("packed", [False, True])
def test_combine(packed: bool) -> None:
    """Of parts of the keys, one of them empty: what attention over all of them gives."""
    q, k, v = _qkv()
    wanted, wanted_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(4), slice(4, 9))]
    outs = torch.stack([*(out for out, _ in parts), torch.full_like(wanted, torch.nan)])
    lses = torch.stack([*(lse for _, lse in parts), torch.full_like(wanted_lse, -torch.inf)]).transpose(2, 3)
    wanted_lse = wanted_lse.transpose(1, 2)
    if packed:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
        wanted, wanted_lse = wanted.flatten(0, 1), wanted_lse.flatten(0, 1)
    out, lse = fa3.flash_attn_combine(outs, lses)
    assert_close("out", out, wanted)
    assert_close("lse", lse, wanted_lse)
    half = fa3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0]
    assert_close("fp16", half, wanted, tiny=2e-3, dtype=torch.float16)
    given = torch.empty_like(wanted)
    assert fa3.flash_attn_combine(outs, lses, given)[0] is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("packed", [False, True])
def test_combine_compiled_and_of_parts_on_their_way(packed: bool) -> None:
    shape = (3, 5, 4, 8) if packed else (3, 2, 5, 4, 8)
    parts = _draw(*shape), _draw(*shape[:-1], seed=1)
    wanted = fa3.flash_attn_combine(*parts)
    kernels = mock.Mock()  # which take no address of such parts
    with backends.using(kernels):
        found = in_one_graph(fa3.flash_attn_combine)(*parts), fa3.flash_attn_combine(*map(Late, parts))
    assert not kernels.mock_calls
    for got in found:
        for name, x, y in zip(("out", "lse"), got, wanted, strict=True):
            assert_close(name, x, y, tiny=1e-6)


def test_compiled_with_used_lengths_and_rows_of_pages() -> None:
    q, cu = _draw(12, 2, 8), _index(0, 4, 12)
    used = _index(3, 5)
    pages, table = _draw(4, 6, 2, 8, seed=1), _index(0, 1, 2, 3).view(2, 2)

    def block(q: torch.Tensor, used: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = fa3.flash_attn_varlen_func(q, q, q, cu, cu, 8, 8, seqused_q=used, seqused_k=used)
        more = fa3.flash_attn_with_kvcache(
            q[:2, None], pages, pages.clone(), cache_seqlens=used, page_table=table, cache_batch_idx=rows
        )
        return out, more

    rows = _index(1, 0)
    for x, y in zip(in_one_graph(block)(q, used, rows), block(q, used, rows), strict=True):
        assert torch.equal(x, y)


def test_fp8_inputs_with_their_factors() -> None:
    q, k, v = _qkv()
    small, factors = [], []
    for x in (q, k, v):
        factor = x.abs().amax((1, 3)).amax(1, keepdim=True).expand(2, 2) / 448
        small.append((x / factor[:, None, :1, None]).to(torch.float8_e4m3fn))
        factors.append(factor)
    out = fa3.flash_attn_func(*small, None, True, None, *factors)
    assert out.dtype is torch.bfloat16
    assert_close("out", out, fa3.flash_attn_func(q, k, v, causal=True), tiny=0.15)


def _wanted_parts(leaves: list[torch.Tensor], dout: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """(out, lse, dq, dk, dv) of the public function."""
    out, lse = fa3.flash_attn_func(*leaves, **options, return_attn_probs=True)
    return out.detach(), lse, *torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("older", [False, True], ids=["window_size_left and _right", "window_size"])
def test_private_functions_equal_the_public_one(older: bool) -> None:
    """Called as yunchang and vllm-omni do, with a window and queries that see no key."""
    leaves = [x.requires_grad_() for x in (_draw(2, 9, 4, 16), *(x[:, :6] for x in _qkv()[1:]))]
    dout = _draw(2, 9, 4, 16, seed=3)
    out, lse, *gradients = _wanted_parts(leaves, dout, causal=True, window_size=(3, 0), softcap=2.0)
    q, k, v = (x.detach() for x in leaves)
    window = {"window_size": (3, 0)} if older else {"window_size_left": 3, "window_size_right": 0}
    given = torch.empty_like(q)
    found = fa3._flash_attn_forward(
        q=q, k=k, v=v, softmax_scale=16**-0.5, causal=True, softcap=2.0, **window, **{"out" if older else "out_": given}
    )
    assert found[0] is given
    assert lse.isneginf().any()
    for got, wanted in zip(found[:2], (out, lse), strict=True):
        assert torch.equal(got, wanted)
    assert [x.numel() for x in found[2:]] == [0, 0]
    buffers = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    softmax_d = fa3._flash_attn_backward(
        dout, q, k, v, out, lse, None, None, None, None, 9, 6, *buffers, softmax_scale=16**-0.5, softcap=2.0,
        deterministic=True, **window, **{"causal" if older else "is_causal": True},
    )  # fmt: skip
    assert softmax_d.shape == lse.shape
    for part, got, wanted in zip("qkv", buffers, gradients, strict=True):
        assert_close(f"d{part}", got, wanted)


def test_a_buffer_for_the_result_keeps_no_history() -> None:
    q, k, v = (x.requires_grad_() for x in _qkv())
    buffer = torch.empty_like(q).detach()
    for _ in range(2):
        fa3._flash_attn_forward(q, k, v, out_=buffer)
        assert not buffer.requires_grad
    assert fa3._flash_attn_forward(q, k, v)[0].requires_grad


def test_private_functions_of_packed_sequences_with_padding() -> None:
    """By position as TransformerEngine calls them: lengths of padded sequences, and how many of their rows count."""
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in _qkv())
    cu_seqlens, used = (_index(0, 6, 12), _index(0, 9, 18)), (_index(4, 6), _index(9, 5))
    out, lse = fa3.flash_attn_varlen_func(q, k, v, *cu_seqlens, 6, 9, *used, causal=True, return_attn_probs=True)
    dout = _draw(12, 4, 16, seed=3)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v, out = (x.detach() for x in (q, k, v, out))
    nothing = [None] * 4
    found = fa3._flash_attn_forward(
        q, k, v, *nothing, *cu_seqlens, None, *used, 6, 9, *nothing, *nothing, None, softmax_scale=0.25, causal=True,
        window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    assert torch.equal(found[0], out)
    assert torch.equal(found[1], lse)
    buffers = [torch.zeros_like(x) for x in (q, k, v)]
    fa3._flash_attn_backward(
        dout, q, k, v, out, lse, *cu_seqlens, *used, 6, 9, *buffers, softmax_scale=0.25, is_causal=True,
        window_size_left=-1, window_size_right=0,
    )  # fmt: skip
    for part, got, wanted in zip("qkv", buffers, gradients, strict=True):
        assert_close(f"d{part}", got, wanted)


def test_private_backward_of_values_of_another_head_dim() -> None:
    leaves = [x.requires_grad_() for x in (_draw(2, 6, 4, 24), _draw(2, 9, 2, 24), _draw(2, 9, 2, 16))]
    dout = _draw(2, 6, 4, 16, seed=3)
    out, lse, *gradients = _wanted_parts(leaves, dout, causal=True)
    q, k, v = (x.detach() for x in leaves)
    buffers = [torch.empty_like(x) for x in (q, k, v)]
    fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=buffers[0], dk=buffers[1], dv=buffers[2], is_causal=True)
    for part, got, wanted in zip("qkv", buffers, gradients, strict=True):
        assert_close(f"d{part}", got, wanted)


def test_private_forward_over_a_cache() -> None:
    """As Megatron calls it: every argument that the signature names, both forms of the window."""
    q, k, v = _qkv()
    pages = [x.reshape(6, 3, 2, 16) for x in (k, v)]
    table, lengths = _index(*range(6)).view(2, 3), _index(9, 7)
    candidates = {
        "q": q.flatten(0, 1), "k": pages[0], "v": pages[1], "cu_seqlens_q": _index(0, 6, 12), "seqused_k": lengths,
        "max_seqlen_q": 6, "max_seqlen_k": 9, "page_table": table, "softmax_scale": None, "causal": True,
        "window_size": (4, 0), "window_size_left": 4, "window_size_right": 0, "num_splits": 0, "absent": None,
    }  # fmt: skip
    named = inspect.signature(fa3._flash_attn_forward).parameters
    out, lse, *_ = fa3._flash_attn_forward(**{name: x for name, x in candidates.items() if name in named})
    wanted = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=True, window_size=(4, 0), return_softmax_lse=True
    )
    assert_close("out", out.view(q.shape), wanted[0])
    assert_close("lse", lse, wanted[1].transpose(0, 1).flatten(1))


def test_private_functions_refuse_what_they_cannot_do() -> None:
    q, k, v = _qkv()
    with pytest.raises(ValueError, match=r"window_size: got \(3, 0\), wanted None with window_size_left = 2"):
        fa3._flash_attn_forward(q, k, v, window_size=(3, 0), window_size_left=2)
    with pytest.raises(NotImplementedError, match="seqused_q: wanted None"):
        fa3._flash_attn_forward(q, k, v, seqused_q=_index(6, 6))
    with pytest.raises(NotImplementedError, match="page_table: wanted None with cu_seqlens_k"):
        fa3._flash_attn_forward(q, k, v, cu_seqlens_k=_index(0, 9), page_table=_index(0))
    with pytest.raises(ValueError, match="max_seqlen_k: got None, wanted all of them"):
        fa3._flash_attn_forward(q, k, v, cu_seqlens_q=_index(0, 6), cu_seqlens_k=_index(0, 9))
    with pytest.raises(ValueError, match=r"out_: got torch\.float16"):
        fa3._flash_attn_forward(q, k, v, out_=q.half())
    lse = torch.zeros(2, 4, 6, device=DEVICE)
    with pytest.raises(ValueError, match="got some, wanted all or none"):
        fa3._flash_attn_backward(q, q, k, v, q, lse, _index(0, 6, 12))
    with pytest.raises(NotImplementedError, match="sequed_q, sequed_k: wanted None"):
        fa3._flash_attn_backward(q, q, k, v, q, lse, sequed_q=_index(6, 6))
    with pytest.raises(TypeError, match="softmax_lse: got NoneType"):
        fa3._flash_attn_backward(q, q, k, v, q, None)


@pytest.mark.parametrize("varlen", [False, True])
def test_a_second_query(varlen: bool) -> None:
    """The values are its keys: as attention of q beside qv and of k beside v."""
    q, k, _ = _qkv()
    v, qv = _draw(2, k.shape[1], 2, 24), _draw(*q.shape[:-1], 24)
    wide_q, wide_k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    wanted, lse = fa3.flash_attn_func(wide_q, wide_k, v, causal=True, softcap=3.0, return_attn_probs=True)
    assert wanted.shape == qv.shape
    if varlen:
        lengths_q, lengths_k = (_index(0, x.shape[1], 2 * x.shape[1]) for x in (q, k))
        rows = [x.flatten(0, 1) for x in (q, k, v, qv)]
        out, found = fa3.flash_attn_varlen_func(
            *rows[:3], lengths_q, lengths_k, q.shape[1], k.shape[1], causal=True, qv=rows[3], softcap=3.0,
            return_attn_probs=True,
        )  # fmt: skip
        out, found = out.view_as(qv), found.view(4, 2, -1).transpose(0, 1)
    else:
        out, found = fa3.flash_attn_func(q, k, v, causal=True, qv=qv, softcap=3.0, return_attn_probs=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(found, lse)
    cached = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, causal=True, softcap=3.0, num_splits=2)
    torch.testing.assert_close(cached, wanted)


def _small(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers in FP8, and the same in fp32."""
    small = _draw(*shape, seed=seed).to(torch.float8_e4m3fn)
    return small.requires_grad_(), small.detach().float()


@pytest.mark.parametrize("varlen", [False, True])
def test_fp8_with_chunks_used_rows_and_sinks(varlen: bool) -> None:
    """As of the same numbers in fp32, whose scale the descales are."""
    drawn = [_small(2, n, h, 16, seed=i) for i, (n, h) in enumerate(((7, 4), (9, 2), (9, 2)))]
    (q, wide_q), (k, wide_k), (v, wide_v) = drawn
    descales = [_draw(2, 2, seed=seed).sigmoid() + 0.5 for seed in (3, 4, 5)]
    factors = [descales[0].repeat_interleave(2, 1), *descales[1:]]
    wide = [x * factor[:, None, :, None] for x, factor in zip((wide_q, wide_k, wide_v), factors, strict=True)]
    given = {"causal": True, "attention_chunk": 4, "return_attn_probs": True}
    in_fp8 = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    if varlen:
        lengths = [_index(0, n, 2 * n) for n in (7, 9)]
        used = {"seqused_q": _index(7, 3), "seqused_k": _index(5, 9)}
        out, lse = fa3.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), *lengths, 7, 9, **used, **given, **in_fp8
        )
        wanted, wanted_lse = fa3.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in wide), *lengths, 7, 9, **used, **given
        )
    else:
        given |= {"s_aux": _draw(4)}
        out, lse = fa3.flash_attn_func(q, k, v, **given, **in_fp8)
        wanted, wanted_lse = fa3.flash_attn_func(*wide, **given)
    assert out.dtype is torch.bfloat16
    assert not out.requires_grad
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, wanted_lse)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fp8_is_turned(packed: bool, interleaved: bool) -> None:
    """Queries and new keys turn in fp32 and are cast again; over pages, from lengths that the device knows."""
    (q, wide_q), (k, wide_k), (v, wide_v) = (_small(2, 3, h, 16, seed=i) for i, h in enumerate((4, 2, 2)))
    pages = [_small(6, 4, 2, 16, seed=seed)[0].detach() for seed in (3, 4)]
    table = _index(4, 0, 2, 1, 5, 3).view(2, 3)
    angles = _draw(12, 4, seed=5)
    cos, sin = angles.cos().to(torch.float8_e4m3fn), angles.sin().to(torch.float8_e4m3fn)
    given = {
        "cache_seqlens": _index(2, 7), "page_table": table, "causal": True, "rotary_interleaved": interleaved,
        "return_softmax_lse": True,
    }  # fmt: skip
    wide_pages = [x.float() for x in pages]
    # The reference turns first, by the same angles, and rounds to FP8.
    starts = _index(2, 7)
    turned = []
    for x in (wide_q, wide_k):
        rows = rotary_functions.apply_rotary_emb(x, cos.float(), sin.float(), interleaved, False, starts)
        turned.append(rows.to(torch.float8_e4m3fn).float())
    wanted, lse, *_ = fa3.flash_attn_with_kvcache(turned[0], *wide_pages, turned[1], wide_v, **given)
    if packed:
        ends = _index(0, 3, 6)
        given |= {"cu_seqlens_q": ends, "cu_seqlens_k_new": ends, "max_seqlen_q": 3}
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    with torch.no_grad():
        out, found, *_ = fa3.flash_attn_with_kvcache(q, *pages, k, v, rotary_cos=cos, rotary_sin=sin, **given)
    if packed:
        out, found = out.view(2, 3, 4, 16), found.view(4, 2, 3).transpose(0, 1)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(found, lse)
    assert all(torch.equal(one.float(), other) for one, other in zip(pages, wide_pages, strict=True))


def test_what_has_no_meaning_here_is_refused() -> None:
    q, k, v = _qkv()
    with pytest.raises(NotImplementedError, match="qv: attention with a second query has no backward"):
        fa3.flash_attn_func(q.requires_grad_(), k, v, qv=q.detach()).sum().backward()
    q = q.detach()
    with pytest.raises(ValueError, match=r"qv: got torch\.float32"):
        fa3.flash_attn_func(q, k, v, qv=q[..., :8])
    with pytest.raises(ValueError, match="v: got head_dim 520, wanted 1 to 512"):
        fa3.flash_attn_func(q, k, _draw(2, 9, 2, 520))
    with pytest.raises(ValueError, match="q_descale: got a tensor, wanted None as q is"):
        fa3.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2, device=DEVICE))
    with pytest.raises(ValueError, match="num_splits: got -1"):
        fa3.flash_attn_func(q, k, v, num_splits=-1)
    with pytest.raises(ValueError, match="num_heads_q: got None"):
        fa3.flash_attn_qkvpacked_func(torch.cat([q, q], 2))
    with pytest.raises(ValueError, match="max_seqlen_q: got None"):
        fa3.flash_attn_with_kvcache(q[0], k, v, cu_seqlens_q=_index(0, 3, 6))
    with pytest.raises(ValueError, match="cu_seqlens_k_new: got a tensor"):
        fa3.flash_attn_with_kvcache(q, k, v, cu_seqlens_k_new=_index(0, 3, 6))
    with pytest.raises(TypeError, match="lse_partial: got"):
        fa3.flash_attn_combine(q[None], q[None, ..., 0].half())
