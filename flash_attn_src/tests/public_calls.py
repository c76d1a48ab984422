"""One small call of every public function with a tensor of each kind, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flash_attention_amd
import flash_attn
import flash_attn_2_cuda as extension
import flash_attn_interface as fa3
import torch
from flash_attn import cute as fa4
from flash_attn import fp8
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_backward
from flash_attn.layers import rotary
from flash_attn.ops import activations, rms_norm
from flash_attn.ops.triton import cross_entropy, layer_norm
from flash_attn.ops.triton.rotary import apply_rotary

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """function(**tensors, **options).

    written: the tensors that it writes.
    """

    function: Callable[..., Any]
    tensors: Tensors
    options: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    def run(self, **changed: torch.Tensor) -> list[torch.Tensor]:
        """Runs the call with some tensors replaced. Returns its results, then the tensors that it wrote."""
        tensors = {**self.tensors, **changed}
        result = self.function(**tensors, **self.options)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        kept = [x for x in results if isinstance(x, torch.Tensor)]
        return kept + [tensors[name] for name in self.written]

    def fresh(self) -> Call:
        """The same call on copies of its tensors."""
        return Call(self.function, {n: x.clone() for n, x in self.tensors.items()}, self.options, self.written)


def _positional(function: Callable[..., Any], names: str, **fixed: Any) -> Callable[..., Any]:
    """A function of upstream's extension, called by position. Missing arguments become None."""

    def named(**given: Any) -> Any:
        return function(*({**fixed, **given}.get(name) for name in names.split()))

    return named


_FWD = "q k v out_ alibi_slopes_ p_dropout softmax_scale is_causal left right softcap return_softmax gen_"
_VARLEN_FWD = (
    "q k v out_ cu_seqlens_q cu_seqlens_k seqused_k leftpad_k_ block_table_ alibi_slopes_ max_seqlen_q max_seqlen_k "
    "p_dropout softmax_scale zero_tensors is_causal left right softcap return_softmax gen_"
)
_BWD = (
    "dout q k v out softmax_lse dq_ dk_ dv_ alibi_slopes_ p_dropout softmax_scale is_causal left right softcap "
    "deterministic gen_ rng_state"
)
_VARLEN_BWD = (
    "dout q k v out softmax_lse dq_ dk_ dv_ cu_seqlens_q cu_seqlens_k alibi_slopes_ max_seqlen_q max_seqlen_k "
    "p_dropout softmax_scale zero_tensors is_causal left right softcap deterministic gen_ rng_state"
)
_FWD_KVCACHE = (
    "q kcache vcache k_ v_ seqlens_k_ rotary_cos_ rotary_sin_ cache_batch_idx_ leftpad_k_ block_table_ alibi_slopes_ "
    "out_ softmax_scale is_causal left right softcap is_rotary_interleaved num_splits"
)
_OPTIONS = {
    "p_dropout": 0.0, "softmax_scale": 0.3, "is_causal": True, "left": -1, "right": -1, "softcap": 0.0,
    "return_softmax": False, "zero_tensors": False, "deterministic": False, "is_rotary_interleaved": True,
    "num_splits": 0,
}  # fmt: skip
_BACKWARD_OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": 0.3, "causal": True, "window_size_left": -1, "window_size_right": -1,
    "softcap": 0.0, "alibi_slopes": None, "deterministic": False,
}  # fmt: skip


def calls(
    batch: int = 2, seqlen_q: int = 3, seqlen_k: int = 4, heads: int = 2, heads_k: int = 1, dim: int = 8, page: int = 2
) -> dict[str, Call]:
    """A call of each function, on fp32 tensors of these sizes.

    With head_dim 1, functions that cannot have it are left out.
    """
    torch.manual_seed(batch + seqlen_q + dim)
    result: dict[str, Call] = {}
    q, k, v = (torch.randn(batch, n, h, dim) for n, h in ((seqlen_q, heads), (seqlen_k, heads_k), (seqlen_k, heads_k)))
    qkv = {"q": q, "k": k, "v": v}
    slopes, sinks = torch.rand(batch, heads), torch.randn(heads)
    bias = torch.randn(batch, heads, seqlen_q, seqlen_k)
    three, two = torch.randn(batch, seqlen_k, 3, heads, dim), torch.randn(batch, seqlen_k, 2, heads_k, dim)
    ends_q, ends_k = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (seqlen_q, seqlen_k))
    rows = {name: x.flatten(0, 1) for name, x in qkv.items()}
    ends = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    longest = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    both = {**rows, **ends}
    pages = -(-(seqlen_k + 1) // page)
    table = torch.arange(batch * pages, dtype=torch.int32).flip(0).reshape(batch, pages)
    paged_k, paged_v = (torch.randn(batch * pages, page, heads_k, dim) for _ in range(2))
    used = torch.full((batch,), seqlen_k, dtype=torch.int32)
    fewer = torch.full((batch,), max(seqlen_k - 1, 1), dtype=torch.int32)
    first = torch.full((batch,), 1, dtype=torch.int32)
    index = torch.arange(batch, dtype=torch.int32).flip(0)
    cache_k, cache_v = (torch.randn(batch, seqlen_k + 2, heads_k, dim) for _ in range(2))
    cache = {"q": q, "k_cache": cache_k, "v_cache": cache_v}
    new = {"k": torch.randn(batch, 1, heads_k, dim), "v": torch.randn(batch, 1, heads_k, dim)}
    # FlashAttention-2
    result["func"] = Call(flash_attn.flash_attn_func, qkv, {"causal": True})
    result["func, alibi and sinks"] = Call(
        flash_attn.flash_attn_func, {**qkv, "alibi_slopes": slopes, "s_aux": sinks}, {"return_attn_probs": True}
    )
    result["func, bias"] = Call(flash_attn.flash_attn_func, {**qkv, "attn_bias": bias, "s_aux": sinks})
    result["qkvpacked"] = Call(flash_attn.flash_attn_qkvpacked_func, {"qkv": three, "s_aux": sinks})
    result["kvpacked"] = Call(flash_attn.flash_attn_kvpacked_func, {"q": q, "kv": two, "alibi_slopes": slopes[0]})
    result["varlen"] = Call(
        flash_attn.flash_attn_varlen_func, {**both, "alibi_slopes": slopes, "s_aux": sinks}, longest
    )
    result["varlen, pages"] = Call(
        flash_attn.flash_attn_varlen_func, {**both, "k": paged_k, "v": paged_v, "block_table": table},
        {**longest, "causal": True},
    )  # fmt: skip
    result["varlen qkvpacked"] = Call(
        flash_attn.flash_attn_varlen_qkvpacked_func, {"qkv": three.flatten(0, 1), "cu_seqlens": ends_k},
        {"max_seqlen": seqlen_k},
    )  # fmt: skip
    result["varlen kvpacked"] = Call(
        flash_attn.flash_attn_varlen_kvpacked_func, {"q": rows["q"], "kv": two.flatten(0, 1), **ends}, longest
    )
    appended = {"return_softmax_lse": True}
    written = ("k_cache", "v_cache")
    result["kvcache"] = Call(
        flash_attn.flash_attn_with_kvcache,
        {**cache, "cache_seqlens": used, "cache_leftpad": first, "cache_batch_idx": index, "s_aux": sinks,
         "alibi_slopes": slopes}, appended,
    )  # fmt: skip
    result["kvcache, new"] = Call(
        flash_attn.flash_attn_with_kvcache, {**cache, **new, "cache_seqlens": fewer, "s_aux": sinks}, appended, written
    )
    result["kvcache, pages"] = Call(
        flash_attn.flash_attn_with_kvcache,
        {"q": q, "k_cache": paged_k, "v_cache": paged_v, **new, "cache_seqlens": fewer, "block_table": table},
        appended, written,
    )  # fmt: skip
    # upstream's extension
    both_ways = extension.fwd, extension.varlen_fwd
    fwd, varlen_fwd = (
        _positional(function, names, **_OPTIONS) for function, names in zip(both_ways, (_FWD, _VARLEN_FWD), strict=True)
    )
    if dim % 8 == 0:
        result["extension fwd"] = Call(
            fwd, {**qkv, "out_": torch.empty_like(q), "alibi_slopes_": slopes}, written=("out_",)
        )
        result["extension varlen_fwd"] = Call(
            varlen_fwd, {**both, "out_": torch.empty_like(rows["q"]), "seqused_k": fewer}, longest, ("out_",)
        )
        result["extension varlen_fwd, pages"] = Call(
            varlen_fwd,
            {**both, "k": paged_k, "v": paged_v, "block_table_": table, "leftpad_k_": first * 0, "seqused_k": fewer},
            longest,
        )  # fmt: skip
        out, lse, *_ = fwd(**qkv)
        gradients = {f"d{name}_": torch.empty_like(x) for name, x in qkv.items()}
        known = {"dout": torch.randn_like(q), **qkv, "out": out, "softmax_lse": lse}
        result["extension bwd"] = Call(
            _positional(extension.bwd, _BWD, **_OPTIONS), {**known, **gradients}, written=tuple(gradients)
        )
        inner = {**known, **{f"d{name}": torch.empty_like(x) for name, x in qkv.items()}}
        result["_flash_attn_backward"] = Call(_flash_attn_backward, inner, _BACKWARD_OPTIONS, ("dq", "dk", "dv"))
        result["FA3 _flash_attn_backward"] = Call(
            fa3._flash_attn_backward, inner, {"softmax_scale": 0.3, "is_causal": True}, ("dq", "dk", "dv")
        )
        out, lse, *_ = varlen_fwd(**both, **longest)
        packed = {"dout": torch.randn_like(rows["q"]), **both, "out": out, "softmax_lse": lse}
        gradients = {f"d{name}_": torch.empty_like(x) for name, x in rows.items()}
        result["extension varlen_bwd"] = Call(
            _positional(extension.varlen_bwd, _VARLEN_BWD, **_OPTIONS), {**packed, **gradients}, longest,
            tuple(gradients),
        )  # fmt: skip
        inner = {**packed, **{f"d{name}": torch.empty_like(x) for name, x in rows.items()}}
        result["_flash_attn_varlen_backward"] = Call(
            _flash_attn_varlen_backward, inner, {**_BACKWARD_OPTIONS, **longest}, ("dq", "dk", "dv")
        )
        result["FA3 _flash_attn_backward, packed"] = Call(
            fa3._flash_attn_backward, inner, {"softmax_scale": 0.3, **longest}, ("dq", "dk", "dv")
        )
        result["extension fwd_kvcache"] = Call(
            _positional(extension.fwd_kvcache, _FWD_KVCACHE, **_OPTIONS),
            {"q": q, "kcache": cache_k, "vcache": cache_v, "k_": new["k"], "v_": new["v"], "seqlens_k_": fewer,
             "rotary_cos_": torch.rand(seqlen_k + 4, 4), "rotary_sin_": torch.rand(seqlen_k + 4, 4),
             "out_": torch.empty_like(q)}, written=("kcache", "vcache", "out_"),
        )  # fmt: skip
    # FP8
    result["fp8"] = Call(fp8.flash_attn_fp8_func, qkv, {"causal": True})
    result["fp8 varlen"] = Call(fp8.flash_attn_varlen_fp8_func, both, longest)
    # FlashAttention-3
    result["FA3 func"] = Call(fa3.flash_attn_func, {**qkv, "s_aux": sinks}, {"return_attn_probs": True})
    result["FA3 func, qv"] = Call(fa3.flash_attn_func, {**qkv, "qv": torch.randn_like(q)})
    result["FA3 func, chunks"] = Call(fa3.flash_attn_func, qkv, {"attention_chunk": 2})
    result["FA3 qkvpacked"] = Call(fa3.flash_attn_qkvpacked_func, {"qkv": three})
    result["FA3 varlen"] = Call(
        fa3.flash_attn_varlen_func, {**both, "seqused_q": first, "seqused_k": fewer, "s_aux": sinks}, longest
    )
    result["FA3 varlen, qv"] = Call(fa3.flash_attn_varlen_func, {**both, "qv": torch.randn_like(rows["q"])}, longest)
    result["FA3 kvcache"] = Call(
        fa3.flash_attn_with_kvcache, {**cache, **new, "cache_seqlens": fewer, "rotary_seqlens": first * 0}, appended,
        written,
    )  # fmt: skip
    result["FA3 kvcache, pages"] = Call(
        fa3.flash_attn_with_kvcache,
        {"q": rows["q"], "k_cache": paged_k, "v_cache": paged_v, "cache_seqlens": fewer, "page_table": table,
         "cache_batch_idx": index, "cu_seqlens_q": ends_q, "qv": torch.randn_like(rows["q"]), "s_aux": sinks},
        {**appended, "max_seqlen_q": seqlen_q},
    )  # fmt: skip
    result["FA3 _flash_attn_forward"] = Call(
        fa3._flash_attn_forward, {**qkv, "out_": torch.empty_like(q)}, written=("out_",)
    )
    result["FA3 _flash_attn_forward, packed"] = Call(
        fa3._flash_attn_forward, {**both, "out_": torch.empty_like(rows["q"])}, longest, ("out_",)
    )
    result["FA3 _flash_attn_forward, cache"] = Call(
        fa3._flash_attn_forward,
        {"q": q, "k": cache_k, "v": cache_v, "k_new": new["k"], "v_new": new["v"], "seqused_k": fewer,
         "out_": torch.empty_like(q)}, written=("k", "v", "out_"),
    )  # fmt: skip
    splits = {
        "out_partial": torch.randn(2, batch, seqlen_q, heads, dim),
        "lse_partial": torch.randn(2, batch, seqlen_q, heads),
    }
    result["FA3 combine"] = Call(fa3.flash_attn_combine, {**splits, "out": torch.empty_like(q)}, written=("out",))
    # FlashAttention-4
    lse = {"return_lse": True}
    result["FA4 func"] = Call(fa4.flash_attn_func, {**qkv, "learnable_sink": sinks}, lse)
    result["FA4 func, qv"] = Call(fa4.flash_attn_func, {**qkv, "qv": torch.randn_like(q)}, lse)
    result["FA4 varlen"] = Call(
        fa4.flash_attn_varlen_func, {**qkv, "seqused_q": first, "seqused_k": fewer, "learnable_sink": sinks}, lse
    )
    result["FA4 varlen, packed"] = Call(fa4.flash_attn_varlen_func, both, {**longest, **lse})
    result["FA4 pages"] = Call(
        fa4.flash_attn_varlen_func,
        {"q": q, "k": paged_k, "v": paged_v, "page_table": table, "seqused_k": fewer, "learnable_sink": sinks}, lse,
    )  # fmt: skip
    result["FA4 combine"] = Call(fa4.flash_attn_combine, {**splits, "out": torch.empty_like(q)}, written=("out",))
    # layers
    weight, offset = torch.rand(dim) + 0.5, torch.randn(dim)
    norm = {"x": q, "weight": weight, "bias": offset, "residual": torch.randn_like(q)}
    norm_out = {"out": torch.empty_like(q), "residual_out": torch.empty_like(q)}
    for name, function in (("layer_norm", layer_norm.layer_norm_fn), ("rms_norm", layer_norm.rms_norm_fn)):
        result[name] = Call(function, {**norm, **norm_out}, {"prenorm": True}, tuple(norm_out))
    result["layer_norm, branches"] = Call(
        layer_norm.layer_norm_fn,
        {**norm, "x1": torch.randn_like(q), "weight1": weight + 1.0, "rowscale": torch.rand(q.shape[:-1])},
    )  # fmt: skip
    result["layer_norm_linear"] = Call(
        layer_norm.layer_norm_linear_fn,
        {"x": q, "norm_weight": weight, "norm_bias": offset, "linear_weight": torch.randn(3, dim),
         "linear_bias": torch.randn(3)},
    )  # fmt: skip
    result["dropout_add_rms_norm"] = Call(
        rms_norm.dropout_add_rms_norm,
        {"x0": q, "residual": norm["residual"], "weight": weight, "layerscale": torch.rand(dim)},
        {"bias": None, "dropout_p": 0.0, "epsilon": 1e-5},
    )  # fmt: skip
    if dim > 1:
        tables = {"cos": torch.rand(seqlen_k + 4, dim // 2), "sin": torch.rand(seqlen_k + 4, dim // 2)}
        result["apply_rotary"] = Call(
            apply_rotary, {"x": q, **tables, "seqlen_offsets": first}, {"inplace": True}, ("x",)
        )
        result["apply_rotary, packed"] = Call(
            apply_rotary, {"x": rows["q"], **tables, "cu_seqlens": ends_q}, {"max_seqlen": seqlen_q}
        )
        result["rotary_emb"] = Call(rotary.apply_rotary_emb, {"x": q, **tables}, {"inplace": True}, ("x",))
        result["rotary_emb_qkv_"] = Call(
            rotary.apply_rotary_emb_qkv_, {"qkv": three, **tables, "seqlen_offsets": first}, written=("qkv",)
        )
        result["rotary_emb_kv_"] = Call(rotary.apply_rotary_emb_kv_, {"kv": two, **tables}, written=("kv",))
    logits = torch.randn(batch * seqlen_q, dim + 1)
    labels = torch.arange(batch * seqlen_q) % (dim + 1)
    result["cross_entropy"] = Call(cross_entropy.cross_entropy_loss, {"logits": logits, "labels": labels})
    result["swiglu"] = Call(activations.swiglu, {"x": q, "y": torch.randn_like(q)})
    result["flash_attention_amd"] = Call(flash_attention_amd.flash_attn_func, qkv)
    return result
