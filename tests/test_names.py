from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names, versions
from rocm_wheels.matrix.cells import Cell

numbers = st.integers(0, 99)
cells = st.builds(
    Cell,
    flash_attn=st.builds("2.{}.{}".format, numbers, numbers),
    python=st.builds("3.{}".format, numbers),
    torch=st.builds("2.{}.{}".format, numbers, numbers),
    rocm=st.sampled_from(list(versions.load().rocm)),
    backend=st.sampled_from(["ck", "triton"]),
)
platforms = st.sampled_from(["linux_x86_64", "manylinux_2_17_x86_64.manylinux2014_x86_64", "manylinux_2_28_x86_64"])


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "rocm62torch2.5triton"),
        ({"backend": "ck"}, "rocm62torch2.5"),
        ({"torch": "2.14.0", "rocm": "7.2"}, "rocm72torch2.14triton"),
        ({"rocm": "7.14"}, "rocm714torch2.5triton"),
        ({"torch": "2.15.0", "rocm": "10.1", "backend": "ck"}, "rocm101torch2.15"),
    ],
)
def test_labels(cell: Cell, changes: dict[str, str], label: str) -> None:
    assert names.local_label(replace(cell, **changes)) == label


def test_wheel_name(cell: Cell) -> None:
    assert names.version(cell) == "2.8.3+rocm62torch2.5triton"
    assert names.wheel_name(cell) == names.EXAMPLE
    assert names.wheel_name(replace(cell, backend="ck"), "manylinux_2_17_x86_64") == (
        "flash_attn-2.8.3+rocm62torch2.5-cp311-cp311-manylinux_2_17_x86_64.whl"
    )


@given(cells, platforms)
def test_round_trip(cell: Cell, platform: str) -> None:
    name = names.wheel_name(cell, platform)
    assert names.parse(name) == names.ParsedWheel(
        flash_attn=cell.flash_attn,
        python=cell.python,
        torch_minor=cell.torch_minor,
        rocm=cell.rocm,
        backend=cell.backend,
        platforms=tuple(sorted(platform.split("."))),
    )
    _, version, _, tags = parse_wheel_filename(name)
    assert version.public == cell.flash_attn
    assert {tag.interpreter for tag in tags} == {tag.abi for tag in tags} == {cell.python_tag}


@given(cells)
def test_a_label_is_a_canonical_local_version(cell: Cell) -> None:
    assert str(Version(names.version(cell))) == names.version(cell)
    assert names.parse_label(names.local_label(cell)) == (cell.rocm, cell.torch_minor, cell.backend)


@pytest.mark.parametrize("rocm", ["62.0", "6.2.4"])
def test_a_rocm_without_an_unambiguous_label(cell: Cell, rocm: str) -> None:
    with pytest.raises(DataError, match=f"ROCm {rocm} has no label"):
        names.local_label(replace(cell, rocm=rocm))


@pytest.mark.parametrize(
    ("filename", "message"),
    [
        ("flash_attn-2.8.3.tar.gz", "'flash_attn-2.8.3.tar.gz' is not a wheel name"),
        ("flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl", "is not one of these wheels"),
        ("torch-2.5.1+rocm62torch2.5-cp311-cp311-linux_x86_64.whl", "is not one of these wheels"),
        ("flash_attn-2.8.3+rocm62torch2.5-1a-cp311-cp311-linux_x86_64.whl", "is not one of these wheels"),
        ("flash_attn-2.8.3+rocm62torch2.5-cp311.cp312-none-linux_x86_64.whl", "is not one of these wheels"),
        ("flash_attn-2.8.3+rocm62torch2.5-py3-none-any.whl", "is not one of these wheels"),
        ("flash_attn-2.8.3+cu12torch2.5-cp311-cp311-linux_x86_64.whl", "'cu12torch2.5' is not a label"),
        (
            "flash_attn-2.8.3+rocm62torch2.5aiter-cp311-cp311-linux_x86_64.whl",
            "'rocm62torch2.5aiter' is not a",
        ),
        ("flash_attn-2.8.3+rocm6torch2.5-cp311-cp311-linux_x86_64.whl", "'rocm6torch2.5' names no ROCm"),
    ],
)
def test_other_names_are_refused(filename: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        names.parse(filename)
    assert message in caught.value.message
    assert "rocm62torch2.5triton" in caught.value.remedy


def test_a_build_number_is_read_and_belongs_to_no_stem() -> None:
    name = "flash_attn-2.8.3+rocm62torch2.5-12-cp311-cp311-manylinux_2_17_x86_64.whl"
    assert names.parse(name).build == names.build_number(name) == 12
    assert names.stem(name) == names.stem(name.replace("-12-", "-")) == "flash_attn-2.8.3+rocm62torch2.5-cp311"
    fa3 = "flash_attn_3-3.0.0+rocm62torch2.5-3-py3-none-any.whl"
    assert names.parse_interface(fa3) == ("flash_attn_3", "6.2", "2.5", "ck")
    assert names.parse_interface(fa3.replace("_3-3", "_4-4")) == ("flash_attn_4", "6.2", "2.5", "ck")
    with pytest.raises(DataError, match=r"is not a wheel of block_sparse_attn\|flash_attn_3\|flash_attn_4"):
        names.parse_interface(fa3.replace("_3-3", "_5-5"))
    assert (names.build_number(fa3), names.stem(fa3)) == (3, "flash_attn_3-3.0.0+rocm62torch2.5-py3")
    assert names.build_number(name.replace("-12-", "-")) == 0
