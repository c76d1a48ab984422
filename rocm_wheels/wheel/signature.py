"""Signs the launcher for Windows by the command of a maintainer who has a certificate.

The signed file takes the place of the launcher in the cache, where the next build finds it. So no process that builds
or tests a wheel needs the certificate.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path

from rocm_wheels.errors import AssembleFailed, DataError
from rocm_wheels.wheel import launcher, pe

_INPUT, _OUTPUT = "{input}", "{output}"
_REMEDY = f"Correct --command. It writes a signed copy of the file {_INPUT} to {_OUTPUT}."


def sign_launcher(command: str, *, version: str, cache: Path) -> None:
    """Signs the launcher for a version of flash_attn in the cache. Compiles it first if it is not there.

    command: words as a shell takes them, with {input} and {output} in the places of two paths. Raises DataError for a
    command without them, AssembleFailed if the command fails or writes no signature, CompileFailed and MissingTool as
    `launcher.build_for_windows` does.
    """
    words = shlex.split(command)
    if missing := [name for name in (_INPUT, _OUTPUT) if not any(name in word for word in words)]:
        raise DataError(f"--command has no {' and no '.join(missing)}: {command}", remedy=_REMEDY)
    with tempfile.TemporaryDirectory(prefix="signature-") as scratch:
        library = launcher.build_for_windows(Path(scratch), version=version, cache=cache)
        signed = Path(scratch) / "signed.pyd"
        _run([word.replace(_INPUT, str(library)).replace(_OUTPUT, str(signed)) for word in words])
        if not signed.is_file() or not pe.is_signed(content := signed.read_bytes()):
            raise AssembleFailed(f"{words[0]} wrote no signed {library.name}", remedy=_REMEDY)
    launcher.keep_for_windows(content, version=version, cache=cache)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise AssembleFailed(f"{command[0]} does not start: {error.strerror}", remedy=_REMEDY) from error
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip()
        raise AssembleFailed(f"{command[0]} ended with exit code {done.returncode}: {text}", remedy=_REMEDY)
