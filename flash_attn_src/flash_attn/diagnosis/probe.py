"""Prints facts that need torch and the GPU, as lines of JSON on stdout.

`flash_attn.diagnosis.survey` runs the text of this file in a separate interpreter, because torch may be broken and a
call may kill the process. Each line is printed before the next step begins, so the last one tells how far it came.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

# torch's warning names it: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"

_answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # keeps output of libraries out of the answer


def answer(**found: Any) -> None:
    print(json.dumps(found), file=_answers, flush=True)


def devices() -> list[dict[str, Any]]:
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        target = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:
            target = properties.gcnArchName.split(":")[0]
        gpus.append({"name": properties.name, "target": target, "memory_mib": properties.total_memory >> 20})
    return gpus


def choose() -> Exception | None:
    """Imports flash_attn, and makes the first GPU that the wheel has kernels for the current one. Returns its error.

    torch's own kernel runs afterwards, on that GPU: torch may have kernels for it alone.
    """
    try:
        from flash_attn.core.build_info import load
        from flash_attn.diagnosis.selftest import machine

        if torch.cuda.is_available():
            torch.cuda.set_device(machine.chosen(load().targets) or 0)
    except Exception as error:
        return error
    return None


def unwritten(result: Any) -> bool:
    return bool(result.isnan().all())


def call(device: str) -> dict[str, Any]:
    """A forward and a backward against fp32: times in ms, errors relative to the largest value.

    unwritten: the results in which no value was written, so that each is the NaN that torch puts into new tensors here.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v, dout = (torch.randn(2, 200, 4, 64).to(device, dtype).requires_grad_() for _ in range(4))
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", exact[0], exact[1]) / 8.0
    hidden = torch.ones(200, 200, dtype=torch.bool, device=device).triu(1)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), exact[2])
    wanted_grads = torch.autograd.grad(expected, exact, dout.detach().float())

    def synchronized() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    started = synchronized()
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    between = synchronized()
    grads = torch.autograd.grad(out, (q, k, v), dout.detach())
    ended = synchronized()
    torch.use_deterministic_algorithms(False)

    def error(got: Any, exactly: Any) -> float:
        return float((got.detach().float() - exactly).abs().max() / exactly.abs().max())

    from flash_attn.attention import backends

    return {
        "device": device,
        "backend": backends.select(q).name,
        "forward_ms": 1e3 * (between - started),
        "backward_ms": 1e3 * (ended - between),
        "forward_error": error(out, expected),
        "backward_error": max(error(*pair) for pair in zip(grads, wanted_grads)),  # noqa: B905
        "limit": 2.4e-2 if dtype == torch.bfloat16 else 1e-4,
        "unwritten": [
            name for name, x in {"out": out, "dq": grads[0], "dk": grads[1], "dv": grads[2]}.items() if unwritten(x)
        ],
    }


def attention(device: str) -> dict[str, Any]:
    """The error of torch's own scaled_dot_product_attention, which takes kernels of AOTriton, beside its math backend.

    The kernel after it is one of torch's that looks at the errors of launches, because AOTriton does not.
    experimental: torch has said that it does not use its kernels for this GPU, because a variable is not set.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 200, 64).to(device, torch.bfloat16) for _ in range(3))
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).float()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    experimental = any(EXPERIMENTAL in str(warning.message) for warning in said)
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    if device != "cpu":
        torch.cuda.synchronize()
    return {"error": error, "limit": 2.4e-2, "experimental": experimental}


def kernels() -> list[dict[str, Any]]:
    """Who serves a causal call of 4096 tokens in bf16 on the current GPU, by head dim."""
    rows = []
    for head_dim in (64, 128):
        q = torch.empty(1, 4096, 1, head_dim, device="cuda", dtype=torch.bfloat16)
        rows.append({"head_dim": head_dim, **flash_attn.backend_info(q, q, q, causal=True)["call"]})
    return rows


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


try:
    import torch
except Exception as error:
    missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    answer(torch_error="" if missing else words(error))
    sys.exit(0)
answer(torch={"version": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda})
try:
    answer(devices=devices())
    failure = choose()
    if torch.cuda.is_available():
        answer(torch_kernel=float(torch.ones(8, device="cuda").mul(2.0).sum()))
    if failure is not None:
        raise failure
    import flash_attn
    from flash_attn.core.platform import PLATFORM

    answer(imported=flash_attn.__file__, info=flash_attn.backend_info())
    answer(libraries=PLATFORM.libraries())
    answer(kernels=kernels() if torch.cuda.is_available() else [])
    answer(call=call("cuda" if torch.cuda.is_available() else "cpu"))
    answer(libraries=PLATFORM.libraries())
except Exception as error:
    answer(error=words(error))
    sys.exit(0)
try:  # the last step, because its failure would disturb later steps
    answer(attention=attention("cuda" if torch.cuda.is_available() else "cpu"))
except Exception as error:
    answer(attention={"failure": words(error)})
