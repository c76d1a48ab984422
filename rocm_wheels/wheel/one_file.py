"""`firstlight`: one Python file that runs flash_attn.firstlight on a GPU where nothing can be installed.

It has the package, a store with the kernels that firstlight times, and a launcher by ctypes. torch is its one import.
"""

from __future__ import annotations

import base64
import io
import json
import lzma
import zipfile
from pathlib import Path

from rocm_wheels.compile import cache as files
from rocm_wheels.errors import DataError
from rocm_wheels.paths import FLASH_ATTN_SRC
from rocm_wheels.wheel import assemble

_OPS, _DIMS = ("fwd", "bwd-dq", "bwd-dkdv", "decode", "extend", "append"), (64, 128)
KERNELS = ";".join(["probe-*", "combine-bf16-*", *(f"{op}-bf16-d{dim}" for op in _OPS for dim in _DIMS)])
MOST_BYTES = 1 << 20
_LAUNCHER = Path(__file__).with_name("ctypes_launcher.py")
_FILE = '''"""flash_attn.firstlight for {target} in one file: is it right, how fast is it, what are the GPU's latencies?

    python {name} [--json FILE] [--gpu N]

It needs torch for ROCm and ten minutes. It writes a report, sends nothing, and leaves nothing else on the machine.
Only the kernels that it times are in it, so it checks fewer calls than a wheel, and its launches cost the host more.
Made from commit {commit}.
"""

import base64, io, lzma, subprocess, sys, tempfile, zipfile

# A portable Python with a file ._pth reads no PYTHONPATH.
RUN = """import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("flash_attn.firstlight", run_name="__main__", alter_sys=True)"""
PACKAGE = """
{package}
"""


def main():
    with tempfile.TemporaryDirectory(prefix="firstlight-") as folder:
        content = lzma.decompress(base64.b85decode(PACKAGE.replace("\\n", "")))
        zipfile.ZipFile(io.BytesIO(content)).extractall(folder)
        process = subprocess.Popen([sys.executable, "-c", RUN, folder, *sys.argv[1:]])
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the process has it too, and writes what it measured
                pass


if __name__ == "__main__":
    sys.exit(main())
'''


def write(target: str, version: str, store: Path, output: Path) -> int:
    """Writes the file for the kernels of a store. Returns its bytes. The same content gives the same bytes.

    Raises DataError if it is larger than a notebook takes.
    """
    build = {"version": version, "label": "onefile", "targets": [target], "some_kernels": True}
    build["commit"] = assemble.commit()
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(f"flash_attn/{name}"), data)

        package = FLASH_ATTN_SRC / "flash_attn"
        for path in sorted(package.rglob("*.py")):
            add(path.relative_to(package).as_posix(), path.read_bytes())
        add("_launcher.py", _LAUNCHER.read_bytes())
        add("_build_info.json", json.dumps(build).encode())
        add(f"_kernels/{target}.zip", store.read_bytes())
    packed = base64.b85encode(lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME)).decode()
    lines = (packed[start : start + 4000] for start in range(0, len(packed), 4000))
    text = _FILE.format(target=target, name=output.name, commit=build["commit"] or "unknown", package="\n".join(lines))
    if len(text) > MOST_BYTES:
        raise DataError(
            f"the file for {target} would have {len(text)} bytes, more than {MOST_BYTES}",
            remedy="Take kernels out of KERNELS in rocm_wheels/wheel/one_file.py.",
        )
    files.write(output, text.encode())
    return len(text)
