"""SpargeAttn's functions by name and signature, on the block-sparse kernels of flash_attn.

Queries, keys, weights and values have 16 bits here, so that a result is nearer to attention over the chosen blocks than
SpargeAttn's own, whose kernels round them to 8 bits. The names that say cuda run on every GPU of flash_attn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from flash_attn.call.arguments import check_dense
from flash_attn.call.arguments.diagnosis import check_strided, diagnose_switches
from flash_attn.call.block_mask import BlockMask
from flash_attn.call.calls import AttentionCall, Options
from flash_attn.core.driver import Driver
from flash_attn.sparse import flash_attn_block_sparse_func
from flash_attn.sparse.similarity import BLOCK_SIZE, blocks_reached, choose_blocks, per_head

_Result = torch.Tensor | tuple[torch.Tensor, float]
_Threshold = float | torch.Tensor

_AXES = {"HND": ("batch", "heads", "seqlen", "head_dim"), "NHD": ("batch", "seqlen", "heads", "head_dim")}
_INPUTS = (torch.float16, torch.bfloat16, torch.float32)


def spas_sage2_attn_meansim_topk_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: _Threshold = -0.1,
    cdfthreshd: _Threshold | None = None,
    topk: _Threshold | None = 0.5,
    pvthreshd: _Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype = torch.float16,
    return_sparsity: bool = False,
) -> _Result:
    """Attention over the blocks of 128 queries and 64 keys that `flash_attn.sparse.similarity.choose_blocks` takes.

    q, k, v: fp16, bf16 or fp32, head dims up to 256, (batch, heads, seqlen, head_dim) with tensor_layout "HND",
    (batch, seqlen, heads, head_dim) with "NHD". Heads of k and v may be fewer. Returns the output in the layout of q,
    with return_sparsity also the share of blocks that are left out, a float, for which the host waits. It is the share
    of the blocks that is_causal leaves. Gradients reach q, k and v through the visible blocks.

    The output is fp16, or bf16 for q in bf16, with output_dtype fp16, as SpargeAttn's is; bf16 and fp32 cast it. fp32
    inputs are computed in fp16. scale: 1 / sqrt(head_dim) by default; the choice of blocks takes the default in any
    case. simthreshd1, cdfthreshd, topk, smooth_k, attention_sink: see `choose_blocks`. pvthreshd: a number, or one for
    each head. SpargeAttn leaves out products whose weights are all below 2**-pvthreshd; none is left out here, so that
    it changes nothing. is_causal hides every later key; SpargeAttn's functions with sage2 in their names show whole
    blocks on the diagonal. A query that sees no key gets 0.

    ValueError for another layout or value, and for is_causal with different numbers of queries and keys. TypeError for
    an argument of another type. NotImplementedError for attn_mask and dropout_p, which SpargeAttn ignores.
    """
    call = _call(q, k, v, attn_mask, dropout_p, is_causal, scale, pvthreshd, tensor_layout, output_dtype)
    mask = choose_blocks(
        call.q, call.k, simthreshd1=simthreshd1, cdfthreshd=cdfthreshd, topk=topk, causal=is_causal, smooth_k=smooth_k,
        attention_sink=attention_sink,
    )  # fmt: skip
    return _attend(call, mask, return_sparsity)


def spas_sage2_attn_meansim_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: _Threshold = 0.6,
    cdfthreshd: _Threshold = 0.98,
    pvthreshd: _Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype = torch.float16,
    return_sparsity: bool = False,
) -> _Result:
    """spas_sage2_attn_meansim_topk_cuda with a cumulative weight, cdfthreshd, in the place of topk."""
    return spas_sage2_attn_meansim_topk_cuda(
        q, k, v, attn_mask, dropout_p, is_causal, scale, smooth_k, simthreshd1, cdfthreshd, None, pvthreshd,
        attention_sink, tensor_layout, output_dtype, return_sparsity,
    )  # fmt: skip


# The same with another precision in SpargeAttn.
spas_sage_attn_meansim_topk_cuda = spas_sage2_attn_meansim_topk_cuda
spas_sage_attn_meansim_cuda = spas_sage2_attn_meansim_cuda


def block_sparse_sage2_attn_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_id: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: _Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype = torch.float16,
    return_sparsity: bool = False,
) -> _Result:
    """Attention over the blocks of a mask. Inputs and outputs as in spas_sage2_attn_meansim_topk_cuda.

    mask_id (1 or batch, 1 or heads, ceil(seqlen_q / 128), ceil(seqlen_k / 64)), or of blocks of 64 queries and 128
    keys, as programs make for "sm90", which MI200 is to them: bool or numbers, a block is visible where it is not 0.
    Pass it as bool, which is not copied.
    smooth_k: attention does not depend on the mean key, so that it changes nothing. return_sparsity: the share of zeros
    in mask_id.

    NotImplementedError for attention_sink, which SpargeAttn ignores here. TypeError without a mask_id.
    """
    call = _call(q, k, v, None, dropout_p, False, scale, pvthreshd, tensor_layout, output_dtype)
    diagnose_switches(None, smooth_k=smooth_k, attention_sink=attention_sink)
    if attention_sink:
        raise NotImplementedError("attention_sink: got True, wanted False with mask_id: set mask_id[..., 0] to 1")
    check_strided("mask_id", mask_id)  # type: ignore[arg-type]
    assert mask_id is not None
    seen = mask_id if mask_id.dtype is torch.bool else mask_id != 0
    sizes = (call.q.shape[0], call.q.shape[2])
    grids = {(m, n): (-(-call.q.shape[1] // m), -(-call.k.shape[1] // n)) for m, n in (BLOCK_SIZE, BLOCK_SIZE[::-1])}
    block = next((block for block, grid in grids.items() if seen.shape[2:] == grid), None)
    if block is None or seen.dim() != 4 or any(seen.shape[i] not in (1, sizes[i]) for i in (0, 1)):
        known = ", or ".join(f"{x}, {y} for blocks of {m} queries and {n} keys" for (m, n), (x, y) in grids.items())
        raise ValueError(
            f"mask_id: got shape {tuple(seen.shape)}, wanted (1 or {sizes[0]}, 1 or {sizes[1]}, and {known})"
        )
    if seen.device != q.device:
        raise ValueError(f"mask_id: got it on {seen.device}, wanted {q.device} as q has")
    return _attend(call, BlockMask(seen, block), return_sparsity)


def get_cuda_arch_versions() -> list[str]:
    """The target of each GPU, such as "gfx942". Programs make blocks of 64 queries and 128 keys if it is "sm90"."""
    return [Driver(index).target for index in range(torch.cuda.device_count())]


class _Call(NamedTuple):
    """A checked call. q, k and v are fp16 or bf16 (batch, seqlen, heads, head_dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    is_causal: bool
    heads_first: bool
    output_dtype: torch.dtype


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    pvthreshd: _Threshold,
    tensor_layout: str,
    output_dtype: torch.dtype,
) -> _Call:
    axes = _AXES.get(tensor_layout) if isinstance(tensor_layout, str) else None
    if axes is None:
        raise ValueError(f"tensor_layout: got {tensor_layout!r}, wanted one of {', '.join(_AXES)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_strided(name, x)
        if x.dim() != len(axes):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({', '.join(axes)}) with {tensor_layout}")
        if x.dtype not in _INPUTS:
            raise TypeError(f"{name}: got {x.dtype}, wanted float16, bfloat16 or float32")
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask: got a mask, wanted None: pass blocks as mask_id of block_sparse_sage2_attn_cuda, or a mask of "
            "single keys as attn_bias of flash_attn.flash_attn_func"
        )
    if type(dropout_p) not in (int, float) or dropout_p != 0:
        raise NotImplementedError(f"dropout_p: got {dropout_p!r}, wanted 0: use flash_attn.flash_attn_func")
    if not isinstance(output_dtype, torch.dtype) or output_dtype not in _INPUTS:
        raise TypeError(f"output_dtype: got {output_dtype!r}, wanted torch.float16, torch.bfloat16 or torch.float32")
    diagnose_switches(None, is_causal=is_causal)
    heads_first = tensor_layout == "HND"
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    per_head("pvthreshd", pvthreshd, q)
    if is_causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"is_causal: got {q.shape[1]} queries and {k.shape[1]} keys, wanted as many queries as keys")
    dtype = torch.bfloat16 if q.dtype is torch.bfloat16 else torch.float16
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    checked = AttentionCall(q, k, v, Options(scale, bool(is_causal)))
    check_dense(checked)
    result = dtype if output_dtype is torch.float16 else output_dtype
    return _Call(q, k, v, checked.options.scale, bool(is_causal), heads_first, result)


def _attend(call: _Call, mask: BlockMask, return_sparsity: bool) -> _Result:
    diagnose_switches(None, return_sparsity=return_sparsity)
    out = flash_attn_block_sparse_func(call.q, call.k, call.v, mask, call.scale, call.is_causal)
    assert isinstance(out, torch.Tensor)
    out = out.to(call.output_dtype)
    out = out.transpose(1, 2).contiguous() if call.heads_first else out
    if not return_sparsity:
        return out
    lengths = (call.q.shape[1], call.k.shape[1])
    reached = blocks_reached(*lengths, mask.block_size, call.is_causal, call.q.device)
    return out, 1.0 - float((mask.seen & reached).sum() / reached.expand_as(mask.seen).sum())
