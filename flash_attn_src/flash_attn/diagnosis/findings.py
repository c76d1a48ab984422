"""The findings of the doctor: which troubles of the table the facts of a machine show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flash_attn.core.environment import (
    KERNEL_SOURCE,
    MAX_LAUNCH_SECONDS,
    TRITON_AUTOTUNE,
    TRITON_ENABLE,
    seconds,
    switch,
)
from flash_attn.core.platform import PLATFORM
from flash_attn.diagnosis import advice
from flash_attn.diagnosis.commands import JOB_MIB, OF_LINUX, commands
from flash_attn.diagnosis.survey import Facts
from flash_attn.diagnosis.troubles import FAULTY_MES, TROUBLES
from flash_attn.kernels.providers import SOURCES
from flash_attn.kernels.targets import TARGETS, override, serving_targets

# The first ROCm whose torch has the kernels of each GPU in a package of their own.
DEVICE_PACKAGES = (7, 14)
# HIP's words for code that has no kernel for the GPU.
_NO_CODE = re.compile(r"invalid device function|InvalidDeviceFunction|NoBinaryForGpu|no kernel image is available")
# How Windows says that Smart App Control or another policy keeps a file from being loaded.
_BLOCKED = re.compile(r"WinError 4551|[Aa]pplication [Cc]ontrol policy|WinError 225\b|contains a virus")
_NEWEST_HIP = "99.0"
# Commits of ROCm/triton, release/internal/3.8.x, after triton#9416 and before ROCm/triton#968 mended it.
_WRONG_BARRIERS = re.compile(r"git(4cff872|fccf1665)")
# How alike a variable's name is to one that is read if that was meant: upstream had more that begin as these do.
_ALIKE = 0.92


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem, or a note: its key in the table of troubles, a description for this machine, and a remedy."""

    key: str
    what: str
    remedy: str


def examine(facts: Facts) -> list[Finding]:
    """All problems, in the order of the table of troubles, because earlier troubles explain later ones."""
    problems: dict[str, str] = {}
    for examination in (_torch, _wheel, _machine, _backend, _variables, _call, _triton, _build):
        for key, what in examination(facts):
            problems.setdefault(key, what)
    if {"torch-missing", "torch-cpu", "torch-cuda"} & problems.keys():
        problems.pop("no-driver", None)  # the driver library comes with torch for ROCm
        problems.pop("torch-minor", None)  # another torch comes anyway
    known = commands(facts)
    return [
        Finding(
            key=trouble.key,
            what=problems[trouble.key],
            remedy=trouble.advice(on_windows=facts.windows).format(**known),
        )
        for trouble in TROUBLES
        if trouble.key in problems and (trouble.windows is not None if facts.windows else trouble.remedy)
    ]


_Found = Iterator[tuple[str, str]]


def _torch(facts: Facts) -> _Found:
    if (error := facts.probe.get("torch_error")) is not None:
        broken = "blocked" if _BLOCKED.search(error) else "torch-broken"
        yield (broken, f"`import torch` fails: {error}") if error else ("torch-missing", "torch is not installed")
    torch, build = facts.probe.get("torch"), facts.build
    if torch is None:
        return
    # A wheel that pip built without kernels names no GPU. The machine does, or torch for CUDA that sees no GPU: pip
    # installs that torch unless it is told otherwise.
    bare = not build.targets and (facts.kfd is not None or _cuda_without_gpu(facts))
    if (build.for_rocm or bare) and torch["hip"] is None:
        kind = "cuda" if torch["cuda"] else "cpu"
        with_cuda = f" (CUDA {torch['cuda']})" if torch["cuda"] else ""
        rocm = f"ROCm {build.rocm}" if build.rocm else "ROCm"
        yield f"torch-{kind}", f"this wheel is for {rocm}, but torch {torch['version']}{with_cuda} is not"
    minor = ".".join(torch["version"].split(".")[:2])
    if build.torch_minor and minor != build.torch_minor:
        yield "torch-minor", f"this wheel is for torch {build.torch_minor}, torch {torch['version']} is installed"
    if not build.torch_minor and [int(part) for part in minor.split(".")] < [2, 5]:
        yield "torch-minor", f"this wheel is for torch 2.5 and newer, torch {torch['version']} is installed"
    hip = ".".join((torch["hip"] or "").split(".")[:2])
    if build.rocm and hip and hip != build.rocm:
        yield "rocm-mismatch", f"this wheel is for ROCm {build.rocm}, torch is built for ROCm {hip}"
    if hip and facts.devices and _torch_is_unsuitable(facts):
        yield "torch-unsuitable", facts.advise().reason


def _torch_is_unsuitable(facts: Facts) -> bool:
    """Whether another torch has to be installed for this GPU; not if this one has just run a kernel on it."""
    if not facts.known or facts.advise().state != advice.TORCH:
        return False
    unserved = {*facts.unserved()} & {*facts.known["targets"]}
    return "torch_kernel" not in facts.probe or (bool(unserved) and _with_a_newer_hip(facts))


def _with_a_newer_hip(facts: Facts) -> bool:
    """Whether the wheel has kernels for the GPU that counts, which this HIP does not load."""
    return any({*serving_targets(target, _NEWEST_HIP)} & {*facts.build.targets} for target in facts.unserved())


def _cuda_without_gpu(facts: Facts) -> bool:
    """Whether torch for CUDA stands beside a package that pip installed, on a machine where it sees no GPU."""
    return bool(facts.build.python and facts.probe["torch"]["cuda"]) and not facts.probe.get("devices")


def _wheel(facts: Facts) -> _Found:
    if facts.lacking:
        yield "wheel-incomplete", f"{facts.location} lacks {', '.join(facts.lacking)}"
    if facts.installed is not None and facts.installed != facts.location:
        yield "shadowed", f"{facts.location} is imported, the wheel is installed in {facts.installed}"
    if facts.leftovers:
        yield "leftovers", f"pip could not remove {', '.join(facts.leftovers)}"
    if len(facts.tritons) > 1:
        named = ", ".join(f"{name} {version}" for name, version in facts.tritons.items())
        yield "two-tritons", f"{named} are all installed, and share one module"


def _machine(facts: Facts) -> _Found:
    devices, hip = facts.devices, (facts.probe.get("torch") or {}).get("hip")
    denied = [each for each in (facts.kfd, facts.dxg, *facts.render) if each is not None and not each.allowed]
    hidden = facts.hiding()
    where = "-in-container" if facts.container else ""
    if (hip or facts.build.for_rocm) and denied and not devices:
        named = ", ".join(f"{each.path} ({each.owner}:{each.group} {each.mode})" for each in denied)
        yield f"no-permission{where}", f"{facts.user} may not read and write {named}"
    elif hip and not devices and facts.has_kfd and not facts.kfd:
        yield f"no-kfd{where}", "torch sees no GPU, and there is no /dev/kfd"
    elif hip and hidden:
        set_to = ", ".join(f"{name}={facts.variables[name]}" for name in hidden)
        there = "/dev/kfd is there, " if facts.kfd and not devices else ""
        seen = f"only {', '.join(facts.targets())}" if devices else "no GPU"
        yield "gpu-hidden", f"torch sees {seen}, {there}and {set_to} is set"
    elif hip and not devices and not facts.has_kfd and not facts.windows and not facts.rocdxg:
        yield "no-rocdxg", "torch sees no GPU, and librocdxg is not installed"
    elif hip and not devices and not facts.has_kfd and not facts.windows and facts.torch_runtime:
        yield "torch-runtime-in-wsl", f"torch sees no GPU, and brings a runtime of its own: {facts.torch_runtime}"
    elif hip and not devices and not facts.has_kfd:
        driver = f", which is {facts.driver}," if facts.driver else ""
        other = facts.driver and not re.search("AMD|Radeon|ATI ", facts.driver)
        yield (
            "no-device-of-windows",
            f"torch sees no GPU, and Windows has no driver of AMD but only {facts.driver}"
            if other
            else f"torch sees no GPU; here the driver of Windows{driver} has to offer it",
        )
    elif hip and not devices:
        yield "no-device", "torch sees no GPU, though /dev/kfd is there"
    for target, (version, package) in FAULTY_MES.items():
        if facts.mes.get(target) == version:
            yield "faulty-firmware", f"the {target} here has MES firmware {version:#x} of {package}"
    if "gfx90a" in facts.targets() and "call" in facts.probe:
        yield "fp16-of-mi200", "a GPU here is a gfx90a"
    runtimes = hip_runtimes(facts.probe.get("libraries", ()))
    # On Windows the launcher takes the one that torch is linked to.
    chosen = facts.windows and facts.probe.get("info", {}).get("launcher")
    if facts.replaced_hip:
        yield "replaced-hip-runtime", f"torch uses {chosen}, which differs from its own {facts.replaced_hip}"
    elif len(runtimes) > 1 and not chosen:
        yield "two-hip-runtimes", f"one process has loaded {' and '.join(runtimes)}"


def hip_runtimes(libraries: Sequence[str]) -> list[str]:
    """The HIP runtimes among the GPU runtimes of a process."""
    return [path for path in libraries if PLATFORM.hip_library in path]


def _backend(facts: Facts) -> _Found:
    try:
        if switch(facts.variables, TRITON_ENABLE) is False and facts.build.backend != "ck":
            what = f"{TRITON_ENABLE}=FALSE asks for Composable Kernel, which this wheel does not have"
            yield "triton-not-selected", what
    except ValueError as error:
        yield "triton-not-selected", str(error)
    unserved = facts.unserved()
    under_zluda = unserved and unserved[0].startswith("sm_") and {*facts.targets()} & {*facts.known.get("targets", ())}
    if facts.build.targets and unserved and not under_zluda:
        relative = (override(unserved[0]) or ("",))[0]
        by_relative = relative in facts.build.targets and not facts.windows
        key = "target-of-a-relative" if by_relative else "target-missing"
        if by_relative or not (_torch_is_unsuitable(facts) and _with_a_newer_hip(facts)):
            yield key, f"a GPU here is a {unserved[0]}, the wheel is for {', '.join(facts.build.targets)}"
    if place := facts.place():
        first, own = (
            f"GPU {number} is {facts.devices[number]['name']}, {facts.devices[number]['target']}"
            for number in (0, place)
        )
        why = "is inside the processor" if facts.serves(facts.devices[0]) else "the wheel is not for"
        yield "another-gpu", f"{first}, which {why}, and {own}, which it is for"
    problems = facts.probe.get("info", {}).get("problems", [])
    if drivers := [problem for problem in problems if "no GPU driver" in problem]:
        yield "no-driver", drivers[0]
    said = [*problems, facts.probe.get("error", "")]
    if broken := [problem for problem in said if "reinstall the wheel" in problem]:
        yield "blocked" if _BLOCKED.search(broken[0]) else "wheel-incomplete", broken[0]


def _triton(facts: Facts) -> _Found:
    radeons = [gpu for gpu in facts.targets() if gpu in TARGETS and TARGETS[gpu].family.startswith("rdna")]
    faulty = [f"{name} {version}" for name, version in facts.tritons.items() if _WRONG_BARRIERS.search(version)]
    if radeons and faulty:
        yield "triton-barriers", f"{faulty[0]} compiles barriers without waits for stores on {radeons[0]}"


def _variables(facts: Facts) -> _Found:
    if facts.windows and (of_linux := [name for name in OF_LINUX if name in facts.variables]):
        yield "variable-of-linux", ", ".join(f"{name}={facts.variables[name]}" for name in of_linux)
    settings = {name: value.strip() for name, value in facts.variables.items() if name.startswith("FLASH_ATT")}
    source = settings.get(KERNEL_SOURCE, "").lower()
    if source and source not in SOURCES:
        yield "variable", f"{KERNEL_SOURCE}={source} is none of {', '.join(SOURCES)}"
    elif source not in ("", "triton") and facts.build.backend != "ck":
        yield "variable", f"{KERNEL_SOURCE}={source} asks for kernels that this wheel does not have"
    try:
        switch(settings, TRITON_AUTOTUNE)
        seconds(settings, MAX_LAUNCH_SECONDS)
    except ValueError as error:
        yield "variable", str(error)
    read = (TRITON_ENABLE, KERNEL_SOURCE, TRITON_AUTOTUNE, MAX_LAUNCH_SECONDS)
    for name, value in settings.items():
        whole = name.replace("FLASH_ATTN_", "FLASH_ATTENTION_")
        if name not in read and (meant := difflib.get_close_matches(whole, read, 1, _ALIKE)):
            yield "variable", f"{name}={value} has no effect: the variable is {meant[0]}"


def _call(facts: Facts) -> _Found:
    call, error = facts.probe.get("call"), facts.probe.get("error", "")
    hip = (facts.probe.get("torch") or {}).get("hip") or "0"
    version = (facts.probe.get("torch") or {}).get("version") or ""
    targets = {device["target"] for device in facts.devices[facts.place() :][:1]}  # of the GPU that was called
    invalid_image = re.search(r"InvalidImage|kernel image is invalid|invalid kernel file", error)
    no_code = (_NO_CODE.search(error) or invalid_image) and "torch_kernel" not in facts.probe
    packages = _numbers(hip) >= DEVICE_PACKAGES and (invalid_image or facts.windows)
    if no_code and facts.place():
        pass  # torch has no kernels for the first GPU, which is not the one that counts: `another-gpu`
    elif no_code and packages and "gfx90a" in targets and _numbers(version) == (2, 12):
        yield "device-package-empty", f"torch {version} loads an empty file instead of its kernels for gfx90a"
    elif no_code and packages and not {*facts.known.get("targets", targets)}.isdisjoint(targets):
        yield "device-package-missing", f"torch {version} has no kernels for the GPU here"
    elif no_code and {*facts.known.get("targets", targets)} & targets and not _torch_is_unsuitable(facts):
        yield "torch-lacks-gpu", f"torch {version} has no kernels for {', '.join(sorted(targets))}"
    elif no_code:
        pass  # `torch-unsuitable` or `target-missing`
    elif "reinstall the wheel" in error or f"has no kernels for {next(iter(facts.unserved()), '?')}" in error:
        pass  # `wheel-incomplete`, `blocked` or `target-missing`
    elif "OutOfMemory" in error:
        yield "out-of-memory", error
    elif "error" in facts.probe:
        yield "call-failed", facts.probe["error"]
    elif facts.died:
        yield "call-failed", f"the process that tried {facts.died}"
    elif call is not None and call.get("unwritten"):
        named = ", ".join(call["unwritten"])
        yield "nothing-launched", f"{call['backend']} left {named} unwritten, and the driver reported no error"
    elif call is not None:
        for way in ("forward", "backward"):
            if not call[f"{way}_error"] <= call["limit"]:
                error = f"{call[f'{way}_error']:.1e}, at most {call['limit']:.1e}"
                yield "call-failed", f"the {way} by {call['backend']} is wrong: error {error}"
    attention = facts.probe.get("attention", {})
    if "failure" in attention:
        yield "torch-attention", f"it fails: {attention['failure']}"
    elif attention and not attention["error"] <= attention["limit"]:
        yield "torch-attention", f"it is wrong: error {attention['error']:.1e}, at most {attention['limit']:.1e}"
    if attention.get("experimental"):
        yield (
            "torch-experimental",
            f"torch {version} has attention kernels for {', '.join(sorted(targets))}, and uses none",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _build(facts: Facts) -> _Found:
    jobs = facts.variables.get("MAX_JOBS", "")
    needed = int(jobs) * JOB_MIB if jobs.isdecimal() and int(jobs) > 1 else 0
    if facts.memory_mib and needed > facts.memory_mib:
        yield "build-memory", f"MAX_JOBS={jobs} compilers take up to {needed} MiB, {facts.memory_mib} MiB are free"
    for trouble in TROUBLES:
        if trouble.log and (match := re.search(f".*(?:{trouble.log}).*", facts.log)):
            yield trouble.key, f"the log says: {match[0].strip()[:200]}"
