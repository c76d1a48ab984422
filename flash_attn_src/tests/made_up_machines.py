"""Facts of made-up machines for the tests of the doctor: a healthy one, and one with each trouble."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flash_attn.core import environment
from flash_attn.core.build_info import BuildInfo, load
from flash_attn.diagnosis.survey import Access, Facts, known

KNOWN = known(load())  # what versions.toml says
BUILD = BuildInfo(
    version="2.8.3",
    label="rocm62torch2.5triton",
    targets=("gfx90a", "gfx942"),
    torch="2.5",
    rocm="6.2",
    advice=KNOWN,
)
UNIVERSAL = replace(
    BUILD, label="rocm", torch="", rocm="", targets=("gfx942", "gfx1030"), repository="https://github.com/Owner/name"
)
TORCH = "pip install torch==2.14.1+rocm7.2 --index-url https://download.pytorch.org/whl/rocm7.2"
PIP_TORCH = "pip install torch=={0} --index-url https://download.pytorch.org/whl/{1}"
KFD = Access(path="/dev/kfd", owner="root", group="render", mode="660", allowed=True)
HIP = "{}/libamdhip64.so.6"
CALL = {
    "device": "cuda",
    "backend": "flash_attn.attention.backends.triton",
    "forward_ms": 1.0,
    "backward_ms": 2.0,
    "forward_error": 3e-3,
    "backward_error": 6e-3,
    "limit": 2.4e-2,
}
PROBE: dict[str, Any] = {
    "torch": {"version": "2.5.1+rocm6.2", "hip": "6.2.41133-dd7f95766", "cuda": None},
    "devices": [{"name": "AMD Instinct MI300X", "target": "gfx942", "memory_mib": 196592}],
    "info": {"launcher": "/torch/lib/libamdhip64.so", "problems": []},
    "libraries": [HIP.format("/torch/lib"), "/usr/lib/libcuda.so.1"],
    "call": CALL,
}
HEALTHY = Facts(
    build=BUILD,
    location="/env/flash_attn",
    installed="/env/flash_attn",
    kfd=KFD,
    python="3.11.7 (/env/bin/python)",
    user="me, groups me",
    memory_mib=64000,
    tritons={"pytorch-triton-rocm": "3.1.0"},
    probe=PROBE,
)


def probed(**answers: Any) -> Facts:
    """A healthy machine, but for some answers of the probe; None takes one away."""
    return replace(HEALTHY, probe={key: value for key, value in {**PROBE, **answers}.items() if value is not None})


def torch(version: str, hip: str | None = None, cuda: str | None = None, **answers: Any) -> Facts:
    return probed(torch={"version": version, "hip": hip, "cuda": cuda}, **answers)


def common_pc(*gpus: str, error: str = "", **facts: Any) -> Facts:
    """A PC with Windows, a wheel for gfx1101, and these GPUs in torch's order."""
    devices = [{"name": name, "target": target, "memory_mib": 1} for name, target in map(PC_GPUS.get, gpus)]  # type: ignore[misc]
    machine = torch(
        "2.12.0+rocm7.14.0", "7.14.60850", devices=devices, **({"error": error, "call": None} if error else {})
    )
    own = replace(UNIVERSAL, targets=("gfx1101",), repository="")
    return replace(machine, windows=True, kfd=None, has_kfd=False, build=own, executable=r"C:\p\python.exe", **facts)


PC_GPUS = {"card": ("Radeon RX 7800 XT", "gfx1101"), "inside": ("AMD Radeon(TM) Graphics", "gfx1036")}
DENIED = replace(KFD, path="/dev/dri/renderD128", allowed=False)

# trouble, a machine that has it, and the text that the doctor must print
CASES: list[tuple[str, Facts, str]] = [
    ("torch-missing", replace(HEALTHY, probe={"torch_error": ""}), PIP_TORCH.format("2.5.1+rocm6.2", "rocm6.2")),
    ("torch-broken", replace(HEALTHY, probe={"torch_error": "OSError: libamdhip64.so.6"}), "OSError: libamdhip64.so.6"),
    ("torch-cpu", torch("2.5.1+cpu", devices=[]), "torch 2.5.1+cpu is not"),
    ("torch-cuda", torch("2.5.1", cuda="12.4", devices=[]), "(CUDA 12.4) is not"),
    ("torch-minor", torch("2.6.0+rocm6.2.4", "6.2.4"), "torch 2.6.0+rocm6.2.4 is installed"),
    ("rocm-mismatch", torch("2.5.1+rocm6.1", "6.1.40091"), "built for ROCm 6.1"),
    ("wheel-incomplete", replace(HEALTHY, lacking=("_launcher",)), "lacks _launcher"),
    (
        "wheel-incomplete",
        probed(info={"problems": ["the planner of the CK backend does not load (x): reinstall the wheel"]}),
        "does not load (x)",
    ),
    (
        "wheel-incomplete",
        replace(HEALTHY, log="KernelError: the launcher does not load (no _launcher): reinstall the wheel"),
        "no _launcher",
    ),
    ("shadowed", replace(HEALTHY, location="/home/me/flash_attn"), "/home/me/flash_attn is imported"),
    ("no-kfd", replace(probed(devices=[]), kfd=None), "there is no /dev/kfd"),
    ("no-kfd-in-container", replace(probed(devices=[]), kfd=None, container=True), "--device=/dev/kfd"),
    ("gpu-hidden", replace(probed(devices=[]), variables={"HIP_VISIBLE_DEVICES": "7"}), "HIP_VISIBLE_DEVICES=7 is set"),
    (
        "gpu-hidden",
        replace(probed(devices=[]), variables={"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}),
        "`unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES`",
    ),
    ("no-device", probed(devices=[]), "dmesg"),
    (
        "no-device-of-windows",
        replace(probed(devices=[]), kfd=None, has_kfd=False, rocdxg="/opt/rocm/lib/librocdxg.so"),
        "wsl --update",
    ),
    (
        "gpu-hidden",
        replace(probed(devices=[]), kfd=None, has_kfd=False, variables={"HIP_VISIBLE_DEVICES": "7"}),
        "torch sees no GPU, and HIP_VISIBLE_DEVICES=7 is set",
    ),
    ("no-device", replace(probed(devices=[]), variables={"HIP_VISIBLE_DEVICES": "0"}), "dmesg"),
    (
        "no-rocdxg",
        replace(probed(devices=[]), kfd=None, has_kfd=False),
        "ROCm/librocdxg/releases, then `export HSA_ENABLE_DXG_DETECTION=1`",
    ),
    (
        "torch-runtime-in-wsl",
        replace(
            probed(devices=[]),
            kfd=None,
            has_kfd=False,
            rocdxg="/opt/rocm/lib/librocdxg.so",
            torch_runtime="/env/torch/lib/libhsa-runtime64.so",
        ),
        "rm /env/torch/lib/libhsa-runtime64.so* && cp /opt/rocm/lib/libhsa-runtime64.so.1 /env/torch/lib/lib",
    ),
    ("no-permission", replace(probed(devices=[]), kfd=replace(KFD, allowed=False)), "/dev/kfd (root:render 660)"),
    ("no-permission", replace(probed(devices=[]), render=(DENIED,)), "D128"),
    (
        "no-permission",
        replace(probed(devices=[]), kfd=replace(KFD, group="993", allowed=False), render=(DENIED,)),
        "usermod -aG 993,render $USER",
    ),
    (
        "no-permission-in-container",
        replace(probed(devices=[]), kfd=replace(KFD, allowed=False), container=True),
        "--group-add",
    ),
    ("no-driver", probed(info={"problems": ["no GPU driver: libamdhip64 is not there"]}), "libamdhip64 is not there"),
    (
        "two-hip-runtimes",
        probed(libraries=[HIP.format("/opt/my rocm/lib"), HIP.format("/torch/lib")]),
        "/opt/my rocm/lib/libamdhip64.so.6 and /torch/lib/libamdhip64.so.6",
    ),
    (
        "triton-barriers",
        replace(
            probed(devices=[{"name": "Radeon RX 7900 XTX", "target": "gfx1100", "memory_mib": 1}]),
            build=replace(BUILD, targets=("gfx1100",)),
            tritons={"triton": "3.8.0+git4cff872c"},
        ),
        "triton 3.8.0+git4cff872c compiles barriers without waits for stores on gfx1100",
    ),
    (
        "faulty-firmware",
        replace(
            torch(
                "2.14.1+rocm7.2",
                "7.2.1",
                devices=[{"name": "Radeon 8060S Graphics", "target": "gfx1151", "memory_mib": 1}],
            ),
            build=replace(UNIVERSAL, targets=("gfx1151",)),
            mes={"gfx1151": 0x83, "gfx1201": 0x83},
        ),
        "the gfx1151 here has MES firmware 0x83 of linux-firmware 20251125",
    ),
    (
        "fp16-of-mi200",
        probed(devices=[{"name": "AMD Instinct MI250X", "target": "gfx90a", "memory_mib": 1}]),
        "rows of dout differ by more than 2^10",
    ),
    ("two-tritons", replace(HEALTHY, tritons={"triton": "3.1.0", "triton-rocm": "3.6.0"}), "triton-rocm 3.6.0"),
    (
        "target-missing",
        probed(devices=[{"name": "Radeon", "target": "gfx1100", "memory_mib": 1}]),
        "PYTORCH_ROCM_ARCH=gfx1100 ./build_rocm.sh 2.8.3`",
    ),
    (
        "target-of-a-relative",
        replace(probed(devices=[{"name": "RX 6700", "target": "gfx1031", "memory_mib": 1}]), build=UNIVERSAL),
        "HSA_OVERRIDE_GFX_VERSION=10.3.0",
    ),
    (
        "target-missing",
        replace(
            torch("2.14.1+rocm7.2", "7.2.1", devices=[{"name": "RX 9070", "target": "gfx1201", "memory_mib": 1}]),
            build=UNIVERSAL,
        ),
        "git clone https://github.com/Owner/name && cd name && PYTORCH_ROCM_ARCH=gfx1201 ./build_rocm.sh 2.8.3",
    ),
    (
        "target-missing",
        replace(probed(devices=[{"name": "Vega", "target": "gfx906", "memory_mib": 1}]), build=UNIVERSAL),
        "Triton does not compile for gfx906, so no wheel has kernels for it.",
    ),
    ("another-gpu", common_pc("inside", "card"), "and GPU 1 is Radeon RX 7800 XT, gfx1101"),
    (
        "replaced-hip-runtime",
        common_pc("card", replaced_hip=r"C:\env\_rocm_sdk_core\bin\amdhip64_7.dll"),
        "/torch/lib/libamdhip64.so, which differs from its own",
    ),
    (
        "variable-of-linux",
        common_pc("card", variables={"ROCR_VISIBLE_DEVICES": "1"}),
        "`Remove-Item Env:ROCR_VISIBLE_DEVICES` (PowerShell) or `set ROCR_VISIBLE_DEVICES=` (cmd)",
    ),
    (
        "triton-not-selected",
        replace(HEALTHY, variables={environment.TRITON_ENABLE: "FALSE"}),
        "asks for Composable Kernel",
    ),
    (
        "triton-not-selected",
        replace(HEALTHY, variables={environment.TRITON_ENABLE: "triton"}),
        "neither TRUE nor FALSE",
    ),
    (
        "variable",
        replace(HEALTHY, variables={environment.KERNEL_SOURCE: "cuda"}),
        "SOURCE=cuda is none of asm, ck, triton",
    ),
    (
        "variable",
        replace(HEALTHY, variables={environment.KERNEL_SOURCE: "asm"}),
        "KERNEL_SOURCE=asm asks for kernels that this",
    ),
    (
        "variable",
        replace(HEALTHY, variables={environment.TRITON_AUTOTUNE: "maybe"}),
        "AUTOTUNE=maybe is neither TRUE nor FALSE",
    ),
    (
        "variable",
        replace(HEALTHY, variables={environment.MAX_LAUNCH_SECONDS: "long"}),
        "SECONDS=long is no number of seconds",
    ),
    (
        "variable",
        replace(HEALTHY, variables={"FLASH_ATTN_TRITON_AMD_ENABLE": "TRUE"}),
        "FLASH_ATTN_TRITON_AMD_ENABLE=TRUE has no effect: the variable is FLASH_ATTENTION_TRITON_AMD_ENABLE",
    ),
    (
        "variable",
        replace(HEALTHY, variables={"FLASH_ATTENTION_TRITON_AMD_ENBALE": "1"}),
        "FLASH_ATTENTION_TRITON_AMD_ENBALE=1 has no effect",
    ),
    (
        "call-failed",
        probed(call={**CALL, "backward_error": float("nan")}),
        "the backward by flash_attn.attention",
    ),
    ("call-failed", probed(call=None, error="RuntimeError: no"), "RuntimeError: no"),
    (
        "device-package-missing",
        replace(
            probed(
                call=None,
                torch={"version": "2.15.0+rocm10.0", "hip": "10.0.60500", "cuda": None},
                error="AcceleratorError: HIP error: device kernel image is invalid (hipErrorInvalidImage)",
            ),
            build=replace(BUILD, torch="", rocm=""),
        ),
        "pip install torch[device-gfx942]==2.15.0+rocm10.0 --index-url https://download.pytorch.org/whl/rocm10.0",
    ),
    (
        "device-package-missing",
        replace(
            probed(
                call=None,
                torch={"version": "2.12.0+rocm7.14.0", "hip": "7.14.60850", "cuda": None},
                error="AcceleratorError: CUDA error: device kernel image is invalid",
            ),
            build=replace(BUILD, torch="", rocm=""),
        ),
        "pip install torch[device-gfx942]==2.12.0+rocm7.14.0 --index-url https://repo.amd.com/rocm/whl-multi-arch/",
    ),
    (
        "torch-lacks-gpu",
        replace(
            probed(
                call=None,
                torch={"version": "2.14.0+rocm7.2", "hip": "7.2.26015", "cuda": None},
                devices=[{"name": "RX 6700 XT", "target": "gfx1031", "memory_mib": 8176}],
                error="AcceleratorError: HIP error: invalid device function",
            ),
            build=replace(UNIVERSAL, targets=("gfx10-3-generic",)),
        ),
        "torchvision torchaudio && pip install torch[device-gfx1031] --index-url https://repo.amd.com/rocm/whl-multi",
    ),
    (
        "torch-lacks-gpu",
        replace(
            probed(
                call=None,
                torch={"version": "2.14.1+rocm7.2", "hip": "7.2.26015", "cuda": None},
                devices=[{"name": "Radeon 780M", "target": "gfx1103", "memory_mib": 8176}],
                error="AcceleratorError: HIP error: invalid device function",
            ),
            build=replace(UNIVERSAL, targets=("gfx11-generic",)),
        ),
        "/whl/rocm7.14`. Or `export HSA_OVERRIDE_GFX_VERSION=11.0.0`, which AMD does not support.",
    ),
    ("out-of-memory", probed(call=None, torch_kernel=16.0, error="OutOfMemoryError: HIP out of memory"), "BIOS"),
    (
        "torch-unsuitable",
        replace(
            probed(
                call=None,
                torch={"version": "2.14.0+rocm7.2", "hip": "7.2.26015", "cuda": None},
                devices=[{"name": "RX 5700 XT", "target": "gfx1010", "memory_mib": 8176}],
                error="AcceleratorError: HIP error: invalid device function",
            ),
            build=replace(UNIVERSAL, targets=("gfx10-1-generic",)),
        ),
        "pip install torch[device-gfx1010] --index-url https://repo.amd.com/rocm/",
    ),
    (
        "torch-unsuitable",
        replace(
            probed(devices=[{"name": "RX 9070", "target": "gfx1201", "memory_mib": 1}]),
            build=replace(UNIVERSAL, targets=("gfx12-generic",)),
        ),
        f"and this torch is for an older ROCm. Install the torch for this GPU: `{TORCH}",
    ),
    (
        "blocked",
        replace(
            common_pc("card"),
            probe={"torch_error": "OSError: [WinError 4551] An Application Control policy has blocked this file."},
        ),
        "Smart App Control settings, Off.",
    ),
    (
        "blocked",
        common_pc(
            "card",
            error="KernelError: the launcher does not load (An Application Control policy has blocked this file.): "
            "reinstall the wheel",
        ),
        "restore it in the scanner",
    ),
    (
        "leftovers",
        replace(HEALTHY, leftovers=("/env/~lash_attn",)),
        "Close it, then `rm -r '/env/~lash_attn'`",
    ),
    (
        "device-package-empty",
        replace(
            probed(
                call=None,
                torch={"version": "2.12.0+rocm7.14.0", "hip": "7.14.60850", "cuda": None},
                devices=[{"name": "MI250X", "target": "gfx90a", "memory_mib": 65520}],
                error="AcceleratorError: CUDA error: device kernel image is invalid",
            ),
            build=replace(BUILD, torch="", rocm=""),
        ),
        "-name 'torch_gfx90a:xnack*.kpack' -delete",
    ),
    # torch's own kernel ran: the image that is invalid is one of this wheel's
    ("call-failed", probed(call=None, torch_kernel=16.0, error="DriverError: hipErrorInvalidImage"), "InvalidImage"),
    (
        "call-failed",
        replace(
            torch("2.12.0+rocm10.0", "10.0.1", call=None, torch_kernel=16.0, error="DriverError: hipErrorInvalidImage"),
            build=replace(BUILD, torch="", rocm=""),
        ),
        "InvalidImage",
    ),
    (
        "nothing-launched",
        probed(call={**CALL, "forward_error": float("nan"), "unwritten": ["out", "dq"]}),
        "flash_attn.attention.backends.triton left out, dq unwritten, and the driver reported no error",
    ),
    (
        "torch-attention",
        probed(attention={"failure": "AcceleratorError: CUDA error: invalid argument"}),
        "it fails: AcceleratorError: CUDA error: invalid argument",
    ),
    (
        "torch-attention",
        replace(
            torch(
                "2.12.0+rocm7.14.0",
                "7.14.60850",
                attention={"error": float("nan"), "limit": 2.4e-2},
                devices=[{"name": "RX 7900 XTX", "target": "gfx1100", "memory_mib": 24560}],
            ),
            build=replace(UNIVERSAL, targets=("gfx1100",)),
        ),
        "pip install amd-torch-device-gfx11==2.12.0+rocm7.14.0 --index-url https://repo.amd.com/rocm/whl-multi-arch/",
    ),
    ("torch-attention", probed(attention={"error": 1.0, "limit": 2.4e-2}), "it is wrong: error 1.0e+00"),
    (
        "torch-experimental",
        probed(attention={"error": 1e-3, "limit": 2.4e-2, "experimental": True}),
        "has attention kernels for",
    ),
    ("call-failed", replace(probed(call=None), died="ended with signal 11"), "signal 11"),
    ("build-memory", replace(HEALTHY, variables={"MAX_JOBS": "64"}), "64000 MiB are free"),
    (
        "build-memory",
        replace(HEALTHY, log="error: a compiler process ended before it was done, most likely for want of memory"),
        "want of memory",
    ),
    ("wheel-module", replace(HEALTHY, log="error: invalid command 'bdist_wheel'"), "invalid command 'bdist_wheel'"),
]
LOGS = {
    "torch-missing": "ModuleNotFoundError: No module named 'torch'",
    "torch-minor": "ImportError: x.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE",
    "wheel-incomplete": "ModuleNotFoundError: No module named 'flash_attn._launcher'",
    "no-permission": "Unable to open /dev/kfd read-write: Permission denied",
    "target-missing": "RuntimeError: HIP error: invalid device function",
    "triton-not-selected": "ModuleNotFoundError: No module named 'flash_attn_2_cuda'",
    "build-memory": "c++: fatal error: Killed signal terminated program cc1plus",
    "wheel-module": "ModuleNotFoundError: No module named 'wheel'",
}
