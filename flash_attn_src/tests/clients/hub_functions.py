"""Loads a repository by the package `kernels` and calls what lies beyond the dense functions, on the CPU.

    python hub_functions.py DIRECTORY

Block-sparse attention, decoding and FlexAttention, each against PyTorch's attention with the same mask. Prints a line
for each. flash_attn.flex leaves calls on a CPU to PyTorch, so they count as calls on a GPU here.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from kernels import get_local_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

SEQLEN = 192


def _check(name: str, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> None:
    """Compares (batch, seqlen, heads, head_dim) with PyTorch's attention, where `seen` is what a query sees."""
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    print(f"{name}: equal to PyTorch's attention")


def _sparse(kernel: Any) -> None:
    q, k, v = torch.randn(3, 1, SEQLEN, 2, 16)
    mask = kernel.sparse.patterns.bands(SEQLEN, SEQLEN, (0,), 32, block_size=(64, 64))
    assert isinstance(mask, kernel.sparse.BlockMask)
    assert not mask.seen.all()
    out = kernel.sparse.flash_attn_block_sparse_func(q, k, v, mask)
    _check("block-sparse", out, q, k, v, mask.seen.repeat_interleave(64, -1).repeat_interleave(64, -2))


def _decode(kernel: Any) -> None:
    q, (k, v) = torch.randn(1, 1, 2, 16), torch.randn(2, 1, SEQLEN, 2, 16)
    out = kernel.flash_attn_with_kvcache(q, k, v, cache_seqlens=100)
    _check("decode", out, q, k, v, torch.arange(SEQLEN)[None] < 100)


def _flex(kernel: Any) -> None:
    q, k, v = torch.randn(3, 1, SEQLEN, 2, 16)
    importlib.import_module(f"{kernel.__name__}.sdpa.attention").is_on_gpu = lambda _: True
    mask = create_block_mask(lambda _b, _h, q, kv: q >= kv, None, None, SEQLEN, SEQLEN, device="cpu")
    with kernel.flex.use_for_flex():
        out = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)
    print(kernel.flex.flex_report())
    _check("flex", out.transpose(1, 2), q, k, v, torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril())


def main() -> None:
    kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
    for check in (_sparse, _decode, _flex):
        check(kernel)
    assert not [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]


if __name__ == "__main__":
    main()
