"""`which.py`: what it detects, prints and serves. What it recommends is in test_advice.py."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import wheelhouse
import yaml
from py_mini_racer import MiniRacer

from rocm_wheels.matrix import versions
from rocm_wheels.matrix.cells import Universal
from rocm_wheels.publish import directory, index, which
from rocm_wheels.publish.catalogue import Catalogue
from rocm_wheels.publish.home import Home
from rocm_wheels.publish.templates import TEMPLATES
from rocm_wheels.publish.which import Machine

ROOT = Path(__file__).resolve().parent.parent
FORM = ROOT / ".github" / "ISSUE_TEMPLATE" / "request_wheel.yml"
HOME = Home(url="https://example.org/wheels/", repository="https://github.com/owner/name")
GPUS = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
TORCH = '{} install "torch=={}" --index-url https://download.pytorch.org/whl/{}'
MI300X = Machine(python="3.12.1", torch="2.5.1+rocm6.2", hip="6.2.41133-dd7f95766", gpus=("gfx942",))
UNIVERSAL = 'pip install "flash_attn==2.8.3+rocm" --extra-index-url https://example.org/wheels/simple/\n'


def built(out: Path, *, cells: bool = False, systems: tuple[str, ...] = ("manylinux_2_17_x86_64",)) -> Path:
    """A site with universal wheels of some systems, or with wheels of one combination alone."""
    dist = out.parent / "dist"
    for flash_attn in ("2.7.4", "2.8.3", "2.8.3.post2"):
        for tag in () if cells else systems:
            targets = GPUS if tag != "win_amd64" else GPUS[2:]
            claim = Universal(flash_attn=flash_attn, python="3.10", backend="ck")
            wheelhouse.write(dist, claim, platform=tag, targets=targets)
    for backend in ("ck", "triton") if cells else ():
        wheelhouse.write(dist, wheelhouse.cell("2.8.3 3.12 2.5.1 6.2", backend), targets=GPUS)
    result = Catalogue(wheels=directory.read(dist).wheels if dist.is_dir() else ())
    index.build(result, out, versions=versions.load(), home=HOME)
    return out


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file address is valid too."""
    return built(tmp_path_factory.mktemp("www") / "site", systems=("manylinux_2_17_x86_64", "win_amd64"))


def run(
    site: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(which, "detect", lambda: machine)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    code = which.main(["--site", site.as_uri(), *options])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize(
    ("machine", "options", "words"),
    [
        (MI300X, [], "tested   passed its tests on CPU (GPU: not run: the machine that tested it has no AMD or NVIDIA"),
        (MI300X._replace(gpus=()), [], "no AMD GPU"),
        (MI300X._replace(torch="2.16.0+rocm10.2", hip="10.2.1"), [], "note     This torch is newer than 2.15"),
        (MI300X._replace(gpus=("gfx1036", "gfx1100")), ["--torch", "2.14.1+rocm7.2"], "If a program uses the gfx1036"),
        (MI300X, ["--gpu", "RX 9070 XT", "--torch", "2.14.1", "--rocm", "7.2"], "gfx1201"),
    ],
)
def test_lines(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: Machine,
    options: list[str],
    words: str,
) -> None:
    code, out, err = run(site, machine, monkeypatch, capsys, *options)
    assert (code, out) == (0, UNIVERSAL), err
    assert words in err


NEWEST = TORCH.format("pip", "2.14.1+rocm7.2", "rocm7.2")
LACK = (
    "gfx1010",
    "PyTorch's torch has no kernels for gfx1010.\ntorch    pip uninstall -y torch torchvision torchaudio\n",
)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (MI300X._replace(torch="", hip=""), f"torch for ROCm comes first.\ntorch    {NEWEST}\nthen     run this again"),
        (MI300X._replace(torch="2.5.1+cu124", hip=""), f"not built for ROCm.\ntorch    {NEWEST}\n"),
        (MI300X._replace(torch="2.4.1+rocm6.1", hip="6.1.4"), "for torch 2.5 and newer.\ntorch    "),
        (MI300X._replace(gpus=("gfx1201",)), "gfx1201 needs torch for ROCm 6.4 or newer"),
        (MI300X._replace(torch="2.13.0+rocm7.2", hip="7.2.1", gpus=(LACK[0],)), LACK[1]),
        (MI300X._replace(python="3.9.1"), "This Python is too old: the wheels are for Python 3.10 and newer."),
        (MI300X._replace(python="3.14.0t"), "not for free-threaded Python 3.14t"),
        (MI300X._replace(gpus=("gfx906",)), "No wheel has kernels for gfx906."),
        (
            MI300X._replace(gpus=("gfx1030",)),
            'published for this machine.\nbuild    PYTORCH_ROCM_ARCH="gfx1030" ./build_rocm.sh 2.8.3'
            "  # in a clone of https://github.com/owner/name\n",
        ),
    ],
)
def test_reasons(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], machine: Machine, words: str
) -> None:
    code, out, err = run(site, machine, monkeypatch, capsys)
    assert (code, out) == (1, "")
    assert words in err


def test_a_withdrawn_wheel_is_named_with_its_reason(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((site / "metadata.json").read_text())
    for wheel in content["wheels"]:
        wheel["yanked"] = "wrong dQ"
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    code, _, err = run(tmp_path, MI300X, monkeypatch, capsys)
    assert code == 1
    assert "withdrawn flash_attn-2.8.3+rocm-cp310-abi3-manylinux" in err
    assert ": wrong dQ\nbuild    " in err


def test_a_wheel_of_one_combination_serves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = built(tmp_path / "site", cells=True)
    line = (
        'pip install "flash_attn==2.8.3+rocm62torch2.5" --extra-index-url https://example.org/wheels/rocm6.2/torch2.5'
    )
    assert run(out, MI300X, monkeypatch, capsys)[1] == f"{line}/simple/\n"
    for other in (MI300X._replace(python="3.11.1"), MI300X._replace(torch="2.6.0+rocm6.1", hip="6.1.4")):
        code, printed, err = run(out, other, monkeypatch, capsys)
        assert (code, printed, "build    " in err) == (1, "", True)


def test_without_any_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(built(tmp_path / "site", systems=()), MI300X, monkeypatch, capsys)
    assert (code, out) == (1, "")
    assert f'build    PYTORCH_ROCM_ARCH="gfx942" ./build_rocm.sh {wheelhouse.NEWEST}  #' in err


def test_sites_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(tmp_path, MI300X, monkeypatch, capsys)
    assert code == 1
    assert "metadata.json gave no list of wheels: " in err
    assert which.main(["--site", ""]) == 1
    assert "No site of wheels is named.\nGive --site URL" in capsys.readouterr().err
    (tmp_path / "metadata.json").write_text('{"format": 1}')
    assert "has format 1.\nGet the which.py of that site." in run(tmp_path, MI300X, monkeypatch, capsys)[2]


def test_a_torch_of_which_the_rocm_is_not_known(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = MI300X._replace(torch="", hip="")
    assert "--torch 2.5 alone.\nGive --rocm too" in run(site, bare, monkeypatch, capsys, "--torch", "2.5")[2]
    assert run(site, bare, monkeypatch, capsys, "--torch", "2.5", "--rocm", "6.2")[:2] == (0, UNIVERSAL)
    assert "'RTX 4090' is no GPU that is known" in run(site, MI300X, monkeypatch, capsys, "--gpu", "RTX 4090")[2]


def test_windows(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    card = Machine(python="3.13.1", torch="2.12.0+rocm7.14.0", hip="7.14.60850", gpus=("gfx1100",))
    monkeypatch.setattr(sys, "executable", r"C:\ComfyUI\python_embeded\python.exe")
    monkeypatch.setattr(sys, "platform", "win32")
    pip = r"C:\ComfyUI\python_embeded\python.exe -m pip"
    code, out, err = run(site, card, monkeypatch, capsys)
    assert (code, out, "win_amd64.whl" in err) == (0, UNIVERSAL.replace("pip", pip, 1), True)
    err = run(site, card, monkeypatch, capsys, "--gpu", "gfx1030")[2]
    assert 'build    PYTORCH_ROCM_ARCH="gfx1030" ./build_rocm.sh 2.8.3 --platform windows  # in' in err
    assert "AMD's torch for Windows does not serve gfx942" in run(site, card, monkeypatch, capsys, "--gpu", "gfx942")[2]
    _, _, err = run(site, card._replace(torch="2.12.0", hip="", gpus=()), monkeypatch, capsys)
    assert f"torch    {pip} uninstall -y torch torchvision torchaudio\n" in err
    assert f'torch    {pip} install "torch[device-all]"' in err
    assert not re.search("(?m)^torch .*#", err)  # cmd takes a comment for arguments


@pytest.mark.parametrize("name", ["darwin", "linux"])
def test_other_systems(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(sys, "platform", name)
    monkeypatch.setattr(which, "detect", lambda: MI300X)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64" if name == "linux" else "x86_64")
    assert which.main(["--site", site.as_uri()]) == 1
    assert f"x86_64, {'this is aarch64' if name == 'linux' else 'not for darwin'}" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--torch", "new"], ["--rocm", "old"]])
def test_options_are_checked(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        which.main(option)
    assert caught.value.code == 2
    assert option[1] in capsys.readouterr().err


def test_detection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is read, not imported; GPUs come from the kernel driver."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    text = "__version__ = '2.6.0+rocm6.2.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.2.41134-65d174c3e'\n"
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    result = which.detect()
    assert (result.torch, result.hip) == ("2.6.0+rocm6.2.4", "6.2.41134-65d174c3e")
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


def test_the_copy_of_a_site_is_one_file_that_runs_alone(site: Path, tmp_path: Path) -> None:
    text = (site / "which.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names}
    assert f'SITE = "{HOME.url}"  #' in text
    here = text.replace(HOME.url, f"{site.as_uri()}/")
    asked = ["--torch", "2.5.1+rocm6.2", "--gpu", "MI300X", "--python", "3.12"]
    done = subprocess.run(
        [sys.executable, "-I", "-", *asked], cwd=tmp_path, input=here, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, UNIVERSAL), done.stderr


@pytest.fixture(scope="module")
def page() -> MiniRacer:
    """The page's script without a page."""
    engine = MiniRacer()
    engine.eval((TEMPLATES / "chooser.js").read_text(encoding="utf-8"))
    return engine


def js(engine: MiniRacer, function: str, *arguments: Any) -> Any:
    written = ", ".join(json.dumps(argument) for argument in arguments)
    return json.loads(str(engine.eval(f"JSON.stringify({function}({written}))")))


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
        ("torch  2.9.1+rocmsdk20260116", {"python": "", "torch": "2.9", "rocm": "", "gpus": [], "unsaid": True}),
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
        (
            "system=Darwin python=3.12.3 torch=2.13.0 hip=None gpu=",
            {
                "python": "3.12",
                "torch": "2.13",
                "rocm": "",
                "gpus": [],
                "notRocm": True,
                "elsewhere": True,
            },
        ),
        ("<script>alert(1)</script>", {"python": "", "torch": "", "rocm": "", "gpus": []}),
        ("", {"python": "", "torch": "", "rocm": "", "gpus": []}),
    ],
)
def test_reports_that_can_be_pasted(page: MiniRacer, text: str, expected: dict[str, Any]) -> None:
    nothing = {"notRocm": False, "unsaid": False, "platform": "", "elsewhere": False}
    result = js(page, "parseEnvironment", text)
    label = re.search(r"\d\+(\S+)", text)
    assert result.pop("label") == (label[1] if label else "")
    assert result == {**nothing, **expected}


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
        "python": which.advice.minor(sys.version),
        "torch": "2.5",
        "rocm": "6.2",
        "gpus": ["gfx942"],
        "notRocm": False,
        "unsaid": False,
        "platform": "linux",
        "elsewhere": False,
        "label": "rocm6.2",
    }


def test_the_issue_form_knows_every_field_that_is_filled_in(page: MiniRacer) -> None:
    fields = {"python": "3.13", "torch": "2.5", "rocm": "6.2", "gpu": "gfx942,gfx1100", "backend": "triton"}
    query = parse_qs(urlsplit(js(page, "requestUrl", fields, HOME.repository)).query)
    assert query.pop("template") == [FORM.name]
    form = yaml.safe_load(FORM.read_text(encoding="utf-8"))
    by_id = {field["id"]: field for field in form["body"] if "id" in field}
    assert set(query) == set(fields) == set(by_id) - {"purpose"}
    assert all(by_id[name]["attributes"]["label"] == name for name in fields)
    assert sorted(by_id["backend"]["attributes"]["options"]) == sorted(versions.load().backends)
