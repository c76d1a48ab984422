from __future__ import annotations

import ast
import json
import os
import platform
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import fake_github
import pytest
import wheelhouse
import yaml
from py_mini_racer import MiniRacer

from rocm_wheels.errors import BadTarget, ImpossibleCell
from rocm_wheels.matrix import machine as survey
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.matrix.plan import Plan, make_plan
from rocm_wheels.matrix.versions import Versions
from rocm_wheels.publish import directory, index, which
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.publish.home import Home
from rocm_wheels.publish.templates import TEMPLATES
from rocm_wheels.publish.which import Machine

ROOT = Path(__file__).resolve().parent.parent
FORM = ROOT / ".github" / "ISSUE_TEMPLATE" / "request_wheel.yml"
CELLS = [
    f"{flash_attn} {python} {torch} {rocm}"
    for flash_attn in ("2.7.4", "2.8.3")
    for python in ("3.10", "3.12")
    for torch, rocm in (("2.5.1", "6.2"), ("2.6.0", "6.1"), ("2.10.0", "7.1"))
]
TARGETS = {"ck": ("gfx90a", "gfx942"), "triton": ("gfx90a", "gfx942", "gfx1100", "gfx1201")}
TORCH = 'pip install "torch=={}" --index-url https://download.pytorch.org/whl/{}'
MI300X = Machine(python="3.12.1", torch="2.5.1+rocm6.2", hip="6.2.41133-dd7f95766", rocm="6.2.0", gpus=("gfx942",))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The metadata.json of a site with a yanked wheel; a file address is valid too."""
    dist, out = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("www") / "site"
    for text in CELLS:
        for backend, targets in TARGETS.items():
            wheelhouse.write(dist, wheelhouse.cell(text, backend), targets=targets)
    home = Home(url="https://example.org/wheels/", repository="https://github.com/owner/name")
    index.build(Catalogue(wheels=directory.read(dist).wheels), out, versions=versions_of_this_repository(), home=home)
    content = json.loads((out / "metadata.json").read_text())
    for wheel in content["wheels"]:
        if wheel["version"] == "2.8.3+rocm71torch2.10":
            wheel["yanked"] = "bad"
    (out / "metadata.json").write_text(json.dumps(content))
    return out


def versions_of_this_repository() -> Versions:
    from rocm_wheels.matrix import versions

    return versions.load()


def run(
    site: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(which, "detect", lambda: machine)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    code = which.main(["--site", site.as_uri(), *options])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def line(version: str, directory: str) -> str:
    return f'pip install "flash_attn=={version}" --extra-index-url https://example.org/wheels/{directory}/simple/\n'


@pytest.mark.parametrize(
    ("machine", "options", "expected"),
    [
        (MI300X, [], line("2.8.3+rocm62torch2.5", "rocm6.2/torch2.5")),
        (MI300X._replace(gpus=()), [], line("2.8.3+rocm62torch2.5", "rocm6.2/torch2.5")),
        (MI300X, ["--backend", "triton"], line("2.8.3+rocm62torch2.5triton", "rocm6.2/torch2.5")),
        (MI300X._replace(gpus=("gfx1100",)), [], line("2.8.3+rocm62torch2.5triton", "rocm6.2/torch2.5")),
        (MI300X._replace(gpus=("gfx1036", "gfx1100")), [], line("2.8.3+rocm62torch2.5triton", "rocm6.2/torch2.5")),
        (MI300X._replace(torch="2.6.0+rocm6.1", hip="6.1.40091"), [], line("2.8.3+rocm61torch2.6", "rocm6.1/torch2.6")),
        (MI300X, ["--torch", "2.6.0+rocm6.1"], line("2.8.3+rocm61torch2.6", "rocm6.1/torch2.6")),
        # The newest ck wheel of this combination is yanked; the newest flash-attn left has triton.
        (MI300X, ["--torch", "2.10", "--rocm", "7.1"], line("2.8.3+rocm71torch2.10triton", "rocm7.1/torch2.10")),
    ],
)
def test_lines(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: Machine,
    options: list[str],
    expected: str,
) -> None:
    code, out, err = run(site, machine, monkeypatch, capsys, *options)
    assert (code, out) == (0, expected), err
    assert "verdict  passed its tests on CPU (GPU: not run: the machine that tested it has no AMD or NVIDIA GPU)" in err
    for gpu in {*machine.gpus} - {*TARGETS["triton"]}:
        assert f"note     the wheel has no kernels for the {gpu} of this machine" in err


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (MI300X._replace(torch=None, hip=None), "no wheel fits: torch is not installed in this Python"),
        (
            MI300X._replace(torch=None, hip=None),
            f"\ntorch    {TORCH.format('2.7.1+rocm6.2.4', 'rocm6.2.4')}\nthen     run this again",
        ),
        (
            MI300X._replace(torch="2.5.1+cu124", hip=None),
            f"\ntorch    {TORCH.format('2.5.1+rocm6.2', 'rocm6.2')}\nthen     run this again",
        ),
        (
            MI300X._replace(torch="2.9.1+rocm6.4", hip="6.4.0"),
            f"\ntorch    {TORCH.format('2.10.0+rocm7.1', 'rocm7.1')}  # that wheel needs this torch; then run",
        ),
        (
            MI300X._replace(python="3.13.0"),
            "is published for Python 3.13, torch 2.5, ROCm 6.2, gfx942\nnearest  Python 3.12, torch 2.5, ROCm 6.2, ck",
        ),
        (MI300X._replace(hip="6.1.0"), "nearest  Python 3.12, torch 2.5, ROCm 6.2, ck"),
        (
            MI300X._replace(gpus=("gfx1030",)),
            f'build    PYTORCH_ROCM_ARCH="gfx1030" ./build_rocm.sh {wheelhouse.NEWEST} 3.12 2.5.1 6.2'
            "  # in a clone of https://github.com/owner/name\nrequest  ",
        ),
        (
            MI300X._replace(gpus=("gfx1030", "gfx1101")),
            "is published for Python 3.12, torch 2.5, ROCm 6.2, gfx1030, gfx1101\nnearest",
        ),
        (MI300X._replace(gpus=("gfx1030", "gfx1101")), "&gpu=gfx1030%2Cgfx1101&backend=triton\n"),
        (MI300X._replace(torch="2.9.1+rocm6.4", hip="6.4.0"), "&gpu=gfx942&backend=ck\n"),
        (MI300X._replace(torch="2.9.1+rocm6.4", hip="6.4.0", gpus=()), "&rocm=6.4&backend=ck\n"),
        (MI300X._replace(gpus=("gfx906",)), "\nreason   There are no kernels for gfx906 (none at all).\n"),
        (
            MI300X._replace(hip="7.1.0"),
            "\nreason   PyTorch's index has no torch 2.5 for ROCm 7.1, only for 6.1, 6.2.\n",
        ),
        (MI300X._replace(torch="2.99.0+rocm6.2"), "reason   torch 2.99 is not known here, only 2.5, 2.6,"),
        (MI300X._replace(torch="2.99.0+rocm6.2"), "\nrequest  https://github.com/owner/name/issues/new?"),
    ],
)
def test_reasons(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], machine: Machine, words: str
) -> None:
    code, out, err = run(site, machine, monkeypatch, capsys)
    assert (code, out) == (1, "")
    assert words in err


def test_a_withdrawn_wheel_is_named_with_its_reason(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = MI300X._replace(torch="2.10.0+rocm7.1", hip="7.1.0")
    code, _, err = run(site, machine, monkeypatch, capsys, "--backend", "ck", "--python", "3.12", "--gpu", "gfx950")
    assert (code, "withdrawn" in err) == (1, False)
    wheels = json.loads((site / "metadata.json").read_text())["wheels"]
    for wheel in wheels:
        wheel["yanked"] = "wrong dQ"
    content = {**json.loads((site / "metadata.json").read_text()), "wheels": wheels}
    (elsewhere := site.parent / "withdrawn").mkdir()
    (elsewhere / "metadata.json").write_text(json.dumps(content))
    code, _, err = run(elsewhere, machine, monkeypatch, capsys)
    assert code == 1
    assert "withdrawn flash_attn-2.8.3+rocm71torch2.10-cp312-cp312" in err
    assert ": wrong dQ\nbuild    " in err


def test_without_any_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(url="https://example.org/", repository="https://github.com/owner/name")
    index.build(Catalogue(), tmp_path / "site", versions=versions_of_this_repository(), home=home)
    code, out, err = run(tmp_path / "site", MI300X, monkeypatch, capsys)
    assert (code, out) == (1, "")
    build = f'PYTORCH_ROCM_ARCH="gfx942" ./build_rocm.sh {wheelhouse.NEWEST} 3.12 2.5.1 6.2'
    assert f"no wheel is published yet\nbuild    {build}" in err


def test_sites_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(tmp_path, MI300X, monkeypatch, capsys)
    assert code == 1
    assert "metadata.json gave no list of wheels: " in err
    assert which.main(["--site", ""]) == 1
    assert "no site of wheels is named\nGive --site URL" in capsys.readouterr().err
    (tmp_path / "metadata.json").write_text('{"format": 2}')
    assert "has format 2\nGet the which.py of that site." in run(tmp_path, MI300X, monkeypatch, capsys)[2]


def test_a_torch_of_which_the_rocm_is_not_known(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = MI300X._replace(torch=None, hip=None)
    assert "--torch 2.5 alone\nGive --rocm too" in run(site, bare, monkeypatch, capsys, "--torch", "2.5")[2]
    expected = line("2.8.3+rocm62torch2.5", "rocm6.2/torch2.5")
    assert run(site, bare, monkeypatch, capsys, "--torch", "2.5", "--rocm", "6.2")[:2] == (0, expected)


def test_other_platforms(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    code, _, err = run(site, MI300X, monkeypatch, capsys)
    assert code == 1
    assert "the wheels are for Linux and Windows on x86_64, this is darwin" in err


def test_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    card = Machine(python="3.13.1", torch="2.12.0+rocm7.14.0", hip="7.14.60850", rocm=None, gpus=("gfx1101",))
    universal = Universal(flash_attn="2.8.3", python="3.10", backend="ck")
    home = Home(url="https://example.org/wheels/", repository="https://github.com/owner/name")
    monkeypatch.setattr(sys, "executable", r"C:\ComfyUI\python_embeded\python.exe")
    pip = r"C:\ComfyUI\python_embeded\python.exe -m pip"
    for platforms in (("manylinux_2_17_x86_64",), ("manylinux_2_17_x86_64", "win_amd64")):
        for tag in platforms:
            wheelhouse.write(tmp_path / "dist", universal, platform=tag, targets=("gfx1101",))
        listed = Catalogue(wheels=directory.read(tmp_path / "dist").wheels)
        index.build(listed, tmp_path / "site", versions=versions_of_this_repository(), home=home)
        monkeypatch.setattr(sys, "platform", "win32")
        code, out, err = run(tmp_path / "site", card, monkeypatch, capsys)
        if len(platforms) == 1:
            assert code == 1
            assert 'build    PYTORCH_ROCM_ARCH="gfx1101" ./build_rocm.sh 2.8.3 --platform windows  # on Linux' in err
            for option, value, why in (
                ("--backend", "ck", "Triton kernels alone"),
                ("--gpu", "gfx942", "not serve gfx942"),
            ):
                assert why in run(tmp_path / "site", card, monkeypatch, capsys, option, value)[2]
        else:
            assert (
                out == f'{pip} install "flash_attn==2.8.3+rocm" --extra-index-url https://example.org/wheels/simple/\n'
            )
            assert "win_amd64.whl" in err
            assert run(tmp_path / "site", card, monkeypatch, capsys, "--backend", "triton")[1] == out
            assert run(tmp_path / "site", card, monkeypatch, capsys, "--backend", "ck")[0] == 1
    _, _, err = run(tmp_path / "site", card._replace(torch="2.12.0", hip=None), monkeypatch, capsys)
    assert f"torch    {pip} uninstall -y torch torchvision torchaudio\n" in err
    assert f'torch    {pip} install "torch[device-all]"' in err
    assert not re.search("(?m)^torch .*#", err)  # cmd takes a comment for arguments
    monkeypatch.setattr(sys, "platform", "linux")
    assert "manylinux" in run(tmp_path / "site", card, monkeypatch, capsys)[2]


@pytest.mark.parametrize("option", [["--torch", "new"], ["--backend", "cuda"]])
def test_options_are_checked(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        which.main(option)
    assert caught.value.code == 2
    assert option[1] in capsys.readouterr().err


def test_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is read, not imported; ROCm from its own file; GPUs from the kernel driver."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    text = "__version__ = '2.6.0+rocm6.2.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2.41134-65d174c3e'\n"
    (tmp_path / "torch" / "version.py").write_text(text)
    (tmp_path / "rocm" / ".info").mkdir(parents=True)
    (tmp_path / "rocm" / ".info" / "version").write_text("6.2.4-139\n")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = which.detect()
    assert (found.torch, found.hip, found.rocm) == ("2.6.0+rocm6.2.4", "6.2.41134-65d174c3e", "6.2.4-139")
    assert found.wanted == {"python": which.minor(sys.version), "torch": "2.6", "rocm": "6.2", "gpus": list(found.gpus)}
    for node, version in enumerate(("0", "90402", "90010", "110000", "120001", "90402")):
        (tmp_path / "nodes" / str(node)).mkdir(parents=True)
        (tmp_path / "nodes" / str(node) / "properties").write_text(f"simd_count 4\ngfx_target_version {version}\n")
    assert which._gpus(tmp_path / "nodes") == ("gfx1100", "gfx1201", "gfx90a", "gfx942")


def test_without_the_kernel_driver_rocms_tool_lists_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example under WSL. The tool prints a line for each card, and one for the CPU."""
    tool = tmp_path / "rocm_agent_enumerator"
    tool.write_text("#!/bin/sh\nprintf 'gfx000\\ngfx90a\\ngfx1100\\ngfx1100\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert which._gpus(tmp_path / "none") == ("gfx1100", "gfx90a")


def test_the_default_backend_comes_from_the_data(data: Versions) -> None:
    assert tuple(data.backends) == which.BACKENDS


def test_is_one_file_of_the_standard_library() -> None:
    tree = ast.parse(Path(which.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names}
    assert 'SITE = "https://example.org/"  #' in which.standalone("https://example.org/")


@pytest.fixture(scope="module")
def page() -> MiniRacer:
    """The page's script without a page."""
    engine = MiniRacer()
    engine.eval((TEMPLATES / "chooser.js").read_text(encoding="utf-8"))
    return engine


def js(engine: MiniRacer, function: str, *arguments: Any) -> Any:
    written = ", ".join(json.dumps(argument) for argument in arguments)
    return json.loads(str(engine.eval(f"JSON.stringify({function}({written}))")))


def universal(wheel: dict[str, Any], flash_attn: str = "2.8.3") -> dict[str, Any]:
    """The summary of a universal wheel: no torch, no ROCm, the oldest Python."""
    made = {"version": f"{flash_attn}+rocm", "flash_attn": flash_attn, "backend": "ck", "index": "simple/"}
    name = f"flash_attn-{flash_attn}+rocm-cp310-abi3-manylinux_2_17_x86_64.whl"
    return {**wheel, **made, "name": name, "torch": "", "rocm": "", "python": "3.10", "yanked": None}


@pytest.mark.parametrize("with_universal", [False, True])
def test_the_page_and_which_choose_alike(site: Path, page: MiniRacer, with_universal: bool) -> None:
    """Neither prints a line that would replace the installed torch."""
    wheels = json.loads((site / "metadata.json").read_text())["wheels"]
    if with_universal:
        each_name = ("2.7.4", "2.7.4.post1", "2.8.3", "2.8.3.post1", "2.8.3.post2")
        wheels += [universal(wheels[0], flash_attn) for flash_attn in each_name]
    chance = random.Random(fake_github.seed("choose"))
    chosen, uses = 0, set()
    for _ in range(400):
        wanted = {
            "python": chance.choice(["3.9", "3.10", "3.11", "3.12", "3.14"]),
            "torch": chance.choice(["2.4", "2.5", "2.6", "2.9", "2.10", "2.14"]),
            "rocm": chance.choice(["6.1", "6.2", "6.4", "7.1"]),
            "backend": chance.choice(["", "ck", "triton"]),
        }
        gpus = chance.sample(["gfx942", "gfx1100", "gfx1030", "gfx906"], chance.choice([0, 1, 1, 2]))
        want = {**wanted, "gpus": gpus, "flash_attn": ""}
        wheel, nearest = which.choose(wheels, {**wanted, "gpus": gpus})
        expected = {"wheel": wheel} if wheel else {"nearest": nearest[0]}
        assert js(page, "choose", wheels, want) == expected
        chosen += wheel is not None
        offered = wheel or (nearest[0] if js(page, "useOf", nearest[0], want) == "line" else None)
        uses.add("" if wheel else js(page, "useOf", nearest[0], want))
        if offered is not None:
            numbers = which.numbers
            assert not gpus or set(gpus) & set(offered["targets"])
            if which.is_universal(offered):
                assert numbers(wanted["torch"]) >= [2, 5]
                assert numbers(wanted["python"]) >= [3, 10]
            else:
                versions = (offered["torch"], offered["rocm"], offered["python"])
                assert versions == (wanted["torch"], wanted["rocm"], wanted["python"])
    assert 10 < chosen < (300 if with_universal else 200)
    assert {"", "line", "torch"} >= uses >= {"", "line"}
    assert js(page, "choose", [], {**wanted, "gpus": []}) == {"nearest": None}


def test_the_page_names_the_universal_wheel_first(site: Path, page: MiniRacer) -> None:
    """Before any choice, and for every choice that it fits."""
    wheels = json.loads((site / "metadata.json").read_text())["wheels"]
    wheels += [universal(wheels[0], version) for version in ("2.7.4", "2.8.3", "2.8.3.post2")]
    nothing = {"python": "", "torch": "", "rocm": "", "backend": "", "flash_attn": "", "gpus": []}

    def first(**wanted: Any) -> str | None:
        wheel = js(page, "universalFor", wheels, {**nothing, **wanted})
        return wheel and str(wheel["version"])

    assert first() == first(python="3.12") == first(torch="2.5", rocm="6.2", gpus=["gfx942"]) == "2.8.3+rocm"
    assert first(flash_attn="2.8.3.post2") == "2.8.3.post2+rocm"
    assert first(flash_attn="2.7.4", torch="2.15") == "2.7.4+rocm"
    assert first(backend="triton") is first(python="3.9") is first(torch="2.4") is first(gpus=["gfx906"]) is None
    for wheel in wheels:
        wheel["yanked"] = "wrong"
    assert first() is None


def test_a_universal_wheel_serves_a_torch_that_no_cell_is_for(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((site / "metadata.json").read_text())
    of_all = universal(content["wheels"][0])
    content["wheels"].append({**of_all, "targets": [*of_all["targets"], "gfx1201"]})
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    expected = 'pip install "flash_attn==2.8.3+rocm" --extra-index-url https://example.org/wheels/simple/\n'
    machine = MI300X._replace(torch="2.9.1+rocm6.4", hip="6.4.0", python="3.13.1")
    assert run(tmp_path, machine, monkeypatch, capsys)[:2] == (0, expected)
    assert run(tmp_path, MI300X, monkeypatch, capsys)[:2] == (0, expected)
    newer = machine._replace(torch="2.5.1+rocm6.2", hip="6.2.41133", gpus=("gfx1201",))
    needs = "note     its kernels for gfx1201 need torch for ROCm 6.4 or newer, and this torch is older\n"
    code, out, err = run(tmp_path, newer, monkeypatch, capsys)
    assert (code, out, err.endswith(needs)) == (0, expected, True)
    assert "note" not in run(tmp_path, newer._replace(hip="10.1.26015"), monkeypatch, capsys)[2]
    old = machine._replace(torch="2.4.0+rocm6.1", hip="6.1.0")
    code, out, err = run(tmp_path, old, monkeypatch, capsys)
    assert (code, out) == (1, "")
    assert "nearest  Python 3.10 and newer, torch 2.5 and newer, every ROCm, ck, gfx90a, gfx942" in err


@pytest.mark.parametrize(
    "name", ["gfx942", "gfx942:sramecc+:xnack-", "mi300x", "MI300X", "AMD Instinct MI300X", "Instinct MI325X", "300x"]
)
def test_gpus_by_the_names_that_users_type(site: Path, name: str) -> None:
    content = json.loads((site / "metadata.json").read_text())
    assert which.target(content, name) == "gfx942"
    for radeon in ("7900 XTX", "Radeon RX 7900 XTX", "rx7900xtx", "AMD Radeon Pro W7900"):
        assert which.target(content, radeon) == "gfx1100"
    with pytest.raises(which.NoWheel, match=r"'RTX 4090' is no GPU that is known here, only gfx908"):
        which.target(content, "RTX 4090")


def test_suggested_builds_are_accepted_by_build_rocm_sh(site: Path, page: MiniRacer, data: Versions) -> None:
    """Neither prints a command that is refused, nor calls a possible build impossible."""
    known = json.loads((site / "metadata.json").read_text())
    chance = random.Random(fake_github.seed("impossible"))
    said = {True: 0, False: 0}
    for _ in range(300):
        torch = chance.choice(list(known["torch"]))
        rocms = list(data.rocm) if chance.random() < 0.3 else list(known["torch"][torch]["rocm"])
        wanted = {
            "torch": torch,
            "rocm": chance.choice(rocms),
            "python": chance.choice(data.python),
            "backend": chance.choice(["", "ck", "triton"]),
            "gpus": chance.sample([*data.targets, "gfx906"], chance.choice([0, 1, 1, 2])),
        }
        why = which.impossible(known, wanted)
        said[not why] += 1
        assert js(page, "impossible", {**wanted, "flash_attn": ""}, known) == why
        if why:
            full, gpus = known["torch"][torch]["full"], wanted["gpus"]
            backend = wanted["backend"] or None
            for subset in ([gpu] for gpu in gpus):
                with pytest.raises((ImpossibleCell, BadTarget)):
                    planned(data, f"2.8.3 {wanted['python']} {full} {wanted['rocm']}", subset, backend)
            if not gpus:
                with pytest.raises(ImpossibleCell):
                    planned(data, f"2.8.3 {wanted['python']} {full} {wanted['rocm']}", [], backend)
            continue
        line = which.build_line(known, wanted)
        assert js(page, "buildLine", {**wanted, "flash_attn": ""}, known, wheelhouse.NEWEST) == line
        match = re.fullmatch(r'(?:PYTORCH_ROCM_ARCH="(\S+)" )?\./build_rocm\.sh (.*?)(?: --backend (\w+))?', line)
        assert match is not None
        plan = planned(data, match[2], (match[1] or "").split(";"), match[3])
        assert set(plan.targets) & {*wanted["gpus"]} or not wanted["gpus"]
    assert min(said.values()) > 50


def planned(data: Versions, cell: str, targets: Sequence[str], backend: str | None) -> Plan:
    names = dict(zip(("flash_attn", "python", "torch", "rocm"), cell.split(), strict=True))
    env = {"PYTORCH_ROCM_ARCH": ";".join(targets)}
    return make_plan(data, **names, backend=backend, env=env, machine=survey.Machine(cores=2, available_mib=4000))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "python=3.11.7 torch=2.5.1+rocm6.2 hip=6.2.41133-dd7f95766 gpu=gfx942:sramecc+:xnack-,gfx942:sramecc+",
            {"python": "3.11", "torch": "2.5", "rocm": "6.2", "gpus": ["gfx942"]},
        ),
        (
            "PyTorch version: 2.10.0+rocm7.1\nIs debug build: False\nCUDA used to build PyTorch: N/A\n"
            "ROCM used to build PyTorch: 7.1.25424-4179531dcd\n\nOS: Ubuntu 22.04\n"
            "Python version: 3.14.0 (main, Oct 10 2025) [GCC 11.4.0] (64-bit runtime)\nPython platform: Linux-6.8.0\n"
            "GPU models and configuration: AMD Instinct MI250X (gfx90a:sramecc+:xnack-)\nHIP runtime version: 7.1.2",
            {"python": "3.14", "torch": "2.10", "rocm": "7.1", "gpus": ["gfx90a"], "platform": "linux"},
        ),
        (
            "Package     Version\nnumpy       2.1.0\ntorch       2.6.0+rocm6.2.4\ntorchvision 0.21.0+rocm6.2.4\n",
            {"python": "", "torch": "2.6", "rocm": "6.2", "gpus": []},
        ),
        ("torch==2.7.1+rocm6.3", {"python": "", "torch": "2.7", "rocm": "6.3", "gpus": []}),
        (
            "system=Windows python=3.13.1 torch=2.12.0+rocm7.14.0 hip=7.14.60850 gpu=gfx1201",
            {"python": "3.13", "torch": "2.12", "rocm": "7.14", "gpus": ["gfx1201"], "platform": "windows"},
        ),
        (
            "PyTorch version: 2.12.0+rocm7.14.0\nOS: Microsoft Windows 11 Pro (10.0.26100 64-bit)\n"
            "Python platform: Windows-11-10.0.26100-SP0",
            {"python": "", "torch": "2.12", "rocm": "7.14", "gpus": [], "platform": "windows"},
        ),
        (
            "python=3.12.3 torch=2.5.1+cu124 hip=None gpu=NVIDIA H200",
            {"python": "3.12", "torch": "2.5", "rocm": "", "gpus": [], "notRocm": True},
        ),
        ("<script>alert(1)</script>", {"python": "", "torch": "", "rocm": "", "gpus": []}),
        ("", {"python": "", "torch": "", "rocm": "", "gpus": []}),
    ],
)
def test_reports_that_can_be_pasted(page: MiniRacer, text: str, expected: dict[str, Any]) -> None:
    nothing = {"python": "", "torch": "", "rocm": "", "gpus": [], "notRocm": False, "platform": ""}
    assert js(page, "parseEnvironment", text) == {**nothing, **expected}


def test_the_command_to_paste_from_runs_in_a_shell(tmp_path: Path, page: MiniRacer) -> None:
    """With a torch that has two GPUs of one kind."""
    code = (
        "from types import SimpleNamespace as N\n__version__ = '2.5.1+rocm6.2'\nversion = N(hip='6.2.41133')\n"
        "cuda = N(device_count=lambda: 2, get_device_properties=lambda i: N(gcnArchName='gfx942:sramecc+:xnack-'))\n"
    )
    (tmp_path / "torch.py").write_text(code)
    command = which.PASTE_COMMAND.replace("python", shlex.quote(sys.executable), 1)
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert js(page, "parseEnvironment", done.stdout) == {
        "python": which.minor(sys.version),
        "torch": "2.5",
        "rocm": "6.2",
        "gpus": ["gfx942"],
        "notRocm": False,
        "platform": "linux",
    }


def test_the_issue_form_knows_every_field_that_is_filled_in(page: MiniRacer) -> None:
    fields = {"python": "3.13", "torch": "2.5", "rocm": "6.2", "gpu": "gfx942,gfx1100", "backend": "triton"}
    site = {"repository": "https://github.com/owner/name"}
    url = which.request_url(site, fields)
    ours, pages = urlsplit(url), urlsplit(js(page, "requestUrl", fields, site["repository"]))
    query = parse_qs(ours.query)
    assert query == parse_qs(pages.query)
    assert query.pop("template") == [FORM.name]
    form = yaml.safe_load(FORM.read_text(encoding="utf-8"))
    by_id = {field["id"]: field for field in form["body"] if "id" in field}
    assert set(query) == set(fields) == set(by_id) - {"purpose"}
    assert all(by_id[name]["attributes"]["label"] == name for name in fields)
    assert sorted(by_id["backend"]["attributes"]["options"]) == sorted(which.BACKENDS)
