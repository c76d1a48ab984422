"""Runs the doctor on several machines, one after another: each argument is the directory of a machine's torch.

Prints a line `== NAME` before the output for each machine, and its exit code after it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

machines, sys.argv = sys.argv[1:], ["-m"]
sys.orig_argv.append("flash_attn.doctor")  # flash_attn then imports no torch, as for `python -m flash_attn.doctor`
from flash_attn.diagnosis import doctor  # noqa: E402

packages = os.environ["PYTHONPATH"]
for machine in machines:
    # The doctor looks at torch in a process of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join((machine, packages))
    sys.path.insert(0, machine)
    print(f"== {Path(machine).name}", flush=True)
    print(doctor.main([]), flush=True)
    sys.path.remove(machine)
