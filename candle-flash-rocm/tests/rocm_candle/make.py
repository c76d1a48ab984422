"""Makes a candle that has a ROCm device: a copy of candle-core as the crate locks it, with a stand-in for the device.

    python candle-flash-rocm/tests/rocm_candle/make.py DIRECTORY && cargo build --manifest-path DIRECTORY/Cargo.toml

candle without its feature `metal` has a Metal device that does nothing. The copy calls it ROCm everywhere, and the
stand-in gives it memory. So the crate compiles for tensors of a ROCm device, and runs, before
candle has one: CANDLE_FLASH_ROCM_DEVICE=1 switches them on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
CRATE = HERE.parents[1]


def source() -> Path:
    """candle-core in cargo's registry, fetched if it is not there."""
    locked = tomllib.loads((CRATE / "Cargo.lock").read_text(encoding="utf-8"))["package"]
    (version,) = (package["version"] for package in locked if package["name"] == "candle-core")
    home = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")
    pattern = f"registry/src/*/candle-core-{version}"
    if not list(home.glob(pattern)):
        subprocess.run(["cargo", "fetch", "--locked"], cwd=CRATE, check=True)
    return next(home.glob(pattern))


def copied() -> dict[str, str]:
    """The files of the copy by their paths."""
    original = source()
    expected = {"Cargo.toml": (original / "Cargo.toml").read_text(encoding="utf-8")}
    for path in original.glob("src/**/*.rs"):
        name = path.relative_to(original).as_posix().replace("metal", "rocm")
        text = path.read_text(encoding="utf-8")
        expected[name] = text.replace("metal", "rocm").replace("Metal", "Rocm")
    library = expected["src/lib.rs"].replace("mod dummy_rocm_backend", "pub mod dummy_rocm_backend")
    expected["src/lib.rs"] = f"#![allow(unexpected_cfgs)]\n{library}\npub use dummy_rocm_backend as rocm_backend;\n"
    expected["src/dummy_rocm_backend.rs"] = (HERE / "rocm_backend.rs").read_text(encoding="utf-8")
    return expected


MANIFEST = """\
[package]
name = "rocm-candle"
version = "0.0.0"
edition = "2021"

[lib]
path = "{library}"
crate-type = ["cdylib"]

[dependencies]
candle-core = {{ version = "*", default-features = false }}
candle-flash-rocm = {{ path = "{crate}" }}
half = "*"
serde = {{ version = "*", features = ["derive"] }}
serde_json = "*"

[patch.crates-io]
candle-core = {{ path = "candle-core" }}

[profile.dev]
debug = "line-tables-only"

[workspace]
"""


def make(directory: Path) -> None:
    """Writes the package of `library.rs` and its candle. Files that are there as they should be keep their dates."""
    expected = {f"candle-core/{name}": text for name, text in copied().items()}
    expected["Cargo.toml"] = MANIFEST.format(library=HERE / "library.rs", crate=CRATE)
    if not (directory / "Cargo.lock").is_file():
        expected["Cargo.lock"] = (CRATE / "Cargo.lock").read_text(encoding="utf-8")
    for name, text in expected.items():
        path = directory / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
