from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_github
import pytest
import wheelhouse

from rocm_wheels import cli
from rocm_wheels.errors import DataError
from rocm_wheels.matrix import names, release_plan
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.paths import ROOT
from rocm_wheels.publish import catalogue, coverage, directory, index
from rocm_wheels.publish.coverage import Published
from rocm_wheels.publish.home import Home

MATRIX = """
ROCM_MATRIX = {
    "flash_attn": ["2.8.3"],
    "python": ["3.10", "3.12", "3.13"],
    "torch": ["2.5.1", "2.6.0"],
    "rocm": ["6.1", "6.2"],
    "backend": ["ck", "triton"],
}
"""

NONE_YET = (
    "There is no release yet: you build the wheel yourself, with one command. **It has never run on an AMD GPU.**"
)
STATUS = f"{coverage.STATUS[0]}{NONE_YET}{coverage.STATUS[1]}"


def name(text: str, backend: str = "triton") -> str:
    return names.wheel_name(wheelhouse.cell(text, backend), wheelhouse.PLATFORM)


def whole(data: Versions, *wheels: str) -> dict[str, Sequence[str]]:
    """Name -> every GPU target that a wheel of that name can have."""
    return dict.fromkeys(wheels, tuple(data.targets))


def add_release(hub: fake_github.Hub, data: Versions, tag: str, wheel: str, **fields: Any) -> None:
    """A release with a wheel for every GPU target, and its plan."""
    release = hub.add_release(tag, **fields)
    plan = release_plan.of_files("v1.2.3", "", whole(data, wheel))
    hub.add_asset(release, release_plan.FILE, plan.as_json().encode())
    hub.add_asset(release, wheel, b"x")


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "create_matrix.py"
    path.write_text(MATRIX)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with only the generated files."""
    (tmp_path / "docs" / "badges").mkdir(parents=True)
    (tmp_path / "docs" / "hardware.json").write_text("[]")
    (tmp_path / "docs" / "published.json").write_text("[]")
    (gpus, gpus_end), (versions, versions_end) = coverage.GPUS, coverage.COVERAGE
    (tmp_path / "CHANGELOG.md").write_text(f"{''.join(coverage.STATUS)}\n")
    (tmp_path / "README.md").write_text(
        f"{''.join(coverage.STATUS)}\n{''.join(coverage.INSTALL)}\nbefore\n{gpus}\nold\n{gpus_end}\nbetween\n"
    )
    (tmp_path / coverage.VERSIONS_PAGE).write_text(f"between\n{versions}\nold\n{versions_end}\nafter\n")
    return tmp_path


def test_wanted_against_published(data: Versions, matrix: Path) -> None:
    published = [name("2.8.3 3.10 2.5.1 6.1"), name("2.8.3 3.12 2.5.1 6.1"), name("2.8.3 3.13 2.6.0 6.2", "ck")]
    extra = name("2.8.3 3.14 2.14.0 7.2")
    there = whole(data, *published, extra)
    lines = coverage.table(data, coverage.wanted(data, matrix), there).splitlines()
    assert lines[:5] == [
        "ROCm  torch  ck 2.8.3  triton 2.8.3",
        " 6.1  2.5.1    0 of 2        2 of 2",
        " 6.1  2.6.0    0 of 3        0 of 3",
        " 6.2  2.5.1    0 of 2        0 of 2",
        " 6.2  2.6.0    1 of 3        0 of 3",
    ]
    assert lines[6] == "3 of 20 wanted wheels are published"
    missing = [line for line in lines if line.startswith("missing")]
    assert len(missing) == 17
    assert "missing  ./build_rocm.sh 2.8.3 3.10 2.5.1 6.1 --backend ck" in missing
    assert lines[-1] == f"beside   {extra}"
    there[published[0]] = ("gfx942",)
    lines = coverage.table(data, coverage.wanted(data, matrix), there).splitlines()
    assert lines[6] == "2 of 20 wanted wheels are published", "a part is not the whole"
    assert "missing  ./build_rocm.sh 2.8.3 3.10 2.5.1 6.1 --backend triton" in lines
    (part,) = [line for line in lines if line.startswith("part")]
    assert part.startswith(f"part     {published[0]} lacks gfx90a, ")


def test_universal_wheels_are_counted_for_each_system(data: Versions, matrix: Path) -> None:
    expected = coverage.universals(data, matrix)
    claims = list(dict.fromkeys(claim for claim, _ in expected))
    assert {system.name for _, system in expected} == {"linux", "windows"}
    assert len(expected) == 2 * len(claims) > 2
    there = [names.wheel_name(claims[0], tag) for tag in ("win_amd64", wheelhouse.PLATFORM)]
    there.append(names.wheel_name(claims[1], wheelhouse.PLATFORM))
    lines = coverage.table(data, coverage.wanted(data, matrix), whole(data, *there), expected).splitlines()
    assert f"universal wheels for Linux: 2 of {len(claims)}" in lines
    assert f"universal wheels for Windows: 1 of {len(claims)}" in lines
    assert f"3 of {20 + len(expected)} wanted wheels are published" in lines
    assert f"missing  ./build_rocm.sh {claims[1]} --platform windows" in lines
    assert f"missing  ./build_rocm.sh {claims[1]} --platform linux" not in lines
    assert not [line for line in lines if line.startswith("beside")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not there: it says which wheels are wanted"),
        ("ROCM_MATRIX = False\n", "holds no ROCM_MATRIX"),
        ('ROCM_MATRIX = {"cuda": ["12"]}\n', "axis 'flash_attn' is missing"),
    ],
)
def test_the_matrix_is_checked(data: Versions, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "create_matrix.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        coverage.wanted(data, path)


def test_of_one_release(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Versions, matrix: Path
) -> None:
    cells = coverage.wanted(data, matrix)
    monkeypatch.setattr(coverage, "wanted", lambda _: cells)
    monkeypatch.setattr(coverage, "universals", lambda _: [])
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    monkeypatch.delenv("GH_TOKEN", raising=False)
    with fake_github.serve(fake_github.Hub()) as hub:
        for tag, wheel in (("v1", "2.8.3 3.10 2.5.1 6.1"), ("v2", "2.8.3 3.12 2.5.1 6.1")):
            add_release(hub, data, tag, name(wheel), draft=False)
        monkeypatch.setenv("GITHUB_API_URL", hub.url)
        command = ["coverage", "--repo", fake_github.REPOSITORY]
        assert cli.main([*command, "--release", "v2"]) == 0
        assert "1 of 20 wanted wheels are published" in capsys.readouterr().out
        assert cli.main(command) == 0
        assert "2 of 20 wanted wheels are published" in capsys.readouterr().out
        add_release(hub, data, "v4", name("2.8.3 3.13 2.6.0 6.2"))
        add_release(hub, data, "v5rc1", name("2.8.3 3.13 2.6.0 6.1"), draft=False, prerelease=True)
        hub.add_asset(hub.add_release("tools", draft=False), "tools-1-py3-none-any.whl", b"x")
        monkeypatch.setenv("GITHUB_TOKEN", fake_github.TOKEN)  # a token that sees drafts
        assert cli.main(command) == 0
        assert "2 of 20 wanted wheels are published" in capsys.readouterr().out
        assert cli.main([*command, "--release", "v4"]) == 0
        assert "1 of 20 wanted wheels are published" in capsys.readouterr().out
        assert cli.main([*command, "--release", "v3"]) == DataError.exit_code
        assert "there is no release v3" in capsys.readouterr().err


def test_readme_and_badges_are_up_to_date(data: Versions) -> None:
    """`python -m rocm_wheels coverage --readme` writes them."""
    for path, text in coverage.generated(ROOT, data).items():
        assert path.read_text(encoding="utf-8") == text, path


def test_before_the_first_release(root: Path, data: Versions) -> None:
    readme, page, *badges, _ = coverage.generated(root, data).values()
    assert readme.startswith(
        f"{STATUS}\n{coverage.INSTALL[0]}\n\n       python3 -m venv env && . env/bin/activate\n"
        '       pip install "torch==2.14.1+rocm7.2" --index-url https://download.pytorch.org/whl/rocm7.2\n'
    )
    assert f"{coverage.COVERAGE[0]}\nNothing is published yet, and nothing has been run on an AMD GPU." in page
    assert "old" not in readme + page
    assert readme.endswith("\nbetween\n")
    assert page.startswith("between\n")
    assert page.endswith(f"{coverage.COVERAGE[1]}\nafter\n")
    assert f"| ROCm | {', '.join(data.rocm)} | 6.1, 6.2, 7.2, 7.14, 10.0, 10.1 | none yet |" in page
    assert "| RX 9060 XT; RX 9070, RX 9070 GRE, RX 9070 XT, R9700 | gfx1200, gfx1201 | PyTorch, ROCm 7.2 |" in readme
    assert "| RX 5600, RX 5600 XT, RX 5700, RX 5700 XT, W5700; V520; RX 5300" in readme
    assert "| gfx1010, gfx1011, gfx1012 | AMD | Triton | not yet |" in readme
    assert "`HSA_OVERRIDE_GFX_VERSION=10.3.0` for gfx1031 to gfx1036" in readme
    assert [ET.fromstring(badge).attrib["aria-label"] for badge in badges] == [
        "wheels: none yet",
        "run on AMD GPUs: not yet",
    ]


def test_after_a_release(root: Path, data: Versions) -> None:
    """From the metadata.json of a site to the README."""
    dist = root / "dist"
    for text, backend, device in (
        ("2.8.3 3.12 2.5.1 6.2", "ck", wheelhouse.MI300X),
        ("2.8.3 3.11 2.5.1 6.2", "triton", wheelhouse.H200),
        ("2.8.3 3.10 2.10.0 7.1", "triton", None),
    ):
        wheelhouse.write(dist, wheelhouse.cell(text, backend), device=device)
    home = Home(url="https://example.org/", repository="https://github.com/owner/name")
    wheels = directory.read(dist).wheels
    index.build(catalogue.Catalogue(wheels=wheels), root / "site", versions=data, home=home)
    listed = coverage.from_site(root / "site" / "metadata.json")
    coverage.save(root / coverage.PUBLISHED, listed)
    assert coverage.load(root / coverage.PUBLISHED) == listed
    assert Published(name=name("2.8.3 3.10 2.10.0 7.1"), ran_on="CPU") in listed
    _, page, *badges, _ = coverage.generated(root, data).values()
    assert "3 wheels are published, 1 of them passed their tests on an AMD GPU." in page
    labels = [ET.fromstring(badge).attrib["aria-label"] for badge in badges]
    assert labels == ["wheels: 3 published", "run on AMD GPUs: 1 of 3 wheels"]
    content = json.loads((root / "site" / "metadata.json").read_text())
    content["wheels"][0]["yanked"] = "bad"
    (root / "site" / "metadata.json").write_text(json.dumps(content))
    assert len(coverage.from_site(root / "site" / "metadata.json")) == 2


@pytest.mark.parametrize("text", ["{}", '[{"name": "x.whl", "ran_on": ""}]', '[{"name": 1}]', "["])
def test_published_json_is_checked(root: Path, data: Versions, text: str) -> None:
    (root / "docs" / "published.json").write_text(text)
    with pytest.raises(DataError, match=r"published|x\.whl"):
        coverage.generated(root, data)


def test_a_readme_without_the_place_is_refused(root: Path, data: Versions) -> None:
    (root / "README.md").write_text("nothing")
    with pytest.raises(DataError, match=r"README\.md has no place for what is generated\nAdd <!-- status"):
        coverage.generated(root, data)


def test_the_status_line_counts_published_wheels(root: Path, data: Versions) -> None:
    """In README.md and CHANGELOG.md, which nobody edits for a release."""
    for wheels, readme, changelog in (
        ([], NONE_YET, "No release is published yet."),
        (["CPU"], "1 wheel is published. **It has never run on an AMD GPU.**", "1 wheel is published."),
        (["AMD Instinct MI300X (gfx942)"], "1 wheel is published.", "1 wheel is published."),
    ):
        coverage.save(
            root / coverage.PUBLISHED, [Published(name=name("2.8.3 3.11 2.5.1 6.2"), ran_on=each) for each in wheels]
        )
        pages = coverage.generated(root, data)
        begin, end = coverage.STATUS
        assert pages[root / "README.md"].startswith(f"{begin}{readme}{end}\n")
        assert pages[root / "CHANGELOG.md"] == f"{begin}{changelog}{end}\n"
