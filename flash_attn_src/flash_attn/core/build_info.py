"""What the wheel was built from: `_build_info.json`, which the build puts next to the package's modules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flash_attn.core.platform import PLATFORM
from flash_attn.kernels import targets

_PATH = Path(__file__).resolve().parent.parent / "_build_info.json"
_VERSIONS = Path("rocm_wheels") / "versions.toml"


def _newest() -> str:
    """The version of a source tree: the newest release that versions.toml names. A wheel's is in its build info.

    rocm_wheels lies beside flash_attn_src in the repository, inside it in an sdist. Python 3.10 cannot read TOML.
    """
    for parent in _PATH.parents[1:3]:
        if (file := parent / _VERSIONS).is_file():
            releases = re.findall(r'^"([\d.]+)" = "\1"$', file.read_text(encoding="utf-8"), re.MULTILINE)
            return max(releases, key=lambda release: [int(part) for part in release.split(".")])
    raise ImportError(f"{_PATH.parent} has neither {_PATH.name} nor a {_VERSIONS} beside it: install a wheel")


@dataclass(frozen=True, kw_only=True)
class BuildInfo:
    """The defaults are those of a source tree. torch and rocm are the wheel's, "" where it is for any.

    repository: address of the repository that the wheel was built from, "" where the build did not know it.
    advice: what diagnosis/advice.py knows of versions and GPUs, {} in a source tree.
    planner: sha256 of `_ck_planner.so`, "" where the wheel has none.
    some_kernels: whether it has a part of its targets' kernels, as the one file of firstlight.
    """

    version: str = field(default_factory=_newest)
    label: str = ""
    backend: str = "triton"
    targets: tuple[str, ...] = ()
    torch: str = ""
    rocm: str = ""
    python: str = ""
    compiler: str = ""
    repository: str = ""
    advice: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    planner: str = ""
    some_kernels: bool = False

    @property
    def torch_minor(self) -> str:
        """Major and minor version of the wheel's torch, "2.5"; "" for any."""
        return ".".join(self.torch.split(".")[:2])

    @property
    def for_rocm(self) -> bool:
        """Whether the wheel needs torch for ROCm: its label names a ROCm, or pip compiled it only for AMD GPUs."""
        return bool(self.rocm) or (any(self.targets) and all(target.startswith("gfx") for target in self.targets))


def read(path: Path) -> BuildInfo:
    """The build info in a file; the defaults if there is none. Keys that are not known here are left out.

    Raises ImportError where the file is damaged.
    """
    if not path.is_file():
        return BuildInfo()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = {name: data[name] for name in BuildInfo.__dataclass_fields__ if data.get(name) is not None}
    except (OSError, ValueError, AttributeError) as error:
        raise ImportError(f"{path} cannot be read ({error!r}): reinstall the wheel") from error
    known["targets"] = tuple(known.get("targets", ()))
    return BuildInfo(**known)


def build_command(version: str, target: str, *, windows: bool = PLATFORM.is_windows) -> str:
    """The line that builds a wheel with kernels for a GPU target, in a shell of Linux. windows: for which system.

    "" where no such wheel is built.
    """
    if target in targets.NOT_EXECUTED or not targets.compiled(target, windows=windows):
        return ""
    return f"PYTORCH_ROCM_ARCH={target} ./build_rocm.sh {version}{' --platform windows' if windows else ''}"


@cache
def load() -> BuildInfo:
    """The build info of this installation. Raises ImportError where the package is in a zip file."""
    for parent in _PATH.parents:
        if parent.is_file():
            raise ImportError(
                f"flash_attn is in the file {parent}, and no system loads libraries out of a zip file: install it into "
                "a directory, as `pip install --target` does, or unpack the file at its start, as shiv does"
            )
    return read(_PATH)


VERSION: str = load().version
