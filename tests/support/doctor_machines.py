"""Runs the doctor on several machines, one after another: each argument is the directory of a machine's torch.

Prints a line `== NAME` before the output for each machine, and its exit code after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

for argument in sys.argv[1:]:
    path = os.pathsep.join((argument, os.environ["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn.doctor"], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE,
        encoding="utf-8", check=False,
    )  # fmt: skip
    print(f"== {Path(argument).name}\n{done.stdout}{done.returncode}", flush=True)
