"""PyTorch's operators of flash attention on these kernels: the implementation "flash_attn" of torch.nn.attention.

    import flash_attn

    torch.nn.attention.activate_flash_attention_impl("flash_attn")  # torch 2.11 or newer
    torch.nn.attention.restore_flash_attention_impl()               # PyTorch's own kernels again

It serves what PyTorch sends to its own flash attention: calls of scaled_dot_product_attention that PyTorch's choice
gives to flash attention, and torch.nn.attention.varlen. A causal mask is aligned to the bottom right, as PyTorch's
operators have it. num_splits counts with block_table or seqused_k; elsewhere the shapes decide if keys are split. An
option without a kernel raises NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library

from flash_attn.attention import backends
from flash_attn.call.arguments import check_dense, check_gradients, check_kvcache, check_per_sequence, check_varlen
from flash_attn.call.calls import AttentionCall, CacheCall, Options, maybe_contiguous, replace
from flash_attn.call.options import SPLIT_KV, draw_rng_state
from flash_attn.sdpa.report import count_served

NAME = "flash_attn"
_HEAD_DIM_STEP = 8
_OPTIONS = {
    "scale", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes", "block_table", "num_splits",
}  # fmt: skip

# out, softmax_lse, rng_state and offset, as PyTorch's backward gets them back
_Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Handle:
    """Keeps the operators replaced until `remove`."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        """Gives the operators back to PyTorch."""
        self._library = None


def activate(dispatch_key: str = "CUDA") -> Handle:
    """Replaces PyTorch's operators of flash attention for one dispatch key, by default that of GPUs."""
    library = Library("aten", "IMPL", dispatch_key)
    for name, kernel in _KERNELS.items():
        if hasattr(torch.ops.aten, name):  # torch 2.11 has no _flash_attention_forward_no_dropout_inplace
            library.impl(name, kernel, dispatch_key)
    return Handle(library)


def register() -> None:
    """Makes the implementation known to torch.nn.attention, where torch has that choice. It activates nothing."""
    offer = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if offer is not None:
        offer(NAME, register_fn=activate)


def _check_options(return_debug_mask: bool, options: dict[str, Any]) -> None:
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask: got True, wanted False: these kernels return no mask")
    if unknown := [name for name, value in options.items() if name not in _OPTIONS and value is not None]:
        raise NotImplementedError(f"{', '.join(unknown)}: no kernel has this option, wanted None")


def _check_head_dims(query: torch.Tensor, value: torch.Tensor) -> None:
    for name, x in (("query", query), ("value", value)):
        if x.shape[-1] % _HEAD_DIM_STEP:
            raise ValueError(
                f"{name}: got head dim {x.shape[-1]}, wanted a multiple of {_HEAD_DIM_STEP}: pad it with zeros"
            )


def _options(arguments: dict[str, Any], is_causal: bool, dropout_p: float) -> Options:
    """The options of a call from the arguments of PyTorch's operators."""
    left, right = arguments.get("window_size_left"), arguments.get("window_size_right")
    window = (-1 if left is None else left, -1 if right is None else right)
    slopes = arguments.get("alibi_slopes")
    return Options(arguments.get("scale"), is_causal, window, dropout_p=dropout_p, alibi_slopes=slopes)


def _in_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor that kernels can write: None stands for a new one, which is copied to x."""
    return x if x is not None and x.stride(-1) == 1 else None


def _over_cache(call: CacheCall, out: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    check_kvcache(call, True)
    call.out = _in_rows(out)
    result: tuple[torch.Tensor, torch.Tensor] = backends.select(call.q).kvcache(call)
    return result


def _attend(
    call: AttentionCall, out: torch.Tensor | None, num_splits: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(out, softmax_lse, rng_state or None) of a call without its checks. out, where given, holds the result."""
    _check_head_dims(call.q, call.v)
    q = call.q
    offsets = call.cu_seqlens_k
    call.q, call.k, call.v = maybe_contiguous(q), maybe_contiguous(call.k), maybe_contiguous(call.v)
    rng_state: torch.Tensor | None = None
    if call.block_table is not None or (call.seqused_k is not None and offsets is None):
        SPLIT_KV.refuse(call, "leave it out with block_table or seqused_k")
        lengths = offsets.diff() if call.seqused_k is None and offsets is not None else call.seqused_k
        result, softmax_lse = _over_cache(
            CacheCall(
                q=call.q, k_cache=call.k, v_cache=call.v, options=call.options, cache_seqlens=lengths,
                block_table=call.block_table, num_splits=num_splits or 0, cu_seqlens_q=call.cu_seqlens_q,
                max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_k or None,
            ),
            out,
        )  # fmt: skip
    else:
        if call.cu_seqlens_q is None:
            check_dense(call)
        else:
            check_varlen(call)
            check_per_sequence(q, call.batch, seqused_k=call.seqused_k)
        if call.options.dropout_p > 0.0:
            call.options.rng_state = rng_state = draw_rng_state(q.device)
        call.out = _in_rows(out)
        result, softmax_lse, _, _ = backends.select(q).forward(call)
    if out is not None and result is not out and result.data_ptr() != out.data_ptr():
        out.copy_(result)
    count_served()
    return result if out is None else out, softmax_lse, rng_state


def _random_state(rng_state: torch.Tensor | None, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rng_state as PyTorch's operators return it: two numbers on ROCm, else a pair and an unused number.

    Without dropout nobody reads the values.
    """
    if rng_state is None:
        rng_state = torch.empty((2,), dtype=torch.int64, device=query.device)
    if torch.version.hip is not None:
        seed, offset = rng_state.unbind()
        return seed, offset
    return rng_state.view(torch.uint64), torch.empty((), dtype=torch.uint64, device=query.device)


def _rng_state(seed: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    return seed.view(torch.int64) if seed.numel() == 2 else torch.stack([seed, offset]).view(torch.int64)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """aten::_flash_attention_forward: (out, softmax_lse, rng_state, unused, debug_mask)."""
    _check_options(return_debug_mask, options)
    call = AttentionCall(
        query, key, value, _options(options, is_causal, dropout_p), cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k,
        max_seqlen_q=0 if cum_seq_q is None else max_q,
        max_seqlen_k=0 if cum_seq_q is None else max_k, seqused_k=options.get("seqused_k"),
        block_table=options.get("block_table"),
    )  # fmt: skip
    out, softmax_lse, rng_state = _attend(call, None, options.get("num_splits"))
    return out, softmax_lse, *_random_state(rng_state, query), query.new_empty((0,))


def _forward_in_place(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> torch.Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace: writes out, returns softmax_lse."""
    if dropout_p > 0.0:
        raise NotImplementedError(f"dropout_p: got {dropout_p}, wanted 0: this operator has no dropout")
    result, softmax_lse, *_ = _forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options
    )
    if out.shape != result.shape or out.dtype is not result.dtype:
        raise ValueError(f"out: got {out.dtype} {tuple(out.shape)}, wanted {result.dtype} {tuple(result.shape)}")
    out.copy_(result)
    return softmax_lse


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    **options: Any,
) -> _Gradients:
    """aten::_flash_attention_backward: (grad_query, grad_key, grad_value), each with the strides of its input."""
    _check_options(False, options)
    _check_head_dims(query, value)
    q, k, v, dout, out = (maybe_contiguous(x) for x in (query, key, value, grad_out, out))
    state = _rng_state(rng_state, unused) if dropout_p > 0.0 else None
    deterministic = torch.are_deterministic_algorithms_enabled()
    call = AttentionCall(
        q, k, v, replace(_options(options, is_causal, dropout_p), rng_state=state), deterministic,
        cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k,
        max_seqlen_q=0 if cum_seq_q is None else max_q, max_seqlen_k=0 if cum_seq_q is None else max_k,
    )  # fmt: skip
    if cum_seq_q is None:
        check_dense(call)
    else:
        check_varlen(call)
    results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    dq, dk, dv = (x if x.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in results)
    backends.select(q).backward(check_gradients(call, dout, out, logsumexp, (dq, dk, dv)))
    for result, written in zip(results, (dq, dk, dv), strict=True):
        if result is not written:
            result.copy_(written)
    return results


def _with_layout_of(x: torch.Tensor, size: int) -> torch.Tensor:
    """A new tensor of the shape of x, its last axis `size` long, with the axes in memory as those of x."""
    if size == x.shape[-1]:
        return torch.empty_like(x)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda axis: (-strides[axis], axis))
    return torch.empty_permuted((*x.shape[:-1], size), order, dtype=x.dtype, device=x.device)


def _sdpa_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention; tensors are (batch, heads, seqlen, head_dim)."""
    _check_options(return_debug_mask, options)
    out = _with_layout_of(query, value.shape[-1])
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    call = AttentionCall(q, k, v, _options(options, is_causal, dropout_p))
    _, softmax_lse, rng_state = _attend(call, out.transpose(1, 2), None)
    state = _random_state(rng_state, query)
    return out, softmax_lse, None, None, query.shape[2], key.shape[2], *state, query.new_empty((0,))


def _sdpa_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,  # noqa: ARG001
    cum_seq_k: torch.Tensor | None,  # noqa: ARG001
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    **options: Any,
) -> _Gradients:
    """aten::_scaled_dot_product_flash_attention_backward."""
    dout, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    dq, dk, dv = _backward(
        dout, q, k, v, out, logsumexp, None, None, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset,
        **options,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


_KERNELS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_in_place,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
