"""A checkout of ROCm/aotriton: where its kernels are, and which tile its tuning database has for a call.

The database is a SQLite file in an archive for each GPU and kernel. A row describes a call. Its sequence lengths are
bins: a call uses the first bin that is not shorter than it, or else the last bin.
"""

from __future__ import annotations

import ast
import sqlite3
import tarfile
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

FORWARD, DKDV, DQ = "attn_fwd", "bwd_kernel_dk_dv", "bwd_kernel_dq"
# The file of each kernel. A backward kernel has the name of its file.
_FILES = {FORWARD: "fwd_kernel"}
# The head dims that kernels are compiled for. Another head dim is padded to the next one.
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 512)
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
# The database's number for a window. AOTriton treats a causal mask as a window.
WINDOWED = 3


class Tile(NamedTuple):
    """A row of the tuning database. preload: whether V is loaded before the scores (forward alone)."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    waves_per_eu: int
    preload: bool = False


@dataclass(frozen=True)
class Checkout:
    """root: the directory of the checkout. Each method raises ValueError, which names what the checkout lacks."""

    root: Path

    @property
    def kernels(self) -> Path:
        """The directory of the Triton kernels."""
        return self._existing(Path("modules/flash/kernel"))

    def module(self, kernel: str) -> str:
        """The module with a kernel, without the suffix .py."""
        return _FILES.get(kernel, kernel)

    def arguments(self, kernel: str) -> list[str]:
        """The names of a kernel's arguments."""
        path = self._existing(self.kernels.relative_to(self.root) / f"{self.module(kernel)}.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name == kernel:
                return [argument.arg for argument in node.args.args]
        raise ValueError(f"{path} has no function {kernel}: this version of AOTriton is not supported")

    def tile(self, target: str, kernel: str, dtype: str, head_dim: int, tokens: int, *, causal: bool) -> Tile:
        """The tile for a call with as many queries as keys, without dropout and bias."""
        path = self._existing(Path("modules/flash/database/amd") / target / f"{kernel}.sqlite3.tar.xz")
        length = "Max_seqlen" if kernel == FORWARD else "max_seqlen"
        column = '"tuned_kernel$PRE_LOAD_V"' if kernel == FORWARD else "0"
        select = (
            f'SELECT "tuned_kernel$BLOCK_M", "tuned_kernel$BLOCK_N", "compiler_options$num_warps",'
            f' "compiler_options$num_stages", "compiler_options$waves_per_eu", {column} FROM "FLASH${kernel}"'
            f' WHERE "inputs$Q_dtype" = ? AND "inputs$BLOCK_DMODEL" = ? AND "inputs$CAUSAL_TYPE" = ?'
            f' AND "inputs$ENABLE_DROPOUT" = 0 AND "inputs$PADDED_HEAD" = 0 AND "inputs$BIAS_TYPE" = 0'
            f' AND "inputs${length}_q" = "inputs${length}_k"'
            f' ORDER BY "inputs${length}_q" < ?, abs("inputs${length}_q" - ?) LIMIT 1'
        )
        call = (_DTYPES[dtype], padded(head_dim), WINDOWED if causal else 0, tokens, tokens)
        try:
            row = _database(path).execute(select, call).fetchone()
        except sqlite3.Error as error:
            raise ValueError(f"{path}: {error}: this version of AOTriton's database is not supported") from error
        if row is None:
            raise ValueError(f"{path} has no row for {dtype}, head dim {call[1]}, CAUSAL_TYPE {call[2]}")
        block_m, block_n, warps, stages, waves, preload = map(int, row)
        return Tile(block_m, block_n, warps, stages, waves, bool(preload))

    def _existing(self, part: Path) -> Path:
        path = self.root / part
        if not path.exists():
            raise ValueError(
                f"{path} does not exist: name a checkout of https://github.com/ROCm/aotriton, which has the GPUs "
                f"{', '.join(sorted(path.name for path in self.root.glob('modules/flash/database/amd/*'))) or 'none'}"
            )
        return path


def padded(head_dim: int) -> int:
    """The head dim of the kernel that serves a head dim. Raises ValueError above the largest."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise ValueError(f"AOTriton has kernels up to head dim {HEAD_DIMS[-1]}, not {head_dim}")


@cache
def _database(path: Path) -> sqlite3.Connection:
    """The database of an archive, in memory."""
    database = sqlite3.connect(":memory:")
    with tempfile.TemporaryDirectory(prefix="aotriton-") as directory, tarfile.open(path) as archive:
        name = path.name.removesuffix(".tar.xz")
        member = archive.extractfile(name) if name in archive.getnames() else None
        if member is None:
            raise ValueError(f"{path} has no member {name}: this version of AOTriton is not supported")
        unpacked = Path(directory, name)
        unpacked.write_bytes(member.read())
        with sqlite3.connect(unpacked) as stored:
            stored.backup(database)
    return database
