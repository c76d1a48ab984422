"""Calls in which one kernel of the Triton backend is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Call = Callable[[], list[torch.Tensor]]
# Keys a page: less than any block has, or the kernel would be the one that takes a page whole.
SMALL_PAGE = 8


def calls(variant: Any, device: torch.device, tokens: int = 4096) -> dict[str, Call]:
    """What a kernel is timed in. Raises NotImplementedError for an operation that is not called here."""
    torch.manual_seed(0)
    if variant.op.startswith(("decode", "extend")):
        return dict(_of_a_cache(variant, device, tokens))
    if variant.op.startswith(("fwd", "bwd", "fp8-fwd")):
        return dict(_of_attention(variant, device, tokens))
    raise NotImplementedError(f"{variant.name}: no call for it")


def _of_attention(variant: Any, device: torch.device, tokens: int) -> Iterator[tuple[str, Call]]:
    from flash_attn.backends import triton as backend
    from flash_attn.backends.triton import fp8 as triton_fp8
    from flash_attn.calls import AttentionCall, GradientCall, replace

    op, kind, dim = variant.op, variant.kind, variant.block_d
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(variant.dtype, torch.bfloat16)
    tokens //= 4 if dtype is torch.float32 else 1
    heads = max(2048 // dim, 8)
    q, k, v, dout = (torch.randn(2, tokens, heads, dim, device=device, dtype=dtype) for _ in range(4))
    slopes = torch.rand(heads, device=device) if kind in ("alibi", "any") else None
    softcap, dropout_p = 20.0 * (kind in ("softcap", "any")), 0.1 * (kind == "dropout")
    random = torch.zeros(2, dtype=torch.int64, device=device) if dropout_p else None
    table = None
    page = {"fwd-paged": SMALL_PAGE, "fwd-paged-whole": min(256, tokens)}.get(op)
    paged = [k, v]
    if page is not None:
        table = torch.randperm(2 * tokens // page, device=device).int().view(2, -1)
        paged = [x.view(-1, page, heads, dim) for x in paged]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    if op == "fp8-fwd":
        cast = [triton_fp8.cast(x, backend.fp8_format(q), None, None, False) for x in (q, k, v)]
        small, factors = zip(*cast, strict=True)
    for name, causal, left in (("full", False, -1), ("causal", True, -1), ("window", True, tokens // 4)):
        call = AttentionCall(
            q, *paged, softmax_scale=dim**-0.5, causal=causal, window_size=(left, -1), softcap=softcap,
            alibi_slopes=slopes, dropout_p=dropout_p, rng_state=random, max_seqlen_k=tokens, block_table=table,
        )  # fmt: skip
        if op.startswith("fwd"):
            yield name, lambda call=call: list(backend.forward(call)[:2])
        elif op == "fp8-fwd":
            fp8_q, fp8_k, fp8_v = small
            fp8 = replace(call, q=fp8_q, k=fp8_k, v=fp8_v, descales=factors)
            yield name, lambda fp8=fp8: list(backend.fp8_forward(fp8)[:2])
        else:
            out, lse, *_ = backend.forward(call)
            gradients = GradientCall(call, dout, out, lse, dq, dk, dv)
            yield name, lambda gradients=gradients: [backend.backward(gradients), dq, dk, dv]


def _of_a_cache(variant: Any, device: torch.device, tokens: int) -> Iterator[tuple[str, Call]]:
    from flash_attn.backends.triton.decode import attend_split
    from flash_attn.calls import CacheCall

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}.get(variant.dtype)
    if dtype is None:
        raise NotImplementedError(f"{variant.name}: a cache in FP8 takes the tiles of bf16")
    queries = 1 if variant.op.startswith("decode") else 32
    slopes = torch.rand(32, device=device) if variant.kind == "any" else None
    for batch, length in ((64, tokens // 2), (16, 2 * tokens), (1, 8 * tokens)):
        q = torch.randn(batch, queries, 32, variant.block_d, device=device, dtype=dtype)
        k, v = (torch.randn(batch, length, 4, variant.block_d, device=device, dtype=dtype) for _ in range(2))
        table = None
        if variant.op.endswith("-paged"):
            table = torch.randperm(batch * length // SMALL_PAGE, device=device).int().view(batch, -1)
            k, v = (x.view(-1, SMALL_PAGE, 4, variant.block_d) for x in (k, v))
        call = CacheCall(
            q, k, v, variant.block_d**-0.5, cache_seqlens=length, block_table=table, causal=True, alibi_slopes=slopes
        )
        yield f"{batch} x {length}", lambda call=call: list(attend_split(call))
