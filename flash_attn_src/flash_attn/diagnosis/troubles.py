"""What goes wrong with an installation: how it shows, and what to do. `flash_attn.doctor` finds these, and
docs/troubleshooting.md is this table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """`sign` is what a user meets. `remedy` may name {torch}, {rocm} and {target}, the wheel's and the GPU's.

    `log` is a regular expression for the line of a build's log that gives the trouble away; "" for none.
    """

    key: str
    title: str
    sign: str
    remedy: str
    log: str = ""


TROUBLES = (
    Trouble(
        key="torch-missing",
        title="No torch",
        sign="`ImportError: flash_attn ... needs torch`",
        remedy="Install torch for ROCm: `pip install 'torch=={torch}.*' --index-url "
        "https://download.pytorch.org/whl/rocm{rocm}` (its name may have a third number: rocm6.2.4).",
        log=r"No module named 'torch'",
    ),
    Trouble(
        key="torch-broken",
        title="torch does not load",
        sign="`import torch` itself fails, often with the name of a library that is not found",
        remedy="Reinstall torch into a fresh environment, and leave LD_LIBRARY_PATH and LD_PRELOAD unset.",
    ),
    Trouble(
        key="torch-cpu",
        title="A CPU build of torch with a ROCm wheel",
        sign="`torch.cuda.is_available()` is False, `torch.version.hip` and `torch.version.cuda` are None",
        remedy="Replace torch by its build for ROCm: `pip install --force-reinstall 'torch=={torch}.*' --index-url "
        "https://download.pytorch.org/whl/rocm{rocm}` (its name may have a third number: rocm6.2.4).",
    ),
    Trouble(
        key="torch-cuda",
        title="A CUDA build of torch with a ROCm wheel",
        sign="`torch.version.cuda` is set and an AMD GPU is not seen; the torch of PyPI is such a build",
        remedy="Replace torch by its build for ROCm: `pip install --force-reinstall 'torch=={torch}.*' --index-url "
        "https://download.pytorch.org/whl/rocm{rocm}` (its name may have a third number: rocm6.2.4).",
    ),
    Trouble(
        key="torch-minor",
        title="Another torch than the wheel's",
        sign="pip installed the wheel with `--no-deps`, or replaced torch afterwards",
        remedy="Install torch {torch}, or the flash_attn wheel whose label names the torch that you have.",
        log=r"undefined symbol: \S*(c10|at6|torch)",
    ),
    Trouble(
        key="rocm-mismatch",
        title="Another ROCm than the wheel's",
        sign="the label of the wheel says one ROCm, `torch.version.hip` another",
        remedy="Install the flash_attn wheel whose label names the ROCm of your torch, or torch for ROCm {rocm}.",
    ),
    Trouble(
        key="wheel-incomplete",
        title="A module of the wheel is missing",
        sign="an error that ends with `reinstall the wheel`: `the launcher does not load ...`, `the kernel store ... "
        "cannot be read ...`",
        remedy="Reinstall the wheel: `pip install --force-reinstall --no-deps WHEEL`.",
        log=r"No module named 'flash_attn\.|: reinstall the wheel",
    ),
    Trouble(
        key="shadowed",
        title="Another flash_attn is imported than the installed one",
        sign="`flash_attn.__file__` is not where pip put the wheel",
        remedy="Run Python from another directory, and take the other flash_attn out of PYTHONPATH.",
    ),
    Trouble(
        key="no-device",
        title="No GPU in sight",
        sign="`torch.cuda.is_available()` is False, with torch for ROCm",
        remedy="Load the driver: `sudo modprobe amdgpu`. Give a container the devices: `docker run --device=/dev/kfd "
        "--device=/dev/dri --group-add video`. Unset HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES.",
    ),
    Trouble(
        key="no-permission",
        title="No permission on the GPU",
        sign="`torch.cuda.is_available()` is False, and `ls -l /dev/kfd` shows a group that you are not in",
        remedy="Join the groups that own the devices, `sudo usermod -aG render,video $USER`, and log in anew. In a "
        'container: `--group-add "$(stat -c %g /dev/kfd)"`.',
        log=r"/dev/(kfd|dri).*([Pp]ermission denied|not permitted)",
    ),
    Trouble(
        key="no-driver",
        title="The GPU driver library does not load",
        sign="`no GPU driver: ...`",
        remedy="torch brings the HIP runtime with it: reinstall torch, and leave LD_LIBRARY_PATH unset.",
    ),
    Trouble(
        key="two-hip-runtimes",
        title="Two HIP runtimes in one process",
        sign="crashes, `invalid device function` or wrong results; `/proc/self/maps` names two libamdhip64",
        remedy="Keep the one of torch: take the directory of the other, often /opt/rocm/lib, out of LD_LIBRARY_PATH "
        "and LD_PRELOAD, and import torch before other GPU libraries.",
    ),
    Trouble(
        key="two-tritons",
        title="Two distributions of Triton",
        sign="`import triton` fails or is the CUDA one: triton, pytorch-triton-rocm and triton-rocm share one module",
        remedy="Uninstall all, `pip uninstall triton pytorch-triton-rocm triton-rocm`, and reinstall the one that your "
        "torch requires. The kernels in the wheel need none.",
    ),
    Trouble(
        key="target-missing",
        title="The wheel has no kernels for this GPU",
        sign="`this flash_attn has no kernels for gfx...`, or seconds at each first call",
        remedy="Build a wheel that has them: `PYTORCH_ROCM_ARCH={target} ./build_rocm.sh ...`. That refuses a target "
        "which it does not know, such as gfx1031 or gfx1103: there, as on any GPU, the Triton that torch for ROCm "
        "requires compiles them at their first call. If the GPU is not to be used, list the others: `export "
        "HIP_VISIBLE_DEVICES=0`.",
        log=r"has no kernels? |invalid device function|hipErrorNoBinaryForGpu|no kernel image is available",
    ),
    Trouble(
        key="triton-not-selected",
        title="The wanted backend is not selected",
        sign="`FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE asks for the CK backend, which this wheel does not have`",
        remedy="`unset FLASH_ATTENTION_TRITON_AMD_ENABLE`: the wheel knows its backend. For the Triton kernels of any "
        "wheel set it to TRUE before Python starts.",
        log=r"asks for the CK backend|No module named 'flash_attn_2_cuda'",
    ),
    Trouble(
        key="call-failed",
        title="A call fails, or is wrong",
        sign="the doctor's own forward and backward",
        remedy="If nothing else is found, open an issue with the whole output of this command. Where the process died "
        "without a word, `sudo dmesg | grep amdgpu` may have one.",
    ),
    Trouble(
        key="build-memory",
        title="A build runs out of memory",
        sign="`Killed`, `signal 9`, exit code 137, or a machine that swaps",
        remedy="Run fewer compilers at once: `MAX_JOBS=2 ./build_rocm.sh ...`. Unset, it is chosen from cores and "
        "memory.",
        log=r"\bKilled\b|signal 9\b|SIGKILL|(code|status) 137|[Cc]annot allocate memory|bad_alloc|MemoryError"
        r"|for want of memory",
    ),
    Trouble(
        key="wheel-module",
        title="The Python module wheel is missing in a build",
        sign="`No module named 'wheel'`, `invalid command 'bdist_wheel'`",
        remedy="`pip install wheel setuptools`, or build without `--no-build-isolation`. `./build_rocm.sh` makes an "
        "environment of its own.",
        log=r"No module named '?wheel'?|invalid command 'bdist_wheel'",
    ),
)
# What stands in a remedy where the wheel or the machine does not say it.
NAMES = {"torch": "X.Y", "rocm": "X.Y", "target": "GFX"}
BY_KEY = {trouble.key: trouble for trouble in TROUBLES}


def page() -> str:
    """The table as Markdown."""
    parts = [
        f"## {each.title}\n\n**It shows as** {each.sign}.\n\n{each.remedy.format(**NAMES)} (`{each.key}`)\n"
        for each in TROUBLES
    ]
    return "\n".join(parts)
