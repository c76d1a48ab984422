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
    if variant.op.startswith(("decode", "extend", "latent")):
        return dict(_of_a_cache(variant, device, tokens))
    if variant.op.removeprefix("sparse-").startswith(("fwd", "bwd", "fp8-fwd", "int8-fwd")):
        return dict(_of_attention(variant, device, tokens))
    raise NotImplementedError(f"{variant.name}: no call for it")


def _of_attention(variant: Any, device: torch.device, tokens: int) -> Iterator[tuple[str, Call]]:
    from flash_attn.attention.backends import triton as backend
    from flash_attn.attention.backends.triton import fp8 as triton_fp8
    from flash_attn.call.calls import GradientCall, attention_call, replace
    from flash_attn.call.mask import Mask

    op, kind, dim = variant.op.removeprefix("sparse-"), variant.kind, variant.block_d
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(variant.dtype, torch.bfloat16)
    tokens //= 4 if dtype is torch.float32 else 1
    heads = max(2048 // dim, 8)
    dim_v = variant.operation.value_dims.get(dim, dim)
    q, k, v, dout = (
        torch.randn(2, tokens, heads, each, device=device, dtype=dtype) for each in (dim, dim, dim_v, dim_v)
    )
    slopes = torch.rand(heads, device=device) if kind in ("alibi", "any") else None
    softcap, dropout_p = 20.0 * (kind in ("softcap", "any")), 0.1 * (kind == "dropout")
    random = torch.zeros(2, dtype=torch.int64, device=device) if dropout_p else None
    ids = torch.zeros(1, tokens, dtype=torch.int32, device=device)  # one document, so that all tiles are visited
    mask = Mask(ids_q=ids, ids_k=ids) if variant.operation.has_mask else None
    table = None
    page = {"fwd-paged": SMALL_PAGE, "fwd-paged-whole": min(256, tokens)}.get(op.removesuffix("-v"))
    paged = [k, v]
    if page is not None:
        table = torch.randperm(2 * tokens // page, device=device).int().view(2, -1)
        paged = [x.view(-1, page, *x.shape[2:]) for x in paged]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    if op == "fp8-fwd":
        cast = [triton_fp8.cast(x, backend.fp8_format(q), None, None, False) for x in (q, k, v)]
        small, factors = zip(*cast, strict=True)
    for name, causal, left in (("full", False, -1), ("causal", True, -1), ("window", True, tokens // 4)):
        call = attention_call(
            q, *paged, softmax_scale=dim**-0.5, causal=causal, window_size=(left, -1), softcap=softcap,
            alibi_slopes=slopes, dropout_p=dropout_p, rng_state=random, block_table=table,
            max_seqlen_k=0 if table is None else tokens, mask=mask,
        )  # fmt: skip
        if op.startswith("fwd"):
            yield name, lambda call=call: list(backend.forward(call)[:2])
        elif op == "int8-fwd":
            yield name, lambda call=call: list(backend.int8_forward(call, None))
        elif op == "fp8-fwd":
            fp8_q, fp8_k, fp8_v = small
            fp8 = replace(call, q=fp8_q, k=fp8_k, v=fp8_v, descales=factors)
            yield name, lambda fp8=fp8: list(backend.fp8_forward(fp8)[:2])
        else:
            out, lse, *_ = backend.forward(call)
            gradients = GradientCall(call, dout, out, lse, dq, dk, dv)
            yield name, lambda gradients=gradients: [backend.backward(gradients), dq, dk, dv]


def _of_a_cache(variant: Any, device: torch.device, tokens: int) -> Iterator[tuple[str, Call]]:
    from flash_attn.attention.backends.triton.decode import attend_split
    from flash_attn.call.calls import cache_call
    from flash_attn.kernels.value_dims import LATENT_DIM

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}.get(variant.dtype)
    if dtype is None:
        raise NotImplementedError(f"{variant.name}: a cache in FP8 takes the tiles of bf16")
    latent, size = variant.op.startswith("latent"), variant.block_d
    queries = 32 if "extend" in variant.op else 1
    # More heads of latent attention to the one key head are more rows than its kernel of few rows takes.
    heads, heads_k, dim = (16, 1, size + LATENT_DIM) if latent else (32, 4, size)
    slopes = torch.rand(heads, device=device) if variant.kind == "any" else None
    for batch, length in ((64, tokens // 2), (16, 2 * tokens), (1, 8 * tokens)):
        q = torch.randn(batch, queries, heads, dim, device=device, dtype=dtype)
        k = torch.randn(batch, length, heads_k, dim, device=device, dtype=dtype)
        qv = table = None
        if latent:  # as the checks split a cache whose first columns are the values
            qv, q, v, k = q[..., :size], q[..., size:], k[..., :size], k[..., size:]
        else:
            v = torch.randn_like(k)
        if variant.op.endswith("-paged"):
            table = torch.randperm(batch * length // SMALL_PAGE, device=device).int().view(batch, -1)
            k, v = (x.unflatten(1, (-1, SMALL_PAGE)).flatten(0, 1) for x in (k, v))
        call = cache_call(
            q,
            k,
            v,
            softmax_scale=dim**-0.5,
            cache_seqlens=length,
            block_table=table,
            causal=True,
            alibi_slopes=slopes,
            qv=qv,
        )
        yield f"{batch} x {length}", lambda call=call: list(attend_split(call))
