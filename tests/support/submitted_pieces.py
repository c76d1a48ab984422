"""What HIP on Windows submits of long calls, by the queue of fake_driver.c: submitted_pieces.py MODULES LIBRARY

Prints one line of JSON: a way to launch three forwards of 65536 tokens and 32 heads on a Radeon 780M -> submissions,
each with the programs of its launches. Then the microseconds of one submission by the launcher.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence

import torch
from fake_driver import FakeDriver

NUMBERS = ("group", "seqlen_q", "seqlen_k", "head_dim", "window_left", "window_right", "chunk")
SHAPE = (1, 65536, 65536, 128 // 8, 1 << 29, 0, 8)
GRID = (1024 * 32, 1, 1)
_TIMED = 20_000


def main(modules: str, library: str) -> None:
    sys.path.insert(0, modules)
    import flash_attn

    sys.modules["flash_attn._launcher"] = flash_attn._launcher = importlib.import_module("_launcher")
    from flash_attn.kernels.variants import Variant
    from flash_attn.runtime import protocol, stored, watchdog
    from flash_attn.runtime.arguments import Arguments

    stored._current_stream = lambda _index: 0  # torch has no GPU here
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
            self._kernel.launch(0, 0, *grid, *numbers)

    class Gpu:
        target, compute_units, submits = "gfx1103", 6, True

        def submit(self) -> bool:
            return stored.submit(self.target, 0) if self.submits else True

    found = {}
    for way in ("not submitted", "submitted"):
        gpu = Gpu()
        gpu.submits = way == "submitted"
        kernel = watchdog.watched(Kernel(), Variant("fwd", "bf16", 128, "plain"), gpu)  # type: ignore[arg-type]
        fake.reset()
        for _ in range(3):  # layers of a model
            kernel.launch(GRID, (), SHAPE)
        found[way] = fake.take_submissions()
    started = time.perf_counter()
    for _ in range(_TIMED):
        stored.submit("gfx1103", 0)
    print(json.dumps(found | {"microseconds": 1e6 * (time.perf_counter() - started) / _TIMED}))


if __name__ == "__main__":
    main(*sys.argv[1:])
