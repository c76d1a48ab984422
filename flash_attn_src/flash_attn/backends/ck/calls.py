"""What every call of the CK backend does: tells what has no CK kernel, describes its tensors, plans and launches.

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
from flash_attn.runtime.ck_planner import Launch

alone = False
"""Whether nothing may go to the Triton kernels; the package sets it once, from the environment."""

DTYPES = {torch.float16: ck_planner.FP16, torch.bfloat16: ck_planner.BF16}
DIMS = (32, 64, 128, 256)
NO_TENSOR = (0, 0, 0, 0)

_announced: set[str] = set()


def instead(call: str, reason: str, *arguments: Any, **options: Any) -> Any:
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
    return by_triton(call, *arguments, **options)


def by_triton(call: str, *arguments: Any, **options: Any) -> Any:
    """The call by the Triton kernels of the same wheel."""
    if recording.current is not None:
        recording.current.add([Launch(f"triton.{call}", (1, 1, 1), b"")])
        return getattr(torch_backend, call)(*arguments, **options)
    return getattr(triton_backend, call)(*arguments, **options)


def run(tensor: torch.Tensor, call: str, parameters: bytes) -> None:
    """Plans a call and launches it on the tensor's device. Raises UnsupportedError before anything is launched."""
    launches = ck_planner.plan(call, parameters)
    if recording.current is not None:
        recording.current.add(launches)
        return
    device = tensor.get_device()
    stream = launch.current_stream(device)
    for kernel, (x, y, z), argument in launches:
        launch.stored(device, kernel).launch(device, stream, x, y, z, argument)


def lacking(tensor: torch.Tensor) -> str | None:
    """Why no CK kernel takes tensors like this one at all, or None."""
    if tensor.dtype not in DTYPES:
        return f"dtype: {tensor.dtype} is neither float16 nor bfloat16"
    return None if recording.current is not None else _lacking_on(tensor.get_device())


@cache
def _lacking_on(device: int) -> str | None:
    target = launch.device_target(device)
    archive = launch.store.open_store(target)
    if archive is not None and any(entry["params"].startswith("B") for entry in archive.kernels.values()):
        return None
    return f"target: this wheel has no CK kernels for {target}"


def aligned(tensor: torch.Tensor) -> torch.Tensor:
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


def padded(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    missing = head_dim - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else aligned(tensor)


def fields(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address and (batch, row, head) strides; (total, heads, dim) has batch stride 0."""
    strides = tensor.stride()
    if len(strides) == 4:
        return tensor.data_ptr(), strides[0], strides[1], strides[2]
    return tensor.data_ptr(), 0, strides[0], strides[1]


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def shape_fields(
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
        DTYPES[q.dtype], batch, q.shape[-2], nheads_k, q.shape[-1], seqlen_q, seqlen_k, *window,
        scale, softcap, dropout_p, *lse,
        alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        address(alibi_slopes), address(cu_seqlens_q), address(cu_seqlens_k), address(rng_state),
    )  # fmt: skip


def window_of(causal: bool, left: int, right: int, *, one_query: bool = False) -> tuple[int, int]:
    """Causal ends the window at the query itself, which one query alone does not notice."""
    if causal:
        right = 0
    return (-1, -1) if one_query and left < 0 and right >= 0 else (left, right)
