"""Forward and backward attention against PyTorch's: TFLOP/s and ratios, side by side in one run on one GPU.

    python benchmarks/attention.py [--json results.json] [--rounds 5]

Peers: SDPA with FlashAttention-2 and with cuDNN (or its ROCm counterpart), where this torch has them; and another
flash_attn, named by --peer, a module with a `flash_attn_func` of its own. A backward counts 2.5 times the
forward's arithmetic, a causal mask half of it (Dao, FlashAttention-2, 2023, section 4.1). Each figure is the
median over rounds; in every round each implementation runs once, so that drift of the clocks hits all alike.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import measuring
import torch
from measuring import Shape, milliseconds
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
SHAPES = (
    Shape(4, 32, 4096, 64, False),
    Shape(4, 32, 4096, 64, True),
    Shape(4, 16, 4096, 128, False),
    Shape(4, 16, 4096, 128, True),
    Shape(2, 16, 8192, 128, False),
    Shape(2, 16, 8192, 128, True),
    Shape(1, 16, 16384, 128, True),
    Shape(4, 16, 4096, 96, False),
    Shape(4, 16, 4096, 96, True),
    Shape(4, 16, 4096, 192, True),
    Shape(4, 16, 4096, 256, True),
)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    import flash_attn

    return flash_attn.flash_attn_func(q, k, v, causal=causal)


def sdpa(backend: SDPBackend) -> Attention:
    """scaled_dot_product_attention by one backend, in flash-attn's layout."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return out.transpose(1, 2)

    return attention


def implementations(peer: str | None) -> dict[str, Attention]:
    calls: dict[str, Attention] = {
        "ours": ours,
        "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    }
    if peer is not None:
        other = importlib.import_module(peer).flash_attn_func
        calls[peer] = lambda q, k, v, causal: other(q, k, v, causal=causal)
    return calls


def measure(shape: Shape, dtype: torch.dtype, peers: dict[str, Attention], rounds: int) -> dict[str, dict[str, Any]]:
    """Median TFLOP/s of each implementation, {"forward": ..., "backward": ..., "ms": every time}, or {"why": ...}."""
    torch.manual_seed(0)
    size = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    results: dict[str, dict[str, Any]] = {}
    for name, attention in peers.items():

        def forward(attention: Attention = attention) -> torch.Tensor:
            with torch.no_grad():
                return attention(q, k, v, shape.causal)

        try:
            out = attention(q, k, v, shape.causal)

            def backward(out: torch.Tensor = out) -> object:
                return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

            for _ in range(3):
                forward()
                backward()
        except RuntimeError as error:
            results[name] = {"why": str(error).splitlines()[0]}
        else:
            calls[name] = forward, backward
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (forward_call, backward_call) in calls.items():
            times[name].append((milliseconds(forward_call, 10), milliseconds(backward_call, 5)))
    for name, rows in times.items():
        forward_ms, backward_ms = zip(*rows, strict=True)
        results[name] = {
            "forward": shape.flops / statistics.median(forward_ms) * 1e-9,
            "backward": 2.5 * shape.flops / statistics.median(backward_ms) * 1e-9,
            "ms": {"forward": forward_ms, "backward": backward_ms},
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=measuring.writable, metavar="FILE", help="write every figure here too")
    parser.add_argument(
        "--rounds", type=measuring.count, default=5, metavar="N", help="times each implementation is measured (5)"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--peer", metavar="MODULE", help="another flash_attn to compare with")
    arguments = parser.parse_args()
    measuring.need_gpu()

    peers = implementations(arguments.peer)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.dtype}, TFLOP/s forward / backward")
    print("".join(f"{title:>22}" for title in ("batch heads seqlen dim", "", *peers)))
    rows = []
    for shape in SHAPES:
        results = measure(shape, getattr(torch, arguments.dtype), peers, arguments.rounds)
        rows.append({**shape._asdict(), "results": results})
        best = results["ours"]
        cells = [f"{shape.batch} {shape.heads} {shape.seqlen} {shape.head_dim}", "causal" if shape.causal else "full"]
        for name in peers:
            result = results[name]
            if "why" in result:
                cells.append("cannot run")
                continue
            cell = f"{result['forward']:.0f} / {result['backward']:.0f}"
            if name != "ours" and "why" not in best:
                ratios = (best[way] / result[way] for way in ("forward", "backward"))
                cell += " ({:.2f} {:.2f})".format(*ratios)
            cells.append(cell)
        print("".join(f"{cell:>22}" for cell in cells), flush=True)
    print("in brackets: ours divided by theirs")
    if arguments.json is not None:
        import flash_attn

        config = {"dtype": arguments.dtype, "rounds": arguments.rounds}
        samples = {
            f"{'x'.join(map(str, shape[:4]))} {'causal' if shape.causal else 'full'} {way} ms": row["results"]["ours"][
                "ms"
            ][way]
            for shape, row in zip(SHAPES, rows, strict=True)
            if "why" not in row["results"]["ours"]
            for way in ("forward", "backward")
        }
        machine = measuring.environment(torch.device("cuda"))
        content = measuring.results(
            "attention", machine, config, metrics=rows, summary=flash_attn.backend_info(), samples=samples
        )
        measuring.write(arguments.json, content)


if __name__ == "__main__":
    main()
