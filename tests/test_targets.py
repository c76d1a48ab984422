from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from amdgpu_simulator.isa import rows
from amdgpu_simulator.isa import targets as simulated
from rocm_wheels.compile import sources
from rocm_wheels.errors import BadTarget
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.targets import gpus_of, known_targets, targets, universal
from rocm_wheels.matrix.versions import Versions


@pytest.mark.parametrize(
    ("backend", "torch", "rocm", "expected"),
    [
        ("triton", "2.5.1", "6.2", "gfx90a gfx942 gfx1030 gfx1100"),
        ("triton", "2.8.0", "6.4", "gfx90a gfx942 gfx1030 gfx1100 gfx1151 gfx1200 gfx1201"),
        ("triton", "2.10.0", "7.0", "gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1151 gfx1200 gfx1201"),
        ("ck", "2.5.1", "6.1", "gfx90a gfx942"),
        ("ck", "2.14.0", "7.2", "gfx90a gfx942 gfx950"),
    ],
)
def test_common_targets(data: Versions, cell: Cell, backend: str, torch: str, rocm: str, expected: str) -> None:
    cell = replace(cell, backend=backend, torch=torch, rocm=rocm)
    assert targets(data, cell, None) == tuple(expected.split())


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (["gfx942:sramecc+:xnack-", "gfx90a"], ("gfx90a", "gfx942")),
        (["gfx942", "gfx942:xnack+", "GFX942 "], ("gfx942",)),
        (["sm_100", "sm_90", "gfx1101"], ("gfx1101", "sm_90", "sm_100")),
    ],
)
def test_requested_targets(data: Versions, cell: Cell, requested: list[str], expected: tuple[str, ...]) -> None:
    assert targets(data, cell, requested) == expected


EVERY = (
    "gfx908, gfx90a, gfx942, gfx950, gfx1010, gfx1011, gfx1012, gfx1030, gfx1031, gfx1032, gfx1033, gfx1034, gfx1035, "
    "gfx1036, gfx1100, gfx1101, gfx1102, gfx1103, gfx1150, gfx1151, gfx1152, gfx1153, gfx1200, gfx1201"
)


@pytest.mark.parametrize(
    ("product", "target"),
    [
        ("mi300x", "gfx942"),
        ("MI300X", "gfx942"),
        ("MI250", "gfx90a"),
        ("AMD Instinct MI355X", "gfx950"),
        ("Radeon 8060S", "gfx1151"),
        ("Radeon RX 7900 XTX", "gfx1100"),
        ("7900 XTX", "gfx1100"),
        ("AMD Radeon PRO W7900", "gfx1100"),
        ("Radeon RX 6600 XT", "gfx1032"),
        ("Radeon 780M", "gfx1103"),
        ("MI100", "gfx908"),
    ],
)
def test_products_are_targets(data: Versions, product: str, target: str) -> None:
    assert known_targets(data, [product]) == (target,)


@pytest.mark.parametrize(
    ("entry", "message", "remedy"),
    [
        ("gfx94a", "no wheel has kernels for gfx94a", "Nearest: gfx942 (MI300). On a gfx94a Triton compiles them"),
        ("gfx900", "no wheel has kernels for gfx900", "Nearest: gfx908 (MI100). On a gfx900 Triton compiles them"),
        ("gfx1013", "no wheel has kernels for gfx1013", "Nearest: gfx1012 (Radeon RX 5300 and 5500). On a gfx1013"),
        ("gfx803", "no wheel has kernels for gfx803", "On a gfx803 Triton compiles them at their first call"),
        ("gfx110", "'gfx110' is not a known GPU", "Did you mean gfx1100"),
        ("banana", "'banana' is not a known GPU", f"Known: {EVERY}, and their products: mi300x."),
        ("RTX 4090", "'RTX 4090' is not a known GPU", f"Known: {EVERY}"),
        ("gfx942:gfx90a", "'gfx942:gfx90a' is not a known GPU", "Did you mean gfx942"),
        ("gfx942:xnack", "'gfx942:xnack' is not a known GPU", "Did you mean gfx942"),
        ("sm_9", "'sm_9' is not a known GPU", f"Known: {EVERY}"),
    ],
)
def test_unknown_targets(data: Versions, cell: Cell, entry: str, message: str, remedy: str) -> None:
    with pytest.raises(BadTarget) as caught:
        targets(data, cell, ["gfx90a", entry])
    assert caught.value.message.startswith(message)
    assert remedy in caught.value.remedy
    with pytest.raises(BadTarget):
        known_targets(data, [entry])


def test_a_target_may_need_a_newer_rocm(data: Versions, cell: Cell) -> None:
    with pytest.raises(BadTarget) as caught:
        targets(data, cell, ["gfx950"])
    assert caught.value.message == (
        "gfx950 (MI350) needs ROCm 7.0 or newer with the triton backend, this combination has ROCm 6.2"
    )
    assert caught.value.remedy.startswith("Take ROCm 7.0 or 7.1 or 7.2")
    assert "(torch 2.10.0, " in caught.value.remedy
    assert caught.value.remedy.endswith(", or the nearest target of this combination: gfx942 (MI300).")


@pytest.mark.parametrize("entry", ["gfx1100", "gfx1201", "sm_90"])
def test_radeons_and_cuda_have_triton_kernels_alone(data: Versions, cell: Cell, entry: str) -> None:
    newer = replace(cell, torch="2.8.0", rocm="6.4")
    assert targets(data, newer, [entry]) == (entry,)
    with pytest.raises(BadTarget, match=f"the ck backend has no kernels for {entry}") as caught:
        targets(data, replace(newer, backend="ck"), [entry])
    assert caught.value.remedy == "Its targets are gfx90a, gfx942, gfx950. Or use --backend triton."
    assert targets(data, replace(newer, backend="ck"), [entry, "gfx942"]) == ("gfx942", entry)


def test_a_ck_wheel_has_triton_kernels_as_far_as_its_rocm_allows(data: Versions, cell: Cell) -> None:
    with pytest.raises(BadTarget, match=r"gfx1201 .* needs ROCm 6\.4 or newer with the ck backend"):
        targets(data, replace(cell, backend="ck"), ["gfx942", "gfx1201"])


def test_a_new_target_is_a_change_of_data_alone(cell: Cell) -> None:
    text = versions.DATA_FILE.read_text(encoding="utf-8")
    entry = text[text.index("[targets.gfx90a]") : text.index("[targets.gfx942]")]
    entry = entry.replace("gfx90a", "gfx999").replace('"mi2', '"mi9')
    data = versions.loads(text + entry)
    assert targets(data, cell, None) == ("gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx999")
    assert targets(data, replace(cell, backend="ck"), ["gfx999:xnack-"]) == ("gfx999",)
    assert targets(data, cell, ["MI950X"]) == ("gfx999",)


def test_the_universal_wheel_has_a_generic_target_for_the_relatives_of_a_gpu(data: Versions) -> None:
    assert " ".join(universal(data, None)) == (
        "gfx908 gfx90a gfx942 gfx950 gfx10-1-generic gfx1030 gfx10-3-generic gfx1100 gfx11-generic gfx12-generic"
    )
    assert universal(data, ["gfx1103", "gfx942"]) == ("gfx942", "gfx1103")
    rows = sources.module("kernels.targets").TARGETS
    for target in data.targets.values():
        assert target.universal in (None, rows[target.name].generic), target.name
        served = rows[target.name].generic or target.name
        assert served in data.targets, target.name
        assert {target.name, served} & set(universal(data, None)), f"{target.name} is not in the universal wheel"


def test_a_generic_target_serves_the_gpus_of_its_family(data: Versions) -> None:
    assert gpus_of(data, ["gfx12-generic", "gfx942"]) == ("gfx942", "gfx1200", "gfx1201", "gfx12-generic")
    assert gpus_of(data, ["gfx1100", "sm_90"]) == ("gfx1100", "sm_90")
    gpus = {target.name for target in data.targets.values() if not target.is_generic}
    assert gpus <= {*gpus_of(data, universal(data, None))}


def test_a_generic_target_needs_a_rocm_that_loads_it(data: Versions, cell: Cell) -> None:
    assert targets(data, replace(cell, torch="2.8.0", rocm="6.4"), ["GFX11-generic"]) == ("gfx11-generic",)
    with pytest.raises(BadTarget, match=r"gfx11-generic .* needs ROCm 6\.4 or newer") as caught:
        targets(data, cell, ["gfx11-generic"])
    assert caught.value.remedy.endswith("or the nearest target of this combination: gfx1100 (Radeon RX 7900).")


def test_every_target_has_a_row_of_facts_for_its_kernels(data: Versions) -> None:
    rows = sources.module("kernels.targets").TARGETS
    assert set(data.targets) <= set(rows)
    assert all(row.name == name for name, row in rows.items())


def test_the_simulator_reads_the_kernels_table() -> None:
    """The simulator installs without flash_attn, so its module of rows is a link to flash_attn's."""
    assert Path(rows.__file__).samefile(sources.module("kernels.targets").__file__)
    for name, target in simulated.TARGETS.items():
        matrix_unit = {"mfma": "mfma", "mirrored": "wmma", "split": "wmma", None: None}[target.generation.matrix]
        assert matrix_unit == target.row.matrix_unit, name
