"""What a backend does: every public function comes down to one of these calls."""

from __future__ import annotations

from typing import Protocol

import torch

from flash_attn.call.calls import AttentionCall, CacheCall, ForwardResult, Fp8Result, GradientCall


class Backend(Protocol):
    """Serves checked calls. A module may be one, or an object.

    All raise NotImplementedError for an option that no kernel honours, and KernelError where neither the wheel nor a
    JIT has the kernel. The values inside index tensors are checked by flash_attn.attention.backends.torch alone.
    """

    @property
    def name(self) -> str:
        """The module: "flash_attn.attention.backends.triton"."""

    def forward(self, call: AttentionCall) -> ForwardResult:
        """Attention."""

    def backward(self, gradients: GradientCall) -> torch.Tensor:
        """Writes dq, dk and dv; returns softmax_d = rowsum(dout * out), laid out as softmax_lse.

        ValueError for dropout without the forward's rng_state.
        """

    def kvcache(self, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends k and v to the caches in place, then attends: (out, softmax_lse (batch, heads, seqlen_q)).

        With cu_seqlens_q softmax_lse is (heads, total_q); rows outside of every sequence give 0 and +inf.
        """

    def fp8_forward(self, call: AttentionCall) -> Fp8Result:
        """Attention in FP8; head_dim is a multiple of 16.

        q, k and v are divided by their descales, or, for None, by their own largest magnitudes. FP8 tensors are taken
        as they are and need descales. The result is bf16 for FP8 tensors, else of q's type.
        """

    def fp8_format(self, x: torch.Tensor) -> torch.dtype:
        """The FP8 type of x's device. Raises NotImplementedError if its matrix units have no FP8."""

    def int8_forward(self, call: AttentionCall, mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, softmax_lse) of attention with INT8 queries and keys: see `flash_attn.int8`. q, k and v are fp16 or
        bf16, and head_dim is a multiple of 16.

        mean: fp32 (batch, heads of k, head_dim), which is subtracted from the keys before they become INT8.
        softmax_lse belongs to these smaller keys.
        """

    def combine(self, partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Joins attention over splits of the keys: fills out (batch, seqlen, heads, head_dim), returns the whole lse.

        partial fp32 (num_splits, batch, seqlen, heads, head_dim) with head_dim dense, partial_lse fp32
        (num_splits, batch, seqlen, heads), -inf or +inf where a split holds no key. The lse is fp32
        (batch, seqlen, heads), +inf where no split holds any.
        """
