"""Collectives of torch.distributed along the first dimension, with and without gradients, and what goes with them.

process_group is one of torch.distributed, None the default one. Wrong arguments raise TypeError or ValueError naming
the argument, what came and what was wanted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from flash_attn.ops.checks import check_int, check_tensor

# The result, and what to wait for with async_op, else None.
_Raw = tuple[torch.Tensor, Any]


def _ranks(input_: torch.Tensor, process_group: Any) -> int:
    """How many ranks there are, of arguments that are right."""
    check_tensor("input_", input_, dtypes=())
    if input_.dim() == 0:
        raise ValueError("input_: got shape (), wanted (n, ...)")
    return dist.get_world_size(process_group)


def all_gather_raw(input_: torch.Tensor, process_group: Any, async_op: bool = False) -> _Raw:
    """input_ (n, ...) of every rank, end to end: (ranks * n, ...). No gradient."""
    ranks = _ranks(input_, process_group)
    output = input_.new_empty((ranks * input_.shape[0], *input_.shape[1:]))
    handle = dist.all_gather_into_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def reduce_scatter_raw(input_: torch.Tensor, process_group: Any, async_op: bool = False) -> _Raw:
    """This rank's part (n, ...) of the sum of every rank's input_ (ranks * n, ...). No gradient."""
    ranks = _ranks(input_, process_group)
    if input_.shape[0] % ranks:
        raise ValueError(f"input_: got {input_.shape[0]} rows, wanted a multiple of {ranks}, the ranks of the group")
    output = input_.new_empty((input_.shape[0] // ranks, *input_.shape[1:]))
    handle = dist.reduce_scatter_tensor(output, input_.contiguous(), group=process_group, async_op=async_op)
    return output, handle


def all_reduce_raw(input_: torch.Tensor, process_group: Any, async_op: bool = False) -> _Raw:
    """The sum of every rank's input_, of any shape: in input_ itself where that is contiguous. No gradient."""
    check_tensor("input_", input_, dtypes=())
    output = input_.contiguous()
    return output, dist.all_reduce(output, group=process_group, async_op=async_op)


class AllGatherFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, process_group: Any) -> torch.Tensor:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter_raw(gradient, ctx.process_group)[0], None


class ReduceScatterFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, process_group: Any) -> torch.Tensor:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather_raw(gradient, ctx.process_group)[0], None


class AllReduceFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, process_group: Any) -> torch.Tensor:  # noqa: ARG004
        return all_reduce_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradient, None


def all_gather(input_: torch.Tensor, process_group: Any) -> torch.Tensor:
    """all_gather_raw, whose gradient is the sum of every rank's: this rank's part of it."""
    return AllGatherFunc.apply(input_, process_group)


def reduce_scatter(input_: torch.Tensor, process_group: Any) -> torch.Tensor:
    """reduce_scatter_raw, whose gradient is every rank's, end to end."""
    return ReduceScatterFunc.apply(input_, process_group)


def all_reduce(input_: torch.Tensor, process_group: Any) -> torch.Tensor:
    """all_reduce_raw, whose gradient is this rank's alone."""
    return AllReduceFunc.apply(input_, process_group)


def _marked(model: torch.nn.Module, mark: str) -> list[torch.nn.Parameter]:
    """Parameters with this attribute, in the order of their names: ranks may have different others."""
    return [each for _, each in sorted(model.named_parameters()) if getattr(each, mark, False)]


@torch.no_grad()
def sync_shared_params(model: torch.nn.Module, process_group: Any) -> None:
    """Parameters with `_shared_params` become those of the group's first rank."""
    first = dist.get_process_group_ranks(process_group)[0]
    for parameter in _marked(model, "_shared_params"):
        dist.broadcast(parameter, src=first, group=process_group)


@torch.no_grad()
def allreduce_sequence_parallel_grad(model: torch.nn.Module, process_group: Any) -> None:
    """Gradients of parameters with `_sequence_parallel` become the sums over the group."""
    for parameter in _marked(model, "_sequence_parallel"):
        if parameter.grad is None:
            raise ValueError("model: got a parameter with _sequence_parallel and no gradient, wanted a backward first")
        dist.all_reduce(parameter.grad, group=process_group)


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """How much of dim is a rank's: multiples of multiple_of, as even as they go, the first ranks having more."""
    check_int("dim", dim, 0)
    check_int("multiple_of", multiple_of, 1)
    each, rest = divmod(dim // multiple_of, check_int("world_size", world_size, 1))
    return (each + (check_int("local_rank", local_rank, 0, world_size - 1) < rest)) * multiple_of
