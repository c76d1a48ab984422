"""The backend flash_rocm: SGLang's steps, and a layer's attention."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.attention.pages import attend_pages
from flash_attn.call.calls import CacheCall, Options
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_flash_rocm.metadata import Step, StepBuilder
from sglang_flash_rocm.refusals import refuse_arguments, refuse_layer, refuse_runner, refuse_step


class FlashRocmAttnBackend(AttentionBackend):
    """Causal attention of decoder models over SGLang's pool of keys and values, of any page size.

    A decoding graph captures the step's tensors too: `init_forward_metadata_in_graph` makes them anew from the request
    table, so a replay needs nothing of the host.
    """

    needs_cpu_seq_lens = False
    forward_metadata: Step

    def __init__(self, model_runner: Any) -> None:
        """Raises NotImplementedError for a model, a cache or a server that no kernel serves."""
        super().__init__()
        refuse_runner(model_runner)
        # SGLang's models read both pools from the backend: `get_token_to_kv_pool`, `get_req_to_token_pool`.
        self.token_to_kv_pool, self.req_to_token_pool = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        self._page_size = model_runner.page_size
        self._steps = StepBuilder(self.req_to_token_pool.req_to_token, self.token_to_kv_pool, self._page_size)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Raises NotImplementedError for a step that is neither prefill nor decoding."""
        mode = forward_batch.forward_mode
        refuse_step(mode, in_graph=False)
        build = self._steps.decode if mode.is_decode_or_idle() else self._steps.extend
        self.forward_metadata = build(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: a graph has the step's tensors in its own memory."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The keys of a sequence that pads a batch: one, which makes its result finite."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: ARG002
        """Raises NotImplementedError for a graph of anything but decoding."""
        refuse_step(forward_batch.forward_mode, in_graph=True)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.forward_metadata = self._steps.decode(forward_batch)

    def forward_decode(self, *arguments: Any, **named: Any) -> torch.Tensor:
        """See `forward_extend`."""
        return self.forward_extend(*arguments, **named)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Writes k and v into the pool, and attends to it.

        q: (tokens, heads * head_dim). k: (tokens, heads_k, head_dim). v: (tokens, heads_k, v_head_dim), k and v None
        where the pool has them already; they are not written without save_kv_cache either. A pool in FP8 divides
        k and v by the layer's scales in place. sinks: (heads,).
        Returns (tokens, heads * v_head_dim). Raises TypeError, ValueError or NotImplementedError for what does not fit.
        """
        refuse_arguments(more)
        refuse_layer(layer)
        step = self.forward_metadata
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, _slots(forward_batch, step), k, v, layer.k_scale, layer.v_scale)
        left = layer.sliding_window_size  # keys before the query's own
        window = (-1, -1) if left is None or left < 0 else (left, 0)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = self._pages(layer.layer_id)
        call = CacheCall(
            q=rows if step.cu_seqlens_q is not None else rows[:, None], k_cache=keys, v_cache=values,
            options=Options(float(layer.scaling), True, window, float(layer.logit_cap or 0.0), s_aux=sinks),
            cache_seqlens=step.seq_lens, block_table=self._table(layer.layer_id), cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=0 if step.cu_seqlens_q is None else step.max_query_len, max_seqlen_k=step.max_seq_len,
        )  # fmt: skip
        out = attend_pages(call, layer.k_scale, layer.v_scale)
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _pages(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (pages, page_size, heads_k, head_dim) of a layer's buffers (slots, heads_k, head_dim)."""
        buffers = self.token_to_kv_pool.get_kv_buffer(layer_id)
        for buffer in buffers:
            if buffer.dim() != 3:
                raise NotImplementedError(
                    f"KV buffer: got shape {tuple(buffer.shape)}, wanted (slots, heads, head_dim): unset "
                    "SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
                )
        keys, values = (buffer.unflatten(0, (-1, self._page_size)) for buffer in buffers)
        return keys, values

    def _table(self, layer_id: int) -> torch.Tensor:
        step = self.forward_metadata
        if step.window_table is not None and self.token_to_kv_pool.layers_mapping[layer_id][1]:
            return step.window_table
        return step.block_table


def _slots(forward_batch: Any, step: Step) -> KVWriteLoc:
    """Where the keys of a step go in the pool. SGLang has `for_batch` since 0.5.22."""
    if hasattr(KVWriteLoc, "for_batch"):
        return KVWriteLoc.for_batch(forward_batch, swa_loc=step.window_slots)
    return KVWriteLoc(forward_batch.out_cache_loc, step.window_slots)
