"""Times the probes on a GPU, with the wheel's own launcher."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from flash_attn.core import device, protocol
from flash_attn.diagnosis.firstlight import probes
from flash_attn.diagnosis.firstlight.probes import LOADED, Probe
from flash_attn.kernels.variants import Variant

_ROUNDS, _LAUNCHES, _LOAD_SECONDS = 5, 1000, 3.0
_LEAST_TABLE = 1 << 26


class Bench:
    """The probes of the GPU with torch's index."""

    def __init__(self, index: int) -> None:
        self._gpu = device.of(index)
        self._on = torch.device("cuda", index)
        self._kernels = {kind: self._gpu.kernel(Variant("probe", "fp16", 64, kind)) for kind in probes.BLOCK}
        self._tables: dict[int, torch.Tensor] = {}
        self._x = torch.rand(1024, generator=torch.Generator().manual_seed(0)).to(self._on, torch.float16)
        self._out = torch.empty(16 * self._gpu.compute_units * 32, device=self._on)
        free = torch.cuda.mem_get_info(self._on)[0]
        self._largest = probes.MEMORY
        while self._largest > max(free // 4, _LEAST_TABLE):
            self._largest //= 2

    def run(self) -> list[dict[str, Any]]:
        """The lines of `probes.run`, and what a launch costs."""
        lines = probes.run(self._nanoseconds, self._gpu.compute_units, self._largest)
        host, gpu = self._launches()
        return [
            *lines,
            {"probe": LOADED, "tflops": self._under_load()},
            {"probe": "launch, host", "ns": host},
            {"probe": "launch, GPU", "ns": gpu},
        ]

    def _under_load(self) -> float | None:
        """The matrix rate after seconds of products, when power limits the frequency."""
        (probe,) = (probe for probe in probes.PROBES if probe.loop == "products")
        until = time.monotonic() + _LOAD_SECONDS
        while time.monotonic() < until:
            self._timed(probe, probe.turns[1])
        return probes.matrix_rate(probe, self._nanoseconds, self._gpu.compute_units)

    def _table(self, probe: Probe) -> torch.Tensor:
        size = min(probe.table, self._largest) // 4
        if size not in self._tables:
            table = torch.arange(size, dtype=torch.int32, device=self._on)
            self._tables[size] = table.add_(probe.stride).remainder_(size)
        return self._tables[size]

    def _launch(self, probe: Probe, turns: int) -> None:
        values: dict[str, Any] = {"x": self._x, "table": self._table(probe), "out": self._out}
        grid = (probe.per_unit * self._gpu.compute_units or 1, 1, 1)
        protocol.launch(self._kernels[probe.kind], grid, values | probe.numbers(turns))

    def _nanoseconds(self, probe: Probe, turns: int) -> float:
        """The median time of a launch."""
        self._launch(probe, turns)  # loads the kernel and fills the caches
        return statistics.median(self._timed(probe, turns) for _ in range(_ROUNDS))

    def _timed(self, probe: Probe, turns: int) -> float:
        if probe.fresh:
            self._tables[self._largest // 4].sum()  # reads what no cache holds
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._launch(probe, turns)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e6

    def _launches(self) -> tuple[float, float]:
        """Nanoseconds of a launch that does nothing: of the host, and of the GPU among others."""
        probe = probes.PROBES[0]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._on)
        begun = time.perf_counter_ns()
        start.record()
        for _ in range(_LAUNCHES):
            self._launch(probe, 0)
        host = (time.perf_counter_ns() - begun) / _LAUNCHES
        end.record()
        end.synchronize()
        return round(host, 1), round(start.elapsed_time(end) * 1e6 / _LAUNCHES, 1)
