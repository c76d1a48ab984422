"""yunchang's LongContextAttention over two processes, by flash_attn and sageattention, against one call of the whole.

The processes split the sequence (ring), or the heads (Ulysses). On two GPUs where there are two, else on the CPU.
"""

from __future__ import annotations

import flash_attn
import torch
import torch.distributed as dist
from flash_attn import flash_attn_func
from two_ranks import WORLD, device, run

SAGE = ("sage_auto", "sage_fp16", "sage_fp16_triton", "sage_fp8", "sage_fp8_sm90")


def draw(rank: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, of the whole sequence. In bf16, the type of yunchang's gradients."""
    torch.manual_seed(0)
    return [torch.randn(1, 32, 4, 32, dtype=torch.bfloat16).to(device(rank)) for _ in range(4)]


def work(rank: int) -> list[tuple[object, ...]]:
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.comm import EXTRACT_FUNC_DICT
    from yunchang.kernels import AttnType

    result: list[tuple[object, ...]] = []
    for ulysses, ring in ((1, 2), (2, 1)):
        set_seq_parallel_pg(ulysses, ring, rank, dist.get_world_size())
        for kind, layout, causal in [
            ("fa", "basic", False), ("fa", "basic", True), ("fa", "zigzag", True),
            *((name, "basic", causal) for name in SAGE for causal in (False, True)),
        ]:  # fmt: skip
            attend = LongContextAttention(ring_impl_type=layout, attn_type=AttnType.from_string(kind))
            local = EXTRACT_FUNC_DICT[layout]
            q, k, v, dout = (local(x, rank, WORLD, rd=ring, ud=ulysses).clone() for x in draw(rank))
            trains = kind == "fa" and ring > 1  # gloo cannot send to its own rank, as a ring of one rank does
            leaves = [x.requires_grad_(trains) for x in (q, k, v)]
            out = attend(*leaves, causal=causal)
            if trains:
                out.backward(dout)
            whole = draw(rank)
            for x in whole[:3]:
                x.requires_grad_()
            expected = flash_attn_func(*whole[:3], causal=causal)
            expected.backward(whole[3])
            errors = []
            pairs = [(out, expected), *((leaf.grad, x.grad) for leaf, x in zip(leaves, whole, strict=False) if trains)]
            for got, exact in pairs:
                want = local(exact.detach(), rank, WORLD, rd=ring, ud=ulysses)
                errors.append(float((got.detach().float() - want.float()).norm() / want.float().norm()))
            result.append((rank, f"ulysses {ulysses}, ring {ring}, {layout}", kind, causal, max(errors)))
    return result


def main() -> None:
    for rank, split, kind, causal, error in run(work):
        assert error < 2e-2, f"rank {rank}, {split}, {kind}, causal {causal}: {error:.2e}"
        print(f"rank {rank}, {split}, {kind}, {'causal' if causal else 'full'}: equal to one call, {error:.1e}")
    print(f"yunchang, flash_attn {flash_attn.__version__}: {WORLD} processes on {device(0).type}")


if __name__ == "__main__":
    main()
