"""Signing the launcher for Windows: the next build takes the signed file. A command that signs nothing is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rocm_wheels import cli
from rocm_wheels.errors import AssembleFailed, DataError
from rocm_wheels.wheel import launcher, pe, signature

VERSION = "2.8.3"
# Appends eight bytes, and writes their place into the header as a certificate's.
_SIGNER = """
import struct, sys
content = bytearray(open(sys.argv[1], "rb").read())
directory = int.from_bytes(content[0x3C:0x40], "little") + 24 + 112 + 8 * 4
struct.pack_into("<II", content, directory, len(content), 8)
open(sys.argv[2], "wb").write(content + b"signed!!")
"""


def test_the_next_build_takes_the_signed_launcher(warm_cache: Path, tmp_path: Path) -> None:
    plain = launcher.build_for_windows(tmp_path / "plain", version=VERSION, cache=warm_cache).read_bytes()
    assert not pe.is_signed(plain)
    signer = tmp_path / "a signer.py"
    signer.write_text(_SIGNER)
    command = f"{sys.executable} '{signer}' {{input}} {{output}}"
    assert cli.main(["sign", VERSION, "--cache", str(warm_cache), "--command", command]) == 0
    signed = launcher.build_for_windows(tmp_path / "signed", version=VERSION, cache=warm_cache).read_bytes()
    assert pe.is_signed(signed)
    assert signed.endswith(b"signed!!")
    assert pe.imported(signed) == pe.imported(plain)
    other = launcher.build_for_windows(tmp_path / "other", version="2.7.3", cache=warm_cache).read_bytes()
    assert not pe.is_signed(other)


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        ("cp {input} {output}", AssembleFailed, r"cp wrote no signed _launcher\.pyd"),
        ("true {input} {output}", AssembleFailed, r"true wrote no signed _launcher\.pyd"),
        ("false {input} {output}", AssembleFailed, "false ended with exit code 1"),
        ("no-such-program {input} {output}", AssembleFailed, "no-such-program does not start: No such file"),
        ("cp {input}", DataError, r"--command has no \{output\}: cp"),
    ],
)
def test_a_command_that_signs_nothing_is_refused(
    command: str, error: type[Exception], message: str, warm_cache: Path, tmp_path: Path
) -> None:
    version = "2.7.3"
    with pytest.raises(error, match=message):
        signature.sign_launcher(command, version=version, cache=warm_cache)
    assert not pe.is_signed(launcher.build_for_windows(tmp_path, version=version, cache=warm_cache).read_bytes())
