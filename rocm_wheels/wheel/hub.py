"""`hub`: a finished wheel as a repository for Hugging Face's package `kernels`, one directory for each build variant.

`kernels` loads a repository as a module with a name of its own, so that several repositories and an installed
flash_attn can be loaded in one process: absolute imports and the namespace of the custom ops get that name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.platforms import DEFAULT, platform_of
from rocm_wheels.wheel.contents import BUILD_INFO, Contents

NAME = "flash-attn-rocm"
VERSION = 1  # version of the repository's API: Hub branch v1
# Use the variants without a torch/ROCm version: they match every version.
_VARIANTS = ("rocm", "cpu")
_FOR_GPUS = ("_kernels/", "_launcher.", "_ck_planner.")
_PACKAGE = "flash_attn/"
_BUILD_INFO = BUILD_INFO.removeprefix(_PACKAGE)
# Places where the package's code names itself: imports, names of modules and custom ops, and the ops.
_OWN_NAME = re.compile(
    r'^( *from )flash_attn(?=[. ])|(")flash_attn(?=\.\w|::)|(torch\.ops\.)flash_attn\b', re.MULTILINE
)
_OWN_IMPORT = re.compile(r"^( *import )flash_attn$", re.MULTILINE)
_CARD = """---
library_name: kernels
license: [bsd-3-clause, mit]
tags: [kernels, rocm]
---

FlashAttention {version} for AMD GPUs, with kernels compiled ahead of time for {targets}. It needs
torch 2.5 or newer, on Linux and x86-64.

    from kernels import get_kernel
    flash_attn = get_kernel("<owner>/{name}", version={api}, trust_remote_code=True)
    out = flash_attn.flash_attn_func(q, k, v, causal=True)

`flash_attn.flash_attn_with_kvcache` decodes. `flash_attn.sparse` has block-sparse attention, and `flash_attn.flex`
serves PyTorch's FlexAttention without a compiler: use them as attributes, because no `import` finds them by this name.
"""


def write(wheel: Path, output: Path) -> list[Path]:
    """Writes the repository of a wheel of flash_attn into the new directory `output`. Returns its variants.

    Raises DataError for another file, and if `output` has files.
    """
    if output.exists() and any(output.iterdir()):
        raise DataError(f"{output} is not empty", remedy="Name a new directory.")
    if platform_of(wheel.name).name != DEFAULT:
        raise DataError(
            f"{wheel.name} is for Windows; `hub` writes variants for Linux", remedy="Give a manylinux wheel."
        )
    with Contents(wheel) as opened:
        info = opened.build_info()
        files = {
            name.removeprefix(_PACKAGE): opened.archive.read(name)
            for name in opened.names
            if name.startswith((_PACKAGE, f"{opened.info}/licenses/"))
        }
        digest = opened.digest()
        license_ = HeaderParser().parsestr(opened.metadata().decode())["License-Expression"]
    card = _CARD.format(version=info["version"], targets=", ".join(info["targets"]), name=NAME, api=VERSION)
    variants = []
    for backend in _VARIANTS:
        if backend == "cpu":
            files = {name: data for name, data in files.items() if not name.startswith(_FOR_GPUS)}
            info = {**info, "targets": [], "backend": "triton"}  # the variant that has only Python
            files[_BUILD_INFO] = json.dumps(info, indent=2).encode()
        module = f"_flash_attn_{backend}_{digest[:12]}"
        metadata = {
            "id": module,
            "name": NAME,
            "version": VERSION,
            "license": license_,
            "upstream": "https://github.com/Dao-AILab/flash-attention",
            **({"source": info["repository"]} if info.get("repository") else {}),
            "python-depends": [],
            "backend": {"type": backend, "archs": _gpus(info["targets"])},
        }
        variants.append(_variant(output / "build" / f"torch-{backend}", module, files, metadata))
    (output / "README.md").write_text(card, encoding="utf-8")
    return variants


def _variant(path: Path, module: str, files: Mapping[str, bytes], metadata: dict[str, Any]) -> Path:
    """Writes a build variant and its metadata.json, with the digests of all other files. Returns its directory."""
    digests = {}
    for name, data in files.items():
        file = path / (f"licenses/{Path(name).name}" if ".dist-info/" in name else name)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = _renamed(data.decode(), module).encode() if name.endswith(".py") else data
        file.write_bytes(content)
        digests[file.relative_to(path).as_posix()] = base64.b64encode(hashlib.sha256(content).digest()).decode()
    metadata["digest"] = {"algorithm": "sha256", "files": digests}
    (path / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return path


def _renamed(source: str, module: str) -> str:
    """A module of the package, with all imports from the package renamed to `module`."""
    return _OWN_IMPORT.sub(rf"\1{module} as flash_attn", _OWN_NAME.sub(rf"\1\2\3{module}", source))


def _gpus(targets: list[str]) -> list[str]:
    """The GPUs that load the kernels of these targets. `kernels` refuses other GPUs by default."""
    known = [target for target in versions.load().targets.values() if not target.is_generic]
    return [gpu.name for gpu in known if {gpu.name, gpu.universal} & set(targets)]
