"""Graphs of SGLang's decoding on a CPU: its own graph runner, over a tape in the place of a CUDA graph.

A replay calls the operators of the tape, in their order, on the tensors of the capture, and writes what they return
into the tensors that they returned then. So it has a graph's properties: it runs nothing of Python, reads the runner's
static buffers, and cannot wait for a value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.runtime_context import get_exec
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZES = [2, 4, 8]  # of captured batches; others are padded


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})
        if func is torch.ops.aten.index.Tensor:  # by numbers it does not wait, by a mask it does
            waits = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if waits:
            raise RuntimeError(f"a graph cannot capture {func}, which waits for a value")
        out = func(*args, **(kwargs or {}))
        self._steps.append((func, args, kwargs or {}, tree_leaves(out)))
        return out

    def replay(self) -> None:
        for func, args, named, captured in self._steps:
            for old, new in zip(captured, tree_leaves(func(*args, **named)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


class TapeBackend(BaseCudaGraphBackend):
    def __init__(self, _runner: Any, replayed: Callable[[], None]) -> None:
        self._tapes: dict[Any, tuple[Tape, Any]] = {}
        self._replayed = replayed

    def capture_session(self, _stream: Any) -> Any:
        return contextlib.nullcontext()

    def capture_one(self, key: Any, forward: Callable[[], Any], **more: Any) -> None:
        for _ in range(2):  # as SGLang warms up
            forward()
            if hook := more.get("post_warmup_hook"):
                hook()
        with Tape() as tape:
            out = forward()
        self._tapes[key] = tape, out

    def can_run(self, _batch: Any, key: Any) -> bool:
        return key in self._tapes

    def replay_session(self) -> Any:
        return contextlib.nullcontext()

    def replay(self, key: Any, _batch: Any, **_more: Any) -> Any:
        tape, out = self._tapes[key]
        tape.replay()
        self._replayed()
        return out

    def cleanup(self) -> None:
        self._tapes.clear()


def capture(model_runner: Any, replayed: Callable[[], None]) -> None:
    """Gives the model runner a graph runner for decoding. replayed: is called for each replay."""
    module = decode_cuda_graph_runner
    module.resolve_decode_backend = lambda runner: TapeBackend(runner, replayed)
    module.graph_capture = lambda **_: contextlib.nullcontext(SimpleNamespace(stream=None))
    module.get_or_create_global_graph_capture_stream = lambda: None
    torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]
    decode = get_exec().graph.cuda_graph_config.decode
    decode.backend, decode.bs = "full", SIZES
    model_runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(model_runner)
    model_runner.decode_cuda_graph_runner = module.DecodeCudaGraphRunner(model_runner)
