"""Writes docs/troubleshooting.md from the doctor's own table; --check compares."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
sys.path[:0] = [str(ROOT / "flash_attn_src"), str(ROOT)]

from flash_attn.core.build_info import BuildInfo  # noqa: E402
from flash_attn.diagnosis import troubles  # noqa: E402
from flash_attn.diagnosis.advice import OVERRIDE  # noqa: E402
from flash_attn.diagnosis.commands import commands, shell_of  # noqa: E402
from flash_attn.diagnosis.survey import Facts  # noqa: E402

# The machine that the page's commands are for.
EXAMPLE = Facts(
    python="3.11",
    location="the directory of flash_attn",
    build=BuildInfo(version="2.8.3", label="rocm"),
    tritons={"triton": "", "triton-rocm": ""},
)
# The machine that the page's commands for Windows are for: a portable Python.
ON_WINDOWS = replace(
    EXAMPLE,
    windows=True,
    executable=r"C:\ComfyUI\python_embeded\python.exe",
    tritons={"triton": "", "triton-windows": ""},
)


def for_the_page(facts: Facts) -> dict[str, str]:
    """The commands of the page. TORCH, GPU and VALUE stand for what depends on the machine, which the doctor prints."""
    shell = shell_of(facts)
    pip = f"{shell.pip} install"
    return commands(facts) | {
        "torch": f"{pip} TORCH",
        "triton": shell.then([f"{shell.pip} uninstall -y {' '.join(facts.tritons)}", f"{pip} TRITON"]),
        "device_package": f'{pip} "torch[device-GPU]" --index-url INDEX',
        "family_package": f'{pip} "amd-torch-device-FAMILY" --index-url INDEX',
        "other_torch": f"{pip} TORCH",
        "override": shell.assign(OVERRIDE, "VALUE"),
        "kernels": "Build a wheel that has them: "
        f"`PYTORCH_ROCM_ARCH=GPU ./build_rocm.sh 2.8.3{' --platform windows' if facts.windows else ''}`.",
    }


HEAD = """\
# Troubleshooting

    python -m flash_attn.doctor

It prints versions, GPUs, who may use them, the backend, and one forward and backward with their errors. It ends with a
command for each thing that is wrong, and exits with 1 if there is one. It runs without torch, too.

| command | what it does |
|-|-|
| `python -m flash_attn.doctor --json` | the same for programs |
| `python -m flash_attn.doctor --log build.log` | reads the log of a build that failed, too |
| `python -m flash_attn.selftest` | checks every kind of call on your GPU against fp32, in some minutes |
| `python wheel_tests/prove_fa3_mi300x.py` | in a clone: forward and backward of the Triton kernels on an MI300X |

The doctor prints each command below for your machine. Here `TORCH` stands for the arguments that install torch for
your GPU, system and Python ([README](../README.md#install) has the common line), `GPU` for your GPU's target, and
`VALUE`, `INDEX`, `FAMILY` and `TRITON` for what else depends on the machine. The paths are those of ComfyUI's portable
Python. No AMD GPU was there when this was written: the doctor is tested with made-up machines. What is known of GPUs
and of the newest stacks is in [gpus.md](gpus.md#what-is-special-about-it).

<!-- written by docs/generate_troubleshooting.py from flash_attn_src/flash_attn/diagnosis/troubles.py -->

"""


def main() -> int:
    page = HEAD + troubles.page(for_the_page(EXAMPLE), for_the_page(ON_WINDOWS))
    if PAGE.read_text(encoding="utf-8") == page:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/troubleshooting.md is out of date: run python docs/generate_troubleshooting.py", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
