"""`backend_info()`: which backend runs here, and what prevents it from running on the GPU."""

from __future__ import annotations

import importlib
import platform
import sys
from typing import Any

import torch

from flash_attn.attention import backends
from flash_attn.attention.backends.sources import explain
from flash_attn.call.calls import attention_call
from flash_attn.core import jit
from flash_attn.core.build_info import BuildInfo, build_command, load
from flash_attn.core.platform import PLATFORM
from flash_attn.diagnosis.commands import install_torch
from flash_attn.diagnosis.survey import Facts
from flash_attn.kernels.targets import TARGETS, compiled, override, serving_targets


def backend_info(
    q: torch.Tensor | None = None, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **options: Any
) -> dict[str, Any]:
    """The build, machine and problems of this installation. With tensors, also the backend of flash_attn_func for them.

    backend, version, label: of the wheel. gpu_backend: who serves GPU tensors in this process, "ck" or "triton", as the
    environment asked. torch: {"wheel", "running"} versions. targets: GPU targets with kernels in the wheel.
    device_targets: targets of the GPUs here. launcher: path of the GPU driver library that kernels are launched
    through, None if there is none. problems: sentences, each with its remedy.

    call: with q, k and v, {"forward", "backward"}, each {"source", "kernel", "why"}: "asm", "ck", "triton" or "torch",
    the kernel's name where the call alone tells it, and the reason. options: causal, window_size, softcap,
    alibi_slopes, dropout_p, deterministic, softmax_scale, and for packed sequences cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q, max_seqlen_k. Nothing is computed. TypeError for another option, or for q alone.
    """
    build = load()
    device_targets = _device_targets()
    launcher, problems = _launcher(build)
    backend_problem = backends.problem()
    call = {} if q is None else {"call": _who_serves(q, k, v, options)}
    return {
        "backend": build.backend,
        "gpu_backend": backends.gpu_backend().name.rpartition(".")[2],
        "version": build.version,
        "label": build.label,
        "torch": {"wheel": build.torch or None, "running": torch.__version__},
        "targets": list(build.targets),
        "device_targets": device_targets,
        "launcher": launcher,
        "problems": [
            *torch_problems(build, torch.__version__, torch.version.hip),
            *_target_problems(build, device_targets),
            *([backend_problem] if backend_problem else []),
            *problems,
        ],
        **call,
    }


def _who_serves(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, options: dict[str, Any]
) -> dict[str, dict[str, str | None]]:
    if k is None or v is None:
        raise TypeError("backend_info: a call has q, k and v, pass all three")
    return explain(
        backends.select(q), attention_call(q=q, k=k, v=v, **{"softmax_scale": q.shape[-1] ** -0.5, **options})
    )


def torch_problems(build: BuildInfo, running: str, hip: str | None) -> list[str]:
    """What does not fit between the wheel and the torch that runs (its version, its HIP version or None)."""
    problems = []
    minor = ".".join(running.split(".")[:2])
    probe = {"torch": {"version": running, "hip": hip}, "devices": []}
    python = platform.python_version()
    here = Facts(build=build, python=python, executable=sys.executable, windows=PLATFORM.is_windows, probe=probe)
    line = install_torch(here)
    if build.torch_minor and minor != build.torch_minor:
        problems.append(
            f"this wheel is for torch {build.torch_minor}, torch {running} is running: `{line}`, or install the "
            f"flash_attn wheel for torch {minor}"
        )
    if build.for_rocm and hip is None:
        rocm = f"ROCm {build.rocm}" if build.rocm else "ROCm"
        problems.append(f"this wheel is for {rocm}, but torch {running} is not: `{line}`")
    return problems


def _device_targets() -> list[str]:
    """Distinct targets of the visible GPUs, such as gfx942 or sm_90, sorted."""
    if not torch.cuda.is_available():
        return []
    targets = set()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            targets.add(properties.gcnArchName.split(":")[0])
        else:
            targets.add(f"sm_{properties.major}{properties.minor}")
    return sorted(targets)


def _target_problems(build: BuildInfo, device_targets: list[str]) -> list[str]:
    unserved = [
        target for target in device_targets if not {*serving_targets(target, torch.version.hip)} & {*build.targets}
    ]
    if not build.targets or len(unserved) < len(device_targets):
        return []  # another GPU, such as one inside the processor, needs no kernels
    return [
        f"a GPU here is a {target}, this wheel has kernels for {', '.join(build.targets)}, and {_by_triton(target)}: "
        f"{_remedy(build, target)}"
        for target in unserved
    ]


def _by_triton(target: str) -> str:
    """What the installed Triton does for a GPU without kernels: a part of a sentence."""
    if target.startswith("gfx") and target in TARGETS and not compiled(target):
        return "Triton does not compile for it"
    if lack := jit.triton_problem():
        return f"its kernels cannot be compiled here ({lack})"
    return "Triton compiles its kernels at their first call"


def _remedy(build: BuildInfo, target: str) -> str:
    relative, version = override(target) or ("", "")
    if relative in build.targets and not PLATFORM.is_windows:
        return f"`export HSA_OVERRIDE_GFX_VERSION={version}` runs the kernels of {relative}"
    if line := build_command(build.version, target):
        return f"`{line}` builds a wheel that has them{' (on Linux or in WSL)' if PLATFORM.is_windows else ''}"
    wheel = "no wheel for Windows" if PLATFORM.is_windows else "no wheel"
    return f"{wheel} has them; `{PLATFORM.python} -m flash_attn.doctor` says what else there is"


def _launcher(build: BuildInfo) -> tuple[str | None, list[str]]:
    runtime = "hip" if torch.version.hip else "cuda" if torch.version.cuda else None
    if runtime is None:
        return None, []
    try:
        module = importlib.import_module("flash_attn._launcher")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and not build.targets:
            return None, []  # a source tree
        return None, [f"the launcher does not load ({error}): reinstall the wheel"]
    try:
        return module.bind(runtime), []
    except RuntimeError as error:
        if build.for_rocm and runtime == "cuda":
            return None, []  # torch for ROCm is missing (see torch_problems), not an NVIDIA driver
        return None, [f"no GPU driver: {error}"]
