"""Build hooks: the version and dependencies of a cell, and the compiled parts of its wheel.

The wheel pipeline describes the cell through FLASH_ATTN_* variables and hands over what it compiled.
With nothing set this is a user's own build: the kernels are compiled here, for the GPUs of this machine.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.version import InvalidVersion, Version

_ROOT = Path(__file__).resolve().parent


def _tools() -> Path:
    """The directory of rocm_wheels: beside this one in the repository, inside it in an sdist."""
    for parent in (_ROOT, _ROOT.parent):
        if (parent / "rocm_wheels" / "versions.toml").is_file():
            return parent / "rocm_wheels"
    raise SystemExit(f"error: no rocm_wheels in {_ROOT} or beside it: build from a whole checkout or sdist")


@functools.cache
def _checkout() -> Path:
    """A directory with rocm_wheels and flash_attn_src in it, as rocm_wheels expects to find them."""
    tools = _tools()
    if tools.parent == _ROOT.parent:
        return tools.parent
    checkout = Path(tempfile.mkdtemp(prefix="flash_attn-sdist-"))
    atexit.register(shutil.rmtree, checkout, ignore_errors=True)
    shutil.copytree(tools, checkout / "rocm_wheels")
    (checkout / "flash_attn_src").symlink_to(_ROOT)
    return checkout


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Errors of rocm_wheels end the build with their message and remedy, without a traceback."""
    parent = str(_checkout())
    if parent not in sys.path:
        sys.path.insert(0, parent)
    from rocm_wheels.errors import RocmWheelsError

    try:
        yield
    except RocmWheelsError as error:
        raise SystemExit(f"error: {error}") from None


def _versions() -> Any:
    """What versions.toml says."""
    with _plain_errors():
        from rocm_wheels.matrix import versions

        return versions.load()


_OF_LINUX = "Operating System :: POSIX :: Linux"


def _platform(name: str) -> Any:
    """The row of rocm_wheels.matrix.platforms. Exits for another name."""
    with _plain_errors():
        from rocm_wheels.matrix.platforms import PLATFORMS

        if name not in PLATFORMS:
            raise SystemExit(f"error: FLASH_ATTN_PLATFORM={name} is none of {', '.join(PLATFORMS)}: set one of them")
        return PLATFORMS[name]


def _flash_attn(named: str | None) -> str:
    """The version that FLASH_ATTN_VERSION names, as build_rocm.sh takes it; unset, the newest release."""
    data = _versions()
    with _plain_errors():
        from rocm_wheels.errors import RocmWheelsError
        from rocm_wheels.matrix.cells import universal

        try:
            return universal(data, named).flash_attn if named else data.flash_attn[-1]
        except RocmWheelsError as error:
            raise SystemExit(f"error: FLASH_ATTN_VERSION: {error}") from None


def _backend(env: Mapping[str, str]) -> str:
    """The backend that upstream's variable asks for; unset, as with TRUE, pip compiles Triton kernels."""
    with _plain_errors():
        from rocm_wheels import environment

        return environment.backend(env) or "triton"


class _Request(NamedTuple):  # hatchling runs this file unregistered in sys.modules, which a dataclass needs
    """The wheel asked for through the environment."""

    version: str
    label: str
    python: str
    platform: str
    abi: str | None
    torch: str | None
    backend: str
    rocm: str | None
    kernels: Path | None
    launcher: Path | None
    planner: Path | None
    compile: bool

    @classmethod
    def from_environment(cls) -> _Request:
        env = {key: value for key, value in os.environ.items() if value}
        kernels, launcher = env.get("FLASH_ATTN_KERNELS"), env.get("FLASH_ATTN_LAUNCHER")
        if (kernels is None) != (launcher is None):
            raise SystemExit("error: FLASH_ATTN_KERNELS and FLASH_ATTN_LAUNCHER go together: set both")
        return cls(
            version=_flash_attn(env.get("FLASH_ATTN_VERSION")),
            label=env.get("FLASH_ATTN_LOCAL_VERSION", ""),
            python=env.get("FLASH_ATTN_PYTHON", f"{sys.version_info.major}.{sys.version_info.minor}"),
            platform=env.get("FLASH_ATTN_PLATFORM", "linux"),
            abi=env.get("FLASH_ATTN_ABI"),
            torch=env.get("FLASH_ATTN_TORCH"),
            backend=env.get("FLASH_ATTN_BACKEND") or _backend(env),
            rocm=env.get("FLASH_ATTN_ROCM"),
            kernels=Path(kernels) if kernels else None,
            launcher=Path(launcher) if launcher else None,
            planner=Path(env["FLASH_ATTN_PLANNER"]) if "FLASH_ATTN_PLANNER" in env else None,
            compile=kernels is None and env.get("FLASH_ATTENTION_SKIP_CUDA_BUILD", "FALSE").upper() != "TRUE",
        )

    @property
    def full_version(self) -> str:
        return f"{self.version}+{self.label}" if self.label else self.version

    @property
    def requires(self) -> list[str]:
        """A wheel for every torch requires none: installers would replace a torch for ROCm by PyPI's, which is for
        CUDA (`uv pip install -U` does where torch is installed, every installer where it is not)."""
        return [f"torch=={self.torch}.*", "einops"] if self.torch else ["einops"]

    @property
    def tag(self) -> str:
        """A cell is for one Python; the universal wheel for it and newer ones; a wheel without launcher for all."""
        if self.launcher is None:
            return "py3-none-any"
        python = "cp" + self.python.replace(".", "")
        return f"{python}-{self.abi or python}-{_platform(self.platform).tag}"


class MetadataHook(MetadataHookInterface):
    """Version and dependencies of the wheel asked for."""

    def update(self, metadata: dict[str, Any]) -> None:
        request = _Request.from_environment()
        try:
            Version(request.full_version)
        except InvalidVersion:
            raise SystemExit(
                f"error: FLASH_ATTN_LOCAL_VERSION={request.label} is no label of a version\n"
                "it takes letters and digits, with dots between them"
            ) from None
        metadata["version"] = request.full_version
        if request.platform == "windows":
            classifiers = metadata["classifiers"]
            classifiers[classifiers.index(_OF_LINUX)] = "Operating System :: Microsoft :: Windows"
        metadata["dependencies"] = request.requires
        metadata["urls"] = {"Upstream": "https://github.com/Dao-AILab/flash-attention"}
        if repository := os.environ.get("FLASH_ATTN_REPOSITORY"):
            metadata["urls"]["Repository"] = repository


class BuildHook(BuildHookInterface[Any]):
    """Puts kernels, launcher and build info into the wheel, rocm_wheels into the sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "sdist":
            tools = _tools()
            for path in sorted((*tools.rglob("*.py"), *tools.rglob("*.toml"))):
                build_data["force_include"][str(path)] = f"rocm_wheels/{path.relative_to(tools).as_posix()}"
            return
        if version == "editable":
            return
        request = _Request.from_environment()
        self._check_metadata(request)
        self._scratch = tempfile.TemporaryDirectory(prefix="flash_attn-")
        scratch = Path(self._scratch.name)
        if request.compile:
            if request.backend != "triton":
                raise SystemExit(
                    f"error: the {request.backend} backend is not compiled by pip: build its wheel with"
                    " ./build_rocm.sh, or unset FLASH_ATTN_BACKEND and FLASH_ATTENTION_TRITON_AMD_ENABLE for the"
                    " Triton kernels"
                )
            request = _compiled(request, scratch)
        stores = sorted(request.kernels.glob("*.zip")) if request.kernels else []
        if request.kernels and not stores:
            raise SystemExit(f"error: FLASH_ATTN_KERNELS={request.kernels} holds no <target>.zip")
        files = {f"flash_attn/_kernels/{store.name}": store for store in stores}
        if request.launcher:
            files[f"flash_attn/{_platform(request.platform).launcher}"] = request.launcher
        if request.planner:
            files["flash_attn/_ck_planner.so"] = request.planner
        with _plain_errors():
            from rocm_wheels.environment import OLDEST_EPOCH, source_date_epoch
            from rocm_wheels.wheel import sbom

            subject = sbom.Subject(
                version=request.full_version,
                license=self.metadata.core.license_expression,
                requires=tuple(request.requires),
                repository=os.environ.get("FLASH_ATTN_REPOSITORY", ""),
                commit=os.environ.get("FLASH_ATTN_COMMIT", ""),
                epoch=source_date_epoch(os.environ) or OLDEST_EPOCH,
            )
            bill = sbom.write(scratch, subject, files)
        build_data["sbom_files"].append(str(bill))
        files["flash_attn/_build_info.json"] = _write_build_info(request, stores, scratch)
        build_data["force_include"].update((str(path), name) for name, path in files.items())
        build_data["pure_python"] = request.launcher is None
        build_data["tag"] = request.tag

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        if scratch := getattr(self, "_scratch", None):
            scratch.cleanup()

    def _check_metadata(self, request: _Request) -> None:
        """An sdist's version and dependencies are fixed (PEP 643), whatever the environment asks for."""
        version, requires = self.metadata.version, self.metadata.core.dependencies
        # The metadata has the label in its canonical form: "my-build" as "my.build".
        if Version(version) != Version(request.full_version) or set(requires) != set(request.requires):
            raise SystemExit(
                f"error: this sdist is {version} with {', '.join(requires)};"
                f" {request.full_version} with {', '.join(request.requires)} was asked for\n"
                "build from a checkout, or unset FLASH_ATTN_{VERSION,LOCAL_VERSION,TORCH}"
            )


def _compiled(request: _Request, scratch: Path) -> _Request:
    """The request with kernels for the GPUs at hand and the launcher, both compiled here."""
    with _plain_errors():
        from rocm_wheels.matrix.machine import survey
        from rocm_wheels.matrix.plan import parallel_jobs
        from rocm_wheels.matrix.requested import from_environment
        from rocm_wheels.matrix.targets import known_targets, without_kernels

        data, machine = _versions(), survey(os.environ)
        asked = from_environment(data, os.environ)
        requested, notes = asked.targets or (), asked.notes
        if asked.of_this_machine:
            left_out = without_kernels(data, machine.gpus)  # often the GPU of a processor, beside a card
            requested = tuple(gpu for gpu in machine.gpus if gpu not in left_out)
            lack = "no AMD GPU is visible on this machine, so it is not known what to compile for"
            if left_out:
                lack = f"there are no kernels for the {', '.join(left_out)} of this machine"
                notes += (lack,) if requested else ()
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        targets = known_targets(data, requested)
        if not targets:
            raise SystemExit(
                f"error: {lack}\n"
                'name the targets: PYTORCH_ROCM_ARCH="gfx942;gfx1100", or build without kernels:'
                " FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE (CPU tensors, and Triton's JIT where it is installed)"
            )
        from rocm_wheels.compile import kernels
        from rocm_wheels.environment import cache_directory
        from rocm_wheels.wheel import launcher

        cache = cache_directory(os.environ)
        jobs = parallel_jobs(data, os.environ, machine)
        stores = kernels.compile_store(targets, cache=cache, jobs=jobs, together=True)
        collected = scratch / "kernels"
        collected.mkdir()
        for target, store in stores.items():
            shutil.copyfile(store, collected / f"{target}.zip")
        return request._replace(kernels=collected, launcher=launcher.build(scratch, cache=cache))


def _write_build_info(request: _Request, stores: list[Path], scratch: Path) -> Path:
    """_build_info.json: what the installed package knows of its own build."""
    compilers = set()
    for store in stores:
        with zipfile.ZipFile(store) as archive:
            compiler = json.loads(archive.read("manifest.json"))["compiler"]
        compilers.add(f"{compiler['name']} {compiler['version']}")
    if len(compilers) > 1:
        raise SystemExit(f"error: the stores come from several compilers: {', '.join(sorted(compilers))}")
    with _plain_errors():
        from rocm_wheels.matrix import advice_facts
    info = {
        "version": request.version,
        "label": request.label,
        "torch": request.torch,
        "rocm": request.rocm,
        "python": "" if request.abi else request.python,
        "backend": request.backend,
        "targets": [store.stem for store in stores],
        "compiler": next(iter(compilers), None),
        "repository": os.environ.get("FLASH_ATTN_REPOSITORY", ""),
        "advice": advice_facts.facts(_versions()),
        "commit": os.environ.get("FLASH_ATTN_COMMIT") or None,
        "planner": hashlib.sha256(request.planner.read_bytes()).hexdigest() if request.planner else "",
    }
    path = scratch / "_build_info.json"
    path.write_text(json.dumps(info, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path
