from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from rocm_wheels.errors import DataError, ImpossibleCell, RocmWheelsError, UnknownVersion
from rocm_wheels.matrix import cells, versions
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.versions import Versions

FLASH_ATTN = ("2.6.3", "2.7.3", "2.7.4", "2.7.4.post1", "2.8.3", "2.8.3.post2")
TORCH = ("2.5.1", "2.6.0", "2.7.0", "2.7.1", "2.8.0", "2.9.0", "2.9.1", "2.10.0", "2.11.0", "2.14.0")


@pytest.fixture(scope="module")
def data() -> Versions:
    """The versions that these tests name, so that an addition to versions.toml does not change the tests."""
    whole = versions.load()
    flash_attn = {name: whole.flash_attn_names[name] for name in FLASH_ATTN}
    return replace(whole, flash_attn_names=flash_attn, torch={name: whole.torch[name] for name in TORCH})


def resolve(data: Versions, text: str, backend: str = "triton") -> Cell:
    flash_attn, python, torch, rocm = text.split()
    return cells.resolve(data, flash_attn=flash_attn, python=python, torch=torch, rocm=rocm, backend=backend)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("2.8.3 3.11 2.5.1 6.2", "2.8.3 3.11 2.5.1 6.2"),
        ("2.8 3.11 2.5 6.2", "2.8.3 3.11 2.5.1 6.2"),
        ("2.6 3.13 2.7 6.3", "2.6.3 3.13 2.7.1 6.3"),
        ("2.7.4 3.12 2.9 6.4", "2.7.4 3.12 2.9.1 6.4"),
        ("2.8.3 3.14 2.10 7.1", "2.8.3 3.14 2.10.0 7.1"),
        ("2.8.3 3.11 2.6 6.2.4", "2.8.3 3.11 2.6.0 6.2"),
        ("2.8.3 3.11 2.6 rocm6.2.4", "2.8.3 3.11 2.6.0 6.2"),
        ("2.8.3 3.11 2.5.1 rocm6.2", "2.8.3 3.11 2.5.1 6.2"),
        ("2.8.3 311 2.5.1 6.2", "2.8.3 3.11 2.5.1 6.2"),
        ("2.8.3 cp310 2.5.1 6.2", "2.8.3 3.10 2.5.1 6.2"),
        ("2.8.3.post2 3.11 2.5.1 6.2", "2.8.3.post2 3.11 2.5.1 6.2"),
        ("v2.7.4.post1 3.11 2.5.1 6.2", "2.7.4.post1 3.11 2.5.1 6.2"),
        ("2.7 3.11 2.5.1 6.2", "2.7.4 3.11 2.5.1 6.2"),
        ("v2.8.3 3.11.4 2.5.1+rocm6.2 rocm6.2", "2.8.3 3.11 2.5.1 6.2"),
        ("2.8.3 python3.11 2.6.0+rocm6.2.4 6.2.4", "2.8.3 3.11 2.6.0 6.2"),
    ],
)
def test_spellings(data: Versions, typed: str, meant: str) -> None:
    assert str(resolve(data, typed)) == meant


def test_properties(data: Versions) -> None:
    cell = resolve(data, "2.8.3 3.10 2.14.0 7.2", backend="ck")
    assert (cell.torch_minor, cell.python_tag, cell.backend) == ("2.14", "cp310", "ck")


@pytest.mark.parametrize(
    ("typed", "message", "remedy"),
    [
        (
            "2.8.5 3.11 2.5.1 6.2",
            "flash-attn '2.8.5' is newer than this checkout knows",
            "Newest known: 2.8.3.post2. `git pull` may bring it; CONTRIBUTING.md says how to add it",
        ),
        ("2 3.11 2.5.1 6.2", "flash-attn '2' is not known", "Nearest: 2.6.3."),
        ("v2.7.2 3.11 2.5.1 6.2", "flash-attn 'v2.7.2' is not known", "Nearest: 2.7.3."),
        ("2.7.4.post2 3.11 2.5.1 6.2", "flash-attn '2.7.4.post2' is not known", "Nearest: 2.7.4.post1."),
        (
            "2.8.3.post 3.11 2.5.1 6.2",
            "flash-attn '2.8.3.post' is not known",
            "Known: 2.6.3, 2.7.3, 2.7.4, 2.7.4.post1,",
        ),
        ("2.8.3 3.9 2.5.1 6.2", "Python '3.9' is not known", "Nearest: 3.10."),
        ("2.8.3 pypy311 2.5.1 6.2", "Python 'pypy311' is not known", "Known: 3.10, 3.11, 3.12, 3.13, 3.14, 3.15"),
        ("2.8.3 3.11 2.5.0 6.2", "torch '2.5.0' is not known", "Nearest: 2.5.1."),
        ("2.8.3 3.11 2.12 7.2", "torch '2.12' is not known", "Nearest: 2.11.0."),
        ("2.8.3 3.16 2.5.1 6.2", "Python '3.16' is newer than this checkout knows", "Newest known: 3.15."),
        ("2.8.3 3.11 2.5.1 6", "ROCm '6' is not known", "Nearest: 6.1."),
        ("2.8.3 3.11 2.5.1 6.5", "ROCm '6.5' is not known", "Nearest: 6.4. Known: 6.1, 6.2, 6.3, 6.4, 7.0"),
    ],
)
def test_unknown_versions(data: Versions, typed: str, message: str, remedy: str) -> None:
    with pytest.raises(UnknownVersion) as caught:
        resolve(data, typed)
    assert caught.value.message.startswith(message)
    assert remedy in caught.value.remedy


def test_an_invalid_version_suggests_the_newest(data: Versions) -> None:
    with pytest.raises(UnknownVersion, match="torch 'latest' is not known") as caught:
        resolve(data, "2.8.3 3.11 latest 7.2")
    assert f"Nearest: {list(data.torch)[-1]}." in caught.value.remedy


def test_unknown_backend(data: Versions) -> None:
    with pytest.raises(UnknownVersion, match="backend 'aiter' is not known\nKnown backends: ck, triton"):
        resolve(data, "2.8.3 3.11 2.5.1 6.2", backend="aiter")


@pytest.mark.parametrize(
    ("typed", "messages", "near"),
    [
        (
            "2.8.3 3.11 2.6.0 6.3",
            [
                "torch 2.6.0 has no wheels for ROCm 6.3, only for 6.1, 6.2",
                "has torch 2.7.0, 2.7.1, 2.8.0, 2.9.0, 2.9.1",
            ],
            "2.8.3 3.11 2.6.0 6.2",
        ),
        (
            "2.8.3 3.14 2.5.1 6.2",
            [
                "torch 2.5.1 serves no Python 3.14 here, only 3.10, 3.11, 3.12",
                "(Python 3.14 has torch 2.9.0,",
            ],
            "2.8.3 3.12 2.5.1 6.2",
        ),
        (
            "2.7.4 3.14 2.6.0 7.2",
            ["serves no Python 3.14", "no wheels for ROCm 7.2", "has torch 2.11.0, 2.14.0"],
            "2.7.4 3.14 2.11.0 7.2",
        ),
        (
            "2.8.3 3.11 2.14 6.2",
            ["torch 2.14.0 has no wheels for ROCm 6.2, only for 7.2"],
            "2.8.3 3.11 2.14.0 7.2",
        ),
    ],
)
def test_impossible_cells(data: Versions, typed: str, messages: list[str], near: str) -> None:
    with pytest.raises(ImpossibleCell) as caught:
        resolve(data, typed)
    for message in messages:
        assert message in caught.value.message
    assert caught.value.remedy == f"Nearest combination that exists: {near}"
    assert str(resolve(data, near)) == near


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("2.8.3 3.11 2.5.1 6.2.4", "torch 2.5.1 is built for ROCm 6.2, not 6.2.4"),
        ("2.8.3 3.11 2.6.0 6.2.1", "torch 2.6.0 is built for ROCm 6.2.4, not 6.2.1"),
    ],
)
def test_a_patch_release_must_match_torchs_minor_version(data: Versions, typed: str, message: str) -> None:
    with pytest.raises(ImpossibleCell) as caught:
        resolve(data, typed)
    assert caught.value.message == message
    assert caught.value.remedy == f"Leave the patch release out: {typed.rpartition('.')[0]}"


def test_the_nearest_cell_exists_for_every_combination(data: Versions) -> None:
    for python, torch, rocm in itertools.product(data.python, data.torch, data.rocm):
        expected = Cell(flash_attn="2.8.3", python=python, torch=torch, rocm=rocm, backend="triton")
        near = cells.nearest(data, expected)
        assert cells.exists(data, near)
        assert (near == expected) == cells.exists(data, expected)


def test_product_leaves_out_impossible_combinations_with_a_reason(data: Versions) -> None:
    matrix = {
        "flash_attn": ["2.8.3"],
        "python": ["3.11", "3.13"],
        "torch": ["2.5.1", "2.6.0"],
        "rocm": ["6.2"],
        "backend": ["ck", "triton"],
    }
    result, left_out = cells.product(data, matrix)
    assert [f"{cell} {cell.backend}" for cell in result] == [
        "2.8.3 3.11 2.5.1 6.2 ck",
        "2.8.3 3.11 2.5.1 6.2 triton",
        "2.8.3 3.11 2.6.0 6.2 ck",
        "2.8.3 3.11 2.6.0 6.2 triton",
        "2.8.3 3.13 2.6.0 6.2 ck",
        "2.8.3 3.13 2.6.0 6.2 triton",
    ]
    assert [(entry["python"], entry["torch"], entry["backend"]) for entry, _ in left_out] == [
        ("3.13", "2.5.1", "ck"),
        ("3.13", "2.5.1", "triton"),
    ]
    assert all("torch 2.5.1 serves no Python 3.13 here" in reason for _, reason in left_out)


def test_product_keeps_one_cell_a_wheel_name(data: Versions) -> None:
    matrix = {
        "flash_attn": ["2.8.3", "2.8"],
        "python": ["3.11"],
        "torch": ["2.7.1", "2.7.0", "2.7"],
        "rocm": ["6.3"],
        "backend": ["triton"],
    }
    result, left_out = cells.product(data, matrix)
    assert [str(cell) for cell in result] == ["2.8.3 3.11 2.7.1 6.3"]
    assert {(entry["torch"], reason) for entry, reason in left_out} == {
        ("2.7.0", "torch 2.7.1 gives a wheel of the same name"),
        ("2.7.1", "the matrix names it twice"),
        ("2.7", "the matrix names it twice"),
    }


def test_product_refuses_unknown_versions(data: Versions) -> None:
    matrix = {axis: ["2.8.3"] for axis in cells.AXES}
    with pytest.raises(UnknownVersion, match=r"Python '2\.8\.3' is not known"):
        cells.product(data, matrix)
    with pytest.raises(DataError, match="axis 'cuda' is unknown\nThe axes are flash_attn, python"):
        cells.product(data, {**matrix, "cuda": ["12.8"]})
    with pytest.raises(DataError, match="matrix: python is empty\nName one at least"):
        cells.product(data, {**matrix, "python": []})
    for bad in ([3.10], "3.10", 3.10, None):
        wrong: dict[str, Any] = {**matrix, "python": bad}
        with pytest.raises(
            DataError, match=r'matrix: python: .* is not a list of texts\nQuote each version, \["3\.10"\]'
        ):
            cells.product(data, wrong)
    del matrix["rocm"]
    with pytest.raises(DataError, match="axis 'rocm' is missing"):
        cells.product(data, matrix)


def test_cells_sort_by_number(data: Versions) -> None:
    texts = ["2.8.3 3.11 2.9.1 6.4", "2.8.3 3.11 2.10.0 7.0", "2.8.3 3.12 2.5.1 6.1"]
    ordered = [resolve(data, text) for text in texts]
    shuffled = random.Random(0).sample(ordered, k=3)
    assert sorted(shuffled) == ordered


NEW_TORCH = """
[torch."2.99.0"]
python = ["3.14", "3.99"]
rocm = { "9.9" = "rocm9.9.1" }

[rocm."9.9"]
"""


def test_a_new_torch_rocm_and_python_are_a_change_of_data_alone() -> None:
    text = versions.DATA_FILE.read_text(encoding="utf-8")
    with pytest.raises(RocmWheelsError):
        resolve(versions.loads(text), "9.9.0 3.99 2.99.0 9.9")
    text = re.sub(r"(?m)^(python = \[.*)\]", r'\1, "3.99"]', text, count=1)
    text = text.replace("[flash_attn]\n", '[flash_attn]\n"9.9.0" = "9.9.0"\n', 1)
    data = versions.loads(text + NEW_TORCH)
    assert resolve(data, "9.9 3.99 2.99 9.9.1") == Cell(
        flash_attn="9.9.0", python="3.99", torch="2.99.0", rocm="9.9", backend="triton"
    )
    with pytest.raises(ImpossibleCell, match=r"torch 2\.99\.0 has no wheels for ROCm 7\.2, only for 9\.9"):
        resolve(data, "9.9 3.99 2.99 7.2")
