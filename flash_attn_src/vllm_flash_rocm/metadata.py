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
    cu_seqlens_q    int32 (batch + 1,), from 0; None where the sequences have equally many queries
    max_query_len   queries of the longest sequence
    causal          False for tokens of an image, which attend to its later tokens too
    """

    first: int
    stop: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    max_query_len: int
    causal: bool = True


@dataclass
class FlashRocmMetadata:
    """The parts of a step. max_seq_len is at least the keys of its longest sequence.

    mm_prefix_range   parts in the place of `parts` in a step with images. Gemma 4 sets it to None, by this name of
                      vLLM's, for layers in which tokens of an image do not attend to later ones
    """

    num_actual_tokens: int
    max_seq_len: int
    parts: tuple[Part, ...]
    mm_prefix_range: tuple[Part, ...] | None = None


# Fields of vLLM's metadata that stand for a kind of attention which no kernel here has.
_REFUSED = ("dcp_local_seq_lens", "rswa_prefix_lens", "encoder_seq_lens")


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
        common = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError(
                f"common_prefix_len: got {common_prefix_len}, wanted 0: FLASH_ROCM has no cascade attention, set "
                "disable_cascade_attn=True"
            )
        if common.causal is not True:
            raise NotImplementedError(f"causal: got {common.causal}, wanted True: FLASH_ROCM serves causal models")
        for name in _REFUSED:
            if getattr(common, name) is not None:
                raise NotImplementedError(f"{name}: got a value, wanted None: FLASH_ROCM does not serve it")
        tokens = common.num_actual_tokens
        single = int((common.query_start_loc_cpu[: common.num_reqs + 1].diff() == 1).cumprod(0).sum())
        decoding = []
        if single:
            decoding = [Part(0, single, common.seq_lens[:single], common.block_table_tensor[:single], None, 1)]
        others = [_sequences(common, single, common.num_reqs, single, tokens)] if single < tokens else []
        pieces = _pieces(common, single) if common.mm_req_doc_ranges else []
        images = (*decoding, *pieces) if pieces else None
        return FlashRocmMetadata(tokens, common.max_seq_len, (*decoding, *others), images)


def _sequences(given: CommonAttentionMetadata, begin: int, end: int, first: int, stop: int) -> Part:
    """The sequences from begin to end, whose queries are the rows from first to stop."""
    starts = given.query_start_loc[begin : end + 1]
    tables = given.block_table_tensor[begin:end]
    return Part(first, stop, given.seq_lens[begin:end], tables, starts - starts[0], given.max_query_len)


def _pieces(given: CommonAttentionMetadata, begin: int) -> list[Part]:
    """The sequences from begin on, those with images cut where an image begins and ends. Empty: the step has no image.

    A piece is a sequence whose last key is its last query's own, and windows count from there. So tokens of an image
    see the window before them and all of the image: vLLM names no image longer than the window, and none in chunks.
    """
    rows = given.query_start_loc_cpu.tolist()
    parts: list[Part] = []
    waiting = begin
    for i in range(begin, given.num_reqs):
        row, end = rows[i], rows[i + 1]
        shift = end - int(given.seq_lens_cpu_upper_bound[i])  # exact while a prompt is read
        images = given.mm_req_doc_ranges.get(i, ())
        spans = [(max(first + shift, row), min(last + 1 + shift, end)) for first, last in images]
        spans = sorted((first, stop) for first, stop in spans if stop - first > 1)
        if not spans:
            continue
        if waiting < i:
            parts.append(_sequences(given, waiting, i, rows[waiting], row))
        waiting = i + 1
        for first, stop in (*spans, (end, end)):
            for a, b, causal in ((row, first, True), (first, stop, False)):
                if a < b:
                    keys, table = given.seq_lens[i : i + 1] - (end - b), given.block_table_tensor[i : i + 1]
                    parts.append(Part(a, b, keys, table, None, b - a, causal))
            row = stop
    if parts and waiting < given.num_reqs:
        parts.append(_sequences(given, waiting, given.num_reqs, rows[waiting], given.num_actual_tokens))
    return parts
