"""Embeddings of tokens, positions and token types, whole or split over a tensor-parallel group.

Token, position and type numbers are int64 or int32, input_ids (batch, seqlen), the others broadcast to that; positions
count from 0 where none are given, types are 0. max_position_embeddings <= 0: no embeddings of positions, which then
change nothing. process_group: of torch.distributed, None for one rank alone. device, dtype: of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from flash_attn.call.tracing import is_traced
from flash_attn.ops.checks import check_int, check_switches, check_tensor
from flash_attn.utils.distributed import all_reduce, reduce_scatter

_NUMBERS = (torch.int64, torch.int32)


def _positions(input_ids: torch.Tensor, position_ids: torch.Tensor | None, count: int) -> torch.Tensor:
    if position_ids is not None:
        check_tensor("position_ids", position_ids, like=input_ids, dtypes=_NUMBERS)
        return position_ids
    seqlen = input_ids.shape[1]
    if seqlen > count:
        raise ValueError(f"input_ids: got {seqlen} tokens, wanted at most {count}, max_position_embeddings")
    return torch.arange(seqlen, device=input_ids.device)


class GPT2Embeddings(nn.Module):
    """Tokens and their positions. word_embed_proj_dim: width of the tokens' embeddings, which a linear layer then
    brings to embed_dim."""

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("embed_dim", embed_dim, 1)
        check_int("vocab_size", vocab_size, 1)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        width = embed_dim if word_embed_proj_dim is None else check_int("word_embed_proj_dim", word_embed_proj_dim, 1)
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding_idx, **place)
        self.project_in = None if word_embed_proj_dim is None else nn.Linear(width, embed_dim, bias=False, **place)
        self.max_position_embeddings = check_int("max_position_embeddings", max_position_embeddings)
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **place)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, seqlen, embed_dim)."""
        check_tensor("input_ids", input_ids, ("batch", "seqlen"), dtypes=_NUMBERS)
        embeddings = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            positions = _positions(input_ids, position_ids, self.max_position_embeddings)
            embeddings = embeddings + self.position_embeddings(positions)
        return embeddings


class BertEmbeddings(GPT2Embeddings):
    """Embeds tokens, their positions, and their types if type_vocab_size > 0."""

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, vocab_size, max_position_embeddings, padding_idx, device=device, dtype=dtype)
        self.type_vocab_size = check_int("type_vocab_size", type_vocab_size)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, device=device, dtype=dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(batch, seqlen, embed_dim)."""
        embeddings = super().forward(input_ids, position_ids)
        if self.type_vocab_size > 0:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(input_ids[:1])
            check_tensor("token_type_ids", token_type_ids, like=input_ids, dtypes=_NUMBERS)
            embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        return embeddings


def _share(name: str, whole: int, process_group: Any) -> int:
    """How many of `whole` a rank holds."""
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    if check_int(name, whole, 1) % ranks:
        raise ValueError(f"{name}: got {whole}, wanted a multiple of {ranks}, the ranks of process_group")
    return whole // ranks


class VocabParallelEmbedding(nn.Embedding):
    """A rank's part of the vocabulary: other tokens have 0, so that the sum over the ranks is the embedding."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        process_group: Any = None,
        padding_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        part = _share("num_embeddings", num_embeddings, process_group)
        if padding_idx is not None and part != num_embeddings:
            raise ValueError(f"padding_idx: got {padding_idx}, wanted None, because the vocabulary is split over ranks")
        super().__init__(part, embedding_dim, padding_idx, *args, **kwargs)
        self.process_group = process_group
        self._vocabulary = num_embeddings

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """(..., embedding_dim) of numbers of the whole vocabulary."""
        check_tensor("input", input, dtypes=_NUMBERS)
        if self.process_group is None:
            return super().forward(input)
        if not input.is_cuda and not is_traced(input) and ((input < 0) | (input >= self._vocabulary)).any():
            raise IndexError(f"input: got {input.min()} to {input.max()}, wanted 0 to {self._vocabulary - 1}")
        number = input - dist.get_rank(self.process_group) * self.num_embeddings
        mine = (number >= 0) & (number < self.num_embeddings)
        return torch.where(mine[..., None], super().forward(torch.where(mine, number, 0)), 0.0)


class ColumnParallelEmbedding(nn.Embedding):
    """A rank's part of the embeddings' columns."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *args: Any, process_group: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(num_embeddings, _share("embedding_dim", embedding_dim, process_group), *args, **kwargs)
        self.process_group = process_group


class ParallelGPT2Embeddings(nn.Module):
    """GPT2Embeddings with the vocabulary, and the columns of the positions' embeddings, shared out."""

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: Any,
        padding_idx: int | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_switches(sequence_parallel=sequence_parallel)
        options: dict[str, Any] = {"process_group": process_group, "device": device, "dtype": dtype}
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(vocab_size, embed_dim, padding_idx=padding_idx, **options)
        self.max_position_embeddings = check_int("max_position_embeddings", max_position_embeddings)
        if max_position_embeddings > 0:
            self.position_embeddings = ColumnParallelEmbedding(max_position_embeddings, embed_dim, **options)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, combine_batch_seqlen_dim: bool = False
    ) -> torch.Tensor:
        """(batch, seqlen, embed_dim), or with combine_batch_seqlen_dim (batch * seqlen, embed_dim): of several ranks
        this one's rows with sequence_parallel (of the first dimension), else all."""
        check_tensor("input_ids", input_ids, ("batch", "seqlen"), dtypes=_NUMBERS)
        embeddings = self.word_embeddings(input_ids)
        shared = self.process_group is not None and dist.get_world_size(self.process_group) > 1
        if self.max_position_embeddings > 0:
            columns = self.position_embeddings(_positions(input_ids, position_ids, self.max_position_embeddings))
            if shared:  # the sum over ranks adds the other ranks' rows
                before = dist.get_rank(self.process_group) * columns.shape[-1]
                columns = functional.pad(columns, (before, embeddings.shape[-1] - before - columns.shape[-1]))
            embeddings = embeddings + columns
        if combine_batch_seqlen_dim:
            embeddings = embeddings.flatten(0, 1)
        if not shared:
            return embeddings
        return (reduce_scatter if self.sequence_parallel else all_reduce)(embeddings, self.process_group)
