"""Writes docs/troubleshooting.md from the doctor's own table; --check compares."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
sys.path[:0] = [str(ROOT / "flash_attn_src"), str(ROOT)]

from flash_attn.diagnosis import troubles  # noqa: E402
from flash_attn.diagnosis.commands import commands  # noqa: E402
from flash_attn.diagnosis.survey import Facts  # noqa: E402
from flash_attn.runtime.build_info import BuildInfo  # noqa: E402

from rocm_wheels.matrix import versions  # noqa: E402

# The machine that the page's commands are for.
EXAMPLE = Facts(
    python="3.11",
    build=BuildInfo(
        label="rocm62torch2.6",
        torch="2.6",
        rocm="6.2",
        targets=("gfx90a", "gfx942"),
        torch_indexes=versions.load().torch_indexes(),
    ),
    tritons={"triton": "3.2.0", "pytorch-triton-rocm": "3.2.0"},
    torch_triton="pytorch-triton-rocm==3.2.0",
    probe={"torch": {"version": "2.6.0+rocm6.2.4", "hip": "6.2.41134"}, "devices": [{"target": "gfx1100"}]},
)
# The machine that the page's commands for Windows are for: a portable Python, and a wheel for every torch.
ON_WINDOWS = Facts(
    windows=True,
    executable=r"C:\ComfyUI\python_embeded\python.exe",
    build=replace(EXAMPLE.build, label="rocm", torch="", rocm="", targets=("gfx1100",)),
    tritons={"triton": "3.7.1", "triton-windows": "3.7.1"},
    probe={"torch": {"version": "2.12.0+rocm7.14.0", "hip": "7.14.60850"}, "devices": [{"target": "gfx1101"}]},
)
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

The commands below are for torch 2.6, ROCm 6.2 and a Radeon RX 7900 XTX (gfx1100). The commands for Windows are for a
Radeon RX 7800 XT (gfx1101) and ComfyUI's portable Python. The doctor prints the commands for your machine. No AMD GPU
was there when this was written: the doctor is tested with made-up machines. What is known of GPUs and of the newest
stacks is in [hardware.md](hardware.md).

<!-- written by docs/generate_troubleshooting.py from flash_attn_src/flash_attn/diagnosis/troubles.py -->

"""


def main() -> int:
    page = HEAD + troubles.page(commands(EXAMPLE), commands(ON_WINDOWS))
    if PAGE.read_text(encoding="utf-8") == page:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/troubleshooting.md is out of date: run python docs/generate_troubleshooting.py", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
