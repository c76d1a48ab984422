"""diffusers' attention dispatcher by flash_attn against PyTorch's own attention: plain, varlen, context-parallel ops.

Its checks for a GPU and for half precision are off unless there is a GPU; they are its default.
"""

from __future__ import annotations

from types import SimpleNamespace

import diffusers
import flash_attn
import torch
from diffusers.models import attention_dispatch as dispatch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
TINY = 2e-2 if GPU else 2e-6


def close(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((got.double() - wanted.double()).abs().max())
    assert got.shape == wanted.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    assert error <= TINY, f"{name}: error {error:.2e}, bar {TINY:.0e}"
    print(f"{name}: error {error:.1e}")


def main() -> None:
    assert dispatch._CAN_USE_FLASH_ATTN, "diffusers does not see flash_attn"
    assert dispatch.flash_attn_func is flash_attn.flash_attn_func
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, 4, 16, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3))
    native, flash, varlen = (dispatch.AttentionBackendName(name) for name in ("native", "flash", "flash_varlen"))
    for causal in (False, True):
        expected = dispatch.dispatch_attention_fn(q, k, v, is_causal=causal, backend=native)
        got = dispatch.dispatch_attention_fn(q, k, v, is_causal=causal, backend=flash)
        close(f"flash, causal {causal}", got, expected)
        dout = torch.randn_like(got)
        gradients = torch.autograd.grad(expected, (q, k, v), dout, retain_graph=True)
        for name, one, other in zip(
            ("dq", "dk", "dv"), torch.autograd.grad(got, (q, k, v), dout), gradients, strict=True
        ):
            close(name, one, other)
        # The parts of context parallelism: the private ops, called with a custom autograd context.
        context = SimpleNamespace()
        context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)  # noqa: B023
        out, lse = dispatch._flash_attention_forward_op(context, q, k, v, is_causal=causal, return_lse=True)
        assert lse.shape == (2, 9, 4)
        close("forward op", out, expected)
        with torch.no_grad():
            parts = dispatch._flash_attention_backward_op(context, dout)
        for name, one, other in zip(("dq", "dk", "dv"), parts, gradients, strict=True):
            close(f"backward op: {name}", one, other)
    mask = torch.arange(9, device=DEVICE) < torch.tensor([9, 5], device=DEVICE)[:, None]
    expected = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask[:, None, None], backend=native)
    close("flash_varlen", dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=varlen), expected)
    print(f"diffusers {diffusers.__version__}, flash_attn {flash_attn.__version__}, {DEVICE}")


if __name__ == "__main__":
    main()
