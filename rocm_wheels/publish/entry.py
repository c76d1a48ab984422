"""Wheels that can be installed from somewhere: where they are, what they are for, what they have passed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocm_wheels.tables import key
from rocm_wheels.wheel.verdict import GPU, PASSED


@dataclass(frozen=True, kw_only=True)
class Link:
    """What an index says of a file, and which index: that of its ROCm and its torch, a minor version."""

    name: str
    url: str
    sha256: str
    metadata_sha256: str
    requires_python: str
    yanked: str | None
    torch: str
    rocm: str
    backend: str

    @property
    def version(self) -> str:
        """With the local label: "2.8.3+rocm62torch2.5triton"."""
        return self.name.split("-")[1]

    @property
    def directory(self) -> str:
        """Of its index: "rocm6.2/torch2.5"."""
        return f"rocm{self.rocm}/torch{self.torch}"


class Interface(Link):
    """A wheel of flash-attn-3, which accompanies the wheels of its label and has no verdict of its own."""


@dataclass(frozen=True, kw_only=True)
class Wheel(Link):
    """One wheel of flash_attn with its verdict. Size in bytes."""

    size: int
    release: str
    flash_attn: str
    python: str
    targets: tuple[str, ...]
    verdict: Mapping[str, Any]

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that it passed its tests on, as "name (target)"; empty if it ran on none."""
        stage = self.verdict["stages"].get(GPU, {})
        if stage.get("status") != PASSED:
            return ()
        found = stage.get("details", {}).get("devices", [])
        return tuple(dict.fromkeys(f"{device['name']} ({device['target']})" for device in found))

    @property
    def ran_on(self) -> str:
        return ", ".join(self.gpus) or "CPU"

    @property
    def on_amd_gpu(self) -> bool:
        return any("(gfx" in gpu for gpu in self.gpus)

    @property
    def gpu_status(self) -> str:
        """ "passed", or "not run: <why>"."""
        return str(self.verdict["stages"].get(GPU, {}).get("status", "not run: not recorded"))

    @property
    def worst_error(self) -> float | None:
        """The largest error against the fp32 reference that its tests measured, over all dtypes."""
        stages = self.verdict["stages"].values()
        errors = [error for stage in stages for error in stage.get("details", {}).get("worst error", {}).values()]
        return max(errors, default=None)

    @property
    def beside_pypis_torch(self) -> bool:
        """Whether it was tested with PyPI's torch, since the index of torch for ROCm did not answer."""
        return str(self.verdict["torch_source"]).startswith("PyPI ")

    @property
    def benchmarks(self) -> Mapping[str, Any] | None:
        """What benchmarks/trend.py found for it, None if it was not measured."""
        return self.verdict.get("benchmarks")

    @property
    def seconds(self) -> float:
        """How long installing and testing it took."""
        return float(sum(stage.get("seconds", 0) for stage in self.verdict["stages"].values()))

    def summary(self) -> dict[str, Any]:
        """What programs need to choose a wheel, JSON-ready."""
        return {
            "name": self.name,
            "version": self.version,
            "url": self.url,
            "sha256": self.sha256,
            "size": self.size,
            "index": f"{self.directory}/simple/",
            "flash_attn": self.flash_attn,
            "python": self.python,
            "torch": self.torch,
            "rocm": self.rocm,
            "backend": self.backend,
            "targets": list(self.targets),
            "requires_python": self.requires_python,
            "release": self.release,
            "yanked": self.yanked,
            "verdict": {
                "ran_on": self.ran_on,
                "gpu": self.gpu_status,
                "worst_error": self.worst_error,
                "seconds": round(self.seconds, 1),
                "torch": self.verdict["torch_source"],
            },
        }

    def __lt__(self, other: Wheel) -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[object, ...]:
        """Newest first, then the default backend, then Python ascending."""
        newest = [[-part for part in key(version)] for version in (self.flash_attn, self.rocm, self.torch)]
        return *newest, self.backend, key(self.python), self.name
