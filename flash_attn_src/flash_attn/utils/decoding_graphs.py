"""Steps of generation as CUDA graphs, over caches that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flash_attn.ops.checks import check_int
from flash_attn.utils.inference_params import InferenceParams, allocate_inference_cache


@dataclass
class DecodingCGCache:
    """The graphs of a model. callables: (batch, tokens of a step) -> the function that replays the graph. The graphs
    read and write the caches of inference_params."""

    max_batch_size: int = 0
    max_seqlen: int = 0
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    callables: dict[tuple[int, int], Callable[..., torch.Tensor]] = field(default_factory=dict)
    mempool: Any = None
    inference_params: InferenceParams | None = None
    run: Callable[..., torch.Tensor] | None = None


@dataclass
class _Step:
    """A graph and the tensors that it reads and writes where they are. tables: plain attributes of modules, such as
    rotary tables, in whose place a longer sequence puts others."""

    graph: torch.cuda.CUDAGraph
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: torch.Tensor
    logits: torch.Tensor
    tables: list[torch.Tensor]

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, seqlen: int) -> torch.Tensor:
        self.lengths.fill_(seqlen)
        self.input_ids.copy_(input_ids)
        self.position_ids.copy_(position_ids)
        self.graph.replay()
        return self.logits.clone()


@torch.inference_mode()
def update_graph_cache(
    model: Any,
    cache: DecodingCGCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: Iterable[int] = (1,),
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
) -> DecodingCGCache:
    """Returns the cache with a CUDA graph of a step for each number of tokens in decoding_seqlens. Makes it if None.

    The graphs stay as long as device and dtype do and neither batch_size nor max_seqlen grows. `cache.run(input_ids,
    position_ids, seqlen)` gives logits (batch, tokens, vocab_size) of a step after seqlen tokens. The caches are the
    model's, by its `allocate_inference_cache(batch_size, max_seqlen, dtype)`, else made of its `config`.
    """
    weight = next(iter(model.parameters()))
    dtype = weight.dtype if dtype is None else dtype
    check_int("batch_size", batch_size, 1)
    check_int("max_seqlen", max_seqlen, 1)
    if (
        cache is None
        or (weight.device, dtype) != (cache.device, cache.dtype)
        or batch_size > cache.max_batch_size
        or max_seqlen > cache.max_seqlen
    ):
        if cache is not None:  # its memory goes before there is more
            cache.callables.clear()
            cache.inference_params = cache.run = cache.mempool = None
        cache = DecodingCGCache(batch_size, max_seqlen, weight.device, dtype, mempool=torch.cuda.graph_pool_handle())
        if hasattr(model, "allocate_inference_cache"):
            caches = model.allocate_inference_cache(batch_size, max_seqlen, dtype)
        else:
            config = model.config
            heads = config.num_attention_heads
            headdim = getattr(config, "head_dim", config.hidden_size // heads)
            caches = allocate_inference_cache(
                batch_size, max_seqlen, heads // check_int("tensor_parallel", tensor_parallel, 1, heads), headdim,
                config.num_hidden_layers, weight.device, dtype,
            )  # fmt: skip
        lengths = torch.full((batch_size,), seqlen_og, dtype=torch.int32, device=weight.device)
        cache.inference_params = InferenceParams(
            max_seqlen, batch_size, key_value_memory_dict=caches, lengths_per_sample=lengths
        )
    assert cache.inference_params is not None
    for tokens in decoding_seqlens:
        if (batch_size, tokens) not in cache.callables:
            cache.callables[batch_size, tokens] = capture_graph(
                model, cache.inference_params, batch_size, cache.max_seqlen, tokens, cache.mempool, n_warmups
            )
    callables = cache.callables

    def run(input_ids: torch.Tensor, position_ids: torch.Tensor, seqlen: int) -> torch.Tensor:
        return callables[input_ids.shape[0], input_ids.shape[1]](input_ids, position_ids, seqlen)

    cache.run = run
    cache.inference_params.seqlen_offset = 0
    return cache


def capture_graph(
    model: Any,
    inference_params: InferenceParams,
    batch_size: int,
    max_seqlen: int,
    decoding_seqlen: int = 1,
    mempool: Any = None,
    n_warmups: int = 2,
) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """A step of decoding_seqlen tokens as a CUDA graph: called with (input_ids, position_ids, seqlen) it gives logits.

    inference_params needs lengths_per_sample: what a step attends to is read from there, on the device. The caches'
    last tokens are overwritten by the warm-up.
    """
    lengths = inference_params.lengths_per_sample
    if lengths is None:
        raise ValueError("inference_params: got lengths_per_sample=None, wanted int32 (max_batch_size,)")
    check_int("decoding_seqlen", decoding_seqlen, 1, max_seqlen - 1)
    device = next(iter(model.parameters())).device
    ids, positions = (torch.zeros((batch_size, decoding_seqlen), dtype=torch.int64, device=device) for _ in range(2))
    offset = inference_params.seqlen_offset
    # The longest step, for sizes that a model takes from it.
    inference_params.seqlen_offset = max_seqlen - decoding_seqlen
    lengths.fill_(inference_params.seqlen_offset)

    def step() -> torch.Tensor:
        return model(
            ids, position_ids=positions, inference_params=inference_params, num_last_tokens=decoding_seqlen
        ).logits

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(check_int("n_warmups", n_warmups, 1)):
            step()
        stream.synchronize()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # no rank captures while another's collective runs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=mempool):
        logits = step()
    inference_params.seqlen_offset = offset
    attributes = [each for module in model.modules() for each in vars(module).values()]
    tables = [each for each in attributes if isinstance(each, torch.Tensor)]
    return _Step(graph, ids, positions, lengths, logits, tables)
