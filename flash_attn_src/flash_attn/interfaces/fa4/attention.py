"""FlashAttention-4's attention, put together from the functions of flash_attn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.compiler import is_compiling

import flash_attn
from flash_attn import fp8
from flash_attn.attention.backends.torch import sequences
from flash_attn.attention.backends.torch.fp8 import is_fp8
from flash_attn.attention.operators import lse
from flash_attn.attention.operators.kvcache import attend as attend_to_cache
from flash_attn.attention.second_derivative import transformed
from flash_attn.call import calls
from flash_attn.call.arguments import check_dense, check_kvcache, check_strided, check_varlen
from flash_attn.call.arguments.diagnosis import check_block_table
from flash_attn.call.autocast import cast
from flash_attn.call.calls import AttentionCall, CacheCall, maybe_contiguous
from flash_attn.call.tracing import is_traced, is_transformed, refuse_transforms
from flash_attn.interfaces.fa3 import second_query
from flash_attn.interfaces.fa3.inputs import check_used, factors, used_rows
from flash_attn.interfaces.fa4.arguments import Mask, keeps_gradients, refuse
from flash_attn.interfaces.fa4.block_sparsity import attend_to_blocks
from flash_attn.interfaces.fa4.rows import Lengths, Rows, fewer, packed, rows_of, rows_that_do_not_count, unpacked

# The head dim of values that upstream takes for keys, too.
_LATENT = 512

Result = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What FlashAttention-4's functions share."""

    softmax_scale: float | None
    mask: Mask
    learnable_sink: torch.Tensor | None
    softcap: float
    num_splits: int
    deterministic: bool
    return_lse: bool
    qv: torch.Tensor | None = None
    block_sparse_tensors: Any = None
    block_sparse_tensors_bwd: Any = None

    def of_call(self) -> calls.Options:
        """The options of a call."""
        window, sink = self.mask.window, self.learnable_sink
        return calls.Options(self.softmax_scale, window_size=window, softcap=self.softcap, s_aux=sink)


def _told(softmax_lse: torch.Tensor) -> torch.Tensor:
    """softmax_lse as FlashAttention-4 gives it: -inf in rows that see no key."""
    return softmax_lse.masked_fill(softmax_lse == torch.inf, -torch.inf)


def _result(call: AttentionCall, options: Options, out: torch.Tensor, softmax_lse: torch.Tensor) -> Result:
    """softmax_lse has a gradient if it was asked for; without return_lse it is there if autograd records the call."""
    recorded = keeps_gradients(call.q, call.k, call.v, call.options.s_aux)
    if options.return_lse and recorded and not is_fp8(call.q):
        return out, _told(lse.with_gradient(call, softmax_lse))
    return out, _told(softmax_lse.detach()) if options.return_lse or recorded else None


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Result:
    q, k, v = cast(q, k, v)
    sink, scale = options.learnable_sink, options.softmax_scale
    common = (0.0, scale, False, options.mask.window, options.softcap, None, options.deterministic, True)
    call = _call(q, k, v, options)
    if options.qv is not None:
        check_dense(call)
        return _with_second_query(call, options.qv, options)
    if is_transformed():
        check_dense(call)
        out, softmax_lse = transformed(call)
        return out, _told(softmax_lse) if options.return_lse else None
    if _is_one_op(call, options):
        check_dense(call)
        out, softmax_lse = lse.by_op(call)
        return out, _told(softmax_lse)
    if is_fp8(q):
        _refuse_sink_in_fp8(sink)
        descales = factors(q, k, q.shape[0], (None, None, None))
        out, softmax_lse, _ = fp8.flash_attn_fp8_func(q, k, v, *common, *descales)
    else:
        out, softmax_lse, _ = flash_attn.flash_attn_func(q, k, v, *common, s_aux=sink)
    return _result(call, options, out, softmax_lse)


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> AttentionCall:
    return AttentionCall(q, k, v, options.of_call(), options.deterministic)


def _with_second_query(call: AttentionCall, qv: torch.Tensor, options: Options) -> Result:
    """Of a checked call, whose scores are softmax_scale * (q @ k + qv @ v)."""
    out, softmax_lse = second_query.attend(call, cast(qv)[0], options.softmax_scale, 0, options.num_splits, 0)
    return out, _told(softmax_lse) if options.return_lse else None


def _is_one_op(call: AttentionCall, options: Options) -> bool:
    """Whether torch.compile traces a call whose softmax_lse gets a gradient. The op knows no `deterministic`."""
    recorded = keeps_gradients(call.q, call.k, call.v, call.options.s_aux)
    return is_compiling() and options.return_lse and recorded and not options.deterministic and not is_fp8(call.q)


def _refuse_sink_in_fp8(sink: torch.Tensor | None) -> None:
    if sink is not None:
        raise NotImplementedError("learnable_sink: attention in FP8 has no sinks, pass fp16 or bf16")


def _varlen(queries: Rows, k: Rows, v: torch.Tensor, lengths: Lengths, options: Options) -> Result:
    """Rows beyond seqused_* give 0 and get no gradient."""
    q, keys, values = cast(queries.x, k.x, v)
    if is_fp8(q):
        raise NotImplementedError("q: packed sequences in FP8 are served by flash_attn.flash_attn_varlen_fp8_func")
    starts_q, starts_k = queries.cu_seqlens, k.cu_seqlens
    for name, used, starts in (("q", lengths.seqused_q, starts_q), ("k", lengths.seqused_k, starts_k)):
        if used is not None:
            check_used(f"seqused_{name}", used, starts.diff())
    seqused_q = fewer(lengths.seqused_q, starts_q, options.mask.fewer_queries)
    seqused_k = fewer(lengths.seqused_k, starts_k, options.mask.fewer_keys)
    if seqused_q is not None or seqused_k is not None:
        starts_q, starts_k = used_rows(starts_q, starts_k, seqused_q, seqused_k)
    call = _call(q, keys, values, options)
    call.cu_seqlens_q, call.cu_seqlens_k = starts_q, starts_k
    call.max_seqlen_q, call.max_seqlen_k = queries.longest, k.longest
    if options.qv is not None:
        check_varlen(call)
        result = _with_second_query(call, rows_of(options.qv, queries), options)
        return unpacked(queries, *_without_padding(queries, lengths, options, *result))
    if _is_one_op(call, options):
        check_varlen(call)
        out, softmax_lse = lse.by_op(call)
        return unpacked(queries, *_without_padding(queries, lengths, options, out, _told(softmax_lse)))
    out, softmax_lse, _ = flash_attn.flash_attn_varlen_func(
        q, keys, values, starts_q, starts_k, queries.longest, k.longest, 0.0, options.softmax_scale, False,
        options.mask.window, options.softcap, None, options.deterministic, True, s_aux=options.learnable_sink,
    )  # fmt: skip
    result = _result(call, options, out, softmax_lse)
    return unpacked(queries, *_without_padding(queries, lengths, options, *result))


def _without_padding(
    queries: Rows, lengths: Lengths, options: Options, out: torch.Tensor, softmax_lse: torch.Tensor | None
) -> Result:
    """The results with 0 and -inf in rows from seqused_q on, from which no gradient reaches a sink."""
    if lengths.seqused_q is None or options.learnable_sink is None:  # Without a sink these rows are so already.
        return out, softmax_lse
    padding = rows_that_do_not_count(queries, lengths.seqused_q)
    out = out.masked_fill(padding[:, None, None], 0.0)
    return out, None if softmax_lse is None else softmax_lse.masked_fill(padding, -torch.inf)


def _paged(queries: Rows, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: Options) -> Result:
    """Over pages (pages, page_size, heads_k, ...), which have no backward."""
    table, seqused_q, seqused_k = lengths.page_table, lengths.seqused_q, lengths.seqused_k
    assert table is not None
    refuse_transforms("attention over pages")
    if keeps_gradients(queries.x, k, v, options.qv):
        raise RuntimeError("page_table: attention over pages has no backward, call it under torch.no_grad()")
    check_block_table(table, queries.x, queries.batch)
    check_strided("k", k)
    if k.dim() != 4:
        raise ValueError(f"k: got shape {tuple(k.shape)}, wanted (pages, page_size, heads, head_dim)")
    starts = queries.cu_seqlens
    capacity = torch.full_like(starts[1:], table.shape[1] * k.shape[1])
    if seqused_k is None:
        seqused_k = capacity
    check_used("seqused_k", seqused_k, capacity)
    if seqused_q is not None:
        check_used("seqused_q", seqused_q, starts.diff())
    if k.is_cpu and not is_traced(k, table, starts, seqused_k):  # their values can be read
        sequences.bounds("cu_seqlens_q", starts, queries.x.shape[0], queries.longest)
        for index, used in enumerate(seqused_k.tolist()):
            sequences.pages_of(k, table, index, used)
    seqused_k = (seqused_k - options.mask.fewer_keys).clamp_min(0)
    seqused_q = fewer(seqused_q, starts, options.mask.fewer_queries)
    if seqused_q is not None:  # The rows that do not count are sequences of their own, without keys.
        stops = torch.minimum(starts[:-1] + seqused_q, starts[1:])
        starts = torch.cat([torch.stack([starts[:-1], stops], 1).flatten(), starts[-1:]])
        seqused_k = torch.stack([seqused_k, torch.zeros_like(seqused_k)], 1).flatten()
        table = table.repeat_interleave(2, 0)
    call = CacheCall(
        q=maybe_contiguous(queries.x), k_cache=k, v_cache=v, options=options.of_call(), cache_seqlens=seqused_k,
        block_table=table, num_splits=options.num_splits, cu_seqlens_q=starts, max_seqlen_q=queries.longest,
        qv=None if options.qv is None else rows_of(options.qv, queries),
    )  # fmt: skip
    check_kvcache(call, True)
    out, softmax_lse = attend_to_cache(call)
    told = _told(softmax_lse) if options.return_lse else None
    return unpacked(queries, *_without_padding(queries, lengths, options, out, told))


def _over_blocks(q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor, options: Options) -> Result:
    """Over the blocks of block_sparse_tensors. Raises NotImplementedError for options that a block mask excludes."""
    if options.qv is not None or q is None or k is None:
        raise NotImplementedError("qv: got a tensor, or no q or k, wanted q, k and v alone with block_sparse_tensors")
    if options.mask.fewer_queries or options.mask.fewer_keys:
        raise NotImplementedError("window_size: got a negative side, wanted 0 or more with block_sparse_tensors")
    out, softmax_lse = attend_to_blocks(
        q, k, v, options.block_sparse_tensors, options.block_sparse_tensors_bwd, options.of_call(),
        deterministic=options.deterministic,
    )  # fmt: skip
    if options.return_lse:
        return out, _told(softmax_lse)
    return out, _told(softmax_lse.detach()) if keeps_gradients(q, k, v, options.learnable_sink) else None


def attend(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor, lengths: Lengths, options: Options
) -> Result:
    """(out, softmax_lse); tensors as flash_attn.cute.flash_attn_varlen_func has them.

    Without q or k, and as upstream where k is v with head dim 512, the second query or else q attends to v alone.
    softmax_lse has heads last where there is a second query.
    """
    if options.block_sparse_tensors is not None or options.block_sparse_tensors_bwd is not None:
        if not lengths.none:
            refuse(block_sparse_tensors=options.block_sparse_tensors)
        return _over_blocks(q, k, v, options)
    alone = q is None or k is None or (k is v and v.shape[-1] == _LATENT)
    if options.qv is None and not alone:
        assert q is not None
        assert k is not None
        return _attend(q, k, v, lengths, options)
    if alone:
        q, k, options = (q if options.qv is None else options.qv), v, replace(options, qv=None)
    if q is None or k is None:
        raise TypeError("q, qv: got None, wanted one of them")
    out, softmax_lse = _attend(q, k, v, lengths, options)
    return out, None if softmax_lse is None else softmax_lse.transpose(-1, -2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, options: Options) -> Result:
    mask = options.mask
    if lengths.none and not mask.fewer_queries and not mask.fewer_keys:
        return _dense(q, k, v, options)
    queries = packed("q", q, lengths.cu_seqlens_q, lengths.max_seqlen_q)
    if lengths.page_table is not None:
        if lengths.cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k: got a tensor, wanted None with page_table, which takes seqused_k")
        return _paged(queries, k, v, lengths, options)
    keys, values = (packed(name, x, lengths.cu_seqlens_k, lengths.max_seqlen_k) for name, x in (("k", k), ("v", v)))
    if queries.batch != keys.batch:
        raise ValueError(f"k: got {keys.batch} sequences, wanted {queries.batch} as q has")
    return _varlen(queries, keys, values.x, lengths, options)
