"""Work that two processes do together, over gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _one_rank(rank: int, directory: Path, work: Callable[[int], list[torch.Tensor]], both_done: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    (directory / str(rank)).write_text(json.dumps([x.tolist() for x in work(rank)]))
    # gloo fails in a rank whose peer ends first, while it connects or in gloo's own barrier.
    both_done.wait()
    dist.destroy_process_group()
    # A normal exit can destroy a running thread of gloo: "terminate called without an active exception".
    os._exit(0)


def both(tmp_path: Path, work: Callable[[int], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Runs `work` with the number of each rank. Returns the results."""
    context = multiprocessing.get_context("spawn")
    arguments = (tmp_path, work, context.Barrier(2, timeout=120))
    workers = [context.Process(target=_one_rank, args=(rank, *arguments)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return [[torch.tensor(x) for x in json.loads((tmp_path / str(rank)).read_text())] for rank in range(2)]
