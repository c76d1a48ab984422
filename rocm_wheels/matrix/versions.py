"""The versions that exist, read from versions.toml and checked: an error names the file, the key and the value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rocm_wheels.paths import ROOT
from rocm_wheels.tables import Table, lenient, parse, version_key

DATA_FILE = ROOT / "rocm_wheels" / "versions.toml"
GENERIC = "-generic"
_IMAGE = re.compile(r"[a-z0-9][a-z0-9./_-]*:[\w.-]+(@sha256:[0-9a-f]{64})?")


@dataclass(frozen=True, kw_only=True)
class Build:
    """Facts of the build machine: the pip of the build environment."""

    pip: str


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A wheel in pure Python with the interface of another FlashAttention: its version and module."""

    name: str
    version: str
    module: str


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """Settings of the workflows' jobs: labels of the runners, limits in minutes, shards of a backend's kernels, GPU
    targets of a pull request's universal wheel.
    """

    runner: str
    universal_runner: str
    container: bool
    gpu_runner: str
    compile_minutes: int
    kernel_minutes: int
    wheel_minutes: int
    assemble_minutes: int
    verify_minutes: int
    gpu_minutes: int
    shards: Mapping[str, int]
    sample_targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A backend: whether its kernels are in this repository (`ready`), memory of a compile job in MiB, and core
    milliseconds per kernel, with those of GPU families that differ.
    """

    name: str
    compiler: str
    job_memory_mib: int
    kernel_milliseconds: int
    family_milliseconds: Mapping[str, int]
    ready: bool

    def seconds(self, family: str) -> float:
        """Core seconds of a kernel for a family of GPU targets."""
        return self.family_milliseconds.get(family, self.kernel_milliseconds) / 1000


@dataclass(frozen=True, kw_only=True)
class Torch:
    """A torch release. rocm: ROCm version -> directory of the wheel index. uncertain: the facts that are not
    confirmed.
    """

    version: str
    python: tuple[str, ...]
    rocm: Mapping[str, str]
    uncertain: str | None = None


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What users are told to install: the ROCm of torch, the oldest torch that the universal wheel supports, the first
    ROCm with a package of torch's kernels for each GPU on PyTorch's index, and the Pythons that AMD's index serves.
    """

    rocm: str
    oldest_torch: str
    device_packages: str
    amd_python: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rocm:
    """A ROCm release, a container image with it if one is known, and the facts about it that are not confirmed.

    amd_index: AMD's package index of torch from this ROCm on.
    """

    version: str
    image: str | None
    amd_index: str | None
    uncertain: str | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A gfx target. backends: backend -> the oldest ROCm under which it has kernels for the target. windows: whether
    AMD's torch for Windows has kernels for it. pytorch: the first ROCm whose torch on PyTorch's index has kernels for
    it. integrated: whether the GPU is a part of a processor.
    """

    name: str
    family: str
    products: tuple[str, ...]
    backends: Mapping[str, str]
    universal: str | None
    default: bool
    windows: bool = False
    pytorch: str | None = None
    integrated: bool = False

    @property
    def is_generic(self) -> bool:
        """Whether it is an LLVM target that stands for a family of GPUs, such as gfx11-generic."""
        return self.name.endswith(GENERIC)

    def serves(self, backend: str, rocm: str) -> bool:
        """Whether `backend` has kernels for this target under that ROCm."""
        since = self.backends.get(backend)
        return since is not None and version_key(rocm) >= version_key(since)


@dataclass(frozen=True, kw_only=True)
class Versions:
    """All of versions.toml, with ascending versions in every field.

    flash_attn_names: version of flash-attn -> the release that has its functions.
    """

    flash_attn_names: Mapping[str, str]
    flash_attn_unreleased: tuple[str, ...]
    python: tuple[str, ...]
    interfaces: Mapping[str, Interface]
    build: Build
    jobs: Jobs
    compilers: Mapping[str, str]
    backends: Mapping[str, Backend]
    rocm: Mapping[str, Rocm]
    torch: Mapping[str, Torch]
    targets: Mapping[str, Target]
    advice: Advice

    @property
    def flash_attn(self) -> tuple[str, ...]:
        """The releases of flash-attn, without their other names."""
        return tuple(name for name, release in self.flash_attn_names.items() if name == release)

    def uncertain(self, torch: str, rocm: str) -> tuple[str, ...]:
        """A line for each of the two releases with facts that are not confirmed: "ROCm 10.1: which torch ..."."""
        both = (f"torch {torch}", self.torch[torch].uncertain), (f"ROCm {rocm}", self.rocm[rocm].uncertain)
        return tuple(f"{name}: {why}" for name, why in both if why)


def load(path: Path = DATA_FILE) -> Versions:
    """Reads the data file. Raises DataError if its content is wrong."""
    return loads(path.read_text(encoding="utf-8"), name=path.name)


@cache
def loads(text: str, *, name: str = "versions.toml") -> Versions:
    """Parses the text of a data file, once. name: the name of the file in errors."""
    root = Table(name, "", parse(text, name))
    flash_attn_names = _flash_attn(root)
    python = root.versions("python")
    build = root.table("build")
    compilers = root.table("compilers")
    versions = Versions(
        flash_attn_names=flash_attn_names,
        flash_attn_unreleased=root.versions("flash_attn_unreleased"),
        python=python,
        interfaces={entry.last: _interface(entry) for entry in root.tables("interfaces")},
        build=Build(pip=build.version("pip")),
        compilers=(pins := {compiler: compilers.version(compiler) for compiler in compilers.names()}),
        backends=(backends := {entry.last: _backend(entry, pins) for entry in root.tables("backends")}),
        rocm=(rocm := {entry.last: _rocm(entry) for entry in root.tables("rocm", versions=True)}),
        torch={entry.last: _torch(entry, python, rocm) for entry in root.tables("torch", versions=True)},
        targets=(targets := {entry.last: _target(entry, backends, rocm) for entry in root.tables("targets")}),
        jobs=_jobs(root.table("jobs"), backends, targets),
        advice=_advice(root.table("advice"), python, rocm),
    )
    for table in (build, compilers, root):
        table.finish()
    return versions


def _flash_attn(root: Table) -> dict[str, str]:
    """Every name of a version, ascending -> its release, which is also a name of itself."""
    table = root.table("flash_attn")
    if not table.data:
        raise root.error("flash_attn", {}, "is empty")
    names = sorted((table.check_version(name, name) for name in table.names()), key=version_key)
    releases = [name for name in names if table.data[name] == name]
    aliases = {name: table.choice(name, releases) for name in names}
    table.finish()
    return aliases


def _interface(table: Table) -> Interface:
    interface = Interface(name=table.last, version=table.version("version"), module=table.text("module"))
    table.finish()
    return interface


def _jobs(table: Table, backends: Mapping[str, Backend], targets: Iterable[str]) -> Jobs:
    parts = table.table("shards")
    jobs = Jobs(
        runner=table.text("runner"),
        universal_runner=table.text("universal_runner"),
        container=table.get("container", bool),
        gpu_runner=table.text("gpu_runner"),
        compile_minutes=_positive(table, "compile_minutes"),
        kernel_minutes=_positive(table, "kernel_minutes"),
        wheel_minutes=_positive(table, "wheel_minutes"),
        assemble_minutes=_positive(table, "assemble_minutes"),
        verify_minutes=_positive(table, "verify_minutes"),
        gpu_minutes=_positive(table, "gpu_minutes"),
        shards={name: _positive(parts, name) for name in backends},
        sample_targets=table.choices("sample_targets", targets),
    )
    parts.finish()
    table.finish()
    if jobs.compile_minutes >= jobs.kernel_minutes:
        raise table.error(
            "compile_minutes", jobs.compile_minutes, f"is not below kernel_minutes, {jobs.kernel_minutes}"
        )
    return jobs


def _positive(table: Table, name: str) -> int:
    value = table.get(name, int)
    if value < 1:
        raise table.error(name, value, "is not above 0")
    return value


def _milliseconds(table: Table) -> dict[str, int]:
    durations = {name: _positive(table, name) for name in table.names()}
    table.finish()
    return durations


def _backend(table: Table, compilers: Mapping[str, str]) -> Backend:
    backend = Backend(
        name=table.last,
        compiler=table.choice("compiler", compilers),
        job_memory_mib=_positive(table, "job_memory_mib"),
        kernel_milliseconds=_positive(table, "kernel_milliseconds"),
        family_milliseconds=_milliseconds(table.table("family_milliseconds")),
        ready=table.get("ready", bool),
    )
    table.finish()
    return backend


def _advice(table: Table, python: tuple[str, ...], rocm: Mapping[str, Rocm]) -> Advice:
    advice = Advice(
        rocm=table.choice("rocm", rocm),
        oldest_torch=table.version("oldest_torch"),
        device_packages=table.choice("device_packages", rocm),
        amd_python=table.choices("amd_python", python),
    )
    table.finish()
    return advice


def _rocm(table: Table) -> Rocm:
    rocm = Rocm(
        version=table.last,
        image=table.optional("image", table.text),
        amd_index=table.optional("amd_index", table.text),
        uncertain=table.optional("uncertain", table.text),
    )
    table.finish()
    if rocm.image is not None and not _IMAGE.fullmatch(rocm.image):
        raise table.error("image", rocm.image, "is neither repository:tag nor repository:tag@sha256:digest")
    return rocm


def _torch(table: Table, python: tuple[str, ...], rocm: Mapping[str, Rocm]) -> Torch:
    index = table.table("rocm")
    torch = Torch(
        version=table.last,
        python=table.choices("python", python),
        rocm={label: index.text(index.check(label, label, rocm)) for label in sorted(index.names(), key=lenient)},
        uncertain=table.optional("uncertain", table.text),
    )
    table.finish()
    return torch


def _target(table: Table, backends: Mapping[str, Backend], rocm: Mapping[str, Rocm]) -> Target:
    since = table.table("backends")
    target = Target(
        name=table.last,
        family=table.text("family"),
        products=table.texts("products") if "products" in table.data else (),
        backends={name: since.choice(since.check(name, name, backends), rocm) for name in since.names()},
        universal=table.optional("universal", table.text),
        default=table.get("default", bool),
        windows="windows" in table.data and table.get("windows", bool),
        pytorch=table.optional("pytorch", lambda name: table.choice(name, rocm)),
        integrated="integrated" in table.data and table.get("integrated", bool),
    )
    table.finish()
    return target
