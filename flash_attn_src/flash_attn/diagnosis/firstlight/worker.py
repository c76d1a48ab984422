"""Runs one part of firstlight in a process of its own, because a faulty kernel can end the process.

`python -m flash_attn.diagnosis.firstlight.worker GPU PART` prints a JSON object for each line of the part.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flash_attn.diagnosis.selftest import worker as selftest


def _probes(index: int) -> Iterator[Mapping[str, Any]]:
    from flash_attn.diagnosis.firstlight.bench import Bench

    yield from Bench(index).run()


def _shapes(index: int) -> Iterator[Mapping[str, Any]]:
    from flash_attn.core import device
    from flash_attn.diagnosis.firstlight import shapes

    for shape in shapes.shapes(device.of(index).target):
        yield selftest.timed(shape, "cuda")


def _providers(index: int) -> Iterator[Mapping[str, Any]]:
    from flash_attn.core import device
    from flash_attn.diagnosis.firstlight import providers

    gpu = device.of(index)
    if gpu.has_composable_kernel():
        for row in providers.rows(gpu.target):
            yield row._asdict()


PARTS: dict[str, Callable[[int], Iterator[Mapping[str, Any]]]] = {
    "probes": _probes,
    "shapes": _shapes,
    "providers": _providers,
}


def main(argv: Sequence[str]) -> int:
    index, part = int(argv[0]), argv[1]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    import torch

    torch.cuda.set_device(index)
    for line in PARTS[part](index):
        print(json.dumps(line), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
