"""Copies this repository with fewer kernels to compile, so that a test of the whole pipeline takes a minute or two.

A copy keeps some kernels, chosen for arguments that differ. In the job of the long tests it keeps every operation in
bf16, in its first kind and smallest size, and the dense forward in every kind, every dtype and in its largest size,
which uses the most registers and shared memory. The kernels of a bias have arguments of their own, so those of the
backward stay too, and the probes of firstlight. A release compiles all kernels. The remaining kernels are byte for byte
the same as in this repository.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from rocm_wheels.paths import ROOT

every_operation = False  # what conftest.py sets in the job of the long tests

_SOME = (
    *("fwd-fp16-d32", "fwd-bf16-d32", "fwd-bf16-d32-bias", "fwd-bf16-d32-any", "bwd-dq-bf16-d32", "bwd-dkdv-bf16-d32"),
    *("sparse-fwd-bf16-d64", "decode-bf16-d64", "decode-paged-bf16-d64", "combine-bf16-d128", "append-bf16-d64"),
    *("rotary-bf16-d64", "norm-fwd-bf16-d64", "norm-bwd-bf16-d64", "cross-entropy-fwd-bf16-d4096"),
    *("probe-fp16-d64", "probe-fp16-d64-wide"),
)
_TABLE = '''

_whole_table = table


def table(target: str) -> tuple[Variant, ...]:
    """The variants of a test: see tests/support/fewer_kernels.py."""
    return tuple(variant for variant in _whole_table(target) if KEPT)


'''
_SIZES = """
def _sizes(variant: Variant) -> tuple[int, ...]:
    operation, kind = variant.operation, variant.kind
    sizes = operation.sizes_for(kind)
    if variant.op == "probe":
        return sizes
    if variant.op == "fwd" and kind == "plain":
        return (sizes[0], sizes[-1]) if variant.dtype == "bf16" else sizes[:1]
    kept = variant.op == "fwd" or kind == operation.kinds[0] or (variant.op.startswith("bwd-d") and kind == "bias")
    return sizes[:1] if kept and variant.dtype == "bf16" else ()
"""


def copy(root: Path) -> None:
    """Copies the files of this repository to `root`, committed or not, without files that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def narrow(root: Path) -> None:
    """Removes kernels from the copy at `root`."""
    with (root / "flash_attn_src/flash_attn/kernels/variants.py").open("a", encoding="utf-8") as file:
        if every_operation:
            file.write(_TABLE.replace("KEPT", "variant.block_d in _sizes(variant)") + _SIZES)
        else:
            file.write(_TABLE.replace("KEPT", f"variant.name in {_SOME!r}"))
