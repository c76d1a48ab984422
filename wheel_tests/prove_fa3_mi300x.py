"""Proves on an AMD MI300X that the installed Triton kernels ("FA3" here, not FlashAttention-3) compute right.

    python wheel_tests/prove_fa3_mi300x.py      # 0: proven; 1: not, and why; 2: there is no AMD GPU here

Selects FA3 as upstream does, by FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE, prints what runs, and compares forward and
backward with fp32 attention on the same inputs. With the wheel of the README an MI300X is expected to show

    torch           2.5.1+rocm6.2
    gfx target      gfx942
    backend symbol  flash_attn.flash_attn_triton_amd.interface_v2
    FA3 forward success

--any-gpu takes whatever GPU there is: it exercises the same code, and says that this is no proof for an MI300X.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TARGET = "gfx942"
SYMBOL = "interface_v2"
BACKEND = "flash_attn.attention.backends.triton"
VARIABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
# batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, causal; odd lengths on purpose
SHAPES = (
    (2, 1024, 1024, 8, 8, 64, False),
    (2, 1024, 1024, 8, 8, 128, True),
    (1, 777, 1333, 8, 2, 128, True),
    (1, 300, 300, 4, 1, 256, False),
)
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Result:
    """Largest errors relative to the largest value of the fp32 reference, and the largest allowed."""

    case: str
    forward: float
    backward: float
    forward_limit: float
    backward_limit: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What ran. `hip` is None where torch is no ROCm build; `problems` are backend_info()'s."""

    torch: str
    hip: str | None
    device: str
    target: str
    driver: str
    flash_attn: str
    symbol: str
    backend: str
    problems: Sequence[str]
    results: Sequence[Result]


def measure(device: str) -> Iterator[Result]:
    """Forward and backward of every shape and dtype on a torch device, against fp32."""
    import torch
    from flash_attn import flash_attn_func
    from helpers import TOLERANCE, error, inputs, reference

    for *sizes, causal in SHAPES:
        for name in DTYPES:
            q, k, v, dout = inputs(*sizes, getattr(torch, name), device)
            out = flash_attn_func(q, k, v, causal=causal)
            grads = torch.autograd.grad(out, (q, k, v), dout)
            exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
            wanted, _ = reference(*exact, causal=causal)
            wanted_grads = torch.autograd.grad(wanted, exact, dout.float())
            limits = TOLERANCE[q.dtype]
            yield Result(
                case=f"{'x'.join(map(str, sizes))} {name}{', causal' * causal}",
                forward=error(out, wanted),
                backward=max(error(*pair) for pair in zip(grads, wanted_grads, strict=True)),
                forward_limit=limits[0],
                backward_limit=limits[1],
            )


def survey(any_gpu: bool) -> Evidence | None:
    """Runs everything on the first MI300X, else on the first AMD GPU. None without an AMD GPU."""
    import torch
    from helpers import devices

    found = devices() if torch.version.hip or any_gpu else []
    chosen = next((device for device in found if device.target == TARGET), next(iter(found), None))
    if chosen is None:
        return None
    torch.cuda.set_device(chosen.index)
    print(f"torch           {torch.__version__}")
    print(f"device          {chosen.name}")
    print(f"gfx target      {chosen.target}")
    print(f"driver          {chosen.driver}", flush=True)

    import flash_attn
    from flash_attn import flash_attn_interface
    from flash_attn.attention import backends

    info = flash_attn.backend_info()
    version = f"{info['version']}+{info['label']}" if info["label"] else info["version"]
    extension = "flash_attn_gpu" if info["version"] >= "2.7" else "flash_attn_cuda"
    symbol = getattr(flash_attn_interface, extension).__name__
    backend = backends.select(torch.empty(0, device="cuda")).name
    print(f"flash-attn      {version}")
    print(f"backend symbol  {symbol}")
    print(f"kernels run by  {backend}")
    print("".join(f"problem         {problem}\n" for problem in info["problems"]))
    print(f"{'batch x seqlen_q x seqlen_k x heads x heads_k x head_dim':<58}{'forward':>20}{'backward':>20}")
    results = []
    for result in measure("cuda"):
        results.append(result)
        pairs = (result.forward, result.forward_limit), (result.backward, result.backward_limit)
        print(f"{result.case:<58}" + "".join(f"{got:>10.1e} <= {limit:.0e}" for got, limit in pairs), flush=True)
    print()
    return Evidence(
        torch=torch.__version__,
        hip=torch.version.hip,
        device=chosen.name,
        target=chosen.target,
        driver=chosen.driver,
        flash_attn=version,
        symbol=symbol,
        backend=backend,
        problems=info["problems"],
        results=results,
    )


def faults(evidence: Evidence, any_gpu: bool) -> list[str]:
    """The reasons why the run is no proof."""
    found = []
    if not any_gpu and evidence.hip is None:
        found.append(f"torch {evidence.torch} is no ROCm build")
    if not any_gpu and evidence.target != TARGET:
        found.append(f"{evidence.device} is a {evidence.target}, an MI300X is a {TARGET}")
    if not evidence.symbol.endswith(SYMBOL):
        found.append(f"the backend symbol {evidence.symbol} does not end in {SYMBOL}")
    if evidence.backend != BACKEND:
        found.append(f"GPU tensors go to {evidence.backend}, not to {BACKEND}")
    if not any_gpu:
        found += evidence.problems
    for way in ("forward", "backward"):
        wrong = [each.case for each in evidence.results if not getattr(each, way) <= getattr(each, f"{way}_limit")]
        found += [f"the {way} is wrong for {case}" for case in wrong]
    if not evidence.results:
        found.append("nothing was measured")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--any-gpu", action="store_true", help="run on any GPU; this proves nothing about an MI300X")
    any_gpu = parser.parse_args(argv).any_gpu
    os.environ[VARIABLE] = "TRUE"
    try:
        evidence = survey(any_gpu)
    except (ImportError, RuntimeError) as error:
        print(f"FA3 not proven: {error}\n`python -m flash_attn.doctor` says more")
        return 1
    if evidence is None:
        import torch

        kind = "GPU" if any_gpu else "AMD GPU"
        print(f"no {kind} here that torch {torch.__version__} can use: nothing ran, nothing is proven")
        return 2
    against = faults(evidence, any_gpu)
    if against:
        print("\n".join(["FA3 not proven:", *(f"  {fault}" for fault in against)]))
        return 1
    print("FA3 forward success\nFA3 backward success")
    if any_gpu and (evidence.hip is None or evidence.target != TARGET):
        print(f"this ran on {evidence.device} ({evidence.target}): it is no proof for an MI300X")
    return 0


if __name__ == "__main__":
    sys.exit(main())
