"""The Composable Kernel backend: from validated tensors to planned launches of the wheel's CK kernels."""

from __future__ import annotations

import torch

from flash_attn import rng
from flash_attn.backends.ck import calls as ck_calls
from flash_attn.backends.ck import dropout as ck_dropout
from flash_attn.backends.ck.calls import (
    DIMS,
    NO_TENSOR,
    address,
    aligned,
    by_triton,
    fields,
    instead,
    lacking,
    padded,
    run,
    shape_fields,
    window_of,
)
from flash_attn.backends.ck.kvcache import attend, lacking_of, splits_of
from flash_attn.backends.split_kv import DECODE_ROWS, as_cache_call, pay
from flash_attn.runtime import ck_planner
from flash_attn.runtime.ck_planner import UnsupportedError

name = "flash_attn.backends.ck"

# Queries in a tile of the forward kernels.
_FORWARD_ROWS = 128


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    return_softmax: bool,
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Attention of q over k and v; shapes and meaning as in `flash_attn_interface`.

    Returns (out, softmax_lse, S_dmask, rng_state). Raises KernelError where the wheel lacks the kernel.
    """
    given = (
        q, k, v, out, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, dropout_p,
        return_softmax, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, leftpad_k,
        block_table,
    )  # fmt: skip
    group = cu_seqlens_q is not None
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    reason = lacking(q)
    if leftpad_k is not None:
        reason = "leftpad_k: the kernels have none"
    elif dropout_p > 0.0 and reason is None:
        reason = ck_dropout.problem(q, k, batch, softmax_scale, softcap, alibi_slopes, max_seqlen_q, max_seqlen_k)
    elif block_table is not None and (dropout_p > 0.0 or q.shape[-1] not in DIMS):
        reason = f"block_table: not with dropout or head_dim {q.shape[-1]}"
    if block_table is not None and return_softmax and dropout_p > 0.0:
        raise NotImplementedError("return_attn_probs with block_table: no S_dmask of a paged cache, leave one out")
    if reason is not None:
        return instead("forward", reason, *given)

    if not group:
        max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
    few = dropout_p == 0.0 and max_seqlen_q * q.shape[-2] <= DECODE_ROWS * k.shape[-2]
    # Packed keys begin at any row, where the parts of Triton's kernels may.
    if few and group and block_table is None and not ck_calls.alone:
        span = batch, max_seqlen_q, max_seqlen_k, causal, window_left, window_right
        if pay(_FORWARD_ROWS, q, k, *span):
            return by_triton("forward", *given)
    q, k, v = aligned(q), aligned(k), aligned(v)
    if few and not group:
        call = as_cache_call(
            _FORWARD_ROWS, q, k, v, out, softmax_scale, causal, window_left, window_right, softcap, alibi_slopes, None,
            None, max_seqlen_q, max_seqlen_k, seqused_k, None, None,
        )  # fmt: skip
        if call is not None and lacking_of(call) is None:
            return *attend(call), None, rng_state
    result = torch.empty_like(q) if out is None else aligned(out)
    lse_shape = (q.shape[1], q.shape[0]) if group else (batch, q.shape[2], max_seqlen_q)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if group or max_seqlen_k == 0:  # rows outside of every sequence, or without a key
        result.zero_()
        lse.fill_(torch.inf)
    if dropout_p > 0.0 and rng_state is None:
        rng_state = rng.draw(q.device)
    shape = shape_fields(
        q, batch=batch, nheads_k=k.shape[-2], seqlen_q=max_seqlen_q, seqlen_k=max_seqlen_k,
        window=window_of(causal, window_left, window_right, one_query=not group and max_seqlen_q == 1),
        scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, lse=(0 if group else lse.stride(0), lse.stride(-2)),
        alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, rng_state=rng_state,
    )  # fmt: skip
    random = None
    if return_softmax and dropout_p > 0.0:
        random = torch.empty((*lse_shape, max_seqlen_k), dtype=torch.uint8, device=q.device)
    if 0 not in (batch, max_seqlen_q, max_seqlen_k, q.shape[0], k.shape[0]):
        try:
            if block_table is not None:
                splits = splits_of(q, batch * q.shape[-2] * -(-max_seqlen_q // 64), max_seqlen_k)
                _over_pages(q, k, v, result, lse, shape, block_table, seqused_k, splits)
            else:
                tensors = (*fields(q), *fields(k), *fields(v), *fields(result))
                rest = (lse.data_ptr(), address(seqused_k), *ck_dropout.fields(random))
                run(q, "forward", ck_planner.FORWARD.pack(*shape, *tensors, *rest))
        except UnsupportedError as error:
            return instead("forward", str(error), *given[:12], rng_state, *given[13:])
    if out is not None and result is not out:
        result = out.copy_(result)
    if random is None:
        return result, lse, None, rng_state
    options = (softmax_scale, *window_of(causal, window_left, window_right), alibi_slopes, dropout_p)
    dmask = ck_dropout.signed_probabilities(
        q, k, lse, random, *options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    )
    return result, lse, dmask, rng_state


def _over_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    shape: tuple[int | float, ...],
    block_table: torch.Tensor,
    seqused_k: torch.Tensor | None,
    splits: int,
) -> None:
    """Sequences of several lengths over pages: the kernels of the decoding."""
    split_out = torch.empty((splits, *lse.shape, q.shape[2]), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    parameters = ck_planner.DECODE.pack(
        *shape, *fields(q), *fields(k), *fields(v), *fields(out), *NO_TENSOR, *NO_TENSOR,
        lse.data_ptr(), 0, address(seqused_k), 0, block_table.data_ptr(), block_table.stride(0), q.shape[0],
        0, 0, 0, 0, 0, k.shape[1], splits, 0, split_out.data_ptr(), split_lse.data_ptr(),
    )  # fmt: skip
    run(q, "decode", parameters)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    deterministic: bool,
    rng_state: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> torch.Tensor:
    """Gradients of `forward` into dq, dk, dv; returns softmax_d = rowsum(dout * out)."""
    given = (
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_left, window_right, softcap,
        alibi_slopes, dropout_p, deterministic, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    group = cu_seqlens_q is not None
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    reason = lacking(q)
    if reason is None and dropout_p > 0.0:
        reason = ck_dropout.problem(q, k, batch, softmax_scale, softcap, alibi_slopes, max_seqlen_q, max_seqlen_k)
    elif reason is None and softcap > 0.0:  # before there is a workspace
        reason = "softcap: the backward has none"
    if reason is not None:
        return instead("backward", reason, *given)

    head_dim = next(dim for dim in DIMS if q.shape[-1] <= dim)
    dout, q, k, v, out = (padded(tensor, head_dim) for tensor in (dout, q, k, v, out))
    if not group:
        max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    softmax_lse = softmax_lse.contiguous()
    empty = 0 in (batch, max_seqlen_q, max_seqlen_k, q.shape[0], k.shape[0])
    if group or empty:  # rows outside of every sequence, or without a key
        delta = torch.zeros_like(softmax_lse)
        for gradient in (dq, dk, dv):
            gradient.zero_()
        if empty:
            return delta
    else:
        delta = torch.empty_like(softmax_lse)
    new_dq = _as_result(dq, q.shape)
    # The kernels give every query head a gradient of its own for its keys and values.
    shared = (*k.shape[:-2], nheads, head_dim)
    new_dk, new_dv = _as_result(dk, shared), _as_result(dv, shared)
    shape = shape_fields(
        q, batch=batch, nheads_k=nheads_k, seqlen_q=max_seqlen_q, seqlen_k=max_seqlen_k,
        window=window_of(causal, window_left, window_right), scale=softmax_scale, softcap=softcap, dropout_p=dropout_p,
        lse=(0 if group else softmax_lse.stride(0), softmax_lse.stride(-2)), alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, rng_state=rng_state,
    )  # fmt: skip
    tensors = [part for tensor in (q, k, v, out, dout, new_dq, new_dk, new_dv) for part in fields(tensor)]
    rest = (q.shape[0] if group else 0, int(deterministic), 0)

    def parameters(sums: int) -> bytes:
        return ck_planner.BACKWARD.pack(*shape, *tensors, softmax_lse.data_ptr(), delta.data_ptr(), sums, *rest)

    workspace = ck_planner.backward_workspace(parameters(0))
    sums = torch.zeros(workspace // 4, dtype=torch.float32, device=q.device)
    try:
        run(q, "backward", parameters(sums.data_ptr()))
    except UnsupportedError as error:
        if dropout_p > 0.0:  # the forward drew its numbers in another pattern than the Triton kernels would
            raise NotImplementedError(f"the CK backend cannot do this backward with dropout: {error}") from None
        return instead("backward", str(error), *given)
    for gradient, computed in ((dq, new_dq), (dk, new_dk), (dv, new_dv)):
        if computed is gradient:
            continue
        found = computed[..., : gradient.shape[-1]]
        if found.shape != gradient.shape:
            found = found.unflatten(-2, (nheads_k, nheads // nheads_k)).sum(-2)
        gradient.copy_(found)
    return delta if dropout_p == 0.0 else delta / (1.0 - dropout_p)  # the kernels keep it times 1 - dropout_p


def _as_result(gradient: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The gradient itself where the kernels can write it, else a tensor of the shape that they can; in a tensor of
    several sequences, zero outside of them."""
    if gradient.shape == shape and aligned(gradient) is gradient:
        return gradient
    make = torch.zeros if len(shape) == 3 else torch.empty
    return make(shape, dtype=gradient.dtype, device=gradient.device)
