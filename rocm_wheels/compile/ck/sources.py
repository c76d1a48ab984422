"""The headers of Composable Kernel: pip fetches one locked archive; it is unpacked into the cache and patched there."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from rocm_wheels.compile import download
from rocm_wheels.errors import DataError
from rocm_wheels.tables import Table, parse

DATA_FILE = Path(__file__).with_name("composable_kernel.toml")

# pip asks a source distribution for its metadata before it downloads it, and flash-attn's setup.py imports torch for
# that. These stand-ins have only names; nothing is called if the build of the extension is switched off.
_TORCH_STAND_IN = """\
import sys, types
__version__ = "0"
class _Name(type):
    pass
extension = types.ModuleType("torch.utils.cpp_extension")
for name in ("BuildExtension", "CppExtension", "CUDAExtension"):
    setattr(extension, name, _Name(name, (), {}))
extension.CUDA_HOME = extension.ROCM_HOME = None
extension.IS_HIP_EXTENSION = False
utils = types.ModuleType("torch.utils")
utils.cpp_extension = extension
sys.modules["torch.utils"], sys.modules["torch.utils.cpp_extension"] = utils, extension
"""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A patch: replaces the only occurrence of `find` in `file`. why: the reason."""

    file: str
    why: str
    find: str
    put: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A locked source distribution that contains a revision of Composable Kernel, and the patches to its headers."""

    package: str
    version: str
    sha256: str
    revision: str
    directory: str
    fixes: tuple[Fix, ...]

    @property
    def key(self) -> str:
        """Digest of the archive and the patches: it changes if a byte of them changes."""
        texts = [self.sha256, self.directory, *(part for fix in self.fixes for part in (fix.file, fix.find, fix.put))]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@cache
def load(path: Path = DATA_FILE) -> Source:
    """Reads the data file. Raises DataError if its content is wrong."""
    root = Table(path.name, "", parse(path.read_text(encoding="utf-8"), path.name))
    table = root.table("source")
    source = Source(
        package=table.text("package"),
        version=table.version("version"),
        sha256=table.text("sha256"),
        revision=table.text("revision"),
        directory=table.text("directory"),
        fixes=tuple(Fix(**fix) for fix in root.get("fix", list)),
    )
    table.finish()
    root.finish()
    return source


def headers(cache: Path) -> Path:
    """The include directory with the patched ck_tile headers. It is fetched once and then read from the cache.

    Raises MissingTool if pip cannot fetch the archive, DataError if its digest or the anchor of a patch is wrong.
    """
    source = load()
    place = cache / "composable_kernel" / source.key[:16]
    if (place / "include").is_dir():
        return place / "include"
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ck-", dir=place.parent) as scratch:
        tree = Path(scratch) / "tree"
        _unpack(_fetch(source, Path(scratch)), source, tree)
        apply(source.fixes, tree / "include")
        try:
            tree.rename(place)
        except OSError:
            # Another process has unpacked the same files first.
            if not (place / "include").is_dir():
                raise
    return place / "include"


def apply(fixes: Sequence[Fix], include: Path) -> None:
    """Applies the patches to an unpacked include directory. Raises DataError unless each anchor occurs exactly once."""
    for fix in fixes:
        path = include / fix.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (count := text.count(fix.find)) != 1:
            raise DataError(
                f"{DATA_FILE.name}: the anchor of a fix occurs {count} times in {fix.file}, not once: {fix.why}",
                remedy="these headers are of another revision: look whether the fix is in them already",
            )
        path.write_text(text.replace(fix.find, fix.put), encoding="utf-8")


def _fetch(source: Source, scratch: Path) -> Path:
    stand_in, output = scratch / "stand-in" / "torch", scratch / "archive"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").write_text(_TORCH_STAND_IN, encoding="utf-8")
    return download.fetch(
        f"{source.package}=={source.version}",
        ("--no-build-isolation", "--no-binary", ":all:"),
        output,
        sha256=source.sha256,
        locked_in=DATA_FILE,
        holds="the headers of Composable Kernel",
        remedy="Look at pip's own settings (index, proxy). The archive is needed once, then it is in the cache.",
        environment={**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "PYTHONPATH": str(stand_in.parent)},
    )


def _unpack(archive: Path, source: Source, tree: Path) -> None:
    """Extracts include/ck_tile of the archive's Composable Kernel."""
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            content = tar.extractfile(member)
            if content is None or not path.is_relative_to(f"{source.directory}/include/ck_tile"):
                continue
            target = tree / path.relative_to(source.directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as output:
                shutil.copyfileobj(content, output)
