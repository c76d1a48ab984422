"""The classes of SGLang 0.5.23 on which the plug-in sglang_flash_rocm rests, as far as it uses them.

`install` puts them where the plug-in imports them. `python flash_attn_src/tests/clients/stand_ins.py sglang DIRECTORY`
checks the names, signatures, fields and defaults here against the sources of SGLang in a directory that has sglang/.
"""

from __future__ import annotations

import sys
from abc import ABC
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import torch

SRT = "sglang.srt"
REGISTRY = f"{SRT}.layers.attention.attention_registry"
CHOICES = f"{SRT}.server_args"
ATTENTION_BACKENDS: dict[str, Any] = {}
ATTENTION_BACKEND_CHOICES = ["triton", "torch_native"]


def register_attention_backend(name: str) -> Any:
    def decorator(fn: Any) -> Any:
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()
    DRAFT_EXTEND_V2 = auto()
    PREBUILT = auto()
    SPLIT_PREFILL = auto()
    DLLM_EXTEND = auto()

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention:
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE",
        logit_capping_method: str = "tanh",
        quant_config: Any = None,
        attn_type: AttentionType = AttentionType.DECODER,
        use_irope: bool = False,
        prefix: str = "",
        use_prefill_attention_wrapper: bool = True,
    ) -> None:
        del quant_config, use_irope, prefix, use_prefill_attention_wrapper
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.qk_head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size, self.is_cross_attention = sliding_window_size or -1, is_cross_attention
        self.pos_encoding_mode, self.logit_capping_method = pos_encoding_mode, logit_capping_method
        self.attn_type, self.k_scale, self.v_scale, self.xai_temperature_len = attn_type, None, None, -1


@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens_sum: int
    out_cache_loc_is_physical: bool = False
    extend_seq_lens: Optional[torch.Tensor] = None  # noqa: UP045 - as SGLang's
    extend_prefix_lens: Optional[torch.Tensor] = None  # noqa: UP045
    extend_seq_lens_cpu: Any = None
    extend_prefix_lens_cpu: Any = None


class AttentionBackend(ABC):  # noqa: B024 - as SGLang's
    needs_cpu_seq_lens: bool = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        raise NotImplementedError

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: B027 - as SGLang's
        pass

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:  # noqa: B027
        pass

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        raise NotImplementedError

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        decodes = forward_batch.forward_mode is ForwardMode.DECODE
        run = self.forward_decode if decodes else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        raise NotImplementedError

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        raise NotImplementedError


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: Optional[torch.Tensor] = None  # noqa: UP045 - as SGLang's
    full_loc: Optional[torch.Tensor] = None  # noqa: UP045
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: Any = None, full_loc: Any = None) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc, physical=forward_batch.out_cache_loc_is_physical)


class MHATokenToKVPool:
    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
    ) -> None:
        assert not enable_memory_saver
        self.dtype, self.start_layer = dtype, 0
        self.store_dtype = torch.uint8 if dtype.itemsize == 1 else dtype
        self.k_buffer, self.v_buffer = (
            [
                torch.zeros((size + page_size, head_num, dim), dtype=self.store_dtype, device=device)
                for _ in range(layer_num)
            ]
            for dim in (head_dim, v_head_dim or head_dim)
        )

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.k_buffer[layer_id].view(self.dtype), self.v_buffer[layer_id].view(self.dtype)

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: Any = None,
        dcp_kv_mask: Any = None,
    ) -> None:
        assert dcp_kv_mask is None
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        for rows, buffers, scale in ((cache_k, self.k_buffer, k_scale), (cache_v, self.v_buffer, v_scale)):
            if rows.dtype != self.dtype and scale is not None:
                rows.div_(scale)
            buffers[layer_id][loc_info.loc] = rows.to(self.dtype).view(self.store_dtype)


class SWAKVPool:
    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        swa_attention_layer_ids: list[int],
        full_attention_layer_ids: list[int],
        device: str,
    ) -> None:
        shape = page_size, dtype, head_num, head_dim
        self.full_kv_pool = MHATokenToKVPool(size, *shape, len(full_attention_layer_ids), device, False)
        self.swa_kv_pool = MHATokenToKVPool(size_swa, *shape, len(swa_attention_layer_ids), device, False)
        self.swa_layer_nums = len(swa_attention_layer_ids)
        self.layers_mapping = {layer: (index, False) for index, layer in enumerate(full_attention_layer_ids)}
        self.layers_mapping |= {layer: (index, True) for index, layer in enumerate(swa_attention_layer_ids)}

    def register_mapping(self, full_to_swa_index_mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = full_to_swa_index_mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[kv_indices]

    def get_kv_buffer(self, layer_id: int) -> Any:
        index, is_window = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if is_window else self.full_kv_pool).get_kv_buffer(index)

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        index, is_window = self.layers_mapping[layer.layer_id]
        pool = self.swa_kv_pool if is_window else self.full_kv_pool
        slots = KVWriteLoc(loc_info.swa_loc if is_window else loc_info.loc)
        pool.set_kv_buffer(None, slots, cache_k, cache_v, k_scale, v_scale, layer_id_override=index)


def get_parallel() -> Any:
    return SimpleNamespace(attn_dcp_size=1, attn_cp_size=1)


MODULES: dict[str, tuple[type | Any, ...]] = {
    f"{SRT}.layers.attention.base_attn_backend": (AttentionBackend,),
    REGISTRY: (register_attention_backend,),
    f"{SRT}.layers.radix_attention": (AttentionType, RadixAttention),
    f"{SRT}.mem_cache.memory_pool": (KVWriteLoc, MHATokenToKVPool),
    f"{SRT}.mem_cache.swa_memory_pool": (SWAKVPool,),
    f"{SRT}.model_executor.forward_batch_info": (ForwardMode, ForwardBatch),
    f"{SRT}.runtime_context": (get_parallel,),
}
# Bases, and parameters of pools that no test gives.
UNCOMPARED = (
    "RadixAttention", "ForwardBatch",
    "MHATokenToKVPool", "MHATokenToKVPool.__init__", "SWAKVPool", "SWAKVPool.__init__",
)  # fmt: skip


def install() -> None:
    """Makes the stand-ins importable as SGLang's modules."""
    for module in (*MODULES, CHOICES):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[module]).update({thing.__name__: thing for thing in MODULES.get(module, ())})
    vars(sys.modules[REGISTRY])["ATTENTION_BACKENDS"] = ATTENTION_BACKENDS
    vars(sys.modules[CHOICES])["add_attention_backend_choices"] = ATTENTION_BACKEND_CHOICES.extend
