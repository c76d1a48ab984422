"""The backend FLASH_ROCM_MLA: decoding of multi-head latent attention. Prefill is vLLM's own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from flash_attn import flash_attn_with_kvcache
from flash_attn.kernels.value_dims import LATENT_DIM, LATENT_VALUE_DIM
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from vllm_flash_rocm.backend import FlashRocmBackend, serves_gpu
from vllm_flash_rocm.cache import FP8_CACHES

NAME = "FLASH_ROCM_MLA"


class FlashRocmMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's own, for steps whose decoding sequences have equally many queries."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.UNIFORM


class FlashRocmMLABackend(MLACommonBackend):
    """Latent attention over a paged cache of rows of 576 numbers, of which the first 512 are the values."""

    supported_dtypes: ClassVar[list[torch.dtype]] = FlashRocmBackend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[list[Any]] = FlashRocmBackend.supported_kv_cache_dtypes

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashRocmMLAImpl]:
        return FlashRocmMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashRocmMLAMetadataBuilder]:
        return FlashRocmMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ARG004
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT_VALUE_DIM + LATENT_DIM]

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return serves_gpu(capability)

    supports_combination = FlashRocmBackend.supports_combination


class FlashRocmMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """A layer's latent attention."""

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
        **mla_args: Any,
    ) -> None:
        """Raises NotImplementedError naming what is not served."""
        refused = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        for name, value in refused.items():
            if value:
                raise NotImplementedError(f"{name}: got {value}, wanted None: {NAME} does not serve it")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"attn_type: got {attn_type}, wanted {AttentionType.DECODER}")
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        self.supports_quant_query_input = False
        self._fp8 = current_platform.fp8_dtype() if kv_cache_dtype in FP8_CACHES else None

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """out (tokens, heads, 512) of the decoding sequences, and None for softmax_lse.

        q: (tokens, heads, 576), or its first 512 columns and the rest. kv_c_and_k_pe_cache: (pages, page_size, 576).
        Raises NotImplementedError for queries that do not see each other's keys causally.
        """
        if not attn_metadata.causal:
            raise NotImplementedError(f"causal: got {attn_metadata.causal}, wanted True: {NAME} serves causal models")
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        pages = kv_c_and_k_pe_cache if self._fp8 is None else kv_c_and_k_pe_cache.view(self._fp8)
        pages = pages[:, :, None]
        decode = attn_metadata.decode
        batch = decode.seq_lens.shape[0]
        scale = None if self._fp8 is None else layer._k_scale.reshape(1, 1).expand(batch, 1)
        out: Any = flash_attn_with_kvcache(
            query.unflatten(0, (batch, -1)), pages, pages[..., : self.kv_lora_rank], cache_seqlens=decode.seq_lens,
            block_table=decode.block_table, softmax_scale=self.scale, causal=True, k_descale=scale, v_descale=scale,
        )  # fmt: skip
        return out.flatten(0, 1), None
