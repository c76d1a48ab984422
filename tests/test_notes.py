from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
import wheelhouse

from rocm_wheels import cli
from rocm_wheels.errors import DataError, PublishFailed
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.publish import directory, hardware, index, notes, templates
from rocm_wheels.publish.home import Home
from rocm_wheels.publish.links import Wheel
from rocm_wheels.wheel import contents
from rocm_wheels.wheel.verdict import GPU, PASSED, Stage

HOSTILE = 'x"><script>alert(1)</script>|`**<!--\n# [a](javascript:b) ${{ secrets }} {{ 7*7 }}'
HOME = Home(url="https://example.org/wheels/", repository="https://github.com/owner/name")


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    directory = tmp_path / "dist"
    wheelhouse.write(directory, wheelhouse.cell("2.8.3 3.12 2.5.1 6.2", "ck"), device=wheelhouse.MI300X)
    wheelhouse.write(directory, wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"), device=wheelhouse.H200)
    wheelhouse.write(directory, wheelhouse.cell("2.8.3 3.10 2.10.0 7.1"))
    return directory


def render(wheels: Sequence[Wheel], new: str = "") -> str:
    return notes.render(wheels, tag="v1.0", index_url=HOME.url, new=new, repository="owner/name")


def rows(page: str) -> list[list[str]]:
    """The entries of the rows of the page's tables."""
    lines = [line for line in page.splitlines() if line.startswith("| 2")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_table(dist: Path) -> None:
    page = render(directory.read(dist).wheels)
    assert re.findall(r"^### (.*)$", page, re.MULTILINE) == ["ROCm 7.1, torch 2.10", "ROCm 6.2, torch 2.5"]
    sizes = {path.name: templates.size(path.stat().st_size) for path in dist.glob("*.whl")}
    small = "gfx90a, gfx942"
    assert rows(page) == [
        ["2.8.3", "3.10", "triton", sizes[names_of(dist, "cp310")], small, "CPU", "4.0e-03", "20 s"],
        [
            "2.8.3",
            "3.12",
            "ck",
            sizes[names_of(dist, "cp312")],
            small,
            "AMD Instinct MI300X (gfx942)",
            "5.0e-03",
            "28 s",
        ],
        ["2.8.3", "3.11", "triton", sizes[names_of(dist, "cp311")], small, "NVIDIA H200 (sm\\_90)", "5.0e-03", "28 s"],
    ]
    assert "1 of 3 passed their tests on an AMD GPU; the others **have not been run on an AMD GPU**." in page
    for path in dist.glob("*.whl"):
        assert f"{contents.file_sha256(path)}  {path.name}" in page
    assert '- `flash_attn_interface`: `"flash-attn-3==3.0.0+rocm71torch2.10triton"`' in page
    assert '- `flash_attn.cute`: `"flash-attn-4==4.0.0+rocm71torch2.10triton"`' in page


def test_flash_attn_3_accompanies_the_newest_flash_attn_alone(tmp_path: Path) -> None:
    wheelhouse.write(tmp_path, wheelhouse.cell("2.7.4 3.11 2.5.1 6.2"))
    page = render(directory.read(tmp_path).wheels)
    assert 'pip install "flash_attn==2.7.4+rocm62torch2.5triton"' in page
    assert "flash-attn-3" not in page


def test_the_universal_wheel_is_for_more_than_one_torch(tmp_path: Path) -> None:
    for made_for in (
        Universal(flash_attn="2.8.3", python="3.10", backend="ck"),
        wheelhouse.cell("2.8.3 3.11 2.5.1 6.2"),
    ):
        wheelhouse.write(tmp_path, made_for)
    page = render(directory.read(tmp_path).wheels)
    limits = page.partition("## Known limits")[2]
    assert 'pip install "flash_attn==2.8.3+rocm"' in page
    assert "- A wheel that names a torch supports only that torch minor version, one ROCm and one Python" in limits
    assert "A wheel is for one" not in limits


def test_wheels_of_one_rocm_and_torch_stand_together(tmp_path: Path) -> None:
    """Whatever their flash-attn is; newest first: ROCm, torch (by number), flash-attn."""
    for text in ("2.8.3 3.12 2.9.1 6.4", "2.8.3 3.12 2.5.1 6.2", "2.7.4 3.12 2.10.0 7.1", "2.7.4 3.12 2.5.1 6.2"):
        wheelhouse.write(tmp_path, wheelhouse.cell(text))
    page = render(directory.read(tmp_path).wheels)
    headings = ["ROCm 7.1, torch 2.10", "ROCm 6.4, torch 2.9", "ROCm 6.2, torch 2.5"]
    assert re.findall(r"^### (.*)$", page, re.MULTILINE) == headings
    assert [row[0] for row in rows(page)] == ["2.7.4", "2.8.3", "2.8.3", "2.7.4"]


def names_of(dist: Path, tag: str) -> str:
    return next(path.name for path in dist.glob(f"*{tag}*.whl"))


def test_notes_never_overstate_the_tests_on_amd_gpus(dist: Path) -> None:
    wheels = directory.read(dist).wheels
    on_amd = [wheel for wheel in wheels if wheel.on_amd_gpu]
    assert [wheel.python for wheel in on_amd] == ["3.12"]
    assert "All of them passed their tests on an AMD GPU." in render(on_amd)
    others = [wheel for wheel in wheels if not wheel.on_amd_gpu]
    assert "**None of them has been run on an AMD GPU**" in render(others)


def test_a_selftest_on_somebodys_gpu_is_reported(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for the wheel that it was run with, and only if it passed."""
    mine, on_amd, failed = wheels = directory.read(dist).wheels
    run = hardware.Run(
        date="2026-12-01", device="AMD Radeon PRO W7900", target="gfx1100", override="11.0.0", wheel=mine.name,
        sha256=mine.sha256, flash_attn="2.8.3", python="3.11", torch="2.5.1", hip="6.2", driver="6.8", passed=81,
        failed=(), speed=(),
    )  # fmt: skip
    later = replace(run, date="2026-12-02", device="AMD Radeon RX 7600", override="")
    broken = replace(run, sha256=failed.sha256, failed=("head dims",))
    monkeypatch.setattr(hardware, "load", lambda _: [later, run, broken])
    where = "AMD Radeon PRO W7900 with HSA_OVERRIDE_GFX_VERSION=11.0.0 (2026-12-01), AMD Radeon RX 7600 (2026-12-02)"
    page = render(list(wheels))
    assert page.count(f"selftest: {templates.markdown(where)}") == 1
    site = index.chooser(wheels, versions=versions.load(), home=HOME)
    assert site.count(f"and its selftest on {where}; worst error") == site.count(f"; selftest: {where}</td>") == 1
    assert "2 of 3 passed their tests on an AMD GPU" in page
    assert on_amd.on_amd_gpu
    assert page.count("; **selftest failed**: AMD Radeon PRO W7900 with") == 1
    assert site.count("; its selftest failed on AMD Radeon PRO W7900 with") == 1


def test_notes_report_a_test_with_another_torch(dist: Path) -> None:
    pypi, *others = directory.read(dist).wheels
    rocm = [
        replace(each, verdict=replace(each.verdict, torch_source="https://x/rocm6.2 2.5.1+rocm6.2")) for each in others
    ]
    assert "1 of 3 was tested with PyPI's torch of the same version, because the index" in render([pypi, *rocm])
    assert "3 of 3 were tested with PyPI's torch" in render([pypi, *others])
    assert "PyPI's torch" not in render(rocm)


def test_the_list_of_changes_is_markdown(dist: Path) -> None:
    page = render(directory.read(dist).wheels, new="* **faster** <kernels>\n")
    assert page.endswith("## What is new\n\n* **faster** &lt;kernels>\n")
    mark = "<!-- Release notes generated using configuration in .github/release.yml at main -->\n\n"
    hidden = render(directory.read(dist).wheels, new=f"{mark}* a title <!-- <details> by @x\n* another\n")
    assert hidden.endswith("## What is new\n\n* a title &lt;!-- &lt;details> by @x\n* another\n")
    assert hidden.index("## Install") < hidden.index("## What is new"), "nothing in a title hides the install lines"
    assert "What is new" not in render(directory.read(dist).wheels)


def test_hostile_names_break_nothing(dist: Path) -> None:
    wheel = directory.read(dist).wheels[1]
    device = {**wheelhouse.MI300X, "name": HOSTILE}
    stages = {**wheel.verdict.stages, GPU: Stage(status=PASSED, details={"devices": [device]})}
    hostile = replace(
        wheel,
        name=f"flash_attn-{HOSTILE}-cp311-cp311-x.whl",
        url=f"https://example.org/{HOSTILE}",
        yanked=HOSTILE,
        targets=(HOSTILE,),
        verdict=replace(wheel.verdict, stages=stages),
    )
    page = render([hostile])
    (row,) = rows(page)
    assert len(row) == 8
    assert "<script" not in page
    assert "<!--" not in page
    assert page.count("<details>") == page.count("</details>") == 1
    for rendered in (
        index.chooser([hostile], versions=versions.load(), home=HOME),
        templates.render("simple.html.j2", title=HOSTILE, links=[index._anchor(hostile)]),
    ):
        assert "alert(1)</script>" not in rendered
        assert "<!--\n" not in rendered
        assert "{{ 7*7 }}" in rendered


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'wheels' is undefined"):
        templates.render("release_notes.md.j2")


def test_notes_that_github_would_not_take(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MAX_CHARACTERS", 1000)
    with pytest.raises(PublishFailed, match="GitHub takes 1000\nPublish the wheels under two tags"):
        render(directory.read(dist).wheels)


def test_three_hundred_wheels_fit(dist: Path) -> None:
    wheel = directory.read(dist).wheels[0]
    assert len(render([wheel] * 333)) < notes.MAX_CHARACTERS


def test_the_line_to_install_is_of_a_wheel_that_is_not_yanked(dist: Path) -> None:
    first, *others = directory.read(dist).wheels
    yanked = replace(first, yanked="wrong dQ")
    assert f'"flash_attn=={first.version}"' in render([first, *others])
    page = render([yanked, *others])
    assert re.findall(r'pip install "flash_attn==([^"]+)"', page) == [others[0].version]
    assert "pip install" not in render([yanked])
    candidate = notes.render([yanked, *others], tag="v1.0.0rc1", index_url=HOME.url, new="", repository="owner/name")
    assert re.findall(r'pip install "([^"]+)"', candidate) == [others[0].url]


def test_a_release_without_wheels_has_no_notes() -> None:
    with pytest.raises(PublishFailed, match=r"release v1\.0 holds no wheel\nPublish some: `publish --tag v1\.0`"):
        render([])


def test_command_line(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.md").write_text("* more\n")
    command = ["notes", "--dist", str(dist), "--tag", "v1.0", "--repo", "owner/name", "--url", HOME.url]
    assert cli.main([*command, "--new", str(tmp_path / "new.md")]) == 0
    assert capsys.readouterr().out == render(directory.read(dist).wheels, new="* more")
    monkeypatch.chdir(dist.parent)
    assert cli.main(["notes", "--tag", "v1.0", "--repo", "owner/name", "--url", HOME.url]) == 0
    assert capsys.readouterr().out == render(directory.read(dist).wheels), "those of dist"
    assert cli.main(["notes", "--dist", str(dist), "--tag", "v1.0", "--repo", "name"]) == DataError.exit_code
    assert "the repository is 'name', not owner/name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (34 * 2**20, "34.0 MiB"), (2**31, "2.00 GiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert templates.size(count) == text


def test_the_notes_mention_nobody_and_hold_no_formula(dist: Path) -> None:
    """A reason is anybody's text. GitHub turns @name into a mention and text between two $ into a formula."""
    wheels = [replace(wheel, yanked="@octocat: $HOME and $PATH, a@b") for wheel in directory.read(dist).wheels]
    page = notes.render(wheels, tag="v1.2.3", index_url="https://x.org/", new="", repository="owner/name")
    assert "@&#8203;octocat: <span>$</span>HOME and <span>$</span>PATH, a@&#8203;b" in page
    assert "@octocat" not in page
