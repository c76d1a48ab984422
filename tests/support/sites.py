"""Wheels of many combinations, and the site that indexes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import wheelhouse

from rocm_wheels.matrix import versions
from rocm_wheels.publish import directory, index
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.publish.home import Home

HOME = Home(url="https://example.org/wheels/", repository="https://github.com/owner/name")
CELLS = [
    *(f"2.8.3 {python} 2.5.1 6.2" for python in ("3.10", "3.11", "3.12", "3.13", "3.14")),
    *(f"2.8.3 {python} 2.5.1 6.1" for python in ("3.10", "3.12")),
    *(f"2.8.3 {python} 2.10.0 7.1" for python in ("3.10", "3.14")),
    *(f"2.7.4 {python} 2.5.1 6.2" for python in ("3.10", "3.11", "3.12", "3.13", "3.14")),
    "2.7.4 3.12 2.9.1 6.4",
    "2.8.3 3.12 2.9.1 6.4",
]
YANKED = "2.8.3 3.12 2.9.1 6.4"
WITH_FA3 = ["2.8.3 3.11 2.5.1 6.2", "2.8.3 3.10 2.10.0 7.1"]  # flash-attn-3 is the same for every Python


def wheels(directory: Path) -> Path:
    """Writes the wheels of all combinations, for both backends, into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for backend in ("ck", "triton"):
        for text in CELLS:
            cell = wheelhouse.cell(text, backend)
            if text in WITH_FA3:
                wheelhouse.write_with_fa3(directory, cell)
            else:
                wheelhouse.write(directory, cell)
    return directory


def build(dist: Path, out: Path, home: Home) -> Path:
    """Builds their site, with the wheels of one combination yanked."""
    yanked = wheelhouse.cell(YANKED)
    local = directory.read(dist)
    wheels = tuple(
        replace(wheel, yanked="wrong gradients <b>")
        if (wheel.torch, wheel.flash_attn) == ("2.9", yanked.flash_attn)
        else wheel
        for wheel in local.wheels
    )
    result = Catalogue(wheels=wheels, interfaces=local.interfaces)
    index.build(result, out, versions=versions.load(), home=home, files=local.files)
    return out
