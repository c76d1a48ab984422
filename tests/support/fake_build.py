"""Stand-ins for what takes hours: build_rocm.sh, the compiler, the crate's check. They write tiny files."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import fake_parts
import wheelhouse

from rocm_wheels import cli
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Claim, resolve, universal
from rocm_wheels.publish import github
from rocm_wheels.wheel import numbering


def build(words: list[str]) -> None:
    """build_rocm.sh for one wheel. BUILD_CHANGE is what has changed since the last release."""
    parser = argparse.ArgumentParser()
    parser.add_argument("versions", nargs="+")
    for option in ("--backend", "--platform", "--cache", "--published"):
        parser.add_argument(option)
    for option in ("--cached-kernels", "--cibuildwheel"):
        parser.add_argument(option, action="store_true")
    options = parser.parse_args(words)
    data, claim = versions.load(), _claim(options.versions, options.backend)
    if os.environ.get("BUILD_FAILS") == str(claim):
        sys.exit(f"{claim} does not build")
    targets = os.environ["PYTORCH_ROCM_ARCH"].split(";")
    assert not set(targets) & {name for name in data.targets if data.targets[name].windows}, "for Linux alone"
    wheel = wheelhouse.write(Path("dist"), claim, targets=targets, payload=os.environ.get("BUILD_CHANGE", ""))
    wheel.with_name(f"{wheel.name}.verdict.json").unlink()
    public = numbering.load(Path(options.published)) if options.published else []
    wheelhouse.write_verdict(numbering.assign(wheel, public), targets=targets)


def _claim(spelt: list[str], backend: str | None) -> Claim:
    data = versions.load()
    if len(spelt) == 1:
        return universal(data, spelt[0])
    flash_attn, python, torch, rocm = spelt
    return resolve(data, flash_attn=flash_attn, python=python, torch=torch, rocm=rocm, backend=backend or "ck")


if __name__ == "__main__":
    program, *words = sys.argv[1:]
    if program == "build_rocm.sh" and words[0] != "--setup":
        build(words)
    elif program == "python" and words[2] != "compile":
        github.BACKOFF_SECONDS = 0.01
        sys.exit(cli.main(words[2:]))
    elif program == "python":
        Path("build/cache/kernels").mkdir(parents=True, exist_ok=True)
        Path("build/cache/kernels/kernel").write_text("code")
    elif program == "check.sh":
        packed = Path("candle-flash-rocm/target/package")
        packed.mkdir(parents=True)
        fake_parts.crate(packed, wheelhouse.COMMIT)
