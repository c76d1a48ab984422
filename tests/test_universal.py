"""The universal wheel: its name, its plan, its contents compared with a combination's wheel, and its tests."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import fake_parts
import pytest
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from rocm_wheels import cli
from rocm_wheels.compile import cache, units
from rocm_wheels.compile.compiler import Compiled
from rocm_wheels.errors import BadTarget, DataError, MissingTool, UnknownVersion
from rocm_wheels.matrix import names, plan, targets, versions
from rocm_wheels.matrix.cells import universal
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import Plan, make_universal_plan
from rocm_wheels.wheel import assemble, combinations, forecast

DATA = versions.load()
MACHINE = Machine(cores=1, available_mib=4096)
CLAIMED = ("METADATA", "WHEEL", "RECORD", "_build_info.json", ".cdx.json")  # the files of a claim


def planned(**env: str) -> Plan:
    return make_universal_plan(DATA, flash_attn="2.8.3", env=env, machine=MACHINE)


def test_its_name_is_for_every_python() -> None:
    name = names.wheel_name(universal(DATA, "2.8.3"), "manylinux_2_17_x86_64")
    assert name == "flash_attn-2.8.3+rocm-cp310-abi3-manylinux_2_17_x86_64.whl"
    _, version, _, tags = parse_wheel_filename(name)
    assert version == Version("2.8.3+rocm")
    assert tags == {Tag("cp310", "abi3", "manylinux_2_17_x86_64")}
    assert names.parse_universal(name) == "2.8.3"
    assert names.parse_universal(name.replace("-cp310", "-2-cp310")) == "2.8.3"
    assert [names.interface_wheel_name(each, universal(DATA, "2.8.3")) for each in DATA.interfaces.values()] == [
        "block_sparse_attn-0.1.0+rocm-py3-none-any.whl",
        "flash_attn_3-3.0.0+rocm-py3-none-any.whl",
        "flash_attn_4-4.0.0+rocm-py3-none-any.whl",
        "sageattention-2.2.0+rocm-py3-none-any.whl",
        "sglang_flash_rocm-0.1.0+rocm-py3-none-any.whl",
        "spas_sage_attn-0.1.0+rocm-py3-none-any.whl",
        "vllm_flash_rocm-0.1.0+rocm-py3-none-any.whl",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "flash_attn-2.8.3+rocm62torch2.5-cp311-cp311-manylinux_2_17_x86_64.whl",
        "flash_attn-2.8.3+rocm-cp310-cp310-manylinux_2_17_x86_64.whl",
        "flash_attn-2.8.3-cp310-abi3-manylinux_2_17_x86_64.whl",
        "other-2.8.3+rocm-cp310-abi3-manylinux_2_17_x86_64.whl",
    ],
)
def test_other_wheels_are_not_universal(name: str) -> None:
    assert names.parse_universal(name) is None


def test_its_plan_has_every_target_and_needs_no_rocm() -> None:
    made = planned()
    assert made.targets == targets.universal(DATA, None)
    for name, target in DATA.targets.items():
        assert {name, target.universal} & {*made.targets}, name
    assert (made.label, made.torch_index, made.image) == ("rocm", None, None)
    assert plan.load(plan.dump([made])) == [made]
    assert planned(PYTORCH_ROCM_ARCH="gfx942;gfx1100").targets == ("gfx942", "gfx1100")


def test_options_of_other_wheels_are_refused() -> None:
    with pytest.raises(DataError, match="ask for a triton wheel"):
        planned(FLASH_ATTENTION_TRITON_AMD_ENABLE="TRUE")
    with pytest.raises(BadTarget, match="native, but this machine has no GPU"):
        planned(GPU_ARCHS="native")
    with pytest.raises(UnknownVersion, match=r"flash-attn '2\.9\.9' is newer than"):
        make_universal_plan(DATA, flash_attn="2.9.9", env={}, machine=MACHINE)


def test_one_argument_means_the_universal_wheel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPU_ARCHS", "FLASH_ATTENTION_TRITON_AMD_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx1201")  # a plan counts the kernels of each GPU
    for options, platforms in (
        ([], ["linux"]), (["linux"], ["linux"]), (["windows"], ["windows"]), (["all"], ["linux", "windows"])
    ):  # fmt: skip
        assert cli.main(["plan", "2.8.3", *(["--platform", *options] if options else [])]) == 0
        made = json.loads(capsys.readouterr().out)
        made = made if len(platforms) > 1 else [made]
        assert [(entry["label"], entry["platform"]) for entry in made] == [("rocm", name) for name in platforms]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "2.8.3", "3.11"])
    assert "torch, rocm missing" in capsys.readouterr().err
    assert cli.main(["plan", "2.8.3", "--backend", "triton"]) == DataError.exit_code
    assert "the universal wheel has every backend" in capsys.readouterr().err


def test_for_one_radeon_nothing_names_composable_kernel() -> None:
    radeon, instinct = planned(PYTORCH_ROCM_ARCH="gfx1100"), planned(PYTORCH_ROCM_ARCH="gfx1100;gfx942")
    assert (radeon.cell.backend, radeon.compiler) == ("triton", f"triton {DATA.compilers['triton']}")
    assert (instinct.cell.backend, instinct.compiler) == ("ck", f"ziglang {DATA.compilers['ziglang']}")
    assert radeon.wheel == instinct.wheel
    assert plan.load(plan.dump([radeon])) == [radeon]


def test_hints_for_a_shorter_build_are_valid_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned().shorter == "PYTORCH_ROCM_ARCH=gfx942 builds for one GPU target alone"
    assert planned(PYTORCH_ROCM_ARCH="gfx942").shorter == ""
    versions_ = {"flash_attn": "2.8.3", "python": "3.11", "torch": "2.5.1", "rocm": "6.2"}
    made = [plan.make_plan(DATA, **versions_, backend=name, env={}, machine=MACHINE) for name in ("ck", "triton")]
    assert [each.shorter for each in made] == ["--backend triton leaves Composable Kernel out", ""]
    assert cli.main(["plan", *versions_.values()]) == 0
    assert json.loads(capsys.readouterr().out)["work"]["shorter"] == made[0].shorter
    assert cli.main(["plan", *versions_.values(), *made[0].shorter.split()[:2]]) == 0


def test_the_plan_estimates_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx1100")
    monkeypatch.setenv("MAX_JOBS", "2")
    monkeypatch.setattr(forecast, "ENVIRONMENT", tmp_path / "env")
    assert cli.main(["plan", "2.8.3", "--platform", "all", "--cache", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    work, windows = (entry["work"] for entry in json.loads(out))
    assert work["kernels"] == windows["kernels"] > 500
    assert work["cached"] == 0
    assert work["minutes"] == math.ceil(work["kernels"] * DATA.backends["triton"].seconds("rdna3") / 120)
    assert work["torch_mib"] == forecast.TORCH_BESIDE_ROCM_MIB
    assert work["disk_mib"] > forecast.ENVIRONMENT_MIB + work["torch_mib"] + 10
    assert (windows["torch_mib"], windows["disk_mib"]) == (0, work["disk_mib"] - work["torch_mib"])
    assert windows["downloads"] == ["packages of locks/build.txt"]
    assert work["downloads"] == ["packages of locks/build.txt", "torch 2.14.1+rocm7.14"]
    assert err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    (unit, *_) = units.find(["gfx1100"])
    cache.put(unit, Compiled(b"image", {name: {} for name in unit.kernels}), tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/stamp").touch()
    assert cli.main(["plan", "2.8.3", "--platform", "all", "--cache", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    again = json.loads(out)[0]["work"]
    words = f"{again['kernels']} kernels, {again['cached']} of them cached, about {again['minutes']} min to compile"
    line = f"{words}; 5.7 GiB of disk, 5.7 of them for torch; "
    assert err.startswith(f"note: flash_attn-2.8.3+rocm-cp310-abi3-linux_x86_64.whl: {line}")
    assert again["cached"] == len(unit.kernels)
    assert again["torch_mib"] < again["disk_mib"] < again["torch_mib"] + 100
    cell = ["2.8.3", "3.11", "2.5.1", "6.2", "--cache", str(tmp_path)]
    assert cli.main(["plan", *cell]) == 0
    assert json.loads(capsys.readouterr().out)["work"]["torch_mib"] == forecast.TORCH_MIB
    assert again["downloads"] == work["downloads"][1:]


def test_a_cell_has_the_same_members_under_another_claim(tmp_path: Path) -> None:
    launcher, planner = tmp_path / "_launcher.abi3.so", tmp_path / "_ck_planner.so"
    launcher.write_bytes(b"\x7fELF launcher")
    planner.write_bytes(b"\x7fELF planner")
    stores = {"gfx942": fake_parts.store(tmp_path / "stores", "gfx942")}
    cell = plan.make_plan(
        DATA, flash_attn="2.8.3", python="3.11", torch="2.5.1", rocm="6.2", backend="ck",
        env={"PYTORCH_ROCM_ARCH": "gfx942"}, machine=MACHINE,
    )  # fmt: skip
    members = []
    for made in (planned(PYTORCH_ROCM_ARCH="gfx942"), cell):
        wheel = assemble.assemble(made, stores, launcher, tmp_path / made.label, planner=planner)
        with zipfile.ZipFile(wheel) as archive:
            contents = {name.replace(made.label, "LABEL"): archive.read(name) for name in archive.namelist()}
        members.append(contents)
    claimed = [{name for name in each if name.endswith(CLAIMED)} for each in members]
    assert claimed[0] == claimed[1]
    assert len(claimed[0]) == len(CLAIMED)
    plain = [{name: content for name, content in each.items() if name not in claimed[0]} for each in members]
    assert plain[0] == plain[1]
    (metadata,) = (content.decode() for name, content in members[0].items() if name.endswith("METADATA"))
    assert "Requires-Dist: torch" not in metadata, "an installer would replace a torch for ROCm by PyPI's"
    assert "Version: 2.8.3+rocm\n" in metadata
    (wheel_file,) = (content.decode() for name, content in members[0].items() if name.endswith("WHEEL"))
    assert "Tag: cp310-abi3-linux_x86_64\n" in wheel_file
    info = json.loads(members[0]["flash_attn/_build_info.json"])
    assert (info["python"], info["torch"], info["rocm"], info["backend"]) == ("", None, None, "ck")


def test_a_wheel_for_one_gpu_is_tested_with_one_torch_that_is_certain() -> None:
    machine = Machine(cores=1, available_mib=4096)
    plan = make_universal_plan(DATA, flash_attn="2.8.3", env={"PYTORCH_ROCM_ARCH": "gfx1201"}, machine=machine)
    (only,) = combinations.of(plan, DATA, {"3.11": "/x", "3.12": "/x"}.get)
    assert (only.python, only.torch) == ("3.12", "2.14.1")
    assert not DATA.torch[only.torch].uncertain


def test_it_is_tested_with_the_newest_and_the_oldest_torch() -> None:
    here = {"3.11": "there", "3.13": "there"}
    newest, oldest = combinations.of(planned(), DATA, here.get)
    assert (newest.python, newest.torch) == ("3.13", list(DATA.torch)[-1])
    assert (oldest.python, oldest.torch, oldest.torch_index) == ("3.11", "2.5.1", "rocm6.2")
    every = combinations.of(planned(), DATA, here.get, every=True)
    assert {each.torch for each in every} >= {"2.5.1", "2.6.0", "2.7.1", "2.9.1"}
    assert "2.9.0" not in {each.torch for each in every}
    assert all(each.python in DATA.torch[each.torch].python for each in every)
    with pytest.raises(MissingTool, match=r"this machine has none of Python 3\.10"):
        combinations.of(planned(), DATA, lambda _: None)


def test_a_cell_is_tested_with_itself() -> None:
    (only,) = combinations.of(fake_parts.plan("gfx942"), DATA, lambda _: None)
    assert (only.python, only.torch, only.torch_index) == ("3.11", "2.5.1", "rocm6.2")


def test_a_wheel_for_radeon_gpus_alone_has_nothing_of_composable_kernel_to_test(
    wheel_script: Callable[[str], ModuleType],
) -> None:
    only_ck = wheel_script("test_ck")._only_ck.__wrapped__
    only_ck({"backend": "ck", "targets": ["gfx1100", "gfx942"]})
    for info in ({"backend": "ck", "targets": ["gfx1100"]}, {"backend": "triton", "targets": ["gfx942"]}):
        with pytest.raises(pytest.skip.Exception, match="without Composable Kernel"):
            only_ck(info)
