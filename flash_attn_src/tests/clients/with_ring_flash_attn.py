"""ring_flash_attn over two processes by flash_attn's private functions, against one call of the whole.

On two GPUs where there are two, else on the CPU.
"""

from __future__ import annotations

import multiprocessing
import tempfile

import flash_attn
import torch
import torch.distributed as dist
from flash_attn import flash_attn_func

WORLD = 2
GPU = torch.cuda.device_count() >= WORLD


def device(rank: int) -> torch.device:
    return torch.device("cuda", rank) if GPU else torch.device("cpu")


def draw(rank: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, of the whole sequence. In fp16: ring_flash_attn 0.1.8 adds gradients up in fp32
    buffers that it takes for copies, which fp32 inputs make views."""
    torch.manual_seed(0)
    return [torch.randn(1, 16, heads, 16, dtype=torch.float16).to(device(rank)) for heads in (4, 2, 2, 4)]


def rows(rank: int, zigzag: bool) -> list[int]:
    """The rows of the sequence that a rank holds."""
    if not zigzag:
        return list(range(rank * 8, rank * 8 + 8))
    return [*range(rank * 4, rank * 4 + 4), *range(12 - rank * 4, 16 - rank * 4)]


def work(rank: int, directory: str) -> None:
    if GPU:
        torch.cuda.set_device(rank)
    backend = "nccl" if GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    import ring_flash_attn

    found = []
    for zigzag, causal in ((False, False), (False, True), (True, True)):
        function = ring_flash_attn.zigzag_ring_flash_attn_func if zigzag else ring_flash_attn.ring_flash_attn_func
        mine = rows(rank, zigzag)
        q, k, v, dout = (x[:, mine].clone() for x in draw(rank))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = function(*leaves, causal=causal)
        out.backward(dout)
        found.append((rank, zigzag, causal, [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))]))
    torch.save(found, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        workers = [context.Process(target=work, args=(rank, directory)) for rank in range(WORLD)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert all(worker.exitcode == 0 for worker in workers), "a process failed"
        found = [each for rank in range(WORLD) for each in torch.load(f"{directory}/{rank}.pt")]
    for rank, zigzag, causal, parts in found:
        q, k, v, dout = draw(0)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves, causal=causal)
        out.backward(dout)
        mine = rows(rank, zigzag)
        for name, got, want in zip(("out", "dq", "dk", "dv"), parts, (out, *(x.grad for x in leaves)), strict=True):
            error = float((got - want[:, mine].detach().cpu()).abs().max())
            assert error < 6e-3, f"rank {rank}, zigzag {zigzag}, causal {causal}: {name}: error {error:.2e}"
        print(f"rank {rank}, {'zigzag, ' * zigzag}{'causal' if causal else 'full'}: equal to one call")
    print(f"ring_flash_attn, flash_attn {flash_attn.__version__}: {WORLD} processes on {device(0).type}")


if __name__ == "__main__":
    main()
