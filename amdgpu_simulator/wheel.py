"""Runs attention, forward and backward, from a wheel's kernel stores on simulated GPUs, through AMD's HIP.

python -m amdgpu_simulator wheel dist/flash_attn-2.8.3+rocm-*manylinux*.whl --hip 7.2

Each GPU uses the store that it would use on a user's machine. HIP loads the code objects, and the simulator runs HIP's
packets.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flash_attn import flash_attn_func
from flash_attn.attention import backends
from flash_attn.attention.backends import triton
from flash_attn.attention.backends.ck import ComposableKernel
from flash_attn.attention.backends.sources import Sources
from flash_attn.core import device
from flash_attn.core.ck_planner import Launch
from flash_attn.core.store import Store
from flash_attn.kernels.targets import serving_targets
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant

from amdgpu_simulator import assembly_kernels, gpu, through_hip
from amdgpu_simulator.hip import process
from amdgpu_simulator.isa import disassembly, machine
from rocm_wheels.matrix import versions
from rocm_wheels.paths import ROOT
from rocm_wheels.tables import version_key

GPUS = (
    *("gfx90a", "gfx942", "gfx950", "gfx1012", "gfx1030", "gfx1036"),
    *("gfx1100", "gfx1103", "gfx1151", "gfx1200", "gfx1201"),
)
# Tolerance: twice bf16's error, plus an absolute floor for values that underflow.
_TINY = 1e-5


class StoredGpu(gpu.SimulatedGpu):
    """A simulated GPU whose kernels, of all providers, come from a store. launched: names of the kernels that ran."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.target, code=self._code)
        self._store = store

    def has_stored(self, name: str) -> bool:
        return name in self._store.kernels

    def has_composable_kernel(self) -> bool:
        return any(entry["params"].startswith("B") for entry in self._store.kernels.values())

    def run(self, launches: Sequence[Launch], tensors: device.Tensors) -> None:
        for launch in launches:
            self.launched.append(launch.kernel)
            in_step = assembly_kernels.relies_on_step(self.target, launch.kernel)
            loaded = self._loaded(launch.kernel)
            loaded.launch(launch.grid, (launch.argument,), gpu.ranges(tensors), in_step=in_step)

    def _code(self, target: str, variant: Variant, config: Config | None) -> gpu.Found:  # noqa: ARG002
        image, entry = self._store.image(variant.name), self._store.kernels[variant.name]
        return image, entry, disassembly.kernel(image, entry["symbol"], target=target)

    @cache  # noqa: B019 - as long-lived as the process
    def _loaded(self, name: str) -> through_hip.Kernel:
        image, entry = self._store.image(name), self._store.kernels[name]
        code = disassembly.kernel(image, entry["symbol"], target=self.target)
        return through_hip.Kernel(name, image, entry, machine.Program(code))


def check(store: Path, *, all_sources: bool) -> str:
    """Runs attention on the store's kernels. Returns the kernels that ran and the largest error relative to the
    tolerance.

    all_sources: use AMD's and this project's kernels as the wheel chooses, else only this project's. Raises ValueError
    if an error exceeds the tolerance. Runs in a process of `hip.process`.
    """
    pretended = StoredGpu(Store(store))
    backend: Any = Sources(ComposableKernel(triton), triton, forced=None) if all_sources else triton
    torch.manual_seed(0)
    shapes = ((1, 40, 2, 64), (1, 70, 1, 64), (1, 70, 1, 64), (1, 40, 2, 64))
    q, k, v, dout = (torch.randn(shape) for shape in shapes)
    with device.using(pretended), backends.using(backend):
        results = _results(_call, q, k, v, dout, torch.bfloat16)
    exact, rough = (_results(_formula, q, k, v, dout, dtype) for dtype in (torch.float32, torch.bfloat16))
    shares = []
    for name, result, right, near in zip(("out", "dq", "dk", "dv"), results, exact, rough, strict=True):
        allowed = 2 * (near - right).abs().max().item() + _TINY
        shares.append((result - right).abs().max().item() / allowed)
        if not shares[-1] <= 1:
            raise ValueError(f"{name} has {shares[-1]:.2f} times the allowed error: {', '.join(pretended.launched)}")
    return f"{max(shares):.2f} of the allowed error: {', '.join(dict.fromkeys(pretended.launched))}"


def _results(call: Any, q: Any, k: Any, v: Any, dout: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    # The inputs are rounded first, so that only the arithmetic is compared.
    leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout.bfloat16().to(dtype))
    return [x.detach().float() for x in (out, *gradients)]


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor)
    return out


def _formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    queries, keys, heads = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def run(wheel: Path, releases: Sequence[str], gpus: Sequence[str] = GPUS) -> bool:
    """Prints a line for each HIP release, GPU and choice of kernels. Returns whether all passed. Raises
    UnavailableError.

    The wheel has to be built from these sources: Python code, launcher interface and planner must match.
    """
    good = True
    with tempfile.TemporaryDirectory(prefix="wheel-") as directory:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(directory)
        stores = {path.stem: path for path in Path(directory, "flash_attn", "_kernels").glob("*.zip")}
        for release, name in itertools.product(releases, gpus):
            since = versions.load().targets[name].backends["triton"]
            target = next((target for target in serving_targets(name, release) if target in stores), None)
            if target is None or version_key(release) < version_key(since):
                why = f"knows it from {since} on" if target else "finds no kernels for it in the wheel"
                print(f"{name}: HIP {release} {why}", flush=True)
                continue
            has_ck = StoredGpu(Store(stores[target])).has_composable_kernel()
            for kinds in ("triton", "all")[: 1 + has_ck]:
                words = ["-m", "amdgpu_simulator.wheel", str(stores[target]), kinds]
                command, environment = process.command(release, name, words)
                environment["PYTHONPATH"] = f"{directory}:{ROOT}"
                done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
                right = done.returncode == 0
                said = ((done.stdout if right else done.stderr).strip().splitlines() or ["ended in silence"])[-1]
                print(f"{name}: HIP {release}, {target}.zip: {'right' if right else 'WRONG'}, {said}", flush=True)
                good = good and right
    return good


if __name__ == "__main__":
    print(check(Path(sys.argv[1]), all_sources=sys.argv[2] == "all"))
