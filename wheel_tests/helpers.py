"""What the tests share: a plain reference, inputs, errors, the GPUs of this machine, fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

# Largest error allowed relative to the largest value of the reference, forward and backward.
# 2^-8 is half a unit in the last place of bf16, 2^-11 of fp16; a few roundings add up.
TOLERANCE = {torch.float32: (1e-5, 2e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (1.2e-2, 2.4e-2)}


class Device(NamedTuple):
    """A GPU as torch sees it; target as the wheel's stores are called: gfx942, sm_90."""

    index: int
    target: str
    name: str
    driver: str


def devices() -> list[Device]:
    """The GPUs that this torch can use."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            target, driver = properties.gcnArchName.split(":")[0], f"HIP {torch.version.hip}"
        else:
            target = f"sm_{properties.major}{properties.minor}"
            driver = f"NVIDIA {_nvidia_driver()}, CUDA {torch.version.cuda}"
        found.append(Device(index, target, properties.name, driver))
    return found


def _nvidia_driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text(encoding="utf-8").split() if version.is_file() else []
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), "unknown")


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T / sqrt(d)) v and its log-sum-exp in fp32, whole matrices, upstream's layout.

    q (b, sq, h, d), k and v (b, sk, hk, d); causal is aligned to the bottom right, and a row that sees
    no key gives 0.
    """
    q, k, v = (tensor.float() for tensor in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        rows, columns = torch.arange(q.shape[1]), torch.arange(k.shape[1])
        hidden = columns[None, :] > rows[:, None] + k.shape[1] - q.shape[1]
        scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def inputs(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_k: int, dim: int, dtype: torch.dtype,
    device: str = "cpu", seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """q, k, v that want gradients, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, count: int) -> torch.Tensor:
        return torch.randn(batch, length, count, dim, generator=generator).to(device, dtype)

    q, k, v, dout = (
        draw(seqlen_q, heads),
        draw(seqlen_k, heads_k),
        draw(seqlen_k, heads_k),
        draw(seqlen_q, heads),
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference relative to the largest wanted value; inf where `got` is not finite."""
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    got, wanted = got.detach().float(), wanted.detach().float()
    difference = (got - wanted).abs().max()
    return float(difference / wanted.abs().max().clamp_min(1e-3)) if difference.isfinite() else float("inf")


def check(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, *, causal: bool
) -> tuple[float, float]:
    """Errors of `out`, made from q, k, v, and of its gradients; asserts that both are small."""
    grads = torch.autograd.grad(out, (q, k, v), dout)
    exact = [tensor.detach().float().requires_grad_() for tensor in (q, k, v)]
    wanted, _ = reference(*exact, causal=causal)
    wanted_grads = torch.autograd.grad(wanted, exact, dout.float())
    forward = error(out, wanted)
    backward = max(error(*pair) for pair in zip(grads, wanted_grads, strict=True))
    limit_forward, limit_backward = TOLERANCE[q.dtype]
    assert forward <= limit_forward, f"forward error {forward:.2e}, at most {limit_forward:.0e}"
    assert backward <= limit_backward, f"backward error {backward:.2e}, at most {limit_backward:.0e}"
    assert out.dtype == q.dtype
    return forward, backward


def fresh(code: str, *, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter, with nothing of this package set in its environment.

    `path` comes first on its module path: a changed copy of the package takes the wheel's place.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("FLASH_ATT", "PYTHONPATH"))}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
