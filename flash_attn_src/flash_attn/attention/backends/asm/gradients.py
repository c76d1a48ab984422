"""The gradients of attention by AMD's assembly kernels: one kernel, which adds up dq by atomics in fp32."""

from __future__ import annotations

import torch

from flash_attn.attention.backends.asm import planning
from flash_attn.attention.backends.asm.attention import is_empty, operand
from flash_attn.attention.backends.asm.planning import Call
from flash_attn.attention.backends.ck.gradients import row_sums
from flash_attn.attention.backends.ck.parameters import aligned
from flash_attn.call.calls import GradientCall, replace
from flash_attn.core import device
from flash_attn.kernels import assembly

# Elements after the end of lse and delta that a window kernel may read.
_SPARE = 32


def backward(gradients: GradientCall, described: Call) -> torch.Tensor:
    """See `protocol.Backend.backward`; of a call without an unsupported_reason. dq differs from run to run by the order
    of its sums."""
    call = gradients.forward
    q, k, v, dout = (aligned(x) for x in (call.q, call.k, call.v, gradients.dout))
    call = replace(call, q=q, k=k, v=v)
    packed = call.cu_seqlens_q is not None
    heads, heads_k = q.shape[-2], k.shape[-2]
    lse = gradients.softmax_lse.contiguous()
    delta = lse.new_empty(lse.numel() + _SPARE)[: lse.numel()].view(lse.shape)
    if packed or is_empty(call):
        delta.zero_()
    if is_empty(call):
        for gradient in (gradients.dq, gradients.dk, gradients.dv):
            gradient.zero_()
        return delta
    if not row_sums(gradients, delta):
        delta.copy_((dout.float() * gradients.out).sum(-1).transpose(-1, -2))
    if described.mask == assembly.WINDOW:
        lse = lse.new_empty(lse.numel() + _SPARE)[: lse.numel()].view(lse.shape).copy_(lse)
    # The kernels write a separate gradient of keys and values for each head of q.
    shape = (*k.shape[:-2], heads, k.shape[-1])
    dk, dv = (_as_result(gradient, shape, packed) for gradient in (gradients.dk, gradients.dv))
    sums = torch.zeros((*lse.shape, q.shape[-1]), dtype=torch.float32, device=q.device)
    operands = {"q": q, "k": k, "v": v, "dout": dout, "dk": dk, "dv": dv}
    launch = planning.backward(
        described, {name: operand(x) for name, x in operands.items()}, lse.data_ptr(), delta.data_ptr(),
        sums.data_ptr(), lse.stride(-2),
    )  # fmt: skip
    tensors = (*operands.values(), lse, delta, sums, call.cu_seqlens_q, call.cu_seqlens_k)
    device.run(q, [launch], tensors)
    gradients.dq.copy_(sums.transpose(-2, -3))
    for gradient, computed in ((gradients.dk, dk), (gradients.dv, dv)):
        if heads != heads_k:
            torch.sum(computed.unflatten(-2, (heads_k, heads // heads_k)), -2, out=gradient)
        elif computed is not gradient:
            gradient.copy_(computed)
    return delta


def _as_result(gradient: torch.Tensor, shape: tuple[int, ...], packed: bool) -> torch.Tensor:
    """The gradient itself if a kernel can write it, else a new tensor of that shape.

    It is zero for keys outside of sequences and for keys of sequences without queries, because no program writes those.
    """
    fits = gradient.shape == shape and aligned(gradient) is gradient
    result = gradient if fits else torch.empty(shape, dtype=gradient.dtype, device=gradient.device)
    return result.zero_() if packed else result
