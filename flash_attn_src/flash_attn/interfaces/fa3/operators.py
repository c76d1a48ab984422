"""torch.ops.flash_attn_3.fwd and bwd: FlashAttention-3 as PyTorch's own implementation "FA3" calls it.

    torch.nn.attention.activate_flash_attention_impl("FA3")  # torch 2.11 or newer, with the wheel flash-attn-3

The schemas are upstream's. The operators have no gradient: PyTorch calls bwd itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_libraries: list[Library] = []  # an operator lives as long as the library that defined it


def define(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Defines the operators on the private functions of flash_attn_interface, unless the process has them already."""
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        return
    library = Library("flash_attn_3", "FRAGMENT")
    library.define(_FORWARD)
    library.define(_BACKWARD)
    library.impl("fwd", _forward_kernel(forward), "CompositeExplicitAutograd")
    library.impl("bwd", _backward_kernel(backward), "CompositeExplicitAutograd")
    _libraries.append(library)


def _forward_kernel(forward: Callable[..., Any]) -> Callable[..., Any]:
    defaults = [argument.default_value for argument in torch.ops.flash_attn_3.fwd.default._schema.arguments]

    def fwd(*args: Any) -> tuple[torch.Tensor, ...]:
        # PyTorch leaves out arguments at the end that have the schema's defaults. The function has others.
        with torch.no_grad():
            result: tuple[torch.Tensor, ...] = forward(*args, *defaults[len(args) :])
        return result

    return fwd


def _backward_kernel(backward: Callable[..., Any]) -> Callable[..., Any]:
    arguments = torch.ops.flash_attn_3.bwd.default._schema.arguments
    # The function has another order, and these names.
    names = [argument.name.replace("seqused", "sequed") for argument in arguments]

    def bwd(*args: Any) -> tuple[torch.Tensor, ...]:
        """softmax_d, and four buffers of upstream's kernels, which are empty here."""
        with torch.no_grad():
            softmax_d: torch.Tensor = backward(**dict(zip(names, args, strict=False)))
        return softmax_d, *(softmax_d.new_empty((0,)) for _ in range(4))

    return bwd
