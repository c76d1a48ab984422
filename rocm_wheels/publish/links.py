"""Wheels that can be installed: their URLs, their versions, their test reports."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names, versions
from rocm_wheels.matrix.platforms import platform_of
from rocm_wheels.matrix.targets import gpus_of
from rocm_wheels.tables import version_key
from rocm_wheels.wheel import contents
from rocm_wheels.wheel.verdict import IMPORT, PASSED, WINDOWS, Verdict

UNLABELLED = "unlabelled/"  # the directory of the index of universal wheels without label


@dataclass(frozen=True, kw_only=True)
class Link:
    """An entry of an index. torch: minor version. release: tag, "" for a local file.

    metadata_sha256: "" if there is no METADATA next to the wheel. listed: False for a withdrawn wheel and a backport,
    which no page of the index has; `yanked` has the reason.
    """

    name: str
    url: str
    sha256: str
    metadata_sha256: str
    requires_python: str
    yanked: str | None
    release: str
    torch: str
    rocm: str
    backend: str
    listed: bool = True

    @property
    def version(self) -> str:
        """The version with the local label: "2.8.3+rocm62torch2.5"."""
        return self.name.split("-")[1]

    @property
    def build(self) -> int:
        """The build number in the name, 0 if it has none."""
        return names.build_number(self.name)

    @property
    def directory(self) -> str:
        """The directory of its index, one for each ROCm and torch: "rocm6.2/torch2.5/"; "" for the universal wheel."""
        return f"rocm{self.rocm}/torch{self.torch}/" if self.torch else ""


class InterfaceWheel(Link):
    """A wheel of an interface, such as flash-attn-3. The test reports of the wheels with its label cover it."""


class UnlabelledWheel(Link):
    """A universal wheel under its version without the label, for programs that compare versions."""

    @property
    def directory(self) -> str:
        """The directory of a separate index: next to `2.8.3+rocm`, no installer would choose this wheel."""
        return UNLABELLED


@dataclass(frozen=True, kw_only=True)
class Wheel(Link):
    """A wheel of flash_attn with its test report. size: bytes."""

    size: int
    flash_attn: str
    python: str
    targets: tuple[str, ...]
    verdict: Verdict

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs on which it passed its tests, as "name (target)"; empty if it ran on none."""
        return self.verdict.passed_on

    @property
    def ran_on(self) -> str:
        """Where its tests ran: GPUs, "CPU", "CPU of Windows (pip, uv)" for the installers of the job `windows`, or
        "nothing" for a wheel that was only installed.
        """
        if self.windows_runs and not self.gpus:
            return f"CPU of Windows ({', '.join(self.windows_runs)})"
        return ", ".join(self.gpus) or ("CPU" if self.verdict.stages[IMPORT].status == PASSED else "nothing")

    @property
    def windows_runs(self) -> Mapping[str, str]:
        """Installer -> what passed on Windows with it, for users; empty if it did not run there."""
        seen = self.verdict.stages.get(WINDOWS)
        passed = seen.details if seen is not None and seen.status == PASSED else {}
        return {name: str(passed[name]) for name in sorted(passed)}

    @property
    def platform(self) -> str:
        """The system that it is for: "linux" or "windows"."""
        return platform_of(self.name).name

    @property
    def on_amd_gpu(self) -> bool:
        return any("(gfx" in gpu for gpu in self.gpus)

    @property
    def worst_error(self) -> float | None:
        """The largest error against the fp32 reference that its tests measured, over all dtypes."""
        errors = [error for stage in self.verdict.stages.values() for error in stage.worst_errors.values()]
        return max(errors, default=None)

    @property
    def beside_pypis_torch(self) -> bool:
        """Whether it was tested with PyPI's torch, because the index of ROCm's torch did not answer."""
        return self.verdict.torch_source.startswith("PyPI ")

    @property
    def benchmarks(self) -> Mapping[str, Any] | None:
        """The results of benchmarks/trend.py, None if it was not measured."""
        return self.verdict.benchmarks

    @property
    def seconds(self) -> float:
        """Seconds to install and test it."""
        return float(sum(stage.seconds for stage in self.verdict.stages.values()))

    def summary(self) -> dict[str, Any]:
        """The facts that programs need to choose a wheel, JSON-ready."""
        return {
            "name": self.name,
            "version": self.version,
            "url": self.url,
            "sha256": self.sha256,
            "size": self.size,
            "index": f"{self.directory}simple/",
            "flash_attn": self.flash_attn,
            "python": self.python,
            "platform": self.platform,
            "torch": self.torch,
            "rocm": self.rocm,
            "backend": self.backend,
            "targets": list(self.targets),
            "requires_python": self.requires_python,
            "release": self.release,
            "commit": self.verdict.commit,
            "yanked": self.yanked,
            "withdrawn": not self.listed,
            "verdict": {
                "ran_on": self.ran_on,
                "gpu": self.verdict.gpu.status,
                "worst_error": self.worst_error,
                "seconds": round(self.seconds, 1),
                "torch": self.verdict.torch_source,
            },
        }

    def __lt__(self, other: Wheel) -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[object, ...]:
        """Sort key: newest first, a release before its post releases, the universal wheel before the others, then the
        default backend, then Python ascending.
        """
        release, _, post = self.flash_attn.partition(".post")
        versions = (release, self.rocm, self.torch)
        flash_attn, *others = [[-part for part in version_key(version)] if version else [] for version in versions]
        return flash_attn, int(post or 0), *others, self.backend, version_key(self.python), self.name


def wheel_link(
    name: str,
    sha256: str,
    size: int,
    metadata: bytes,
    verdict: Verdict,
    *,
    url: str,
    release: str,
    yanked: str | None = None,
) -> Wheel:
    """The link of a wheel of flash_attn. size: bytes. metadata: its METADATA.

    Raises DataError if the test report is about other bytes, or if the metadata names another wheel.
    """
    parsed = names.parse(name)
    headers = contents.headers(name, metadata)
    if verdict.sha256 != sha256:
        raise DataError(f"the verdict beside {name} is about another file of that name", remedy="Build it again.")
    return Wheel(
        name=name,
        url=url,
        sha256=sha256,
        size=size,
        metadata_sha256=_sha256(metadata),
        requires_python=headers["Requires-Python"] or "",
        yanked=yanked,
        release=release,
        flash_attn=parsed.flash_attn,
        python=parsed.python,
        torch=parsed.torch_minor,
        rocm=parsed.rocm,
        backend=parsed.backend,
        targets=gpus_of(versions.load(), verdict.targets),
        verdict=verdict,
    )


def interface_link(
    name: str, sha256: str, metadata: bytes, *, url: str, release: str, yanked: str | None = None
) -> InterfaceWheel:
    """The link of the wheel of an interface. Raises DataError if the metadata names another wheel."""
    _, rocm, torch, backend = names.parse_interface(name)
    return InterfaceWheel(
        name=name,
        url=url,
        sha256=sha256,
        metadata_sha256=_sha256(metadata),
        requires_python=contents.headers(name, metadata)["Requires-Python"] or "",
        yanked=yanked,
        release=release,
        torch=torch,
        rocm=rocm,
        backend=backend,
    )


def bare_link(name: str, sha256: str, metadata: bytes, *, url: str, release: str, yanked: str) -> Link:
    """The link of a wheel without a test report of success. metadata: b"" if it is unknown."""
    rocm, torch, backend = names.parse_label(name.split("-")[1].partition("+")[2])
    return Link(
        name=name,
        url=url,
        sha256=sha256,
        metadata_sha256=_sha256(metadata) if metadata else "",
        requires_python="",
        yanked=yanked,
        release=release,
        torch=torch,
        rocm=rocm,
        backend=backend,
    )


def unlabelled_link(wheel: Wheel, name: str, url: str, sha256: str, metadata: bytes) -> UnlabelledWheel:
    """The link of the universal wheel `wheel` without its label. Raises DataError if the metadata names another
    wheel.
    """
    contents.headers(name, metadata)
    return UnlabelledWheel(
        name=name,
        url=url,
        sha256=sha256,
        metadata_sha256=_sha256(metadata),
        requires_python=wheel.requires_python,
        yanked=wheel.yanked,
        release=wheel.release,
        torch="",
        rocm="",
        backend=wheel.backend,
        listed=wheel.listed,
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
