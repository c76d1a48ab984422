"""The facts that `flash_attn.doctor` judges: of the wheel, of the machine, and of a process that uses both."""

from __future__ import annotations

import contextlib
import filecmp
import functools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from flash_attn.core import build_info, store
from flash_attn.core.platform import PLATFORM
from flash_attn.core.platform.base import LaunchLimit
from flash_attn.diagnosis import advice
from flash_attn.diagnosis.endings import ending
from flash_attn.kernels.targets import serving_targets

KFD, DXG = Path("/dev/kfd"), Path("/dev/dxg")
RENDER_NODES = "/dev/dri"
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_SYSTEM = re.compile(r"(?:platform_system|sys_platform)\s*==\s*['\"](\w+)")  # in the condition of a requirement
TRITONS = ("triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows")  # distributions of one module
# Plug-ins of this project, and the program that each is for.
PLUG_INS = {"vllm-flash-rocm": "vllm", "sglang-flash-rocm": "sglang"}
# What changes how torch, the driver, Triton or this package behave; nothing else of the environment is shown.
_SHOWN = ("FLASH_ATT", "TRITON_", "HIP_", "ROCR_", "HSA_", "CUDA_VISIBLE", "PYTORCH_", "GPU_ARCHS", "MAX_JOBS", "LD_")
_PROBE_SECONDS = 300
_BEGINS_WITH_FIRST = re.compile(r"\s*0+\s*(,|$)")
# Where ROCm's runtime finds librocdxg in WSL, beside the directories of LD_LIBRARY_PATH.
_LIBRARIES = ("/opt/rocm/lib", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/wsl/lib", "/usr/local/lib")


@dataclass(frozen=True, kw_only=True)
class Access:
    """A device file and this user's permissions for it; `mode` as `ls -l` shows it."""

    path: str
    owner: str
    group: str
    mode: str
    allowed: bool


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything the doctor knows. `probe` is what diagnosis/probe.py answered, its lines merged.

    died: how the probe ended where it did not end by itself. lacking: files that the wheel should have. origin: where
    the wheel was installed from, "" for a package index. rocm: version of the ROCm on this machine, "" for none.
    torch_triton: the Triton that the installed torch requires, as pip takes it. has_kfd: whether GPUs are reached
    through /dev/kfd here. windows: whether the system is Windows, outside of WSL. executable: path of the Python.
    plug_ins: versions of this project's plug-ins and of their programs, by distribution.
    mes: `Platform.mes_firmware`.
    leftovers: directories of packages that pip could not remove, because a program had their files open.
    replaced_hip: on Windows, torch's own HIP runtime where the process has loaded another file in its place. rocdxg and
    torch_runtime: in WSL, the library between ROCm and Windows, and torch's own copy of ROCm's runtime; "" for none.
    """

    python: str = ""
    executable: str = ""
    windows: bool = False
    system: str = ""
    build: build_info.BuildInfo = field(default_factory=build_info.BuildInfo)
    location: str = ""
    installed: str | None = None
    origin: str = ""
    lacking: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    kfd: Access | None = None
    dxg: Access | None = None
    has_kfd: bool = True
    replaced_hip: str = ""
    rocdxg: str = ""
    torch_runtime: str = ""
    render: tuple[Access, ...] = ()
    user: str = ""
    container: bool = False
    rocm: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    tritons: Mapping[str, str] = field(default_factory=dict)
    plug_ins: Mapping[str, str] = field(default_factory=dict)
    torch_triton: str = ""
    memory_mib: int = 0
    driver: str = ""
    mes: Mapping[str, int] = field(default_factory=dict)
    limit: LaunchLimit | None = None
    probe: Mapping[str, Any] = field(default_factory=dict)
    died: str = ""
    log: str = ""

    @property
    def known(self) -> Mapping[str, Any]:
        """What is known of versions and GPUs, for `advice`."""
        return known(self.build)

    @property
    def devices(self) -> list[dict[str, Any]]:
        """The GPUs that torch sees, in its order."""
        return self.probe.get("devices") or []

    def serves(self, device: Mapping[str, Any]) -> bool:
        """Whether the wheel has kernels for a GPU."""
        hip = (self.probe.get("torch") or {}).get("hip")
        return not {*serving_targets(device["target"], hip)}.isdisjoint(self.build.targets)

    def place(self) -> int:
        """torch's number of the GPU that counts, which the doctor calls; 0 without a GPU."""
        targets = [device["target"] for device in self.devices]
        return advice.place(self.known, targets, [*map(self.serves, self.devices)]) if targets else 0

    def targets(self) -> list[str]:
        """The targets of the GPUs that count here: the cards, else the GPUs in processors. Without torch, or under
        ZLUDA, a GPU is known by the name that the driver gives it.
        """
        if not self.known:
            return sorted({device["target"] for device in [*filter(self.serves, self.devices)] or self.devices})
        named = [device["target"] for device in self.devices if device["target"].startswith("gfx")]
        names = [
            *(device["name"] for device in self.devices),
            *re.findall(r"[(;] ?([^();]*(?:\(TM\)[^();]*)?)", self.driver),
        ]
        gpus = named or [*filter(None, (advice.target(self.known, name) for name in names))]
        return sorted(advice.counting(self.known, gpus, self.system_name))

    def unserved(self) -> list[str]:
        """The target of the GPU that counts, if the wheel has no kernels for it."""
        device = self.devices[self.place()] if self.devices else None
        return [device["target"]] if device is not None and not self.serves(device) else []

    @property
    def system_name(self) -> str:
        return "windows" if self.windows else "linux"

    def advise(self) -> advice.Advice:
        """What to install on this machine."""
        torch = self.probe.get("torch") or {}
        question = advice.Question(
            gpus=self.targets(),
            system=self.system_name,
            python=advice.minor(self.python),
            torch=torch.get("version") or "",
            hip=torch.get("hip") or "",
            pinned=(self.build.torch_minor, self.build.rocm),
        )
        return advice.advise(self.known, question)

    def hiding(self) -> list[str]:
        """The variables that may hide a GPU: of all GPUs, or the GPU that the wheel is for.

        The first GPU is not hidden by the number 0. ROCR_VISIBLE_DEVICES has no effect on Windows.
        """
        named = [name for name in self.variables if name.endswith("_VISIBLE_DEVICES")]
        effective = [name for name in named if not (self.windows and name.startswith("ROCR_"))]
        if self.devices:
            known = self.known.get("targets", {})
            inside = all(known.get(device["target"], {}).get("integrated") for device in self.devices)
            return effective if inside or (self.build.targets and self.unserved()) else []
        return [name for name in effective if not _BEGINS_WITH_FIRST.match(self.variables[name])]


def survey(log: str = "") -> Facts:
    """The facts of this machine; takes as long as importing torch and one call."""
    package = Path(__file__).resolve().parent.parent
    build = build_info.load()
    answers, died = run_probe()
    return Facts(
        python=f"{platform.python_version()} ({sys.executable})",
        executable=sys.executable,
        windows=PLATFORM.is_windows,
        system=platform.platform(),
        build=build,
        location=str(package),
        installed=installed(),
        origin=origin(),
        lacking=tuple(lacking(build, package)),
        leftovers=tuple(leftovers(package.parent)),
        kfd=access(KFD),
        dxg=access(DXG),
        has_kfd=PLATFORM.has_kfd,
        replaced_hip=replaced_hip(answers.get("info", {}).get("launcher") or ""),
        rocdxg=rocdxg(),
        torch_runtime=torch_runtime(),
        render=tuple(filter(None, map(access, sorted(Path(RENDER_NODES).glob("renderD*"))))),
        user=PLATFORM.user(),
        container=any(path.exists() for path in CONTAINER_MARKS),
        rocm=_first_line(Path(os.environ.get("ROCM_PATH") or "/opt/rocm") / ".info" / "version"),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)},
        tritons=versions(TRITONS),
        plug_ins=versions((*PLUG_INS, *PLUG_INS.values())),
        torch_triton=torch_triton(),
        memory_mib=PLATFORM.available_mib(),
        driver=PLATFORM.gpu_driver(),
        mes=PLATFORM.mes_firmware(),
        limit=PLATFORM.launch_limit(""),
        probe=answers,
        died=died,
        log=log,
    )


# Run in a process of its own, because the package imports nothing of the pipeline.
_FACTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from rocm_wheels.matrix import advice_facts, versions
print(json.dumps(advice_facts.facts(versions.load())))
"""


def known(build: build_info.BuildInfo) -> Mapping[str, Any]:
    """What a wheel knows of versions and GPUs; in a source tree, what versions.toml says, {} if it is not read."""
    return build.advice or _of_the_sources()


@functools.cache
def _of_the_sources() -> Mapping[str, Any]:
    for parent in Path(__file__).resolve().parents[2:5]:
        if (parent / "rocm_wheels" / "versions.toml").is_file():
            done = subprocess.run(
                [sys.executable, "-c", _FACTS, str(parent)], capture_output=True, encoding="utf-8", check=False
            )
            return dict(json.loads(done.stdout)) if done.returncode == 0 else {}
    return {}


def leftovers(directory: Path) -> Iterable[str]:
    """What pip leaves of a package whose files are open: its directory, with ~ in place of the first letter."""
    return (str(path) for path in sorted(directory.glob("~*")) if re.match(r"~(lash_attn|orch)", path.name))


def installed() -> str | None:
    """The directory of the installed package. None if it is not installed, or installed as editable."""
    try:
        distribution = metadata.distribution("flash_attn")
    except metadata.PackageNotFoundError:
        return None
    directory = Path(str(distribution.locate_file("flash_attn")))
    return str(directory.resolve()) if directory.is_dir() else None


def origin() -> str:
    """The file or address that the installer recorded for the wheel, "" if the wheel came from an index."""
    try:
        written = json.loads(metadata.distribution("flash_attn").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    url = str(written.get("url", ""))
    parts = urlsplit(url)
    if not parts.path.endswith(".whl"):
        return ""
    return (
        url2pathname(f"//{parts.netloc}{parts.path}" if parts.netloc else parts.path) if parts.scheme == "file" else url
    )


def beside(package: str, directory: str, pattern: str) -> list[Path]:
    """The files of a pattern in a directory of an installed package, which is not imported."""
    spec = find_spec(package)
    places = (spec.submodule_search_locations if spec else None) or ()
    return sorted(path for place in places for path in (Path(place) / directory).glob(pattern))


def replaced_hip(used: str) -> str:
    """torch's own HIP runtime, if the process uses a file in its place that differs. "" on Linux.

    Windows finds a library by its name among the loaded ones, so amdhip64_7.dll of System32 serves torch if something
    has loaded it before.
    """
    if not used or not PLATFORM.is_windows:
        return ""
    pattern = f"{PLATFORM.hip_library}*.dll"
    own = [*beside("_rocm_sdk_core", "bin", pattern), *beside("torch", "lib", pattern)]
    same = any(filecmp.cmp(used, path, shallow=False) for path in own)
    return "" if same or not own else str(own[0])


def rocdxg() -> str:
    """The path of librocdxg, through which ROCm reaches the GPU in WSL; "" if there is none."""
    named = (os.environ.get("LD_LIBRARY_PATH", "")).split(":")
    directories = [*filter(None, named), str(Path(os.environ.get("ROCM_PATH") or "/opt/rocm") / "lib"), *_LIBRARIES]
    paths = (path for directory in directories for path in sorted(Path(directory).glob("librocdxg.so*")))
    return str(next(paths, None) or next(iter(beside("_rocm_sdk_core", "lib", "librocdxg.so*")), ""))


def torch_runtime() -> str:
    """The copy of ROCm's runtime that PyTorch's wheels bring, "" if there is none."""
    return str(next(iter(beside("torch", "lib", "libhsa-runtime64.so*")), ""))


def torch_triton() -> str:
    """What the installed torch requires of Triton: "pytorch-triton-rocm==3.1.0", "" if it requires no Triton."""
    try:
        requirements = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return ""
    named = [each.partition(";") for each in requirements if each.startswith(TRITONS)]
    here = "windows|win32" if PLATFORM.is_windows else "linux"
    return next((name.strip() for name, _, marker in named if _for_system(marker, here)), "")


def _for_system(marker: str, names: str) -> bool:
    """Whether the condition of a requirement is for a system with these names, or names no system."""
    systems = _SYSTEM.findall(marker)
    return not systems or any(re.fullmatch(names, system, re.IGNORECASE) for system in systems)


def lacking(build: build_info.BuildInfo, package: Path) -> Iterable[str]:
    """Files that a wheel with this build info has and this directory does not."""
    for target in build.targets:
        path = package / "_kernels" / f"{target}.zip"
        try:
            store.Store(path)
        except store.KernelError as error:
            yield f"_kernels/{path.name} ({error.__cause__ or error})"
    if build.targets and not list(package.glob(PLATFORM.launcher)):
        yield "_launcher"
    if build.targets and build.backend == "ck" and not (package / PLATFORM.planner).is_file():
        yield PLATFORM.planner


def access(path: Path) -> Access | None:
    """This user's permissions for a device file; None if the file does not exist."""
    try:
        mode = path.stat().st_mode
        owner, group = PLATFORM.owner(path)
    except OSError:
        return None
    return Access(
        path=str(path),
        owner=owner,
        group=group,
        mode=oct(mode & 0o777)[2:],
        allowed=os.access(path, os.R_OK | os.W_OK),
    )


def versions(names: Iterable[str]) -> dict[str, str]:
    """Installed distribution -> version."""
    distributions = {name: next(iter(metadata.Distribution.discover(name=name)), None) for name in names}
    return {name: distribution.version for name, distribution in distributions.items() if distribution is not None}


def run_probe(seconds: int = _PROBE_SECONDS) -> tuple[dict[str, Any], str]:
    """The output of the probe, and how it ended if it crashed."""
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, encoding="utf-8", errors="replace", timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        answers = merged(output.decode(errors="replace") if isinstance(output, bytes) else output)
        return answers, f"did not end within {seconds} s"
    last = done.stderr.strip().splitlines()[-1:]
    died = "" if done.returncode == 0 else f"ended with {ending(done.returncode)}{': ' + last[0] if last else ''}"
    return merged(done.stdout), died


def merged(output: str) -> dict[str, Any]:
    """Merges the probe's lines.

    Ignores lines of other programs, and a last line that is incomplete because the process died.
    """
    answers: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                answers |= json.loads(line)
    return answers


def _first_line(*paths: Path) -> str:
    return next((text.splitlines()[0] for path in paths if (text := _read(path).strip())), "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
