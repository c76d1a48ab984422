"""The Composable Kernel backend: from validated tensors to planned launches of the wheel's CK kernels.

What CK has no kernel for goes to the Triton kernels of the same wheel, said once by a warning that names why, or
raises NotImplementedError where FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE asks for CK alone.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad

from flash_attn.backends import torch as torch_backend
from flash_attn.backends import triton as triton_backend
from flash_attn.runtime import ck_planner, launch, recording
from flash_attn.runtime.ck_planner import Launch, UnsupportedError

name = "flash_attn.backends.ck"

alone = False
"""Whether nothing may go to the Triton kernels; the package sets it once, from the environment."""

Tensors = tuple[torch.Tensor, ...]

_DTYPES = {torch.float16: ck_planner.FP16, torch.bfloat16: ck_planner.BF16}
_DIMS = (32, 64, 128, 256)
_NO_TENSOR = _NO_RANDOM = (0, 0, 0, 0)

_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 0)
_announced: set[str] = set()


def __getattr__(name: str) -> Any:
    """What is not attention in fp16 or bf16 (FP8, the sum of partial results) is the Triton backend's own."""
    return getattr(triton_backend, name)


def _instead(call: str, reason: str, *arguments: Any, **options: Any) -> Any:
    """The call by the Triton kernels, announced once for each kind of reason."""
    if alone:
        raise NotImplementedError(
            f"the CK backend cannot do this {call}: {reason}. Unset FLASH_ATTENTION_TRITON_AMD_ENABLE to let the "
            "Triton kernels of this wheel do it"
        )
    kind = f"{call} {reason.partition(':')[0]}"
    if kind not in _announced:
        _announced.add(kind)
        warnings.warn(
            f"the CK backend cannot do this {call}: {reason}. The Triton kernels of this wheel do it",
            RuntimeWarning,
            stacklevel=5,
        )
    if recording.current is not None:
        recording.current.add([Launch(f"triton.{call}", (1, 1, 1), b"")])
        return getattr(torch_backend, call)(*arguments, **options)
    return getattr(triton_backend, call)(*arguments, **options)


def _run(tensor: torch.Tensor, call: str, parameters: bytes) -> None:
    """Plans a call and launches it on the tensor's device. Raises UnsupportedError before anything is launched."""
    launches = ck_planner.plan(call, parameters)
    if recording.current is not None:
        recording.current.add(launches)
        return
    device = tensor.get_device()
    stream = _current_stream(device)
    for kernel, (x, y, z), argument in launches:
        launch.stored(device, kernel).launch(device, stream, x, y, z, argument)


def _lacking(tensor: torch.Tensor) -> str | None:
    """Why no CK kernel takes tensors like this one at all, or None."""
    if tensor.dtype not in _DTYPES:
        return f"dtype: {tensor.dtype} is neither float16 nor bfloat16"
    return None if recording.current is not None else _lacking_on(tensor.get_device())


@cache
def _lacking_on(device: int) -> str | None:
    target = launch.device_target(device)
    archive = launch.store.open_store(target)
    if archive is not None and any(entry["params"].startswith("B") for entry in archive.kernels.values()):
        return None
    return f"target: this wheel has no CK kernels for {target}"


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its rows start on 16 bytes and lie dense, else a copy that does."""
    *outer, last = tensor.stride()
    misaligned = tensor.data_ptr() & 15
    for stride in outer:
        misaligned |= stride & 7
    return (
        tensor
        if last == 1 and not misaligned
        else torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)
    )


def _padded(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    missing = head_dim - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else _aligned(tensor)


def _tensor(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address and (batch, row, head) strides; (total, heads, dim) has batch stride 0."""
    strides = tensor.stride()
    if len(strides) == 4:
        return tensor.data_ptr(), strides[0], strides[1], strides[2]
    return tensor.data_ptr(), 0, strides[0], strides[1]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _shape(
    q: torch.Tensor,
    *,
    batch: int,
    nheads_k: int,
    seqlen_q: int,
    seqlen_k: int,
    window: tuple[int, int],
    scale: float,
    softcap: float,
    dropout_p: float,
    lse: tuple[int, int],
    alibi_slopes: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    rng_state: torch.Tensor | None,
) -> tuple[int | float, ...]:
    """The fields of flash_attn_ck_shape."""
    return (
        _DTYPES[q.dtype], batch, q.shape[-2], nheads_k, q.shape[-1], seqlen_q, seqlen_k, *window,
        scale, softcap, dropout_p, *lse,
        alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        _address(alibi_slopes), _address(cu_seqlens_q), _address(cu_seqlens_k), _address(rng_state),
    )  # fmt: skip


def _dropout_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    seqlen_q: int,
    seqlen_k: int,
) -> str | None:
    """Why CK's kernels do not draw this call's random numbers. Forward and backward ask the same: both have to draw
    the same pattern, which the Triton kernels do not share."""
    if softcap > 0.0:
        return "softcap: not together with dropout_p"
    if scale <= 0.0:
        return f"scale: {scale} is not above 0"
    if alibi_slopes is not None and max(seqlen_q, seqlen_k) >= 65536:
        return "alibi_slopes: distances of 65536 and more do not fit the 16 bits of the kernels"
    # What the backward's fp32 sums of one sequence may take, and with them every tensor of the call.
    widest = 4 * max(seqlen_q * max(q.stride(-3), q.shape[-2] * 256), seqlen_k * k.stride(-3))
    return None if widest < 2**31 else "dropout_p: one sequence may take 2^31 bytes or more in the backward"


def _random(random: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Address and (batch, head, row) strides of the stored random numbers, (heads, total_q, keys) with batch 0."""
    if random is None:
        return _NO_RANDOM
    strides = random.stride()
    return random.data_ptr(), 0 if len(strides) == 3 else strides[0], strides[-3], strides[-2]


def signed_probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    random: torch.Tensor,
    scale: float,
    left: int,
    right: int,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqlen_q: int,
    seqlen_k: int,
) -> torch.Tensor:
    """S_dmask (batch, heads, seqlen_q, seqlen_k): the probabilities, negative where dropped; for tests only.

    random is what the kernels stored: below or at floor(255 * (1 - dropout_p)) where kept, (batch, heads, seqlen_q,
    seqlen_k) or (heads, total_q, seqlen_k).
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        sequences = list(zip(q, k, lse, random, strict=True))
    else:
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        spans = zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)
        sequences = [(q[a:b], k[c:d], lse[:, a:b], random[:, a:b]) for a, b, c, d in spans]
    nheads = q.shape[-2]
    found = torch.zeros((len(sequences), nheads, seqlen_q, seqlen_k), dtype=q.dtype, device=q.device)
    for entry, (queries, keys, row_lse, numbers) in enumerate(sequences):
        rows, columns = queries.shape[0], keys.shape[0]
        keys = keys.repeat_interleave(nheads // keys.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys.float()) * scale
        place = torch.arange(rows, device=q.device)[:, None] + columns - rows
        distance = torch.arange(columns, device=q.device) - place
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[entry]
            scores -= slopes[:, None, None] * distance.abs()
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        p = torch.exp(scores - row_lse[..., None])
        kept = numbers[..., :columns] <= int(255 * (1.0 - dropout_p) + 1e-5)  # as fp32 rounds it
        # The sign must survive rounding to zero in the mask's type.
        signed = torch.where(kept, p, -p.clamp_min(torch.finfo(q.dtype).tiny)).masked_fill(~seen, 0.0)
        found[entry, :, :rows, :columns] = signed.to(q.dtype)
    return found


def _window(causal: bool, left: int, right: int, *, one_query: bool = False) -> tuple[int, int]:
    """Causal ends the window at the query itself, which one query alone does not notice."""
    if causal:
        right = 0
    return (-1, -1) if one_query and left < 0 and right >= 0 else (left, right)


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
    reason = _lacking(q)
    if leftpad_k is not None:
        reason = "leftpad_k: the kernels have none"
    elif dropout_p > 0.0 and reason is None:
        reason = _dropout_problem(q, k, softmax_scale, softcap, alibi_slopes, max_seqlen_q, max_seqlen_k)
    elif block_table is not None and (dropout_p > 0.0 or q.shape[-1] not in _DIMS):
        reason = f"block_table: not with dropout or head_dim {q.shape[-1]}"
    if block_table is not None and return_softmax and dropout_p > 0.0:
        raise NotImplementedError("return_attn_probs with block_table: S_dmask of a paged cache is not there")
    if reason is not None:
        return _instead("forward", reason, *given)

    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    group = cu_seqlens_q is not None
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    if not group:
        max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
    result = torch.empty_like(q) if out is None else _aligned(out)
    lse_shape = (q.shape[1], q.shape[0]) if group else (batch, q.shape[2], max_seqlen_q)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if group or max_seqlen_k == 0:  # rows outside of every sequence, or without a key
        result.zero_()
        lse.fill_(torch.inf)
    if dropout_p > 0.0 and rng_state is None:
        # Two words from torch's own generator: advances with it, and can be captured in a graph.
        rng_state = torch.randint(0, 2**31 - 1, (2,), dtype=torch.int64, device=q.device)
    shape = _shape(
        q, batch=batch, nheads_k=k.shape[-2], seqlen_q=max_seqlen_q, seqlen_k=max_seqlen_k,
        window=_window(causal, window_left, window_right, one_query=not group and max_seqlen_q == 1),
        scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, lse=(0 if group else lse.stride(0), lse.stride(-2)),
        alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, rng_state=rng_state,
    )  # fmt: skip
    random = None
    if return_softmax and dropout_p > 0.0:
        random = torch.empty((*lse_shape, max_seqlen_k), dtype=torch.uint8, device=q.device)
    if batch and max_seqlen_q and max_seqlen_k:
        try:
            if block_table is not None:
                _over_pages(q, k, v, result, lse, shape, block_table, seqused_k)
            else:
                tensors = (*_tensor(q), *_tensor(k), *_tensor(v), *_tensor(result))
                rest = (lse.data_ptr(), _address(seqused_k), *_random(random))
                _run(q, "forward", ck_planner.FORWARD.pack(*shape, *tensors, *rest))
        except UnsupportedError as error:
            return _instead("forward", str(error), *given[:12], rng_state, *given[13:])
    if out is not None and result is not out:
        result = out.copy_(result)
    if random is None:
        return result, lse, None, rng_state
    options = (softmax_scale, *_window(causal, window_left, window_right), alibi_slopes, dropout_p)
    dmask = signed_probabilities(q, k, lse, random, *options, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
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
) -> None:
    """Sequences of several lengths over pages: the kernels of the decoding, without splitting the keys."""
    split_out = torch.empty((q.shape[1], q.shape[0], q.shape[2]), dtype=torch.float32, device=q.device)
    split_lse = torch.empty_like(lse)
    parameters = ck_planner.DECODE.pack(
        *shape, *_tensor(q), *_tensor(k), *_tensor(v), *_tensor(out), *_NO_TENSOR, *_NO_TENSOR,
        lse.data_ptr(), 0, _address(seqused_k), 0, block_table.data_ptr(), block_table.stride(0), q.shape[0],
        0, 0, 0, 0, 0, k.shape[1], 1, 0, split_out.data_ptr(), split_lse.data_ptr(),
    )  # fmt: skip
    _run(q, "decode", parameters)


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
    reason = _lacking(q)
    if reason is None and dropout_p > 0.0:
        reason = _dropout_problem(q, k, softmax_scale, softcap, alibi_slopes, max_seqlen_q, max_seqlen_k)
    if reason is not None:
        return _instead("backward", reason, *given)

    head_dim = next(dim for dim in _DIMS if q.shape[-1] <= dim)
    dout, q, k, v, out = (_padded(tensor, head_dim) for tensor in (dout, q, k, v, out))
    group = cu_seqlens_q is not None
    batch = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0]
    if not group:
        max_seqlen_q, max_seqlen_k = q.shape[1], k.shape[1]
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    softmax_lse = softmax_lse.contiguous()
    if group or not (max_seqlen_q and max_seqlen_k):  # rows outside of every sequence, or without a key
        delta = torch.zeros_like(softmax_lse)
        for gradient in (dq, dk, dv):
            gradient.zero_()
        if not (batch and max_seqlen_q and max_seqlen_k):
            return delta
    else:
        delta = torch.empty_like(softmax_lse)
    new_dq = _as_result(dq, q.shape)
    # The kernels give every query head a gradient of its own for its keys and values.
    shared = (*k.shape[:-2], nheads, head_dim)
    new_dk, new_dv = _as_result(dk, shared), _as_result(dv, shared)
    shape = _shape(
        q, batch=batch, nheads_k=nheads_k, seqlen_q=max_seqlen_q, seqlen_k=max_seqlen_k,
        window=_window(causal, window_left, window_right), scale=softmax_scale, softcap=softcap, dropout_p=dropout_p,
        lse=(0 if group else softmax_lse.stride(0), softmax_lse.stride(-2)), alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, rng_state=rng_state,
    )  # fmt: skip
    tensors = [part for tensor in (q, k, v, out, dout, new_dq, new_dk, new_dv) for part in _tensor(tensor)]
    rest = (q.shape[0] if group else 0, int(deterministic), 0)

    def parameters(sums: int) -> bytes:
        return ck_planner.BACKWARD.pack(*shape, *tensors, softmax_lse.data_ptr(), delta.data_ptr(), sums, *rest)

    workspace = ck_planner.backward_workspace(parameters(0))
    sums = torch.zeros(workspace // 4, dtype=torch.float32, device=q.device)
    try:
        _run(q, "backward", parameters(sums.data_ptr()))
    except UnsupportedError as error:
        if dropout_p > 0.0:  # the forward drew its numbers in another pattern than the Triton kernels would
            raise NotImplementedError(f"the CK backend cannot do this backward with dropout: {error}") from None
        return _instead("backward", str(error), *given)
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
    if gradient.shape == shape:
        aligned = _aligned(gradient)
        if aligned is gradient:
            return gradient
    make = torch.zeros if len(shape) == 3 else torch.empty
    return make(shape, dtype=gradient.dtype, device=gradient.device)


def kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: torch.Tensor | None,
    num_splits: int,
    *,
    out: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    attention_chunk: int = 0,
    sm_margin: int = 0,
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache, as in `backends.torch.kvcache`: (out, softmax_lse)."""
    given = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_left, window_right, softcap, rotary_interleaved, alibi_slopes, num_splits,
    )  # fmt: skip
    options = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens,
        "attention_chunk": attention_chunk or None, "descales": descales,
    }  # fmt: skip
    more = {
        "out": out,
        "max_seqlen_q": max_seqlen_q,
        "sm_margin": sm_margin,
        **options,
        "attention_chunk": attention_chunk,
    }
    reason = _lacking(q)
    for option, value in options.items():
        if value is not None:
            reason = f"{option}: the kernels have none"
    if cache_leftpad is not None:
        reason = "cache_leftpad: the kernels have none"
    elif q.shape[-1] not in _DIMS:
        reason = f"head_dim: a cache of {q.shape[-1]} would have to be copied"
    elif not (_aligned(k_cache) is k_cache and _aligned(v_cache) is v_cache):
        reason = "k_cache, v_cache: rows that do not start on 16 bytes"
    elif rotary_cos is not None and (rotary_cos.shape[-1] % 8 or not (rotary_cos.is_contiguous())):
        reason = "rotary_cos: rotary_dim is not a multiple of 16, or the rows do not lie dense"
    elif 0 in q.shape or k_cache.shape[1] == 0:
        reason = "q, k_cache: an empty one"
    elif num_splits > ck_planner.MAX_SPLITS:
        reason = f"num_splits: {num_splits} is above {ck_planner.MAX_SPLITS}"
    if reason is not None:
        return _instead("kvcache", reason, *given, **more)

    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    batch, seqlen_q, nheads, head_dim = q.shape
    nheads_k, page_size = k_cache.shape[2], k_cache.shape[1] if block_table is not None else 0
    seqlen_k = page_size * block_table.shape[1] if block_table is not None else k_cache.shape[1]
    window = _window(causal, window_left, window_right, one_query=seqlen_q == 1)
    q = _aligned(q)
    if rotary_cos is not None and k is not None:
        q = q.clone()  # it is turned in place
    result = torch.empty_like(q)
    lse = torch.empty((batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    seqlens = cache_seqlens if k is None or cache_seqlens is None else cache_seqlens + k.shape[1]
    # Heads that share keys become queries of one head, where nothing tells queries apart: a block then reads the
    # keys once for all of them.
    group = nheads // nheads_k
    together = group > 1 and seqlen_q == 1 and window == (-1, -1) and alibi_slopes is None and rotary_cos is None
    folded_q, folded_out, lse_strides = q, result, (lse.stride(0), lse.stride(1))
    if together:
        folded_q, folded_out = (tensor.view(batch, nheads_k, group, head_dim).transpose(1, 2) for tensor in (q, result))
        lse_strides = (lse.stride(0), group)
    rows, heads = folded_q.shape[1:3]
    splits = num_splits or _splits(q, batch * heads * -(-rows // 64), seqlen_k)
    split_out = torch.empty((splits, batch, nheads, seqlen_q, head_dim), dtype=torch.float32, device=q.device)
    split_lse = torch.empty((splits, batch, nheads, seqlen_q), dtype=torch.float32, device=q.device)
    shape = _shape(
        folded_q, batch=batch, nheads_k=nheads_k, seqlen_q=rows, seqlen_k=seqlen_k, window=window, scale=softmax_scale,
        softcap=softcap, dropout_p=0.0, lse=lse_strides, alibi_slopes=alibi_slopes, cu_seqlens_q=None,
        cu_seqlens_k=None, rng_state=None,
    )  # fmt: skip
    new = (
        (*_NO_TENSOR, *_NO_TENSOR)
        if k is None or v is None
        else (*_tensor(k := _aligned(k)), *_tensor(v := _aligned(v)))
    )
    parameters = ck_planner.DECODE.pack(
        *shape, *_tensor(folded_q), *_tensor(k_cache), *_tensor(v_cache), *_tensor(folded_out), *new, lse.data_ptr(),
        _address(cache_seqlens) if k is not None else 0, _address(seqlens), _address(cache_batch_idx),
        _address(block_table), 0 if block_table is None else block_table.stride(0), 0,
        _address(rotary_cos), _address(rotary_sin), 0 if rotary_cos is None else 2 * rotary_cos.shape[-1],
        int(rotary_interleaved), 0 if k is None else k.shape[1], page_size, splits, 0,
        split_out.data_ptr(), split_lse.data_ptr(),
    )  # fmt: skip
    try:
        _run(q, "decode", parameters)
    except UnsupportedError as error:
        return _instead("kvcache", str(error), *given, **more)
    return (result if out is None else out.copy_(result)), lse


def _splits(q: torch.Tensor, blocks: int, seqlen_k: int) -> int:
    """Parts of the keys such that their blocks fill the compute units once, each part 256 keys or more."""
    units = _compute_units(q.get_device()) if recording.current is None else 304
    return max(1, min(units // max(1, blocks), -(-seqlen_k // 256), ck_planner.MAX_SPLITS))


@cache
def _compute_units(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
