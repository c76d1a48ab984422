"""Known problems of an installation, with symptoms and remedies.

`flash_attn.doctor` finds these, and docs/troubleshooting.md is this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """`sign` is the symptom that a user sees. `remedy` may name commands of commands.py in braces.

    `windows` is the remedy on Windows: "" if `remedy` works there too, None if the trouble does not exist there. A
    trouble without `remedy` exists on Windows alone.
    `log` is a regular expression for the line of a build's log that shows the trouble; "" if there is no such line.
    `note`: flash_attn itself is right, so that the doctor's exit status is 0.
    """

    key: str
    title: str
    sign: str
    remedy: str = ""
    windows: str | None = ""
    log: str = ""
    note: bool = False

    def advice(self, *, on_windows: bool) -> str:
        """The remedy for a system, with the names of commands in braces."""
        return (on_windows and self.windows) or self.remedy


# Firmware of the GPU's scheduler (MES) that makes any program fault: its version and package, by target.
# ROCm/legacy-rocm-build#5724, #5616
FAULTY_MES = dict.fromkeys(("gfx1150", "gfx1151"), (0x83, "linux-firmware 20251125"))

TROUBLES = (
    Trouble(
        key="torch-missing",
        title="No torch",
        sign="`ImportError: flash_attn ... needs torch`",
        remedy="Install torch for ROCm: `{torch}`.",
        log=r"No module named 'torch'",
    ),
    Trouble(
        key="torch-broken",
        title="torch does not load",
        sign="`import torch` itself fails, often with the name of a library that is not found",
        remedy="Install torch again: `{torch} --force-reinstall`. If that changes nothing: `unset LD_LIBRARY_PATH "
        "LD_PRELOAD`, because they can lead torch to another library of the same name.",
        windows="Install Microsoft's Visual C++ Redistributable, which torch needs: "
        "https://aka.ms/vs/17/release/vc_redist.x64.exe. If that changes nothing, install torch again: `{torch}`.",
    ),
    Trouble(
        key="torch-cpu",
        title="A CPU build of torch with a ROCm wheel",
        sign="`torch.cuda.is_available()` is False, `torch.version.hip` and `torch.version.cuda` are None",
        remedy="Replace torch by its build for ROCm: `{torch}`.",
    ),
    Trouble(
        key="torch-cuda",
        title="A CUDA build of torch with a ROCm wheel",
        sign="`torch.version.cuda` is set and an AMD GPU is not seen; the torch of PyPI is such a build",
        remedy="Replace torch by its build for ROCm: `{torch}`.",
    ),
    Trouble(
        key="blocked",
        title="Windows blocks a file",
        sign="`WinError 4551` or `An Application Control policy has blocked this file`: the file is there, and Windows "
        "does not load it",
        windows="Smart App Control and policies of companies block libraries without a signature, such as torch's and "
        "this wheel's. Smart App Control: Windows Security, App & browser control, Smart App Control settings, Off. "
        "A company's policy: its administrator allows {location}. Where a virus scanner has removed the file, restore "
        "it in the scanner, exclude that directory, then `{reinstall}`.",
    ),
    Trouble(
        key="torch-unsuitable",
        title="torch does not fit this GPU",
        sign="`invalid device function` or no kernels for a new GPU, with a torch for an older ROCm or for other GPUs",
        remedy="Install the torch for this GPU: `{torch}`.",
    ),
    Trouble(
        key="torch-minor",
        title="Another torch than the wheel's",
        sign="pip installed the wheel with `--no-deps`, or replaced torch afterwards",
        remedy="Install the torch that the wheel is for: `{torch}`. The universal wheel of flash_attn is for every "
        "torch from 2.5 on.",
        log=r"undefined symbol: \S*(c10|at6|torch)",
    ),
    Trouble(
        key="rocm-mismatch",
        title="Another ROCm than the wheel's",
        sign="the label of the wheel says one ROCm, `torch.version.hip` another",
        remedy="Install torch for the ROCm of the wheel: `{torch}`. To keep your torch instead, install the "
        "flash_attn wheel that names its ROCm.",
    ),
    Trouble(
        key="wheel-incomplete",
        title="A module of the wheel is missing",
        sign="an error that ends with `reinstall the wheel`: `the launcher does not load ...`, `the kernel store ... "
        "cannot be read ...`",
        remedy="Install the wheel again: `{reinstall}`.",
        windows="Install the wheel again: `{reinstall}`. If a file is missing again afterwards, a virus scanner "
        "removes it: restore it there, and exclude {location}.",
        log=r"No module named 'flash_attn\.|: reinstall the wheel",
    ),
    Trouble(
        key="leftovers",
        title="A package that pip could not remove",
        sign="a directory such as `~lash_attn` beside the packages, and pip warns of an `invalid distribution`",
        remedy="A program, such as ComfyUI, had its files open while pip ran. Close it, then {leftovers}, and install "
        "again: `{reinstall}`.",
        note=True,
    ),
    Trouble(
        key="shadowed",
        title="Another flash_attn is imported than the installed one",
        sign="`flash_attn.__file__` is not where pip put the wheel",
        remedy="Run Python elsewhere and without PYTHONPATH: `cd / && env -u PYTHONPATH python -m flash_attn.doctor`.",
        windows="Run Python elsewhere and without PYTHONPATH: `cd /`, then `{python} -E -m flash_attn.doctor`.",
    ),
    Trouble(
        key="gpu-hidden",
        title="A variable hides the GPU",
        sign="`torch.cuda.is_available()` is False, or torch sees another GPU than the wheel's, and "
        "HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES is set",
        remedy="{unset}, then start Python again. The first GPU has the number 0.",
    ),
    Trouble(
        key="another-gpu",
        title="The wheel is for another GPU of this machine",
        sign="`this flash_attn has no kernels for gfx1036`, or for another GPU, beside a GPU that the wheel is for",
        remedy="Programs use the first GPU that they see. {other_gpu} before Python starts: it is then the first one.",
    ),
    Trouble(
        key="no-kfd",
        title="The GPU driver is not loaded",
        sign="`torch.cuda.is_available()` is False, and there is no /dev/kfd",
        remedy="Load the driver: `sudo modprobe amdgpu && ls -l /dev/kfd`. If modprobe finds no such module, install "
        "AMD's driver: https://rocm.docs.amd.com/projects/install-on-linux/",
        windows=None,
    ),
    Trouble(
        key="no-kfd-in-container",
        title="The container has no GPU",
        sign="`torch.cuda.is_available()` is False in a container, and there is no /dev/kfd in it",
        remedy="Start the container with the devices: `docker run --device=/dev/kfd --device=/dev/dri --group-add "
        'video --group-add "$(stat -c %g /dev/kfd)" ...`.',
        windows=None,
    ),
    Trouble(
        key="no-device",
        title="The driver offers no GPU",
        sign="`torch.cuda.is_available()` is False, /dev/kfd is there, and no variable hides a GPU",
        remedy="The driver's own messages say why: `sudo dmesg | grep -i -e amdgpu -e kfd`.",
        windows=None,
    ),
    Trouble(
        key="no-rocdxg",
        title="WSL without librocdxg",
        sign="`torch.cuda.is_available()` is False in WSL, /dev/dxg is there, and there is no librocdxg",
        remedy="ROCm reaches the GPU of WSL through librocdxg. Install its package from "
        "https://github.com/ROCm/librocdxg/releases, then {use_dxg} before Python starts.",
        windows=None,
    ),
    Trouble(
        key="torch-runtime-in-wsl",
        title="torch's own ROCm runtime in WSL",
        sign="`torch.cuda.is_available()` is False in WSL, `rocminfo` shows the GPU, and libhsa-runtime64 is in "
        "torch/lib",
        remedy="librocdxg and ROCm's runtime must be of one release, and torch brings a runtime of its own. {use_dxg} "
        "before Python starts. If that changes nothing, put the machine's runtime in its place: `{system_runtime}`.",
        windows=None,
    ),
    Trouble(
        key="no-device-of-windows",
        title="The driver of Windows offers no GPU",
        sign="`torch.cuda.is_available()` is False on Windows or in WSL, and no variable hides a GPU",
        remedy="Install AMD's newest driver in Windows, https://www.amd.com/en/support, restart Windows, run "
        "`wsl --update` in PowerShell, and {use_dxg} in WSL before Python starts.",
        windows="Install AMD's newest driver, https://www.amd.com/en/support, and restart Windows.",
    ),
    Trouble(
        key="no-permission",
        title="No permission on the GPU",
        sign="`torch.cuda.is_available()` is False, and `ls -l /dev/kfd` shows a group that you are not in",
        remedy="Join the groups that own the devices, `sudo usermod -aG {groups} $USER`, then log out and in again.",
        windows=None,
        log=r"/dev/(kfd|dri).*([Pp]ermission denied|not permitted)",
    ),
    Trouble(
        key="no-permission-in-container",
        title="No permission on the GPU in the container",
        sign="`torch.cuda.is_available()` is False in a container, and `ls -l /dev/kfd` shows a group that you are "
        "not in",
        remedy="Start the container with the group that owns the device: `docker run --device=/dev/kfd "
        '--device=/dev/dri --group-add video --group-add "$(stat -c %g /dev/kfd)" ...`, with stat on the host.',
        windows=None,
    ),
    Trouble(
        key="no-driver",
        title="The GPU driver library does not load",
        sign="`no GPU driver: ...`",
        remedy="The HIP runtime comes with torch. Install torch again: `{torch} --force-reinstall`. If that changes "
        "nothing: `unset LD_LIBRARY_PATH`.",
        windows="The HIP runtime comes with torch. Install torch again: `{torch}`.",
    ),
    Trouble(
        key="faulty-firmware",
        title="Firmware with which every program faults",
        sign="memory access faults and hangs in any program on "
        + ", ".join(
            f"{target} with MES firmware {version:#x} ({package})" for target, (version, package) in FAULTY_MES.items()
        ),
        remedy="Install another release of the system's GPU firmware, and restart. Older releases are right: on Fedora "
        "`sudo dnf downgrade amd-gpu-firmware`. Newer ones are right for gfx1150: `sudo dnf upgrade amd-gpu-firmware`, "
        "on Ubuntu `sudo apt install --only-upgrade linux-firmware`.",
        windows=None,
    ),
    Trouble(
        key="fp16-of-mi200",
        title="fp16 of an MI200 loses small numbers",
        sign="training in fp16 on an MI200 (gfx90a) differs from other GPUs where numbers are small",
        remedy="Its matrix instructions take numbers below 6.1e-5 as 0. The kernels scale what they can. Where q, k or "
        "v have a standard deviation of 1e-3 or less, or rows of dout differ by more than 2^10, take bf16 or scale: "
        "docs/notes/mi200.md of the repository has the bounds.",
        windows=None,
        note=True,
    ),
    Trouble(
        key="two-hip-runtimes",
        title="Two HIP runtimes in one process",
        sign="crashes, `invalid device function` or wrong results; `/proc/self/maps` names two libamdhip64",
        remedy="Use torch's runtime alone: `unset LD_LIBRARY_PATH LD_PRELOAD`, and import torch before other GPU "
        "libraries.",
        windows="torch's c10_hip.dll would name the right one, and is not loaded. Install torch for ROCm again: "
        "`{torch}`.",
    ),
    Trouble(
        key="replaced-hip-runtime",
        title="Windows' HIP runtime in the place of torch's",
        sign="crashes or `invalid device function` on Windows, where something loads amdhip64_7.dll of System32 before "
        "torch",
        windows="Each release of torch needs the HIP runtime that it brings. Install torch again: `{torch}`. If that "
        "changes nothing, something in this Python loads System32's runtime before torch does, such as a package that "
        "starts by itself.",
    ),
    Trouble(
        key="two-tritons",
        title="Two distributions of Triton",
        sign="`import triton` fails or imports the CUDA build: triton, pytorch-triton-rocm and triton-rocm share one "
        "module",
        remedy="Keep the Triton that your torch requires: `{triton}`. The wheel's compiled kernels need no Triton.",
        windows="Keep one of them: `{triton}`. The wheel's compiled kernels need no Triton.",
    ),
    Trouble(
        key="device-package-empty",
        title="torch 2.12 for ROCm 7.14 on gfx90a",
        sign="`hipErrorInvalidImage: device kernel image is invalid` at the first kernel of torch itself, on an MI200",
        remedy="That torch contains two empty files that HIP loads as its kernels (ROCm/TheRock#7081). Delete them: "
        '`find "$(python -c \'import sysconfig; print(sysconfig.get_path("purelib"))\')" -name '
        "'torch_gfx90a:xnack*.kpack' -delete`, or install torch 2.11.",
        windows=None,
    ),
    Trouble(
        key="device-package-missing",
        title="torch for ROCm 7.14 or newer without the package of this GPU",
        sign="`torch.cuda.is_available()` is True, and the first kernel of torch itself ends with "
        "`hipErrorInvalidImage: device kernel image is invalid`",
        remedy="In AMD's index of ROCm 7.14, and from 10.0 on everywhere, torch's kernels for each GPU are a package "
        "of their own. Install it: "
        "`{device_package}`.",
    ),
    Trouble(
        key="torch-lacks-gpu",
        title="torch itself has no kernels for this GPU",
        sign="`torch.cuda.is_available()` is True, and the first kernel of torch itself ends with "
        "`invalid device function`: PyTorch's wheels have no kernels for RX 5000, RX 6700 and smaller, and others",
        remedy="Install a torch that has them: `{other_torch}`.{or_override}",
    ),
    Trouble(
        key="target-missing",
        title="The wheel has no kernels for this GPU",
        sign="`this flash_attn has no kernels for gfx...`, or seconds at each first call",
        remedy="{kernels}",
        log=r"has no kernels? |invalid device function|hipErrorNoBinaryForGpu|no kernel image is available",
    ),
    Trouble(
        key="target-of-a-relative",
        title="The GPU runs the kernels of a relative",
        sign="`this flash_attn has no kernels for gfx1031`, or another of gfx1031 to gfx1036, gfx1103, gfx1152, "
        "gfx1153",
        remedy="{override} before Python starts: HIP then loads the kernels of the relative. AMD does not support "
        "it, and `{python} -m flash_attn.selftest` says whether the results are right.",
        windows=None,
    ),
    Trouble(
        key="triton-not-selected",
        title="The wanted backend is not selected",
        sign="`FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE asks for the CK backend, which this wheel does not have`",
        remedy="{unset_triton}: the wheel knows its backend. For the Triton kernels of any wheel: {set_triton} before "
        "Python starts.",
        log=r"asks for the CK backend|No module named 'flash_attn_2_cuda'",
    ),
    Trouble(
        key="variable",
        title="A variable has a wrong name or value",
        sign="`FLASH_ATTENTION_KERNEL_SOURCE=... is none of asm, ck, triton`, or a variable without an effect",
        remedy="flash_attn reads FLASH_ATTENTION_TRITON_AMD_ENABLE and FLASH_ATTENTION_TRITON_AMD_AUTOTUNE, TRUE or "
        "FALSE, FLASH_ATTENTION_KERNEL_SOURCE, asm, ck or triton, and FLASH_ATTENTION_MAX_LAUNCH_SECONDS, a number; a "
        "wheel of Triton kernels alone has no asm and no ck. Set them before Python starts, or remove them.",
    ),
    Trouble(
        key="variable-of-linux",
        title="A variable of Linux on Windows",
        sign="ROCR_VISIBLE_DEVICES or HSA_OVERRIDE_GFX_VERSION is set on Windows, and changes nothing",
        windows="HIP on Windows does not read it. HIP_VISIBLE_DEVICES selects GPUs there, and no variable makes one "
        "GPU run the kernels of another. To remove it: {unset_linux}.",
        note=True,
    ),
    Trouble(
        key="out-of-memory",
        title="The GPU has too little memory",
        sign="`OutOfMemoryError: HIP out of memory` at a small call",
        remedy="Close programs that use the GPU. A GPU in a processor has the memory that the BIOS (UMA frame "
        "buffer size) or the driver's settings give it: give it more.",
    ),
    Trouble(
        key="call-failed",
        title="A call fails, or is wrong",
        sign="the forward or backward that the doctor runs fails",
        remedy="If nothing else is found, report it with all that this command prints: {issue}. Where the process "
        "died without a message, {driver_log}.",
    ),
    Trouble(
        key="nothing-launched",
        title="A launch that does nothing",
        sign="results that are zeros, NaN or old values, without an error",
        remedy="The driver accepted the launch and did not run it. Print its log: {log_level}, then "
        "`{python} -m flash_attn.doctor`, and report it with all of that: {issue}.",
    ),
    Trouble(
        key="torch-attention",
        title="torch's own attention fails",
        sign="zeros from `scaled_dot_product_attention`, or `hipErrorInvalidValue` at the next kernel after it, of "
        "whatever library. flash_attn itself is right",
        remedy="AOTriton, inside torch, has found no kernels for this GPU (pytorch#194498, ROCm/TheRock#7992). Where "
        "torch's kernels are packages of their own, that of the GPU's family is missing: `{family_package}`. "
        "`flash_attn.use_for_sdpa()` serves such calls by flash_attn.",
    ),
    Trouble(
        key="torch-experimental",
        title="torch does not use its own attention kernels",
        sign="`scaled_dot_product_attention` is slow and takes much memory on a Radeon, and torch warns that attention "
        "on this GPU `is still experimental`. flash_attn itself is right",
        remedy="torch takes the math path, which needs memory for all scores. Two ways out: {experimental} before you "
        "start Python, for torch's own kernels; or `flash_attn.use_for_sdpa()`, or `{python} -m flash_attn.sdpa FILE` "
        "for a program that you do not change, for the kernels of flash_attn. Both together work too.",
        note=True,
    ),
    Trouble(
        key="triton-barriers",
        title="A Triton that compiles wrong barriers for Radeon",
        sign="`torch.compile` and other programs with Triton kernels of their own give other results from run to run "
        "on a Radeon, with a Triton 3.8 of ROCm's wheels. flash_attn's compiled kernels are right",
        remedy="The compiler leaves out waits for stores (triton#10906). ROCm/triton#968 mends it (commit 6cdb2d05). "
        "Take a newer torch of ROCm, `{torch} --upgrade --force-reinstall`, and run this command again.",
        note=True,
    ),
    Trouble(
        key="build-memory",
        title="A build runs out of memory",
        sign="`Killed`, `signal 9`, exit code 137, or a machine that swaps",
        remedy="Run fewer compilers at once: {max_jobs}, then build again. Unset, it is chosen from cores and memory.",
        windows=None,  # wheels for Windows are built on Linux
        log=r"\bKilled\b|signal 9\b|SIGKILL|(code|status) 137|[Cc]annot allocate memory|bad_alloc|MemoryError"
        r"|most likely for want of memory",
    ),
    Trouble(
        key="wheel-module",
        title="The Python module wheel is missing in a build",
        sign="`No module named 'wheel'`, `invalid command 'bdist_wheel'`",
        remedy="`{pip} install wheel setuptools`, or build without `--no-build-isolation`. `./build_rocm.sh` makes an "
        "environment of its own.",
        windows=None,
        log=r"No module named '?wheel'?|invalid command 'bdist_wheel'",
    ),
)
BY_KEY = {trouble.key: trouble for trouble in TROUBLES}


def page(commands: Mapping[str, str], on_windows: Mapping[str, str]) -> str:
    """The table as Markdown, with the commands of an example of each system."""
    return "\n".join(_section(trouble, commands, on_windows) for trouble in TROUBLES)


def _section(trouble: Trouble, commands: Mapping[str, str], on_windows: Mapping[str, str]) -> str:
    paragraphs = [f"## {trouble.title}", f"**Symptom:** {trouble.sign}."]
    here, there = trouble.remedy.format(**commands), trouble.advice(on_windows=True).format(**on_windows)
    paragraphs.append(f"{here or there} (`{trouble.key}`)")
    if here and trouble.windows is not None and there != here:
        paragraphs.append(f"On Windows: {there}")
    return "\n\n".join(paragraphs) + "\n"
