"""diffusers' context parallelism over two processes, ring and Ulysses, by flash_attn's private ops, against one call.

Its checks for a GPU and for half precision are off unless there is a GPU; they are its default.
"""

from __future__ import annotations

from types import SimpleNamespace

import diffusers
import flash_attn
import torch
from diffusers.models import attention_dispatch as dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch.distributed.device_mesh import init_device_mesh
from two_ranks import GPU, WORLD, device, run

DTYPE = torch.bfloat16 if GPU else torch.float32
TINY = 3e-2 if GPU else 2e-6
ROWS = 8


def draw(rank: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, of the whole sequence."""
    torch.manual_seed(0)
    return [torch.randn(2, WORLD * ROWS, 4, 16).to(device(rank), DTYPE) for _ in range(4)]


def work(rank: int) -> list[tuple[int, str, list[torch.Tensor]]]:
    result = []
    for kind in ("ring", "ulysses"):
        degrees = {"ring_degree": WORLD if kind == "ring" else 1, "ulysses_degree": WORLD if kind == "ulysses" else 1}
        config = ContextParallelConfig(**degrees)
        mesh = init_device_mesh(device(rank).type, tuple(degrees.values()), mesh_dim_names=("ring", "ulysses"))
        config.setup(rank, WORLD, device(rank), mesh)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        q, k, v, dout = (x[:, mine].clone() for x in draw(rank))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        parallel = ParallelConfig(context_parallel_config=config)
        backend = dispatch.AttentionBackendName("flash")
        out = dispatch.dispatch_attention_fn(*leaves, backend=backend, parallel_config=parallel)
        out.backward(dout)
        result.append((rank, kind, [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))]))
    return result


def main() -> None:
    for rank, kind, parts in run(work):
        q, k, v, dout = draw(0)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = flash_attn.flash_attn_func(*leaves)
        out.backward(dout)
        mine = slice(rank * ROWS, (rank + 1) * ROWS)
        whole = SimpleNamespace(out=out, dq=q.grad, dk=k.grad, dv=v.grad)
        for (name, want), got in zip(vars(whole).items(), parts, strict=True):
            error = float((got - want[:, mine].detach().cpu()).abs().max())
            assert error <= TINY, f"rank {rank}, {kind}: {name}: error {error:.2e}, bar {TINY:.0e}"
        print(f"rank {rank}, {kind}: equal to one call")
    print(
        f"diffusers {diffusers.__version__}, flash_attn {flash_attn.__version__}: {WORLD} processes on {device(0).type}"
    )


if __name__ == "__main__":
    main()
