"""Runs a function in two processes of torch.distributed: on two GPUs if the machine has them, else on the CPU."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

WORLD = 2
GPU = torch.cuda.device_count() >= WORLD
Work = Callable[[int], list[Any]]


def device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if GPU else torch.device("cpu")


def _process(work: Work, rank: int, directory: str) -> None:
    if GPU:
        torch.cuda.set_device(rank)
    backend = "nccl" if GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    torch.save(work(rank), f"{directory}/{rank}.pt")
    dist.barrier()  # gloo ends a process whose partner leaves first: "terminate called without an active exception"
    dist.destroy_process_group()


def run(work: Work) -> list[Any]:
    """Runs work(rank) on each rank. Returns the results, first all of rank 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        workers = [context.Process(target=_process, args=(work, rank, directory)) for rank in range(WORLD)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert all(worker.exitcode == 0 for worker in workers), "a process failed"
        return [each for rank in range(WORLD) for each in torch.load(f"{directory}/{rank}.pt")]
