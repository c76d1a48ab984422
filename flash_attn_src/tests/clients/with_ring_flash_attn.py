"""ring_flash_attn over two processes by flash_attn's private functions, against one call of the whole.

On two GPUs where there are two, else on the CPU.
"""

from __future__ import annotations

import flash_attn
import torch
from flash_attn import flash_attn_func
from two_ranks import WORLD, device, run


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


def work(rank: int) -> list[tuple[object, ...]]:
    import ring_flash_attn

    result = []
    for zigzag, causal in ((False, False), (False, True), (True, True)):
        function = ring_flash_attn.zigzag_ring_flash_attn_func if zigzag else ring_flash_attn.ring_flash_attn_func
        mine = rows(rank, zigzag)
        q, k, v, dout = (x[:, mine].clone() for x in draw(rank))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = function(*leaves, causal=causal)
        out.backward(dout)
        result.append((rank, zigzag, causal, [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))]))
    return result


def main() -> None:
    for rank, zigzag, causal, parts in run(work):
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
