from __future__ import annotations

import re
from pathlib import Path

import pytest

from rocm_wheels.errors import DataError, MissingTool
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.tables import version_key

TEXT = versions.DATA_FILE.read_text(encoding="utf-8")
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_versions_ascend_by_number(data: Versions) -> None:
    assert next(iter(data.torch)) == "2.5.1"
    assert list(data.torch).index("2.10.0") > list(data.torch).index("2.9.1")
    for listed in (data.flash_attn, data.python, tuple(data.torch), tuple(data.rocm)):
        assert list(listed) == sorted(listed, key=version_key)


@pytest.mark.parametrize(
    ("torch", "rocm", "directory"),
    [
        ("2.5.1", "6.2", "rocm6.2"),
        ("2.6.0", "6.1", "rocm6.1"),
        ("2.6.0", "6.2", "rocm6.2.4"),
        ("2.7.1", "6.3", "rocm6.3"),
        ("2.9.1", "6.4", "rocm6.4"),
        ("2.10.0", "7.0", "rocm7.0"),
        ("2.14.0", "7.2", "rocm7.2"),
    ],
)
def test_index_directories(data: Versions, torch: str, rocm: str, directory: str) -> None:
    assert data.torch[torch].rocm[rocm] == directory


def test_a_target_is_served_from_its_rocm_on(data: Versions) -> None:
    gfx950 = data.targets["gfx950"]
    assert [rocm for rocm in data.rocm if not gfx950.serves("ck", rocm)] == ["6.1", "6.2", "6.3", "6.4"]
    assert not data.targets["gfx1100"].serves("ck", "7.2")


def test_a_product_names_one_target(data: Versions) -> None:
    """Vendor names are removed from the user's text, so a product name that contains one would never be found."""
    products = [product for target in data.targets.values() for product in target.products]
    assert len(products) == len(set(products))
    assert all(re.fullmatch("(?!.*(radeon|instinct|amd))[a-z0-9]+", product) for product in products)


def test_compilers_match_the_build_group(data: Versions) -> None:
    pins = dict(re.findall(r'"([\w-]+)==([\d.]+)"', PYPROJECT.read_text(encoding="utf-8")))
    assert {name: pins[name] for name in data.compilers} == dict(data.compilers)


@pytest.mark.parametrize(
    ("old", "new", "message", "remedy"),
    [
        pytest.param(
            'rocm = { "6.1" = "rocm6.1", "6.2" = "rocm6.2" }',
            'rocm = { "6.1" = "rocm6.1", "6.2" = "rocm6.2" }\ntriton = "3.1.0"',
            "versions.toml: torch/2.5.1/triton: '3.1.0' is a key that nothing reads",
            "Known: python, rocm, uncertain.",
            id="unknown key",
        ),
        pytest.param(
            'pip = "26.3"',
            "",
            "versions.toml: build/pip: None is missing: str expected",
            "",
            id="missing key",
        ),
        pytest.param(
            "[build]",
            "[bulid]\nx = 1\n[build]",
            "versions.toml: bulid: {'x': 1} is a key that nothing reads",
            "build, compilers",
            id="unknown table",
        ),
        pytest.param(
            "container = false",
            "container = false\nimage = true",
            "versions.toml: jobs/image: True is a key that nothing reads",
            "Known: assemble_minutes, compile_minutes",
            id="unknown key of the jobs",
        ),
        pytest.param(
            "shards = { ck = 4, triton = 1 }",
            "shards = { ck = 4, triton = 1, aiter = 2 }",
            "versions.toml: jobs/shards/aiter: 2 is a key that nothing reads",
            "Known: ck, triton.",
            id="shards of an unknown backend",
        ),
        pytest.param(
            '[rocm."6.3"]',
            '[rocm."6.3"]\nimages = "rocm/pytorch:x"',
            "versions.toml: rocm/6.3/images: 'rocm/pytorch:x' is a key that nothing reads",
            "Known: amd_index, image, uncertain.",
            id="unknown key of a ROCm",
        ),
        pytest.param(
            "job_memory_mib = 700",
            'job_memory_mib = "700"',
            "versions.toml: backends/triton/job_memory_mib: '700' is str, not int",
            "",
            id="type",
        ),
        pytest.param(
            "job_memory_mib = 700",
            "job_memory_mib = true",
            "versions.toml: backends/triton/job_memory_mib: True is bool, not int",
            "",
            id="a bool is no int",
        ),
        pytest.param(
            "job_memory_mib = 700",
            "job_memory_mib = 0",
            "versions.toml: backends/triton/job_memory_mib: 0 is not above 0",
            "",
            id="range",
        ),
        pytest.param(
            'rocm = { "6.1" = "rocm6.1", "6.2" = "rocm6.2" }',
            'rocm = { "6.1" = "rocm6.1", "6.9" = "rocm6.9" }',
            "versions.toml: torch/2.5.1/rocm/6.9: '6.9' is not known",
            "Known: 6.1, 6.2, 6.3, 6.4, 7.0, 7.1, 7.2",
            id="dangling rocm",
        ),
        pytest.param(
            'python = ["3.10", "3.11", "3.12"]',
            'python = ["3.9", "3.11", "3.12"]',
            "versions.toml: torch/2.5.1/python: '3.9' is not known",
            "Known: 3.10, 3.11",
            id="dangling python",
        ),
        pytest.param(
            'compiler = "ziglang"',
            'compiler = "gcc"',
            "versions.toml: backends/ck/compiler: 'gcc' is not known",
            "Known: triton, ziglang.",
            id="dangling compiler",
        ),
        pytest.param(
            'backends = { ck = "7.0", triton = "7.0" }',
            'backends = { ck = "7.0", tritn = "7.0" }',
            "versions.toml: targets/gfx950/backends/tritn: 'tritn' is not known",
            "Known: ck, triton.",
            id="dangling backend",
        ),
        pytest.param(
            'backends = { ck = "7.0", triton = "7.0" }',
            'backends = { ck = "7.0", triton = "8.0" }',
            "versions.toml: targets/gfx950/backends/triton: '8.0' is not known",
            "Known: 6.1",
            id="dangling rocm of a target",
        ),
        pytest.param('"2.6.3" =', '"2.6.x" =', "flash_attn/2.6.x: '2.6.x' is not a dotted", "", id="version"),
        pytest.param('[torch."2.5.1"]', '[torch."2.5.x"]', "torch/2.5.x: '2.5.x' is not a dotted", "", id="torch"),
        pytest.param('[rocm."6.3"]', '[rocm."6.x"]', "rocm/6.x: '6.x' is not a dotted", "", id="rocm"),
        pytest.param('"2.6.3" =', '"2.6.3.post" =', "'2.6.3.post' is not a dotted", "", id="post"),
        pytest.param('"2.7.3" =', '"2.6.3" =', "versions.toml: not valid TOML", "", id="twice"),
        pytest.param(
            '= "2.6.3"', '= "2.6.4"', "flash_attn/2.6.3: '2.6.4' is not known", "Known: 2.7.4, 2.8.3", id="name"
        ),
        pytest.param('= "2.6.3"', "= 263", "flash_attn/2.6.3: 263 is int, not str", "", id="name type"),
        pytest.param(
            '["2.8.4"]', "[284]", "versions.toml: flash_attn_unreleased: 284 is int, not str", "", id="list type"
        ),
        pytest.param("[torch.", "[[torch.", "versions.toml: not valid TOML", "", id="syntax"),
    ],
)
def test_a_wrong_file_is_reported_by_key_and_value(old: str, new: str, message: str, remedy: str) -> None:
    assert old in TEXT
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        versions.loads(TEXT.replace(old, new, 1))
    assert remedy in caught.value.remedy


def test_an_empty_table_is_an_error() -> None:
    text = re.sub(r'\[rocm\."[^[]*', "", TEXT) + "\n[rocm]\n"
    with pytest.raises(DataError, match=r"versions\.toml: rocm: \{\} is empty"):
        versions.loads(text)


def test_the_error_names_the_file_that_was_read(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text(TEXT.replace('python = ["3.10"', 'python = [3.10, "3.10"', 1), encoding="utf-8")
    with pytest.raises(DataError, match=r"^other\.toml: python: 3\.1 is float, not str"):
        versions.load(path)


def test_without_any_toml_reader_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("rocm_wheels.tables.importlib.import_module", missing)
    with pytest.raises(MissingTool, match="no TOML reader") as caught:
        versions.loads(f"{TEXT}\n")  # a text that nothing has read yet
    assert "python3-pip" in caught.value.remedy
