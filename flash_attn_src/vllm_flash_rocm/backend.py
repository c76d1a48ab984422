"""The backend FLASH_ROCM: what it serves, and a layer's attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from flash_attn.attention.pages import attend_pages
from flash_attn.call.calls import CacheCall, Options, replace
from flash_attn.kernels.targets import NOT_EXECUTED, TARGETS
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf

from vllm_flash_rocm.cache import FP8_CACHES, key_and_value, write
from vllm_flash_rocm.metadata import FlashRocmMetadata, FlashRocmMetadataBuilder, Part

NAME = "FLASH_ROCM"
MAX_HEAD_SIZE = 512
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def _targets(capability: Any) -> list[str]:
    """The GPU targets of a capability, which has all but the last digit of their names: (9, 0) is gfx908 and gfx90a."""
    return [name for name in TARGETS if name[:-1] == f"gfx{capability.major}{capability.minor}"]


def serves_gpu(capability: Any) -> bool:
    """Whether this vLLM is for ROCm and flash_attn has kernels for the capability that something has executed."""
    return bool(current_platform.is_rocm() and {*_targets(capability)} - {*NOT_EXECUTED})


class FlashRocmBackend(AttentionBackend):
    """Causal attention of decoder models over a paged cache."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(_DTYPES.values())
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *_DTYPES, *FP8_CACHES]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashRocmImpl]:
        return FlashRocmImpl

    @staticmethod
    def get_builder_cls() -> type[FlashRocmMetadataBuilder]:
        return FlashRocmMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ARG004
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(8, MAX_HEAD_SIZE + 1, 8))

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a step is split by the lengths on the host

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return serves_gpu(capability)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,  # noqa: ARG003
        use_mla: bool,  # noqa: ARG003
        has_sink: bool,  # noqa: ARG003
        use_sparse: bool,  # noqa: ARG003
        use_mm_prefix: bool,  # noqa: ARG003
        device_capability: Any,
    ) -> str | None:
        """Why a cache of this type does not go with the model or with the GPU, or None."""
        if kv_cache_dtype in FP8_CACHES:
            if head_size % 16:
                return f"kv_cache_dtype {kv_cache_dtype} needs a head_size that is a multiple of 16, got {head_size}"
            targets = [] if device_capability is None else _targets(device_capability)
            if targets and not any(TARGETS[name].fp8 for name in targets):
                return (
                    f"kv_cache_dtype {kv_cache_dtype} has no kernel for {', '.join(targets)}: use --kv-cache-dtype "
                    f"{str(dtype).removeprefix('torch.')}, also for a checkpoint that asks for FP8 itself"
                )
        if _DTYPES.get(kv_cache_dtype or "", dtype) is not dtype:
            return f"kv_cache_dtype {kv_cache_dtype} differs from the model's {dtype}: use --kv-cache-dtype auto"
        return None


class FlashRocmImpl(AttentionImpl[FlashRocmMetadata]):
    """A layer's attention. vLLM writes keys and values by `do_kv_cache_update`, then calls `forward`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Raises NotImplementedError or ValueError naming what no kernel serves."""
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: got {attn_type}, wanted {AttentionType.DECODER}")
        if kv_cache_dtype not in FlashRocmBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype: got {kv_cache_dtype}, wanted one of {FlashRocmBackend.supported_kv_cache_dtypes}"
            )
        if not FlashRocmBackend.supports_head_size(head_size):
            raise NotImplementedError(f"head_size: got {head_size}, wanted a multiple of 8 up to {MAX_HEAD_SIZE}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        for name, values in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if values is not None and len(values) != num_heads:
                raise ValueError(f"{name}: got {len(values)} values, wanted {num_heads}, one a head")
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        left = -1 if sliding_window is None else sliding_window - 1
        window = (left, -1 if left < 0 else 0)
        self.options = Options(self.scale, True, window, logits_soft_cap or 0.0, alibi_slopes=slopes, s_aux=sinks)
        self._fp8 = current_platform.fp8_dtype() if kv_cache_dtype in FP8_CACHES else None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002 - in the cache already
        value: torch.Tensor,  # noqa: ARG002
        kv_cache: torch.Tensor,
        attn_metadata: FlashRocmMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes attention of query (tokens, heads, head_size) into output of that shape, and returns output.

        Without metadata, in vLLM's profiling run, output becomes 0. Raises NotImplementedError for a quantized output.
        """
        for name, scale in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if scale is not None:
                raise NotImplementedError(f"{name}: got a tensor, wanted None: {NAME} does not quantize its output")
        if attn_metadata is None:
            return output.zero_()
        caches = key_and_value(kv_cache, self.head_size, self._fp8)
        for part in attn_metadata.mm_prefix_range or attn_metadata.parts:
            rows = query[part.first : part.stop]
            output[part.first : part.stop] = self._attend(rows, caches, part, attn_metadata.max_seq_len, layer)
        return output

    def _attend(
        self, rows: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], part: Part, max_seq_len: int, layer: Any
    ) -> torch.Tensor:
        """Attention of a part's queries (tokens, heads, head_size), in their shape."""
        is_packed = part.cu_seqlens_q is not None
        left, right = self.options.window_size
        call = CacheCall(  # with options of its own, which the checks complete
            q=rows if is_packed else rows.unflatten(0, (part.seq_lens.shape[0], -1)), k_cache=caches[0],
            v_cache=caches[1], options=replace(self.options, causal=part.causal,
            window_size=(left, right if part.causal else -1)), cache_seqlens=part.seq_lens,
            block_table=part.block_table, cu_seqlens_q=part.cu_seqlens_q,
            max_seqlen_q=part.max_query_len if is_packed else 0, max_seqlen_k=max_seq_len,
        )  # fmt: skip
        return attend_pages(call, layer._k_scale, layer._v_scale).view_as(rows)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes new keys and values (tokens, heads_k, head_size) into the slots of the cache."""
        caches = key_and_value(kv_cache, self.head_size, self._fp8)
        write(key, value, caches, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)
