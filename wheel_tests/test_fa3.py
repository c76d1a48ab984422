"""One forward of FA3: the Triton kernels, which FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE selects, on the GPU here.

    python wheel_tests/test_fa3.py [index of the GPU]

Exit code 0: the GPU computed it, and right; 1: not; 2: there is no GPU, pure PyTorch ran on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helpers import Device

BACKEND = "flash_attn.attention.backends.triton"
VARIABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"


def test_forward(fitting: list[Device], record_property: Callable[[str, object], None]) -> None:
    """Runs in another process, because the backend is chosen when flash_attn is imported."""
    command = [sys.executable, __file__, str(fitting[0].index)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record_property("error bfloat16 forward", printed_error(done.stdout))


def printed_error(text: str) -> float:
    """Reads the error from the output of `main`."""
    return float(text.partition(": error ")[2].partition(",")[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=int, nargs="?", default=0, help="of the GPU (0)")
    index = parser.parse_args(argv).index
    os.environ[VARIABLE] = "TRUE"
    try:
        import torch
        from flash_attn import flash_attn_func
        from flash_attn.attention import backends
        from helpers import TOLERANCE, devices, error, inputs, reference
    except ModuleNotFoundError as missing:
        print(f"FA3 did not run: {missing.name} is not installed in {sys.executable}; pip install torch and the wheel")
        return 1
    device = next((each for each in devices() if each.index == index), None)
    q, k, v, _ = inputs(2, 512, 512, 8, 8, 64, torch.bfloat16, "cpu" if device is None else f"cuda:{device.index}")
    out = flash_attn_func(q, k, v, causal=True)
    wanted, _ = reference(q, k, v, causal=True)
    found, limit = error(out, wanted), TOLERANCE[q.dtype][0]
    where = "the CPU" if device is None else f"{device.name} ({device.target})"
    backend = backends.select(q)
    print(f"{tuple(out.shape)} on {where} by {backend.name}: error {found:.2e}, at most {limit:.1e}")
    if found > limit:
        print("FA3 forward failed: the result is wrong")
        return 1
    if device is None:
        print(f"FA3 did not run: torch {torch.__version__} sees no GPU {index}; pure PyTorch gave this result")
        return 2
    if backend.name != BACKEND:
        print(f"FA3 did not run: GPU tensors go to {backend.name}, not to {BACKEND}")
        return 1
    print("FA3 forward success")
    return 0


if __name__ == "__main__":
    sys.exit(main())
