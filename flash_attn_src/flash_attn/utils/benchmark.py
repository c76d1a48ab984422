"""How long a function takes, how much memory, and what it runs, as benchmark scripts of flash-attn ask.

fn(*inputs, **kwinputs) gives a tensor, or a tuple that begins with one, whose gradient is asked for. repeats: calls
whose mean is taken. amp: under autocast to amp_dtype. grad: of the result, default random. verbose: prints, with desc.
Times are (timer, measurement) of torch.utils.benchmark, which waits for the GPU; seconds in measurement.mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import benchmark

Times = tuple[benchmark.Timer, benchmark.Measurement]


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _autocast(amp: bool, amp_dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device_type="cuda", dtype=amp_dtype, enabled=amp)


def _forget(inputs: tuple[Any, ...]) -> None:
    """No gradient is there to add to."""
    for each in inputs:
        if isinstance(each, torch.Tensor):
            each.grad = None


def _gradient(grad: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return torch.randn_like(y)
    if grad.shape != y.shape:
        raise ValueError(f"grad: got shape {tuple(grad.shape)}, wanted {tuple(y.shape)}")
    return grad


def _measured(step: Callable[[], Any], repeats: int, title: str, verbose: bool) -> Times:
    if verbose:
        print(title)
    timer = benchmark.Timer(stmt="step()", globals={"step": step}, num_threads=torch.get_num_threads())
    measurement = timer.timeit(repeats)
    if verbose:
        print(measurement)
    return timer, measurement


def benchmark_forward(
    fn: Callable[..., Any], *inputs: Any, repeats: int = 10, desc: str = "", verbose: bool = True, amp: bool = False,
    amp_dtype: torch.dtype = torch.float16, **kwinputs: Any,
) -> Times:  # fmt: skip
    """Of a call."""

    def step() -> None:
        with _autocast(amp, amp_dtype):
            fn(*inputs, **kwinputs)

    return _measured(step, repeats, f"{desc} - Forward pass", verbose)


def benchmark_backward(
    fn: Callable[..., Any], *inputs: Any, grad: torch.Tensor | None = None, repeats: int = 10, desc: str = "",
    verbose: bool = True, amp: bool = False, amp_dtype: torch.dtype = torch.float16, **kwinputs: Any,
) -> Times:  # fmt: skip
    """Of the backward of one call."""
    with _autocast(amp, amp_dtype):
        y = _first(fn(*inputs, **kwinputs))
    gradient = _gradient(grad, y)

    def step() -> None:
        _forget(inputs)
        y.backward(gradient, retain_graph=True)

    return _measured(step, repeats, f"{desc} - Backward pass", verbose)


def benchmark_combined(
    fn: Callable[..., Any], *inputs: Any, grad: torch.Tensor | None = None, repeats: int = 10, desc: str = "",
    verbose: bool = True, amp: bool = False, amp_dtype: torch.dtype = torch.float16, **kwinputs: Any,
) -> Times:  # fmt: skip
    """Of a call and its backward."""
    with _autocast(amp, amp_dtype):
        gradient = _gradient(grad, _first(fn(*inputs, **kwinputs)))

    def step() -> None:
        _forget(inputs)
        with _autocast(amp, amp_dtype):
            y = _first(fn(*inputs, **kwinputs))
        y.backward(gradient)

    return _measured(step, repeats, f"{desc} - Forward + Backward pass", verbose)


def benchmark_fwd_bwd(
    fn: Callable[..., Any], *inputs: Any, grad: torch.Tensor | None = None, repeats: int = 10, desc: str = "",
    verbose: bool = True, amp: bool = False, amp_dtype: torch.dtype = torch.float16, **kwinputs: Any,
) -> tuple[Times, Times]:  # fmt: skip
    """benchmark_forward and benchmark_backward."""
    options: dict[str, Any] = {"repeats": repeats, "desc": desc, "verbose": verbose, "amp": amp, "amp_dtype": amp_dtype}
    forward = benchmark_forward(fn, *inputs, **options, **kwinputs)
    return forward, benchmark_backward(fn, *inputs, grad=grad, **options, **kwinputs)


def benchmark_all(
    fn: Callable[..., Any], *inputs: Any, grad: torch.Tensor | None = None, repeats: int = 10, desc: str = "",
    verbose: bool = True, amp: bool = False, amp_dtype: torch.dtype = torch.float16, **kwinputs: Any,
) -> tuple[Times, Times, Times]:  # fmt: skip
    """benchmark_forward, benchmark_backward and benchmark_combined."""
    options: dict[str, Any] = {
        "grad": grad,
        "repeats": repeats,
        "desc": desc,
        "verbose": verbose,
        "amp": amp,
        "amp_dtype": amp_dtype,
    }
    forward, backward = benchmark_fwd_bwd(fn, *inputs, **options, **kwinputs)
    return forward, backward, benchmark_combined(fn, *inputs, **options, **kwinputs)


def pytorch_profiler(
    fn: Callable[..., Any], *inputs: Any, trace_filename: str | None = None, backward: bool = False, amp: bool = False,
    amp_dtype: torch.dtype = torch.float16, cpu: bool = False, verbose: bool = True, **kwinputs: Any,
) -> None:  # fmt: skip
    """What a call, with backward its backward too, runs on the GPU, with cpu on the CPU too, after 30 warm ones: as a
    table that is printed, and as a trace for Chrome in the file trace_filename."""

    def step() -> None:
        _forget(inputs)
        with _autocast(amp, amp_dtype):
            y = _first(fn(*inputs, **kwinputs))
        if backward:
            y.backward(torch.ones_like(y))

    for _ in range(30):
        step()
    kinds = [torch.profiler.ProfilerActivity.CPU] * cpu + [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, record_shapes=True, with_stack=True) as profile:
        step()
    if verbose:
        print(profile.key_averages().table(row_limit=50))
    if trace_filename is not None:
        profile.export_chrome_trace(trace_filename)


def benchmark_memory(
    fn: Callable[..., Any], *inputs: Any, desc: str = "", verbose: bool = True, **kwinputs: Any
) -> float:
    """The most memory that torch had allocated on the GPU during a call, in units of 1000 MiB."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    fn(*inputs, **kwinputs)
    torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() / (1000 << 20)
    if verbose:
        print(f"{desc} max memory: {memory}GB")
    torch.cuda.empty_cache()
    return memory
