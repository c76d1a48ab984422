"""Work that two processes do together, over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _one_rank(rank: int, store: str, work: Callable[[int], list[torch.Tensor]], queue: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    queue.put((rank, [x.tolist() for x in work(rank)]))
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()


def both(tmp_path: Path, work: Callable[[int], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Runs `work` with the number of each rank. Returns the results."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_one_rank, args=(r, str(tmp_path / "store"), work, queue)) for r in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return [[torch.tensor(x) for x in found] for _, found in sorted(queue.get() for _ in workers)]
