"""FLASH_ATTENTION_TRITON_AMD_AUTOTUNE=TRUE: searches the launch configuration of each kind of call on this GPU.

The first call of a kind compiles and times the candidates of `launches.candidates` with Triton's JIT, beside the
table's own configuration, and keeps the winner on disk, per device, kernel and shape class, so that the search
happens once on a machine. Where none is faster, the wheel's kernels run. Any configuration gives a right result:
tuning changes time alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flash_attn import rng
from flash_attn.backends import triton as backend
from flash_attn.backends.split_kv import as_cache_call
from flash_attn.backends.triton import attention as triton_attention
from flash_attn.backends.triton import combine, format_of, fp8_forward, kvcache
from flash_attn.backends.triton import kernels as triton_kernels
from flash_attn.kernels import launches
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant
from flash_attn.runtime import launch

# What is not searched for is the Triton backend's own.
__all__ = ["backward", "combine", "format_of", "forward", "fp8_forward", "kvcache", "name", "wanted"]

_SWITCH = "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE"
_ROUNDS = 5
_lock = threading.Lock()
_kernels: dict[tuple[object, ...], tuple[triton_kernels.Kernel, ...]] = {}

name = backend.name


def wanted() -> bool:
    """Whether the environment asks for the search. Warns where Triton is not there to make it."""
    asked = os.environ.get(_SWITCH, "").strip().upper()
    if asked in ("", "0", "FALSE"):
        return False
    if asked not in ("1", "TRUE"):
        raise RuntimeError(f"{_SWITCH}={asked} is neither TRUE nor FALSE: unset it, or set it to TRUE")
    problem = launch.triton_problem()
    if problem is not None:
        warnings.warn(f"{_SWITCH}={asked} has no effect: {problem}", RuntimeWarning, stacklevel=2)
    return problem is None


def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As `triton.forward`, with the kernel that is fastest here."""
    q, k, _, _, scale, causal, left, right, softcap, slopes, dropout_p, _, rng_state, cu_q, _, max_q, max_k = args[:17]
    leftpad_k, block_table = args[18:20]
    if dropout_p > 0.0 and rng_state is None:  # drawn once: the search must not advance torch's generator
        rng_state = rng.draw(q.device)
    args = (*args[:12], rng_state, *args[13:])
    if cu_q is None:
        max_q, max_k = q.shape[1], k.shape[1] if block_table is None else max_k
    kind = triton_kernels.score_kind(softcap, slopes, dropout_p, scale)
    ops = ("fwd",)
    if block_table is not None:
        ops = triton_attention.paged_ops(k, leftpad_k, q.get_device(), q.dtype, q.shape[-1], kind)
    (kernel,) = triton_kernels.find(ops, q.get_device(), q.dtype, q.shape[-1], kind)
    # A call in parts of the keys has other kernels.
    if dropout_p > 0.0 or as_cache_call(kernel.block_m, *args[:10], *args[13:]) is None:
        shape = _shape_class(max_q, max_k, causal, left, right, cu_q is not None)
        _choose(ops, q, kind, shape, lambda: backend.forward(*args))
    return backend.forward(*args)


def backward(*args: Any) -> torch.Tensor:
    """As `triton.backward`, with the kernels that are fastest here."""
    q, k = args[1:3]
    scale, causal, left, right, softcap, slopes, dropout_p = args[9:16]
    cu_q, max_q, max_k = args[18], args[20], args[21]
    if cu_q is None:
        max_q, max_k = q.shape[1], k.shape[1]
    kind = triton_kernels.score_kind(softcap, slopes, dropout_p, scale)
    shape = _shape_class(max_q, max_k, causal, left, right, cu_q is not None)
    _choose(("bwd-dq", "bwd-dkdv"), q, kind, shape, lambda: backend.backward(*args))
    return backend.backward(*args)


def _shape_class(max_q: int, max_k: int, causal: bool, left: int, right: int, varlen: bool) -> str:
    """What calls share a configuration: lengths up to the next power of two, and the mask."""
    mask = ("causal" if causal else "full") + ("" if left < 0 and (causal or right < 0) else "-window")
    q, k = (1 << max(length - 1, 0).bit_length() for length in (max_q, max_k))
    return f"q{q}-k{k}-{mask}{'-varlen' if varlen else ''}"


def _choose(ops: tuple[str, ...], q: torch.Tensor, kind: str, shape: str, call: Callable[[], object]) -> None:
    """Makes the kernels of the shape class the ones that `triton_kernels.find` gives; searches where none are known."""
    device = q.get_device()
    key = (ops, device, q.dtype, q.shape[-1], kind)
    tuned = (*key, shape)
    with _lock:
        if tuned not in _kernels:
            if device >= 0 and torch.cuda.is_current_stream_capturing():
                return  # nothing can be timed while a graph is captured: the wheel's own kernels serve it
            variants = triton_kernels.variants(*key)
            standing = tuple(launch.kernel(device, variant) for variant in variants)
            # All of one call are of one kind, which take their arguments in the same form.
            own = tuple(launch.JitKernel(variant, _target(device)) for variant in variants)
            best = tuple(_best(index, variant, own, key, shape, call) for index, variant in enumerate(variants))
            _kernels[tuned] = standing if best == own else best
        triton_kernels.remember(key, _kernels[tuned])


def _best(
    index: int,
    variant: Variant,
    standing: tuple[triton_kernels.Kernel, ...],
    key: tuple[Any, ...],
    shape: str,
    call: Callable[[], object],
) -> triton_kernels.Kernel:
    """The fastest kernel of a variant, in place `index` of the standing ones."""
    device = key[1]
    target = _target(device)
    entry = f"{variant.name} {shape}"
    store = _store(device)
    try:
        kept = _config(_read(store)[entry]["config"])
    except (KeyError, TypeError, ValueError):
        pass  # not searched for yet, or not what this module writes
    else:
        return standing[index] if kept is None else launch.JitKernel(variant, target, kept)

    candidates = launches.candidates(variant, target)[1:]
    triton_kernels.remember(key, standing)
    best, best_config, best_ms = standing[index], None, _milliseconds(call, device)
    for number, config in enumerate(candidates, 1):
        print(f"flash_attn: tuning {entry}: {number}/{len(candidates)}, best {best_ms:.3f} ms", file=sys.stderr)
        kernel = launch.JitKernel(variant, target, config)
        triton_kernels.remember(key, (*standing[:index], kernel, *standing[index + 1 :]))
        try:
            taken = _milliseconds(call, device)
        except Exception as error:  # Triton and its compilers raise many kinds: the candidate is what failed
            print(f"flash_attn: {config} does not run here: {error}", file=sys.stderr)
            continue
        if taken < best_ms:
            best, best_config, best_ms = kernel, config, taken
    triton_kernels.remember(key, standing)
    _write(store, entry, {"config": best_config, "milliseconds": round(best_ms, 4)})
    return best


def _target(device: int) -> str:
    return launch.INTERPRETED if device < 0 else launch.device_target(device)


def _config(fields: list[Any] | None) -> Config | None:
    """A configuration as the file holds it; None says that the table's own is the fastest."""
    if fields is None:
        return None
    block_m, block_n, num_warps, num_stages, depth, options = fields
    sizes = int(block_m), int(block_n), int(num_warps), int(num_stages), int(depth)
    chosen = ((str(option), value if isinstance(value, str) else int(value)) for option, value in options)
    return Config(*sizes, tuple(chosen))


def _milliseconds(call: Callable[[], object], device: int) -> float:
    """Median over a few rounds, after one that compiles and warms."""
    times = []
    for _ in range(_ROUNDS + 1):
        if device >= 0:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device >= 0:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[_ROUNDS // 2] * 1e3


@cache
def _store(device: int) -> Path:
    """The file of what was found: one for each device model, Triton and state of the kernels' sources."""
    import triton

    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_attn" / "autotune"
    sources = sorted(Path(str(launches.__file__)).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + triton.__version__.encode())
    model = "interpreter" if device < 0 else torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return root / f"{model}-{digest.hexdigest()[:16]}.json"


def _read(store: Path) -> dict[str, Any]:
    try:
        found = json.loads(store.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(store: Path, entry: str, result: dict[str, Any]) -> None:
    """Adds one entry; the file is whole whenever the process ends. Warns where it cannot be kept."""
    temporary = store.with_name(f"{store.name}.{os.getpid()}.tmp")
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(_read(store) | {entry: result}, indent=1, sort_keys=True))
        temporary.replace(store)
    except OSError as error:
        warnings.warn(
            f"what the search found cannot be kept ({error}), the next process searches again: "
            "set XDG_CACHE_HOME to a directory that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
