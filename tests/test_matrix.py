from __future__ import annotations

import fnmatch
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocm_wheels import package_modules
from rocm_wheels.cli import matrix
from rocm_wheels.errors import BadTarget, DataError
from rocm_wheels.matrix import names, release_plan, rows, versions
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.select import Matrix, select
from rocm_wheels.matrix.targets import targets, universal
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.publish import coverage, figures, published

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "create_matrix.py"
DOCS = ROOT / "CONTRIBUTING.md"


@pytest.fixture
def whole() -> dict[str, list[str]]:
    """A matrix like the one in create_matrix.py, which may grow without a change of these tests."""
    return {
        "flash_attn": ["2.6.3", "2.7.4", "2.8.3"],
        "python": ["3.10", "3.11", "3.12"],
        "torch": ["2.5.1", "2.6.0"],
        "rocm": ["6.1", "6.2"],
        "backend": ["ck", "triton"],
    }


NO_ROWS = {"tag": "", **{name: {"include": []} for name in ("kernels", "wheels", "assemble", "verify", "gpu")}}


def run(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs create_matrix.py as the workflow does, with a Python without packages."""
    return subprocess.run(
        [sys.executable, "-S", str(cwd / SCRIPT.name), *arguments],
        cwd=cwd.parent, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("matrix_pull_request.json", ["--event", "pull_request"]),
        ("matrix_list.txt", ["--list"]),
        ("matrix_one_target.txt", ["--github-output", "--only", "2.8.3 3.11 2.5.1 6.2 *", "--target", "gfx942"]),
    ],
)
def test_golden(name: str, arguments: list[str], golden: Callable[[str, str], None]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    golden(name, done.stdout)


def test_a_row_of_each_kind(golden: Callable[[str, str], None]) -> None:
    """A row in full. matrix_list.txt has the names of all rows."""
    done = run("--tag", "v1.2.3")
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout)
    first = {name: result["include"][0] if name != "tag" else result for name, result in jobs.items()}
    first["wheels, for one combination"] = jobs["wheels"]["include"][-1]
    golden("matrix_rows.json", json.dumps(first, indent=2) + "\n")


def test_the_whole_matrix_with_both_backends(data: Versions, whole: dict[str, list[str]]) -> None:
    selected = select(data, {"rocm": whole})
    assert len(selected.cells) == 3 * 3 * 2 * 2 * 2
    assert selected.left_out == ()
    made = rows.rows(data, selected.cells)
    assert len({row["name"] for row in made["wheels"]}) == len({row["artifact"] for row in made["wheels"]}) == 72
    # Four parts of CK for two targets, which compile Triton's kernels for these targets too, and Triton's for two more:
    # compiled once, for any number of combinations.
    assert len(made["kernels"]) == 4 * 2 + 2
    artifacts = [str(row["artifact"]) for row in made["kernels"]]
    assert len(set(artifacts)) == len(artifacts)


def test_a_release_has_a_universal_wheel_for_each_name(data: Versions, whole: dict[str, list[str]]) -> None:
    selected = select(data, {"rocm": whole})
    every_name = ["2.6.3", "2.7.4", "2.7.3", "2.7.4.post1", "2.8.3", "2.8.0.post2", "2.8.3.post1", "2.8.3.post2"]
    assert [rows.cell_name(each) for each in selected.universals] == [f"{name} universal" for name in every_name]
    made = rows.rows(data, selected.cells, None, selected.universals)
    first = made["wheels"][0]
    assert (first["flash-attn-version"], first["python-version"], first["backend"]) == ("2.6.3", "", "")
    assert first["artifact"] == "wheel-flash_attn-2.6.3+rocm-cp310"
    targets = set(str(first["targets"]).split(";"))
    assert targets == set(universal(data, None)) > {"gfx942", "gfx11-generic"}
    taken = [row for row in made["kernels"] if fnmatch.fnmatchcase(str(row["artifact"]), str(first["kernels"]))]
    assert targets <= _targets(taken)
    artifacts = [row["artifact"] for kind in ("kernels", "wheels") for row in made[kind]]
    assert len(set(artifacts)) == len(artifacts), "what cells and universal wheels share is compiled once"
    assert str(made["wheels"][-1]["name"]).startswith("2.8.3 3.12 ")

    def left(**options: Any) -> list[str]:
        return [str(each) for each in select(data, {"rocm": whole}, **options).universals]

    linux, windows = release_plan.planned(data, selected.universals[:1])
    there = {linux.stem: linux.targets, windows.stem: windows.targets}
    assert left(has=there) == every_name[1:]
    assert left(has={linux.stem: linux.targets}) == left(has={windows.stem: windows.targets}) == every_name
    assert left(has={**there, linux.stem: ("gfx942",)}) == every_name, "a part is not the whole"
    assert left(has={**there, linux.stem: ("gfx942",)}, requested=["gfx942"]) == every_name[1:]
    assert left(only="2.8.3 * * * *") == []
    assert left(event="pull_request") == ["2.8.3"]
    assert left(only="2.8.3 universal") == ["2.8.3"]
    whole["backend"] = ["triton"]
    assert left() == []


def _targets(taken: list[rows.Row]) -> set[str]:
    return {target for row in taken for target in str(row["target"]).split(";")}


def test_targets_with_the_same_assembly_share_a_job(data: Versions, whole: dict[str, list[str]]) -> None:
    """Triton's kernels of a target are compiled by one job of a release."""
    selected = select(data, {"rocm": whole})
    made = rows.rows(data, selected.cells, ["gfx942", "gfx1100", "gfx1102", "gfx1103"], selected.universals)
    assert [(row["name"], row["target"]) for row in made["kernels"] if row["backend"] == "triton"] == [
        ("ck gfx1100+gfx1102+gfx1103 1/1", "gfx1100;gfx1102;gfx1103")
    ]
    base = {name: row.made_for or name for name, row in package_modules.module("kernels.targets").TARGETS.items()}
    every = rows.rows(data, selected.cells, None, selected.universals)["kernels"]
    jobs: dict[str, set[str]] = {}
    for row in every:
        for target in str(row["target"]).split(";"):
            jobs.setdefault(base[target], set()).add(str(row["artifact"]).rpartition("-")[0])
    assert all(len(artifacts) == 1 for artifacts in jobs.values()), jobs


def test_a_wheel_takes_the_kernels_of_its_targets(data: Versions, whole: dict[str, list[str]]) -> None:
    made = rows.rows(data, select(data, {"rocm": whole}).cells)
    for wheel in made["wheels"]:
        taken = [row for row in made["kernels"] if fnmatch.fnmatchcase(str(row["artifact"]), str(wheel["kernels"]))]
        assert set(str(wheel["targets"]).split(";")) <= _targets(taken)
        parts = [row["shard"] for row in taken if str(wheel["targets"]).split(";")[0] in _targets([row])]
        assert parts == [f"{part}/{len(parts)}" for part in range(1, len(parts) + 1)]


def test_kernels_of_ck_depend_on_the_rocm_of_a_container(data: Versions, whole: dict[str, list[str]]) -> None:
    inside = replace(data, jobs=replace(data.jobs, container=True))
    made = rows.rows(inside, select(inside, {"rocm": whole}).cells)
    assert {(row["backend"], row["rocm-version"]) for row in made["kernels"]} == {
        ("ck", "6.1"),
        ("ck", "6.2"),
        ("triton", rows.NO_ROCM),
    }
    for row in (*made["kernels"], *made["wheels"]):
        rocm = str(row["rocm-version"])
        assert str(row["container"]).startswith("rocm/pytorch:rocm" + ("6." if rocm == rows.NO_ROCM else rocm))
    lacking = replace(inside, rocm={**inside.rocm, "6.1": replace(inside.rocm["6.1"], image=None)})
    with pytest.raises(DataError, match=r"rocm/6\.1: no image, and jobs run in containers"):
        rows.rows(lacking, select(lacking, {"rocm": whole}).cells)


@pytest.mark.parametrize(
    ("torch", "rocm", "image_of"), [("2.8.0", "6.3", "6.4"), ("2.10.0", "7.0", "7.1"), ("2.5.1", "6.1", "6.1")]
)
def test_a_gpu_job_has_an_image_whatever_its_rocm(data: Versions, torch: str, rocm: str, image_of: str) -> None:
    def image(data: Versions) -> object:
        (row,) = rows.wheel_rows(data, [cell])
        assert row["container"] == "", "a hosted job has no room for one"
        return row["image"]

    cell = Cell(flash_attn="2.8.3", python="3.11", torch=torch, rocm=rocm, backend="triton")
    assert image(data) == data.rocm[image_of].image
    oldest = {version: replace(each, image=None) for version, each in data.rocm.items()}
    oldest["6.1"] = data.rocm["6.1"]
    assert image(replace(data, rocm=oldest)) == data.rocm["6.1"].image
    with pytest.raises(DataError, match="no version has an image"):
        image(replace(data, rocm={**oldest, "6.1": replace(oldest["6.1"], image=None)}))


def test_a_platform_can_be_switched_off(data: Versions) -> None:
    assert select(data, {"rocm": False}) == Matrix(cells=(), left_out=(("rocm", "switched off"),))
    with pytest.raises(DataError, match="platform 'rocm' is on without a matrix"):
        select(data, {"rocm": True})
    assert matrix.main({"rocm": False}, ["--github-output"]) == 0


def test_an_empty_matrix_has_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main({"rocm": False}, []) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == NO_ROWS
    assert err == "left out: rocm: switched off\n"


def test_a_glob_selects(data: Versions, whole: dict[str, list[str]]) -> None:
    def selected(only: str) -> list[str]:
        return [rows.cell_name(cell) for cell in select(data, {"rocm": whole}, only=only).cells]

    assert selected("2.8.3 3.11 2.5.1 6.2 *") == ["2.8.3 3.11 2.5.1 6.2 ck", "2.8.3 3.11 2.5.1 6.2 triton"]
    assert len(selected("2.8.3 *")) == 24
    with pytest.raises(DataError, match=r"no combination matches '2\.9\.\*'\nWrite combinations as '2\.6\.3 3\.10"):
        selected("2.9.*")


def test_a_pull_request_builds_the_oldest_and_the_newest(data: Versions, whole: dict[str, list[str]]) -> None:
    cells = select(data, {"rocm": whole}, event="pull_request").cells
    assert [str(cell) for cell in cells] == ["2.6.3 3.10 2.5.1 6.1", "2.8.3 3.12 2.6.0 6.2"]
    wide = {"rocm": whole}
    assert [str(each) for each in select(data, wide, event="pull_request").universals] == [data.flash_attn[-1]]
    one = {axis: each[:1] if axis != "backend" else ["triton"] for axis, each in whole.items()}
    assert len(select(data, {"rocm": one}, event="pull_request").cells) == 1


def test_a_pull_request_builds_a_small_universal_wheel_for_both_systems() -> None:
    """With kernels of Composable Kernel and of Triton, so that the first tag is not the first time."""
    data = versions.load()
    done = run("--event", "pull_request")
    made = {name: each["include"] for name, each in json.loads(done.stdout).items() if name != "tag"}
    (universal,) = (row for row in made["wheels"] if not row["python-version"])
    targets_ = universal["targets"].split(";")
    assert targets_ == [*data.jobs.sample_targets]
    assert rows.count_for_windows(data, made["wheels"]) == 1
    assert any("ck" in data.targets[name].backends for name in targets_)
    compiled = {row["artifact"] for row in made["kernels"]}
    assert all(
        any(fnmatch.fnmatch(name, f"kernels-ck-rocm_any-{target}-*") for name in compiled) for target in targets_
    )
    asked = json.loads(run("--event", "pull_request", "--target", "gfx942").stdout)
    assert {row["targets"] for row in asked["wheels"]["include"] if not row["python-version"]} == {"gfx942"}


def test_a_sample_has_no_combination_with_uncertain_facts(data: Versions, whole: dict[str, list[str]]) -> None:
    """PyTorch's index may lack its directory, and then a run that needs torch for ROCm fails."""
    wide = {"rocm": {**whole, "torch": ["2.5.1", "2.14.1", "2.15.0"], "rocm": ["6.1", "7.14", "10.1"]}}
    assert str(select(data, wide).cells[-1]) == "2.8.3 3.12 2.15.0 10.1"
    assert [str(cell) for cell in select(data, wide, event="pull_request").cells][-1] == "2.8.3 3.12 2.14.1 7.14"
    wheels = rows.wheel_rows(data, select(data, wide).cells)
    assert [row["name"] for row in rows.newest(data, wheels)] == ["2.8.3 3.12 2.14.1 7.14 ck"]
    (job,) = rows.gpu_rows(data, wheels)
    assert "torch2.15" not in str(job["wheels"])
    assert "+rocm714torch2.14triton-*cp312" in str(job["wheels"])
    alone = [row for row in wheels if row["torch-version"] == "2.15.0"]
    assert "torch2.15triton-*cp312" in str(rows.gpu_rows(data, alone)[0]["wheels"]), "there is no other"
    assert rows.newest(data, alone)[0]["name"] == "2.8.3 3.12 2.15.0 10.1 ck"


def test_wheels_in_the_release_are_left_out(data: Versions, whole: dict[str, list[str]], tmp_path: Path) -> None:
    cells = select(data, {"rocm": whole}, only="2.8.3 * 2.5.1 6.2 triton").cells
    there = {each.stem: each.targets for each in release_plan.planned(data, cells)}
    second = names.stem(names.wheel_name(cells[1]))
    path = tmp_path / "release.json"
    part = {**there, second: there[second][:1]}
    path.write_text(json.dumps({"there": {stem: part[stem] for stem in part if "cp312" not in stem}}))
    done = run("--only", "2.8.3 * 2.5.1 6.2 triton", "--missing", str(path))
    assert [row["name"] for row in json.loads(done.stdout)["wheels"]["include"]] == [
        rows.cell_name(cell) for cell in cells[1:3]
    ]
    assert "already released" in done.stderr

    path.write_text(json.dumps({"there": there}))
    done = run("--only", "2.8.3 * 2.5.1 6.2 triton", "--missing", str(path))
    assert json.loads(done.stdout) == NO_ROWS


def test_wheels_without_their_interface_are_built_again(data: Versions, whole: dict[str, list[str]]) -> None:
    def left(only: str, *more: str) -> list[str]:
        cells = select(data, {"rocm": whole}, only=only).cells
        has = {each.stem: each.targets for each in release_plan.planned(data, cells) if each.targets}
        has |= dict.fromkeys(map(names.stem, more), ())
        return [str(cell) for cell in select(data, {"rocm": whole}, only=only, has=has).cells]

    newest = data.flash_attn[-1]
    label = "rocm62torch2.5triton-py3-none-any"
    beside = [f"{each.name}-{each.version}+{label}.whl" for each in data.interfaces.values()]
    whole["flash_attn"] = ["2.7.4", newest]
    assert left(f"{newest} 3.1[12] 2.5.1 6.2 triton") == [f"{newest} 3.11 2.5.1 6.2", f"{newest} 3.12 2.5.1 6.2"]
    assert left(f"{newest} 3.11 2.5.1 6.2 triton", *beside) == []
    assert len(left(f"{newest} 3.11 2.5.1 6.2 triton", *beside[:1])) == 1
    assert left("2.7.4 3.11 2.5.1 6.2 triton") == [], "it has none"


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "does not describe a release"), ('{"message": "Not Found"}', "KeyError('there')"), ("[1]", "TypeError")],
)
def test_a_listing_is_checked(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "release.json"
    path.write_text(content)
    with pytest.raises(DataError, match=re.escape(message)):
        published.there(path)
    with pytest.raises(DataError, match=r"other\.json: No such file"):
        published.there(tmp_path / "other.json")


def test_requested_targets_go_to_the_cells_that_serve_them(data: Versions, whole: dict[str, list[str]]) -> None:
    cells = select(data, {"rocm": whole}, only="2.8.3 3.11 2.5.1 6.2 *").cells
    made = rows.rows(data, cells, ["gfx942", "gfx1100"])
    assert {row["backend"]: row["targets"] for row in made["wheels"]} == dict.fromkeys(
        ("ck", "triton"), "gfx942;gfx1100"
    )
    kernels = [(row["name"], row["backend"], row["shard"]) for row in made["kernels"] if row["target"] == "gfx1100"]
    assert kernels == [("ck gfx1100 1/1", "triton", "1/1")]
    assert rows.left_out(data, cells, ["gfx942", "gfx1100"]) == []
    why = r"none of gfx1100 is supported by the combination 2\.8\.3 3\.11 2\.5\.1 6\.2 ck"
    with pytest.raises(BadTarget, match=why):
        rows.rows(data, cells, ["gfx1100"])
    with pytest.raises(BadTarget, match="'gfx94' is not a known GPU"):
        rows.rows(data, cells, ["gfx94"])


def test_a_release_for_radeons_alone_leaves_out_what_cannot_be() -> None:
    done = run("--target", "gfx1201", "--target", "gfx1100")
    made = json.loads(done.stdout)
    rows_ = made["wheels"]["include"]
    assert {row["backend"] for row in rows_ if row["torch-version"]} == {"triton"}
    assert {row["targets"] for row in rows_} <= {"gfx1100;gfx1201", "gfx1100"}
    assert re.fullmatch(r"left out: combinations for \d+ reasons; --verbose prints them", done.stderr.splitlines()[0])
    told = run("--target", "gfx1201", "--verbose").stderr
    assert re.search(r"left out: .* ck and \d+ more: none of gfx1201 is supported", told)
    assert len(told.splitlines()) > 20  # a line for each reason


def test_a_cell_has_the_targets_that_the_script_builds(data: Versions, whole: dict[str, list[str]]) -> None:
    """A release and build_rocm.sh agree for every request, and unsupported targets are reported."""
    cells = select(data, {"rocm": whole}).cells
    names = [*data.targets, "sm_90"]
    one_python = [cell for cell in cells if cell.python == "3.11"]  # targets do not depend on Python
    for first, second in itertools.product(names, names):
        for cell in one_python:
            asked = dict.fromkeys((first, second))
            try:
                built = rows.row_targets(data, cell, list(asked))
            except BadTarget:
                built = ()
            told = rows.left_out(data, [cell], list(asked))
            assert len(built) + len(told) == len(asked)
            if built:
                assert targets(data, cell, built) == built
            if not told:
                assert targets(data, cell, asked) == built
    (note,) = rows.left_out(data, cells, ["gfx942", "gfx950"])
    why = "gfx950 (MI350) needs ROCm 7.0 or newer with the ck backend, this combination has ROCm 6.1"
    assert note == f"gfx950 is left out of 2.6.3 3.10 2.5.1 6.1 ck and {len(cells) - 1} more: {why}"


def test_the_targets_of_the_environment_are_requested() -> None:
    done = run("--only", "2.8.3 3.11 2.5.1 6.2 *", PYTORCH_ROCM_ARCH="gfx942")
    assert {row["target"] for row in json.loads(done.stdout)["kernels"]["include"]} == {"gfx942"}
    also = run("--only", "2.8.3 3.11 2.5.1 6.2 *", PYTORCH_ROCM_ARCH="gfx900;gfx942")
    assert (also.stdout, also.stderr) == (
        done.stdout, "note: PYTORCH_ROCM_ARCH: gfx900 left out, for which no backend has kernels\n"
    )  # fmt: skip


def test_too_many_rows_are_an_error_with_a_way_out(data: Versions) -> None:
    wide = {
        "flash_attn": list(data.flash_attn),
        "python": list(data.python),
        "torch": list(data.torch),
        "rocm": list(data.rocm),
        "backend": ["triton"],
    }
    more = replace(data, flash_attn_names={**data.flash_attn_names, "2.9.0": "2.9.0", "2.9.1": "2.9.1"})
    cells = select(more, {"rocm": {**wide, "flash_attn": list(more.flash_attn)}}).cells
    assert len(rows.rows(more, cells[:256])["wheels"]) == 256
    with pytest.raises(DataError) as caught:
        rows.rows(more, cells)
    assert caught.value.message == f"the matrix has {len(cells)} rows, a workflow run holds 256"
    globs = re.findall(r"--only '([^']+)'", caught.value.remedy)
    assert globs[0] == "2.6.3 * * * *"
    parts = [select(more, {"rocm": {**wide, "flash_attn": list(more.flash_attn)}}, only=glob).cells for glob in globs]
    assert sum(map(len, parts)) == len(cells)
    assert all(len(rows.rows(more, part)["wheels"]) <= 256 for part in parts)


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "v1.2.3; rm", "refs/tags/v1.2.3"])
def test_a_tag_is_checked(tag: str) -> None:
    done = run("--tag", tag)
    assert done.returncode == 2
    assert "is not a release tag such as v1.2.3" in done.stderr


def test_an_unknown_version_is_an_error(capsys: pytest.CaptureFixture[str], whole: dict[str, list[str]]) -> None:
    assert matrix.main({"rocm": {**whole, "torch": ["9.9.9"]}}, []) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: torch '9.9.9' is newer than this checkout knows\nNewest known: 2.")


def test_a_matrix_without_a_cell_that_exists_is_an_error(data: Versions, whole: dict[str, list[str]]) -> None:
    """Otherwise a release without wheels would succeed."""
    why = r"no combination of the platform 'rocm' exists: torch 2\.5\.1 has no wheels for ROCm"
    with pytest.raises(DataError, match=why):
        select(data, {"rocm": {**whole, "torch": ["2.5.1"], "rocm": ["7.2"]}})


def test_the_newest_patch_release_is_built_and_duplicates_are_reported(
    data: Versions, whole: dict[str, list[str]]
) -> None:
    """Their wheels have the same name."""
    for torch in (["2.9.0", "2.9.1"], ["2.9.1", "2.9.0"]):
        wide = {**whole, "flash_attn": ["2.8.3"], "python": ["3.12"], "torch": torch, "rocm": ["6.4"]}
        selected = select(data, {"rocm": {**wide, "backend": ["triton"]}})
        assert [cell.torch for cell in selected.cells] == ["2.9.1"]
        assert selected.left_out == (("2.8.3 3.12 2.9.0 6.4 triton", "torch 2.9.1 gives a wheel of the same name"),)
    twice = select(data, {"rocm": {**wide, "torch": ["2.9.1", "2.9"], "backend": ["triton"]}})
    assert (len(twice.cells), [why for _, why in twice.left_out]) == (1, ["the matrix names it twice"])


def test_a_number_in_the_matrix_is_an_error(capsys: pytest.CaptureFixture[str], whole: dict[str, list[str]]) -> None:
    """An unquoted 3.10 is 3.1."""
    numbers: dict[str, Any] = {**whole, "python": [3.10]}
    assert matrix.main({"rocm": numbers}, []) == DataError.exit_code
    assert capsys.readouterr().err.startswith("error: matrix: python: [3.1] is not a list of texts\nQuote each")


def test_a_reader_that_has_enough_is_no_error() -> None:
    """`./create_matrix.py | head`"""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, SCRIPT], stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert done.returncode == 128 + signal.SIGPIPE
    assert "Error" not in done.stderr


def test_adding_a_version_is_the_edit_that_the_documentation_shows(tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(ROOT / "rocm_wheels", copy / "rocm_wheels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "flash_attn_src", copy / "flash_attn_src", ignore=shutil.ignore_patterns("__pycache__"))
    (diff,) = re.findall(r"(?ms)^```diff\n(.*?)^```", DOCS.read_text(encoding="utf-8"))
    # The matrix that the diff starts from: today's may have grown.
    old = "".join(line[1:] for line in diff.partition("@@\n")[2].splitlines(keepends=True) if line[0] in " -")
    text = SCRIPT.read_text(encoding="utf-8")
    shutil.copy(SCRIPT, copy)
    (copy / SCRIPT.name).write_text(re.sub(r"(?s)\nROCM_MATRIX = {.*?\n}\n", lambda _: old, text), encoding="utf-8")
    before = {row["name"] for row in json.loads(run(cwd=copy).stdout)["wheels"]["include"]}
    subprocess.run(["git", "apply", "--unsafe-paths", "-p1", "-"], cwd=copy, input=diff, text=True, check=True)
    done = run("--verbose", cwd=copy)
    assert done.returncode == 0, done.stderr
    result = {row["name"]: row for row in json.loads(done.stdout)["wheels"]["include"]}
    assert before < set(result)
    new = result["2.8.3 3.13 2.9.1 6.4 triton"]
    assert (new["label"], new["torch-index"]) == ("rocm64torch2.9triton", "rocm6.4")
    assert "gfx1201" in new["targets"].split(";")
    assert "2.8.3 3.13 2.6.0 6.2 triton" in result
    assert "2.8.3 3.13 2.5.1 6.2 triton" not in result
    assert "torch 2.5.1 serves no Python 3.13 here" in done.stderr
    assert "torch 2.9.1 has no wheels for ROCm 6.1" in done.stderr


def test_the_documented_table_of_a_new_torch_can_be_planned(tmp_path: Path) -> None:
    page = DOCS.read_text(encoding="utf-8")
    (table,) = re.findall(r"(?ms)^```toml\n(.*?)^```", page)
    (command,) = re.findall(r"(?m)^    \./build_rocm\.sh (2\.8\.3 .* --plan)$", page)
    for folder in ("rocm_wheels", "flash_attn_src"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    shutil.copy(ROOT / "build_rocm.sh", tmp_path)
    typed = [tmp_path / "build_rocm.sh", *command.split()]
    before = subprocess.run(typed, capture_output=True, text=True, check=False)
    assert "torch '2.99.0' is newer than this checkout knows" in before.stderr, "the page adds what exists"
    with (tmp_path / "rocm_wheels/versions.toml").open("a", encoding="utf-8") as file:
        file.write(f"\n{table}")
    done = subprocess.run(typed, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["label"] == "rocm72torch2.99"


def test_the_universal_wheel_is_tested_under_every_python() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers", "flash_attn_src"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [f"cp{python.replace('.', '')}-manylinux_x86_64" for python in versions.load().python]


def test_a_release_ends_within_a_day(data: Versions) -> None:
    """Even if each job takes its limit, on the 20 runners of a free plan. docs/notes/pipeline.md, "What it costs"."""
    made = json.loads(run().stdout)
    count = {name: len(each["include"]) for name, each in made.items() if name != "tag"}
    minutes = math.ceil(count["kernels"] / 20) * data.jobs.kernel_minutes + count["gpu"] * data.jobs.gpu_minutes
    minutes += math.ceil(count["assemble"] / 20) * data.jobs.assemble_minutes
    minutes += math.ceil(count["verify"] / 20) * data.jobs.verify_minutes
    hours = (minutes + figures.OTHER_MINUTES) / 60
    assert hours < 24
    assert figures.figures(data, coverage.matrix_of())["longest-hours"] == f"{hours:.1f}"


def test_shards_and_minutes_are_checked() -> None:
    text = versions.DATA_FILE.read_text(encoding="utf-8")
    for old, new, message in (
        ("shards = { ck = 4, triton = 1 }", "shards = { ck = 4 }", "jobs/shards/triton: None is missing"),
        ("shards = { ck = 4, triton = 1 }", "shards = { ck = 0, triton = 1 }", "jobs/shards/ck: 0 is not above 0"),
        ("compile_minutes = 120", "compile_minutes = 150", "150 is not below kernel_minutes, 150"),
        ('image = "rocm/pytorch:rocm6.1_', 'image = "rocm/pytorch@rocm6.1_', "is neither repository:tag nor"),
    ):
        assert old in text
        with pytest.raises(DataError, match=re.escape(message)):
            versions.loads(text.replace(old, new, 1))
    digest = "sha256:" + "0" * 64
    pinned = re.sub(r'image = "(rocm/pytorch:rocm6\.1_[^"]+)"', rf'image = "\1@{digest}"', text)
    assert str(versions.loads(pinned).rocm["6.1"].image).endswith(digest)
