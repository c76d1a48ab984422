"""Generation with a model that keeps caches: greedy or sampled decoding, eager or by CUDA graphs.

A model is called as `model(input_ids, position_ids=..., inference_params=..., num_last_tokens=n)` and returns an object
with `.logits` (batch, n, vocab_size) of its last n tokens. Wrong arguments raise TypeError or ValueError naming the
argument, what came and what was wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flash_attn.ops.checks import check_int, check_switches, check_tensor
from flash_attn.utils.decoding_graphs import DecodingCGCache, capture_graph, update_graph_cache
from flash_attn.utils.inference_params import InferenceParams, allocate_inference_cache
from flash_attn.utils.sampling import (
    check_sampling,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
)

__all__ = [
    "DecoderOnlyOutput", "DecodingCGCache", "GenerationMixin", "InferenceParams", "allocate_inference_cache",
    "capture_graph", "decode", "modify_logits_for_top_k_filtering", "modify_logits_for_top_p_filtering", "sample",
    "update_graph_cache",
]  # fmt: skip

_NUMBERS = (torch.int64, torch.int32)


@dataclass
class DecoderOnlyOutput:
    """sequences (batch, length), the prompt included; scores: logits (batch, vocab_size) of each token after it."""

    sequences: torch.Tensor
    scores: tuple[torch.Tensor, ...] | None = None


@torch.inference_mode()
def decode(
    input_ids: torch.Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: torch.Tensor | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
) -> DecoderOnlyOutput:
    """The sequences that begin with input_ids (batch, seqlen), up to max_length tokens, at least one more.

    top_k, top_p, temperature  as sample has them
    eos_token_id     ends it where every sequence has just got that token
    teacher_outputs  (batch, length): tokens to take instead of drawn ones, as far as it goes
    vocab_size       of the logits; more are padding
    tensor_parallel  with cg, of a model that does not say which caches it needs: ranks that share its heads
    cg               steps after the prompt are replayed from CUDA graphs, kept in model._decoding_cache
    enable_timing    prints the milliseconds that it took on the GPU
    """
    check_tensor("input_ids", input_ids, ("batch", "seqlen"), dtypes=_NUMBERS)
    batch, seqlen = input_ids.shape
    check_int("max_length", max_length, seqlen)
    check_sampling(top_k, top_p, temperature)
    check_switches(cg=cg, enable_timing=enable_timing)
    if seqlen == 0:
        raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}, wanted at least one token")
    if teacher_outputs is not None:
        check_tensor("teacher_outputs", teacher_outputs, ("batch", "length"), like=input_ids, dtypes=_NUMBERS)
    for name, asked in (("cg", cg), ("enable_timing", enable_timing)):
        if asked and not input_ids.is_cuda:
            raise ValueError(f"{name}: got True, wanted False for input_ids on {input_ids.device}")
    if cg:
        model._decoding_cache = update_graph_cache(
            model, getattr(model, "_decoding_cache", None), batch, seqlen, max_length, tensor_parallel=tensor_parallel
        )
        params = model._decoding_cache.inference_params
        params.reset(max_length, batch)
    else:
        params = InferenceParams(max_seqlen=max_length, max_batch_size=batch)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if enable_timing else (None, None)
    if start is not None:
        start.record()
    sequences, scores = [input_ids], []
    while True:
        tokens, offset = sequences[-1], params.seqlen_offset
        positions = None if offset == 0 else torch.full((batch, 1), offset, device=input_ids.device)
        if cg and positions is not None:
            logits = model._decoding_cache.run(tokens, positions, offset)
        else:
            logits = model(tokens, position_ids=positions, inference_params=params, num_last_tokens=1).logits
        scores.append(logits.squeeze(1)[..., :vocab_size])
        params.seqlen_offset += tokens.shape[1]
        if teacher_outputs is not None and teacher_outputs.shape[1] > params.seqlen_offset:
            token = teacher_outputs[:, params.seqlen_offset]
        else:
            token = sample(scores[-1], top_k, top_p, temperature)
        sequences.append(token[:, None].to(input_ids.dtype))
        if params.seqlen_offset >= max_length - 1 or (eos_token_id is not None and (token == eos_token_id).all()):
            break
    if start is not None and end is not None:
        end.record()
        end.synchronize()
        print(f"Prompt processing + decoding time: {start.elapsed_time(end):.0f}ms")
    return DecoderOnlyOutput(torch.cat(sequences, 1), tuple(scores))


class GenerationMixin:
    """`generate` for a model as decode has it."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, torch.Tensor]:
        """layer_idx -> cache, as InferenceParams has it: the model's own."""
        raise NotImplementedError(f"{type(self).__name__} does not say which caches it needs: allocate_inference_cache")

    def generate(
        self,
        input_ids: torch.Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | DecoderOnlyOutput:
        """decode's sequences; with return_dict_in_generate its result, with scores where output_scores asks."""
        check_switches(return_dict_in_generate=return_dict_in_generate, output_scores=output_scores)
        output = decode(input_ids, self, max_length, top_k=top_k, top_p=top_p, temperature=temperature, **kwargs)
        if not output_scores:
            output.scores = None
        return output if return_dict_in_generate else output.sequences
