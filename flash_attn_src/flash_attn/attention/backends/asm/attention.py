"""Attention by AMD's assembly kernels: from checked calls to planned launches."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from flash_attn.attention.backends.asm import planning
from flash_attn.attention.backends.asm.planning import Call, Operand
from flash_attn.attention.backends.ck.parameters import aligned
from flash_attn.call.calls import AttentionCall, ForwardResult, new_out
from flash_attn.call.options import ASM_BACKWARD, ASM_FORWARD
from flash_attn.core import device
from flash_attn.core.protocol import spoil
from flash_attn.kernels import assembly

DTYPES = {torch.float16: assembly.FP16, torch.bfloat16: assembly.BF16}


def unsupported_reason(call: AttentionCall, described: Call | None, op: str) -> str | None:
    """The reason why no assembly kernel serves an op (fwd or bwd) of a call. None if a kernel does."""
    name = (ASM_FORWARD if op == "fwd" else ASM_BACKWARD).unserved(call)
    if name is not None:
        return f"{name}: the kernels have none"
    if described is None:
        return f"dtype: {call.q.dtype} is neither float16 nor bfloat16"
    if (kernel := planning.find(described, op)) is not None and not has_kernel(call.q.get_device(), kernel.name):
        return f"wheel: it has no {kernel.name} for {described.target}"
    operands = {"q": operand(call.q), "k": operand(call.k), "v": operand(call.v)}
    return planning.unsupported_reason(described, op, operands)


def has_kernel(index: int, name: str) -> bool:
    """Whether the device's store has a kernel."""
    answer: bool | None = device.kernels.get((index, "has", name))
    if answer is None:
        answer = device.kernels[index, "has", name] = device.of(index).has_stored(name)
    return answer


def describe(call: AttentionCall) -> Call | None:
    """The facts of a call that a launch is planned from; None for a dtype that no kernel has."""
    if call.q.dtype not in DTYPES:
        return None
    here = device.of(call.q.get_device())
    left, right = call.options.window_size
    packed = call.cu_seqlens_q is not None
    starts_q = starts_k = total_q = total_k = 0
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        spoil()
        starts_q, starts_k = call.cu_seqlens_q.data_ptr(), call.cu_seqlens_k.data_ptr()
        total_q, total_k = call.q.shape[0], call.k.shape[0]
    return Call(
        target=here.target, units=here.compute_units, dtype=DTYPES[call.q.dtype], batch=call.batch,
        heads=call.q.shape[-2], heads_k=call.k.shape[-2], head_dim=call.q.shape[-1],
        seqlen_q=call.longest_q, seqlen_k=call.longest_k, left=left, right=0 if call.options.causal else right,
        scale=call.options.scale, packed=packed, starts_q=starts_q, starts_k=starts_k, total_q=total_q, total_k=total_k,
        value_dim=0 if call.v.shape[-1] == call.q.shape[-1] else call.v.shape[-1],
    )  # fmt: skip


def operand(x: torch.Tensor) -> Operand:
    """Address and strides of (batch, rows, heads, head_dim) or (rows, heads, head_dim)."""
    strides = x.stride()
    if len(strides) == 4:
        return Operand(x.data_ptr(), strides[0], strides[1], strides[2])
    return Operand(x.data_ptr(), 0, strides[0], strides[1])


def is_empty(call: AttentionCall) -> bool:
    """Whether no program would run, or no program would see a key."""
    return 0 in (call.batch, call.longest_q, call.longest_k, call.q.shape[0], call.k.shape[0])


def forward(call: AttentionCall, described: Call) -> ForwardResult:
    """See `protocol.Backend.forward`; of a call without an unsupported_reason."""
    q, k, v = aligned(call.q), aligned(call.k), aligned(call.v)
    packed = call.cu_seqlens_q is not None
    if call.out is not None:
        result = aligned(call.out)
    else:
        result = torch.empty_like(q) if described.value_dim == 0 else new_out(q, v)
    lse_shape = (q.shape[1], q.shape[0]) if packed else (call.batch, q.shape[2], call.longest_q)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if packed or is_empty(call):  # rows outside of every sequence, or without a key
        result.zero_()
        lse.fill_(torch.inf)
    if not is_empty(call):
        launch = planning.forward(
            described, operand(q), operand(k), operand(v), operand(result), lse.data_ptr(), lse.stride(-2)
        )
        tensors = (q, k, v, result, lse, call.cu_seqlens_q, call.cu_seqlens_k)
        device.run(q, [launch], tensors)
        _rows_without_keys(call, described.mask, result, lse)
    if call.out is not None and result is not call.out:
        result = call.out.copy_(result)
    return ForwardResult(result, lse)


def _rows_without_keys(call: AttentionCall, mask: str, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Gives rows that see no key out 0 and lse +inf. A causal kernel gives them 0 and -inf, a plain one NaN."""
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    if starts_q is None or starts_k is None:
        if mask == assembly.CAUSAL and call.longest_q > call.longest_k:
            lse.masked_fill_(lse == -torch.inf, torch.inf)
    elif starts_q is starts_k or starts_q.data_ptr() == starts_k.data_ptr():
        return  # as many keys as queries
    elif mask == assembly.CAUSAL:
        lse.masked_fill_(lse == -torch.inf, torch.inf)
    else:
        sequences = torch.bucketize(torch.arange(out.shape[0], device=out.device), starts_q[1:], right=True)
        empty = pad(starts_k.diff() == 0, (0, 1))[sequences]
        out.masked_fill_(empty[:, None, None], 0.0)
        lse.masked_fill_(empty, torch.inf)
