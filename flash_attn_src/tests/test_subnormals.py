"""fp16 on MI200, whose products take subnormal operands as zero, run instruction by instruction.

Each case loses everything, or a good part, without what the kernels do against it. The bar is everybody's: twice the
error of PyTorch in fp16, which flushes nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from reference import attention, public

from amdgpu_simulator import gpu

TARGET = "gfx90a"
# A weight of exp(-GAP), 1.7e-5 of the largest one, is subnormal in fp16.
GAP = 11.0


def dominated(seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, dim: int) -> list[torch.Tensor]:
    """q, k and v where key 0 has a score GAP above the others and no value; theirs are near 1."""
    generator = torch.Generator().manual_seed(0)
    q = 0.1 * torch.randn((1, seqlen_q, heads, dim), generator=generator)
    k = 0.1 * torch.randn((1, seqlen_k, heads_k, dim), generator=generator)
    v = 1.0 + 0.1 * torch.randn((1, seqlen_k, heads_k, dim), generator=generator)
    q[..., 0], k[..., 0] = dim**0.5, 0.0
    k[:, 0, :, 0] = GAP
    v[:, 0] = 0.0
    return [x.half() for x in (q, k, v)]


@pytest.mark.parametrize(
    ("dim", "kernel", "options"),
    [
        (64, "fwd-fp16-d64", {}),
        (128, "fwd-fp16-d128", {"causal": True}),
        (64, "fwd-fp16-d64-sink", {"s_aux": torch.tensor([3.0, 14.0])}),
        (64, "fwd-fp16-d64-softcap", {"softcap": 50.0}),
    ],
)
def test_a_dominating_key(dim: int, kernel: str, options: dict[str, Any]) -> None:
    inputs = dominated(40, 150, 2, 1, dim)
    with gpu.pretend(TARGET) as launched, torch.no_grad():
        out, lse, _ = flash_attn_func(*inputs, **public(options), return_attn_probs=True)
    assert launched[0] == kernel
    (exact, exact_lse), (rounded, _) = (attention(*inputs, **options, dtype=dtype) for dtype in (torch.float32, None))
    assert_close("out", out, exact, rough=rounded, tiny=1e-6)
    assert_close("lse", lse, exact_lse, tiny=1e-5)


@pytest.mark.parametrize(("page_size", "kernel"), [(0, "decode-fp16-d64"), (16, "decode-paged-fp16-d64")])
def test_decoding_with_a_dominating_key(page_size: int, kernel: str) -> None:
    q, k, v = dominated(1, 160, 4, 2, 64)
    paged: dict[str, Any] = {}
    caches = [k, v]
    if page_size:
        caches = [x.reshape(-1, page_size, 2, 64) for x in (k, v)]
        paged = {"block_table": torch.arange(160 // page_size, dtype=torch.int32)[None]}
    with gpu.pretend(TARGET) as launched:
        out, lse = flash_attn_with_kvcache(
            q, *caches, cache_seqlens=150, num_splits=2, return_softmax_lse=True, **paged
        )
    assert launched == [kernel, "combine-fp16-d128"]
    (exact, exact_lse), (rounded, _) = (
        attention(q, k[:, :150], v[:, :150], dtype=dtype) for dtype in (torch.float32, None)
    )
    assert_close("out", out, exact, rough=rounded, tiny=1e-6)
    assert_close("lse", lse, exact_lse, tiny=1e-5)
