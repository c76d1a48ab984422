"""flash_attn.utils.distributed and embeddings that are split over two processes, compared with one process."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flash_attn.modules.embedding import GPT2Embeddings, ParallelGPT2Embeddings, VocabParallelEmbedding
from flash_attn.utils import distributed
from two_ranks import both


def _gather(rank: int) -> list[torch.Tensor]:
    """Rows, and the gradient of both ranks' weighted sums; through a transpose, as OpenRLHF gathers."""
    part = torch.arange(6.0).view(2, 3).add(10 * rank).requires_grad_()
    whole = distributed.all_gather(part.transpose(0, 1), dist.group.WORLD)
    (whole * torch.arange(12.0).view(6, 2).mul(rank + 1)).sum().backward()
    raw, handle = distributed.all_gather_raw(part.detach(), None, async_op=True)
    handle.wait()
    return [whole.detach(), part.grad, raw]


def _scatter(rank: int) -> list[torch.Tensor]:
    whole = torch.arange(8.0).view(4, 2).mul(rank + 1).requires_grad_()
    part = distributed.reduce_scatter(whole, dist.group.WORLD)
    (part * torch.tensor([1.0, 10.0]).add(rank)).sum().backward()
    return [part.detach(), whole.grad]


def _reduce(rank: int) -> list[torch.Tensor]:
    each = torch.tensor([1.0, 2.0]).add(rank).requires_grad_()
    total = distributed.all_reduce(each * 1, dist.group.WORLD)
    (total * (rank + 2)).sum().backward()
    return [total.detach(), each.grad]


def _models(rank: int) -> list[torch.Tensor]:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ("free", "shared", "summed")})
    for each in model.parameters():
        torch.nn.init.constant_(each, rank + 1.0)
        each.grad = torch.full_like(each, rank + 5.0)
    model["shared"].weight._shared_params = True
    model["summed"].weight._sequence_parallel = True
    distributed.sync_shared_params(model, dist.group.WORLD)
    distributed.allreduce_sequence_parallel_grad(model, dist.group.WORLD)
    return [torch.stack([x.detach() for x in model.parameters()]), torch.stack([x.grad for x in model.parameters()])]


def _uneven(_rank: int) -> list[torch.Tensor]:
    with pytest.raises(ValueError, match="input_: got 3 rows, wanted a multiple of 2"):
        distributed.reduce_scatter(torch.zeros(3), dist.group.WORLD)
    return []


def _embeddings(rank: int) -> list[torch.Tensor]:
    """Each rank's rows, with gradients, and all of them, of halves of the tables in _tables."""
    result, (words, places), ids = [], _tables(), torch.tensor([[3, 0, 1], [2, 2, 1]])
    for sequence_parallel in (True, False):
        layer = ParallelGPT2Embeddings(4, 4, 5, dist.group.WORLD, sequence_parallel=sequence_parallel)
        layer.word_embeddings.weight.data.copy_(words.chunk(2)[rank])
        layer.position_embeddings.weight.data.copy_(places.chunk(2, 1)[rank])
        out = layer(ids, combine_batch_seqlen_dim=sequence_parallel)
        out.square().sum().backward()
        result += [out.detach(), layer.word_embeddings.weight.grad, layer.position_embeddings.weight.grad]
    with pytest.raises(IndexError, match="input: got 0 to 4, wanted 0 to 3"):
        layer.word_embeddings(torch.tensor([4, 0]))
    with pytest.raises(ValueError, match="num_embeddings: got 5, wanted a multiple of 2"):
        VocabParallelEmbedding(5, 4, process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="padding_idx: got 1, wanted None"):
        VocabParallelEmbedding(4, 4, process_group=dist.group.WORLD, padding_idx=1)
    return result


def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(16.0).view(4, 4), torch.arange(20.0).view(5, 4) * 100


Results = dict[Any, list[list[torch.Tensor]]]  # work -> the results of each rank
_WORKS = (_gather, _scatter, _reduce, _models, _uneven, _embeddings)


def _all(rank: int) -> list[torch.Tensor]:
    """The results of all works, each after their number."""
    result: list[torch.Tensor] = []
    for work in _WORKS:
        of_one = work(rank)
        result += [torch.tensor(len(of_one)), *of_one]
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two processes do all works, because their start takes longest."""
    result: Results = {work: [] for work in _WORKS}
    for of_rank in both(tmp_path_factory.mktemp("ranks"), _all):
        rest = iter(of_rank)
        for work in _WORKS:
            result[work].append(list(islice(rest, int(next(rest)))))
    return result


def test_all_gather(results: Results) -> None:
    parts = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(2)]
    for rank, (whole, gradient, raw) in enumerate(results[_gather]):
        assert torch.equal(whole, torch.cat([x.t() for x in parts]))
        assert torch.equal(raw, torch.cat(parts))
        assert torch.equal(gradient, torch.arange(12.0).view(6, 2)[rank * 3 : rank * 3 + 3].t() * 3)


def test_reduce_scatter(results: Results) -> None:
    whole = torch.arange(8.0).view(4, 2) * 3
    for rank, (part, gradient) in enumerate(results[_scatter]):
        assert torch.equal(part, whole[rank * 2 : rank * 2 + 2])
        assert gradient.tolist() == [[1.0, 10.0]] * 2 + [[2.0, 11.0]] * 2


def test_all_reduce(results: Results) -> None:
    for rank, (total, gradient) in enumerate(results[_reduce]):
        assert total.tolist() == [3.0, 5.0]
        assert gradient.tolist() == [rank + 2.0] * 2


def test_parameters_and_gradients_of_a_model(results: Results) -> None:
    for rank, (weights, gradients) in enumerate(results[_models]):
        assert weights.flatten().tolist() == [rank + 1.0, 1.0, rank + 1.0]
        assert gradients.flatten().tolist() == [rank + 5.0, rank + 5.0, 11.0]


def test_rows_that_do_not_divide(results: Results) -> None:
    assert results[_uneven] == [[], []]


def test_embeddings_are_shared_out(results: Results) -> None:
    whole = GPT2Embeddings(4, 4, 5)
    for each, table in zip((whole.word_embeddings, whole.position_embeddings), _tables(), strict=True):
        each.weight.data.copy_(table)
    expected = whole(torch.tensor([[3, 0, 1], [2, 2, 1]]))
    expected.square().sum().backward()
    words, places = whole.word_embeddings.weight.grad, whole.position_embeddings.weight.grad
    for rank, (part, *gradients, all_rows, _, _) in enumerate(results[_embeddings]):
        assert torch.equal(part, expected.view(6, 4)[rank * 3 : rank * 3 + 3])
        assert torch.equal(all_rows, expected)
        assert torch.equal(gradients[0], words.chunk(2)[rank])
        assert torch.equal(gradients[1], places.chunk(2, 1)[rank])


def test_parts_of_a_dim() -> None:
    assert [distributed.get_dim_for_local_rank(10, 4, rank) for rank in range(4)] == [3, 3, 2, 2]
    assert [distributed.get_dim_for_local_rank(512, 3, rank, 128) for rank in range(3)] == [256, 128, 128]
    with pytest.raises(ValueError, match="local_rank: got 4, wanted 0 to 3"):
        distributed.get_dim_for_local_rank(10, 4, 4)


def test_tensors_without_rows_are_refused() -> None:
    with pytest.raises(TypeError, match="input_: got list"):
        distributed.all_gather([1.0], None)
    with pytest.raises(ValueError, match=r"input_: got shape \(\), wanted \(n, \.\.\.\)"):
        distributed.all_gather(torch.tensor(1.0), None)
