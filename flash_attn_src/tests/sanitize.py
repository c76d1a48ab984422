"""Runs every public operation, forward and backward, under compute-sanitizer's three tools on an NVIDIA GPU.

    python flash_attn_src/tests/sanitize.py [--tool memcheck] [--only cache] [--sanitizer PATH]

memcheck finds reads and writes outside of an allocation, racecheck races in shared memory, initcheck reads of memory
that nothing wrote. PyTorch's caching allocator is off, so that a tensor that is freed too early is really gone. Prints
a table; the exit code is 0 only where every call ran and no tool found anything.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck")
_MARK = "@@ "
# What the tools print that is no finding.
_QUIET = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Target application")
# A tool takes up to a few hundred times as long as the call alone.
_SECONDS = 900


def calls(device: str) -> dict[str, Callable[[], None]]:
    """Every public operation on small random tensors, by name."""
    import flash_attn
    import torch
    from flash_attn.layers.rotary import apply_rotary_emb
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    generator = torch.Generator().manual_seed(0)
    half = torch.bfloat16

    def draw(*shape: int, dtype: torch.dtype = half, grad: bool = True) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def differentiated(result: Any) -> None:
        """The backward of every result that has one, from a gradient that is not dense."""
        results = result if isinstance(result, tuple) else (result,)
        for x in results:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.backward(torch.ones_like(x[..., :1] if x.dim() else x).expand_as(x), retain_graph=True)

    def dense(
        dim: int = 64, dtype: torch.dtype = half, sq: int = 77, sk: int = 130, values: int | None = None, **options: Any
    ) -> None:
        q, k, v = (draw(2, *shape, dtype=dtype) for shape in ((sq, 4, dim), (sk, 2, dim), (sk, 2, values or dim)))
        differentiated(flash_attn.flash_attn_func(q, k, v, **options))

    def biased(*shape: int, dim: int = 64, dtype: torch.dtype = half, **options: Any) -> None:
        """A bias whose rows are not aligned, and whose allocation ends with its last element."""
        numbers = draw(1 + math.prod(shape), dtype=dtype)
        dense(dim, dtype, shape[2], shape[3], attn_bias=numbers[1:].view(shape), **options)

    def packed(**options: Any) -> None:
        q, k, v = draw(90, 4, 64), draw(260, 2, 64), draw(260, 2, 64)
        cu_q, cu_k = ints(3, 40, 40, 88), ints(1, 130, 190, 250)  # rows outside, and a sequence without queries
        differentiated(flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 48, 129, **options))

    def paged() -> None:
        q, pages = draw(3, 4, 64, grad=False), draw(12, 64, 2, 64, grad=False)
        table = torch.randperm(12, generator=generator).int().view(3, 4).to(device)
        flash_attn.flash_attn_varlen_func(q, pages, pages, ints(0, 1, 2, 3), ints(0, 100, 300, 500), 1, 200,
                                          block_table=table)  # fmt: skip

    def cache(new: int = 0, seqlen_q: int = 1, page: int = 0, rotary: bool = False, **options: Any) -> None:
        q = draw(2, seqlen_q, 8, 64, grad=False)
        pages = 640 // page if page else 0
        shape = (2 * pages, page, 2, 64) if page else (2, 600, 2, 64)
        caches = [draw(*shape, grad=False) for _ in range(2)]
        if page:
            options["block_table"] = torch.randperm(2 * pages, generator=generator).int().view(2, -1).to(device)
        if new:
            options |= {"k": draw(2, new, 2, 64, grad=False), "v": draw(2, new, 2, 64, grad=False)}
        if rotary:
            angles = torch.rand(1600, 16, device=device)
            options |= {"rotary_cos": angles.cos().to(half), "rotary_sin": angles.sin().to(half)}
        flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=ints(500, 77), causal=True, **options)

    def latent(queries: int = 1, page: int = 0, heads: int = 16, **options: Any) -> None:
        """Multi-head latent attention: the values are the first columns of the keys."""
        q, rows = draw(2, queries, heads, 576, grad=False), draw(2, 192, 1, 576, grad=False)
        if page:
            rows = rows.view(-1, page, 1, 576)
            options["block_table"] = torch.randperm(len(rows), generator=generator).int().view(2, -1).to(device)
        flash_attn.flash_attn_with_kvcache(q, rows, rows[..., :512], cache_seqlens=ints(190, 77), causal=True,
                                           **options)  # fmt: skip

    def fp8(**options: Any) -> None:
        q, k, v = draw(2, 70, 4, 64), draw(2, 90, 2, 64), draw(2, 90, 2, 64)
        differentiated(flash_attn.flash_attn_fp8_func(q, k, v, **options))

    def turned(interleaved: bool) -> None:
        angles = torch.rand(70, 16, device=device)
        differentiated(apply_rotary_emb(draw(2, 70, 4, 64), angles.cos(), angles.sin(), interleaved=interleaved))

    def normed(function: Any, dim: int, dtype: torch.dtype, residual: bool) -> None:
        x, weight, bias = draw(37, dim, dtype=dtype), draw(dim, dtype=torch.float32), draw(dim, dtype=torch.float32)
        added = draw(37, dim, dtype=dtype) if residual else None
        differentiated(function(x, weight, bias, residual=added, prenorm=residual))

    def lossy(reduce: str, **options: Any) -> None:
        logits = draw(60, 5003)
        labels = torch.randint(0, 5003, (60,), generator=generator).to(device)
        losses, _ = cross_entropy_loss(logits, labels, **options)
        getattr(losses, reduce)().backward()

    actual: dict[str, Callable[[], None]] = {}
    for dim in (32, 40, 64, 96, 128, 192, 256, 512):
        actual[f"dense dim {dim}"] = lambda dim=dim: dense(dim, causal=True)
    actual |= {
        "dense fp16": lambda: dense(dtype=torch.float16),
        "dense fp32": lambda: dense(dtype=torch.float32, causal=True),
        "dense full": dense,
        "dense window": lambda: dense(window_size=(20, 5)),
        "dense softcap": lambda: dense(softcap=10.0, causal=True),
        "dense alibi": lambda: dense(alibi_slopes=torch.rand(4, device=device)),
        "dense dropout": lambda: dense(dropout_p=0.2, return_attn_probs=True),
        "dense everything": lambda: dense(softcap=5.0, dropout_p=0.1, alibi_slopes=torch.rand(2, 4, device=device)),
        "dense more queries": lambda: dense(sq=130, sk=77, causal=True),
        "dense decoding": lambda: dense(sq=1, sk=3000),
        "qkv packed": lambda: differentiated(flash_attn.flash_attn_qkvpacked_func(draw(2, 70, 3, 4, 64))),
        "kv packed": lambda: differentiated(
            flash_attn.flash_attn_kvpacked_func(draw(2, 70, 4, 64), draw(2, 90, 2, 2, 64), causal=True)
        ),
        "varlen": packed,
        "varlen causal": lambda: packed(causal=True, window_size=(30, 0)),
        "varlen dropout": lambda: packed(dropout_p=0.2, return_attn_probs=True),
        "varlen pages": paged,
        "cache": cache,
        "cache append": lambda: cache(new=3, seqlen_q=3),
        "cache append rotary": lambda: cache(new=3, seqlen_q=3, rotary=True),
        "cache rotary halves": lambda: cache(new=3, seqlen_q=3, rotary=True, rotary_interleaved=False),
        "cache pages": lambda: cache(page=64, new=2, seqlen_q=2),
        "cache small pages": lambda: cache(page=16, seqlen_q=20),
        "cache splits": lambda: cache(num_splits=5),
        "cache one split": lambda: cache(num_splits=1, softcap=5.0),
        "cache many queries": lambda: cache(seqlen_q=200),
        "cache leftpad": lambda: cache(cache_leftpad=ints(7, 20)),
        "cache sinks": lambda: cache(s_aux=draw(8, grad=False)),
        "cache sinks many queries": lambda: cache(page=16, seqlen_q=200, s_aux=draw(8, grad=False)),
        "sinks": lambda: dense(s_aux=draw(4), causal=True),
        "sinks window": lambda: dense(s_aux=draw(4, dtype=torch.float32), window_size=(20, 0)),
        "values": lambda: dense(192, values=128, causal=True),
        "bias": lambda: biased(2, 4, 77, 131),
        "bias causal": lambda: biased(1, 1, 130, 77, dim=128, causal=True),
        "bias whole tiles": lambda: biased(1, 4, 128, 256),
        "bias fp32": lambda: biased(2, 1, 77, 130, dtype=torch.float32),
        "bias 512": lambda: biased(1, 4, 45, 77, dim=512),
        "latent": latent,
        "latent pages": lambda: latent(page=64),
        "latent small pages": lambda: latent(page=16, queries=9),
        "latent many heads": lambda: latent(heads=128, queries=2),
        "fp8": fp8,
        "fp8 causal": lambda: fp8(causal=True, softcap=5.0),
        "rotary": lambda: turned(False),
        "rotary interleaved": lambda: turned(True),
        "loss sum": lambda: lossy("sum"),
        "loss mean": lambda: lossy("mean", label_smoothing=0.1, lse_square_scale=1e-3),
        "loss in place": lambda: lossy("sum", inplace_backward=True),
    }
    for name, function in (("layer norm", layer_norm_fn), ("RMS norm", rms_norm_fn)):
        for dim in (64, 1000, 1003, 20000):
            actual[f"{name} {dim}"] = lambda f=function, dim=dim: normed(f, dim, half, True)
        actual[f"{name} fp32"] = lambda f=function: normed(f, 1000, torch.float32, False)
    return actual


def run(only: str, device: str) -> None:
    """Runs the calls, each announced on stdout before it begins."""
    import torch

    for name, call in calls(device).items():
        if only in name:
            if device == "cuda":
                torch.cuda.synchronize()
            print(f"{_MARK}{name}", flush=True)
            call()
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"{_MARK}end", flush=True)


def findings(output: str) -> Iterator[tuple[str, list[str]]]:
    """(call, first lines of the tool's findings) of a run; the last call is "end" if all calls ran."""
    name, result = "start", []
    for line in output.splitlines():
        if line.startswith(_MARK):
            yield name, result
            name, result = line.removeprefix(_MARK), []
        elif line.startswith("========= ") and line[10:11].strip() and not line[10:].startswith(_QUIET):
            result.append(line[10:])
    yield name, result


def _under(tool: str, sanitizer: str, only: str) -> dict[str, list[str]]:
    """The tool's findings for each call. Raises SystemExit unless all calls ran."""
    command = [
        sanitizer, "--tool", tool, "--report-api-errors", "no", "--target-processes", "application-only",
        sys.executable, __file__, "--run", "--only", only,
    ]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=_SECONDS,
    )  # fmt: skip
    result = dict(findings(done.stdout))
    if "end" not in result:
        print(done.stdout[-4000:])
        raise SystemExit(f"{tool}: the calls ended after {list(result)[-1]!r}, exit code {done.returncode}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one tool alone; may be repeated")
    parser.add_argument("--only", default="", metavar="WORD", help="the calls whose name holds it")
    parser.add_argument("--sanitizer", metavar="PATH", help="compute-sanitizer, if it is not on PATH")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        run(options.only, "cuda")
        return 0
    sanitizer = options.sanitizer or shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        raise SystemExit("compute-sanitizer is not here: install the CUDA toolkit, or name it with --sanitizer")
    tools = options.tool or TOOLS
    results = {tool: _under(tool, sanitizer, options.only) for tool in tools}
    names = [name for name in results[tools[0]] if name not in ("start", "end")]
    print(f"{'call':<24}" + "".join(f"{tool:>12}" for tool in tools))
    for name in ("start", *names, "end"):
        counts = [len(results[tool][name]) for tool in tools]
        if name in names or any(counts):
            print(f"{name:<24}" + "".join(f"{count or 'clean':>12}" for count in counts))
    wrong = [(tool, name, line) for tool in tools for name, lines in results[tool].items() for line in lines[:3]]
    for tool, name, line in wrong:
        print(f"{tool}: {name}: {line}")
    print(f"{len(names)} calls, {len(tools)} tools: {'something was found' if wrong else 'clean'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
