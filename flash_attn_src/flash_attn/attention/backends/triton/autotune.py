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
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flash_attn.attention.backends.split_kv import as_cache_call
from flash_attn.attention.backends.triton import attention, combine, fp8_format, fp8_forward, int8_forward, kvcache
from flash_attn.attention.backends.triton import backward as untuned_backward
from flash_attn.attention.backends.triton import forward as untuned_forward
from flash_attn.attention.backends.triton.gradients import backward_ops
from flash_attn.attention.backends.triton.kernels import find, forward_kind, remember, score_kind, variants
from flash_attn.attention.backends.triton.value_dims import padded
from flash_attn.call.calls import AttentionCall, ForwardResult, GradientCall, replace
from flash_attn.call.options import draw_rng_state
from flash_attn.core import device, jit, watchdog
from flash_attn.core.device import Kernel
from flash_attn.core.environment import TRITON_AUTOTUNE, switch
from flash_attn.core.files import write_whole
from flash_attn.core.platform import PLATFORM
from flash_attn.core.protocol import spoil
from flash_attn.kernels import launches
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant

# What is not searched for is the Triton backend's own.
__all__ = ["backward", "combine", "forward", "fp8_format", "fp8_forward", "int8_forward", "kvcache", "name", "wanted"]

name = "flash_attn.attention.backends.triton"

_ROUNDS = 5
_lock = threading.Lock()


def wanted() -> bool:
    """Whether the environment requests the search. Warns if Triton, which the search needs, is not installed."""
    try:
        asked = switch(os.environ, TRITON_AUTOTUNE)
    except ValueError as error:
        raise RuntimeError(f"{error}: unset it, or set it to TRUE") from None
    if not asked:
        return False
    problem = jit.triton_problem()
    if problem is not None:
        warnings.warn(f"{TRITON_AUTOTUNE}=TRUE has no effect: {problem}", RuntimeWarning, stacklevel=2)
    return problem is None


def forward(call: AttentionCall) -> ForwardResult:
    """As `triton.forward`, with the kernel that is fastest here."""
    if call.options.dropout_p > 0.0 and call.options.rng_state is None:
        # Drawn once: the search must not advance torch's generator.
        call = replace(call, rng_state=draw_rng_state(call.q.device))
    if padded(call) is not None:
        return untuned_forward(call)
    kind = forward_kind(call)
    ops = attention.forward_ops(call, kind)
    (kernel,) = find(ops, call.q.get_device(), call.q.dtype, call.q.shape[-1], kind)
    # A call in splits of the keys has other kernels.
    if as_cache_call(kernel.block_m, call) is None:
        _choose(ops, call, lambda: untuned_forward(call))
    return untuned_forward(call)


def backward(gradients: GradientCall) -> torch.Tensor:
    """As `triton.backward`, with the kernels that are fastest here."""
    if padded(gradients.forward) is None:
        _choose(backward_ops(gradients.forward), gradients.forward, lambda: untuned_backward(gradients))
    return untuned_backward(gradients)


def _shape_class(call: AttentionCall) -> str:
    """What calls share a configuration: lengths up to the next power of two, and the mask."""
    left, right = call.options.window_size
    mask = ("causal" if call.options.causal else "full") + (
        "" if left < 0 and (call.options.causal or right < 0) else "-window"
    )
    q, k = (1 << max(length - 1, 0).bit_length() for length in (call.longest_q, call.longest_k))
    return f"q{q}-k{k}-{mask}{'-varlen' if call.cu_seqlens_q is not None else ''}"


def _choose(ops: tuple[str, ...], call: AttentionCall, run: Callable[[], object]) -> None:
    """Makes `kernels.find` return the best kernels of the shape class. Searches if they are not known yet."""
    index, dtype, head_dim = call.q.get_device(), call.q.dtype, call.q.shape[-1]
    kind = (score_kind if ops == backward_ops(call) else forward_kind)(call)
    key, shape = (ops, index, dtype, head_dim, kind), _shape_class(call)
    tuned = (*key, shape)
    with _lock:
        if tuned not in device.kernels:
            spoil()
            if index >= 0 and torch.cuda.is_current_stream_capturing():
                return  # nothing can be timed while a graph is captured: the wheel's own kernels serve it
            needs = variants(ops, dtype, head_dim, kind)
            standing = tuple(device.kernel(index, variant) for variant in needs)
            # All of one call are of one kind, which take their arguments in the same form.
            own = tuple(_compiled(variant, index) for variant in needs)
            best = tuple(_best(place, variant, own, key, shape, run) for place, variant in enumerate(needs))
            device.kernels[tuned] = standing if best == own else best
        remember(key, device.kernels[tuned])


def _best(
    place: int,
    variant: Variant,
    standing: tuple[Kernel, ...],
    key: tuple[Any, ...],
    shape: str,
    run: Callable[[], object],
) -> Kernel:
    """The fastest kernel of a variant, at its index among the current kernels."""
    _, index, *_ = key
    target = device.of(index).target
    entry = f"{variant.name} {shape}"
    store = _store(index)
    try:
        kept = _config(_read(store)[entry]["config"])
    except (KeyError, TypeError, ValueError, OSError):
        pass  # not searched for yet, not a file of this module, or held by another process
    else:
        return standing[place] if kept is None else _compiled(variant, index, kept)

    candidates = launches.candidates(variant, target)[1:]
    remember(key, standing)
    best: Kernel = standing[place]
    best_config: Config | None = None
    best_ms = _milliseconds(run, index)
    for number, config in enumerate(candidates, 1):
        print(f"flash_attn: tuning {entry}: {number}/{len(candidates)}, best {best_ms:.3f} ms", file=sys.stderr)
        kernel = _compiled(variant, index, config)
        remember(key, (*standing[:place], kernel, *standing[place + 1 :]))
        try:
            taken = _milliseconds(run, index)
        except Exception as error:  # of Triton and its compilers, which raise many kinds: the candidate failed
            print(f"flash_attn: {config} does not run here: {error}", file=sys.stderr)
            continue
        if taken < best_ms:
            best, best_config, best_ms = kernel, config, taken
    remember(key, standing)
    _write(store, entry, {"config": best_config, "milliseconds": round(best_ms, 4)})
    return best


def _compiled(variant: Variant, index: int, config: Config | None = None) -> Kernel:
    """A variant's kernel with this launch configuration, or with the tuning table's for None."""
    there = device.of(index)
    return watchdog.watched(jit.JitKernel(variant, there.target, config, index=index), variant, there)


def _config(fields: list[Any] | None) -> Config | None:
    """Converts a configuration to the file's form. None means that the table's configuration is the fastest."""
    if fields is None:
        return None
    block_m, block_n, num_warps, num_stages, depth, options = fields
    sizes = int(block_m), int(block_n), int(num_warps), int(num_stages), int(depth)
    chosen = ((str(option), value if isinstance(value, str) else int(value)) for option, value in options)
    return Config(*sizes, tuple(chosen))


def _milliseconds(run: Callable[[], object], index: int) -> float:
    """Median over a few rounds, after one that compiles and warms."""
    times = []
    for _ in range(_ROUNDS + 1):
        if index >= 0:
            torch.cuda.synchronize(index)
        start = time.perf_counter()
        run()
        if index >= 0:
            torch.cuda.synchronize(index)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[_ROUNDS // 2] * 1e3


@cache
def _store(index: int) -> Path:
    """The file of search results.

    There is a file for each device model, Triton release and version of the kernels' sources.
    """
    import triton

    root = PLATFORM.cache_directory(os.environ) / "autotune"
    sources = sorted(Path(str(launches.__file__)).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + triton.__version__.encode())
    model = "interpreter" if index < 0 else re.sub(r'[\s<>:"/\\|?*]', "-", torch.cuda.get_device_name(index))
    return root / f"{model}-{digest.hexdigest()[:16]}.json"


def _read(store: Path) -> dict[str, Any]:
    """The entries of a file, none if there is no file or a damaged one. Raises OSError if a file cannot be read."""
    try:
        content = json.loads(PLATFORM.read(store))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(store: Path, entry: str, result: dict[str, Any]) -> None:
    """Adds an entry atomically. Warns, and leaves the file alone, if it cannot be read or written."""
    try:
        write_whole(store, json.dumps(_read(store) | {entry: result}, indent=1, sort_keys=True))
    except OSError as error:
        warnings.warn(
            f"the results of the search cannot be saved ({error}), so the next process searches again: "
            f"close the program that holds the file, or set {PLATFORM.cache_variable} to a directory that can be "
            "written",
            RuntimeWarning,
            stacklevel=2,
        )
