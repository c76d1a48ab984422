"""What one step of vLLM computes: decoding sequences first, then the sequences with more queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass(frozen=True)
class Part:
    """Sequences that one launch serves.

    first, stop     their rows among the queries of the step
    seq_lens        int32 (batch,): the keys of each sequence, its new ones included
    block_table     int32 (batch, pages)
    cu_seqlens_q    int32 (batch + 1,), from 0; None where each sequence has one query
    max_query_len   queries of the longest sequence
    """

    first: int
    stop: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    max_query_len: int


@dataclass
class FlashRocmMetadata:
    """The parts of a step. max_seq_len is at least the keys of its longest sequence."""

    num_actual_tokens: int
    max_seq_len: int
    parts: tuple[Part, ...]


# Fields of vLLM's metadata that stand for a kind of attention which no kernel here has.
_REFUSED = ("dcp_local_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens", "encoder_seq_lens")


class FlashRocmMetadataBuilder(AttentionMetadataBuilder[FlashRocmMetadata]):
    """Splits a step by vLLM's lengths on the host. Nothing waits for the GPU."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002 - there is one way to build
    ) -> FlashRocmMetadata:
        """The parts of a step. Raises NotImplementedError for a kind of attention that is not served."""
        given = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError(
                f"common_prefix_len: got {common_prefix_len}, wanted 0: FLASH_ROCM has no cascade attention, set "
                "disable_cascade_attn=True"
            )
        if given.causal is not True:
            raise NotImplementedError(f"causal: got {given.causal}, wanted True: FLASH_ROCM serves causal models")
        for name in _REFUSED:
            if getattr(given, name) is not None:
                raise NotImplementedError(f"{name}: got a value, wanted None: FLASH_ROCM does not serve it")
        starts, tokens = given.query_start_loc, given.num_actual_tokens
        single = int((given.query_start_loc_cpu[: given.num_reqs + 1].diff() == 1).cumprod(0).sum())
        parts = []
        if single:
            parts.append(Part(0, single, given.seq_lens[:single], given.block_table_tensor[:single], None, 1))
        if single < tokens:
            parts.append(
                Part(
                    single,
                    tokens,
                    given.seq_lens[single : given.num_reqs],
                    given.block_table_tensor[single : given.num_reqs],
                    starts[single : given.num_reqs + 1] - starts[single],
                    given.max_query_len,
                )
            )
        return FlashRocmMetadata(tokens, given.max_seq_len, tuple(parts))
