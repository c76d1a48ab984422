"""What HIP on Windows submits of long calls, by the queues of fake_driver.c: submitted_pieces.py MODULES LIBRARY

Prints one line of JSON: a case -> submissions, each with its stream and the programs of its launches. All launches are
forwards of 65536 tokens with 32 heads on a Radeon 780M, or parts of one. "size" has the programs of half a second.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from fake_driver import FakeDriver

NUMBERS = ("group", "seqlen_q", "seqlen_k", "head_dim", "window_left", "window_right", "chunk")
SHAPE = (1, 65536, 65536, 128 // 8, 1 << 29, 0, 8)
WHOLE = 1024 * 32
_TIMED = 20_000


def main(modules: str, library: str) -> None:
    sys.path.insert(0, modules)
    import flash_attn

    sys.modules["flash_attn._launcher"] = flash_attn._launcher = importlib.import_module("_launcher")
    from flash_attn.core import protocol, stored, watchdog
    from flash_attn.core.arguments import Arguments
    from flash_attn.core.platform.windows import Windows
    from flash_attn.kernels.variants import Variant

    watchdog.PLATFORM = Windows()
    stream = 1
    stored._current_stream = lambda _index: stream  # torch has no GPU here
    fake = FakeDriver(library)
    letters = "i" * len(SHAPE)

    class Kernel:
        block_m, block_n, num_xcds = 64, 64, 1
        arguments = Arguments("fwd", (), NUMBERS, NUMBERS)

        def __init__(self) -> None:
            self._kernel = stored.launcher("gfx1103").Kernel(letters.encode(), "k", letters, 0, 64, "fwd")

        def launch(
            self, grid: protocol.Grid, _tensors: Sequence[torch.Tensor | None], numbers: Sequence[int | float]
        ) -> None:
            self._kernel.launch(0, stream, *grid, *numbers)

    class Gpu:
        target, compute_units, screen, submits = "gfx1103", 12, None, True

        def queue(self) -> int:
            return stored.queue(self.target, 0)

        def submit(self) -> bool:
            return stored.submit(self.target, 0) if self.submits else True

    def launches(case: Callable[[Callable[[int, float], None]], None], *, submits: bool = True) -> list[list[int]]:
        gpu = Gpu()
        gpu.submits = submits
        kernel = watchdog.watched(Kernel(), Variant("fwd", "bf16", 128, "plain"), gpu)  # type: ignore[arg-type]
        size = result["size"] = kernel.programs_within(SHAPE)  # type: ignore[attr-defined]

        def launch(on: int, seconds: float) -> None:
            nonlocal stream
            stream = on
            kernel.launch((round(seconds / 0.5 * size) or WHOLE, 1, 1), (), SHAPE)

        fake.reset()
        case(launch)
        return fake.take_submissions()

    def layers(launch: Callable[[int, float], None]) -> None:
        for _ in range(3):
            launch(1, 0)

    def beside_pieces(launch: Callable[[int, float], None]) -> None:
        for _ in range(20):
            launch(1, 0.4)
            launch(2, 0)

    def in_turn(launch: Callable[[int, float], None]) -> None:
        for _ in range(60):
            launch(1, 0.04)
            launch(2, 0.47)

    def beside_a_capture(launch: Callable[[int, float], None]) -> None:
        for graph in range(2):
            fake.library.fake_begin_capture(2)
            for _ in range(32):
                launch(2, 0.09)
                launch(1, 0.04)
            assert fake.library.fake_end_capture() == 1, graph

    result: dict[str, object] = {}
    result["whole calls, never submitted"] = launches(layers, submits=False)
    result["whole calls"] = launches(layers)
    result["short beside whole calls"] = launches(beside_pieces)
    result["short calls in turn"] = launches(in_turn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result["two graphs beside short calls"] = launches(beside_a_capture)
    result["warnings"] = [str(each.message) for each in caught]
    stream, started = 1, time.perf_counter()
    for _ in range(_TIMED):
        stored.submit("gfx1103", 0)
    result["microseconds"] = 1e6 * (time.perf_counter() - started) / _TIMED
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
