"""What attention costs a program: time by kind of call, who served it, and what would be faster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flash_attn.attention import backends
from flash_attn.attention.backends.protocol import Backend
from flash_attn.attention.backends.sources import explain
from flash_attn.call.calls import AttentionCall, CacheCall
from flash_attn.call.options import FIELDS
from flash_attn.core.protocol import spoil
from flash_attn.diagnosis.info import backend_info
from flash_attn.diagnosis.selftest.speed import milliseconds
from flash_attn.flash_attn_interface import flash_attn_func
from flash_attn.flex import flex_report
from flash_attn.sdpa import override

PYTORCH = "PyTorch"
_TIMED = 200  # calls of a kind that are timed; the first one apart, which may load or compile a kernel
_COMPARED = 3  # kinds that are measured beside PyTorch's SDPA at the end
_SMALL = 0.1  # of the program's time: below it, attention is not what is slow
_NEAR = 1.1  # times as fast, from which on a kernel counts as faster


class Kind(NamedTuple):
    """Calls that are alike: lengths are powers of two."""

    what: str
    by: str
    why: str


class Example(NamedTuple):
    """A dense forward, to be measured again with random tensors of the shapes of its q, k and v."""

    shapes: tuple[torch.Size, torch.Size, torch.Size]
    dtype: torch.dtype
    device: torch.device
    causal: bool


@dataclass(kw_only=True)
class Cost:
    """The calls of a kind, and one of them if SDPA could serve it."""

    calls: int = 0
    times: list[Any] = field(default_factory=list)  # milliseconds, or pairs of GPU events
    example: Example | None = None

    @property
    def milliseconds(self) -> float:
        """Of all calls: those that were not timed take the mean of the others, the first one's time aside."""
        times = [each if isinstance(each, float) else each[0].elapsed_time(each[1]) for each in self.times]
        rest = times[1:] or times
        return times[0] + (self.calls - 1) * sum(rest) / len(rest) if times else 0.0


class Watched:
    """A backend whose calls of attention are timed."""

    def __init__(self, backend: Backend, costs: Costs) -> None:
        self._backend, self._costs = backend, costs

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._backend, name)
        return self._timed(name, function) if name in ("forward", "backward", "kvcache", "fp8_forward") else function

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any) -> Any:
            spoil()
            of = request if isinstance(request, AttentionCall | CacheCall) else request.forward
            kind, example = _kind(self._backend, name, of)
            return self._costs.timed(kind, of.q, lambda: function(request), example)

        return call


class Costs:
    """The cost of each kind of call, in every thread."""

    def __init__(self) -> None:
        self.of: dict[Kind, Cost] = {}
        self._lock = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times calls of attention."""
        with backends.watched(lambda backend: Watched(backend, self)):
            override.watch = self._passed_on
            try:
                yield
            finally:
                override.watch = None

    def _passed_on(self, reason: str, query: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        what = f"SDPA {_name(query.dtype)} {' x '.join(map(str, query.shape))}"
        out: torch.Tensor = self.timed(Kind(what, PYTORCH, f"not flash_attn: {reason}"), query, call)
        return out

    def timed(self, kind: Kind, x: torch.Tensor, call: Callable[[], Any], example: Example | None = None) -> Any:
        """The result of a call, whose time counts for its kind; by events of the GPU of x."""
        with self._lock:
            cost = self.of.setdefault(kind, Cost(example=example))
            cost.calls += 1
            is_timed = len(cost.times) < _TIMED
        if not is_timed or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return call()
        if x.is_cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            result = call()
            end.record()
            cost.times.append((start, end))
            return result
        began = time.perf_counter()
        result = call()
        cost.times.append(1e3 * (time.perf_counter() - began))
        return result

    def report(self, seconds: float) -> str:
        """What attention cost in a program that took some seconds, and what would be faster, the most costly first."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        costs = sorted(((cost.milliseconds, kind, cost) for kind, cost in self.of.items()), key=lambda each: -each[0])
        total = sum(each[0] for each in costs) / 1e3
        lines = [f"flash_attn.why: attention took {total:.3f} s of {seconds:.1f} s ({total / max(seconds, 1e-9):.0%})"]
        lines += [f"{'ms':>10}  {'calls':>7}  call, and what served it"]
        for spent, kind, cost in costs:
            lines.append(f"{spent:10.1f}  {cost.calls:7d}  {kind.what}: {kind.by}; {kind.why}")
        if (flex := flex_report()).passed_on:
            lines.append(str(flex))
        lines += ["", "What would be faster:"]
        lines += [f"- {text}" for text in (*_first(total, seconds), *_advice(costs))]
        return "\n".join(lines)


def _first(total: float, seconds: float) -> list[str]:
    problems = list(backend_info()["problems"])
    if not torch.cuda.is_available():
        problems.append("torch sees no GPU, so all of this ran on the CPU: python -m flash_attn.doctor says why")
    if not total:
        problems.append("no call of attention came to flash_attn or to SDPA: the program has attention of its own")
    elif total < _SMALL * seconds:
        problems.append("attention is not what takes the time: look at the rest of the program first")
    return problems


def _advice(costs: list[tuple[float, Kind, Cost]]) -> list[str]:
    texts = []
    for spent, kind, cost in costs[: 2 * _COMPARED]:
        if kind.by == PYTORCH:
            texts.append(f"{kind.what} ({spent:.1f} ms): {kind.why}. docs/slow.md has what is served")
        elif cost.example is not None and cost.example.device.type != "cpu" and len(texts) < _COMPARED:
            texts.append(f"{kind.what} ({spent:.1f} ms): {_beside_sdpa(cost.example)}")
    return texts or ["nothing that this command knows of"]


def _beside_sdpa(example: Example) -> str:
    """A comparison with PyTorch's own SDPA, without the call's other options, and what follows from it."""
    device, causal = example.device.type, example.causal
    try:
        q, k, v = (torch.randn(shape, dtype=example.dtype, device=example.device) for shape in example.shapes)
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        gqa = q.shape[2] != k.shape[2]
        ours = milliseconds(lambda: flash_attn_func(q, k, v, causal=causal), device)
        theirs = milliseconds(lambda: override.pytorch(query, key, value, is_causal=causal, enable_gqa=gqa), device)
    except (RuntimeError, NotImplementedError, TypeError) as error:  # out of memory, an option that this torch lacks
        return f"the comparison with SDPA failed: {type(error).__name__}: {str(error).splitlines()[0]}"
    times = f"flash_attn {ours:.3f} ms, PyTorch's SDPA {theirs:.3f} ms"
    if ours > _NEAR * theirs:
        return f"SDPA is faster on such tensors ({times}): leave these calls to PyTorch, and send these figures"
    return f"it is served well ({times})" if theirs > _NEAR * ours else f"both are equally fast ({times})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _about(length: int) -> int:
    """The next power of two: keys of a cache grow with each step."""
    return 1 << max(length - 1, 0).bit_length()


def _kind(backend: Backend, name: str, call: AttentionCall | CacheCall) -> tuple[Kind, Example | None]:
    q, options = call.q, call.options
    used = [each for each in FIELDS[type(options)].names if each != "softmax_scale" and _says(getattr(options, each))]
    shape = f"{_name(q.dtype)} {' x '.join(str(_about(size)) for size in q.shape[:-2])} x {q.shape[-2]} x {q.shape[-1]}"
    listed = "".join(f", {each}" for each in used)
    if isinstance(call, CacheCall):
        return Kind(f"{name} {shape}{listed}", "flash_attn", f"{backend.name.rpartition('.')[2]} serves caches"), None
    served = explain(backend, call)["backward" if name == "backward" else "forward"]
    kind = Kind(
        f"{name} {shape}, keys up to {_about(call.longest_k)}{listed}",
        f"flash_attn, {served['kernel'] or served['source']}",
        str(served["why"]),
    )
    if name != "forward" or call.cu_seqlens_q is not None or call.block_table is not None:
        return kind, None
    return kind, Example((q.shape, call.k.shape, call.v.shape), q.dtype, q.device, options.causal)


def _says(value: object) -> bool:
    """Whether an option is used."""
    return isinstance(value, torch.Tensor) or value not in (None, False, 0.0, (-1, -1))
