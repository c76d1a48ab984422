"""Writes docs/troubleshooting.md from the doctor's own table; --check compares."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
sys.path.insert(0, str(ROOT / "flash_attn_src"))

from flash_attn.diagnosis import troubles  # noqa: E402

HEAD = """\
# Troubleshooting

    python -m flash_attn.doctor

prints what a report of a bug needs: versions, the label of the wheel, its GPU targets, the devices and who may use
them, the backend, the driver library, and one forward and backward with their errors. It ends with the remedy for each
thing that it finds wrong, in the words of this page, and exits with 1 if there is one. It runs without torch, too.
X.Y and GFX stand for versions and a GPU target that it fills in.

| | |
|-|-|
| `python -m flash_attn.doctor --json` | the same for programs |
| `python -m flash_attn.doctor --log build.log` | reads the log of a build that failed, too |
| `python wheel_tests/test_fa3.py` | one forward of the Triton kernels on the GPU |
| `python wheel_tests/prove_fa3_mi300x.py` | forward and backward on an MI300X against fp32 |

No AMD GPU was there when this was written: what the doctor says of one is tested with made-up machines.

<!-- written by docs/generate_troubleshooting.py from flash_attn_src/flash_attn/diagnosis/troubles.py -->

"""


def main() -> int:
    page = HEAD + troubles.page()
    if PAGE.read_text(encoding="utf-8") == page:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/troubleshooting.md is out of date: run python docs/generate_troubleshooting.py", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
