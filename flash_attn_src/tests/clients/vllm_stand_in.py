"""The classes of vLLM 0.33 on which the plug-in vllm_flash_rocm rests, as far as it uses them.

`install` puts them where the plug-in imports them. `python flash_attn_src/tests/clients/stand_ins.py vllm DIRECTORY`
checks the names, signatures, fields and defaults here against the sources of vLLM in a directory that has vllm/.
"""

from __future__ import annotations

import sys
from abc import ABC
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import torch

M = TypeVar("M")
BACKEND = "vllm.v1.attention.backend"
REGISTRY = "vllm.v1.attention.backends.registry"
LATENT = "vllm.model_executor.layers.attention.mla_attention"


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):  # noqa: B024 - as vLLM's
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update: bool = True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes  # type: ignore[attr-defined]

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:  # noqa: ARG003
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,  # noqa: ARG003
        dtype: torch.dtype,  # noqa: ARG003
        kv_cache_dtype: Any,  # noqa: ARG003
        block_size: int | None,  # noqa: ARG003
        use_mla: bool,  # noqa: ARG003
        has_sink: bool,  # noqa: ARG003
        use_sparse: bool,  # noqa: ARG003
        use_mm_prefix: bool,  # noqa: ARG003
        device_capability: Any,  # noqa: ARG003
    ) -> str | None:
        return None


class AttentionImpl(ABC, Generic[M]):
    pass


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,  # noqa: ARG002
        supports_dcp_with_varlen: bool = False,  # noqa: ARG002
    ) -> None:
        self.reorder_batch_threshold = reorder_batch_threshold


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    seq_lens_cpu_upper_bound: Any = None
    encoder_seq_lens: Any = None
    dcp_local_seq_lens: Any = None
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"

    @classmethod
    def register(cls, name: str, value: str) -> AttentionBackendEnum:
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member

    def get_path(self, include_classname: bool = True) -> str:
        path = _OVERRIDES[self]
        return path if include_classname else path.rsplit(".", 1)[0]


_OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Any:
    assert class_path is not None
    assert not is_mamba
    if isinstance(backend, str):
        backend = AttentionBackendEnum.register(backend, class_path)
    _OVERRIDES[backend] = class_path
    return lambda x: x


class QueryLenSupport(Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


@dataclass
class MLACommonDecodeMetadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    dcp_tot_seq_lens: torch.Tensor | None


class MLACommonMetadata(Generic[M]):
    causal: bool = True
    decode: Any = None


class MLACommonMetadataBuilder(AttentionMetadataBuilder[M]):
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.SINGLE_ONLY


class MLACommonImpl(AttentionImpl[M]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        del alibi_slopes, sliding_window, logits_soft_cap, attn_type, kv_sharing_target_layer_name, kv_b_proj, indexer
        del q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, qk_head_dim, v_head_dim, q_pad_num_heads
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.kv_cache_dtype, self.kv_lora_rank = kv_cache_dtype, kv_lora_rank


MODULES: dict[str, tuple[type | Any, ...]] = {
    BACKEND: (
        AttentionType, MultipleOf, AttentionCGSupport, AttentionBackend, AttentionImpl, AttentionMetadataBuilder,
        CommonAttentionMetadata,
    ),
    REGISTRY: (AttentionBackendEnum, register_backend),
    LATENT: (
        QueryLenSupport, MLACommonBackend, MLACommonDecodeMetadata, MLACommonMetadata, MLACommonMetadataBuilder,
        MLACommonImpl,
    ),
}  # fmt: skip


def install(fp8: torch.dtype = torch.float8_e4m3fn) -> None:
    """Makes the stand-ins importable as vLLM's modules, for a GPU by ROCm with this type of FP8."""
    for module, things in MODULES.items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[module]).update({thing.__name__: thing for thing in things})
    platform = SimpleNamespace(is_rocm=lambda: True, fp8_dtype=lambda: fp8)
    sys.modules["vllm.platforms"] = ModuleType("vllm.platforms")
    vars(sys.modules["vllm.platforms"])["current_platform"] = platform


# Classes that have another base in vLLM, between the base here and the class.
UNCOMPARED = ("AttentionImpl", "MLACommonImpl", "MLACommonMetadata")
