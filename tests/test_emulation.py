"""A wheel under AMD's rocjitsu: which commands run, and that the result never becomes one of hardware.

The stand-ins take the arguments that rocjitsu's documents name (ROCm/rocm-systems, emulation/rocjitsu, November 2026)
and refuse every other one.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from workflows import load

from rocm_wheels import cli
from rocm_wheels.errors import DataError, VerifyFailed
from rocm_wheels.matrix import versions
from rocm_wheels.publish import emulation, tryout
from rocm_wheels.wheel import verify

_ROCJITSU = """#!/bin/sh
case "$1 $2" in
--version*) echo "NAME 0.3.0"; echo "Git revision 0123456"; exit ;;
"run --help") RUN_HELP ;;
esac
FORM
[ "$1" = --config ] && [ -f "$2" ] && [ "$3" = -- ] || { echo "usage" >&2; exit 2; }
shift 3
EMULATED=1 exec "$@"
"""
# The command line since 0.3 with its older name, and the one before it, which has no verbs.
_VERBS = {"RUN_HELP": "echo '  --in-process'; exit", "FORM": '[ "$1 $2" = "run --in-process" ] || exit 2; shift 2'}
_BEFORE = {"RUN_HELP": "echo unknown argument >&2; exit 1", "FORM": ""}
PROGRAMS = {"rocjitsu": ("rocjitsu", _VERBS), "mirage": ("mirage", _VERBS), "without verbs": ("rocjitsu", _BEFORE)}

_PYTHON = """#!{python}
import json, os, pathlib, sys
with open({log!r}, "a") as log:
    print(json.dumps(["EMULATED" in os.environ, *sys.argv[1:]]), file=log)
answers = pathlib.Path({answers!r})
if sys.argv[1] == "-c":
    version = "2.13.0+rocm10.1.0"
    print(version if "gcnArchName" not in sys.argv[2] else version + "|" + (answers / "gpu").read_text())
    sys.exit()
flag = {{"flash_attn.selftest": "--json", "pytest": "--report"}}[sys.argv[2]]
source = answers / (sys.argv[2] + ".json")
if source.exists():
    pathlib.Path(sys.argv[sys.argv.index(flag) + 1]).write_text(source.read_text())
sys.exit(1)  # an exit code does not count, the report does
"""


class Sdk:
    """Stand-ins for uv, for the environment that it makes, and for the programs of rocm-sdk-devel."""

    def __init__(self, root: Path) -> None:
        self.root, self.log, self.answers = root / "sdk", root / "python.log", root / "answers"
        self.installed: list[str] = []
        self.answers.mkdir()
        self.log.touch()
        configurations = self.root / "share/rocjitsu/configs"
        configurations.mkdir(parents=True)
        for name in emulation.CONFIGURATIONS.values():
            (configurations / name).write_text("{}")
        self.answer("gpu", "gfx942|rocjitsu")
        self.report(emulator="rocjitsu")
        outcomes = ["passed", "passed", "skipped"]
        self.answer("pytest.json", {"tests": [{"name": str(i), "outcome": each} for i, each in enumerate(outcomes)]})

    def answer(self, name: str, content: Any) -> None:
        (self.answers / name).write_text(content if isinstance(content, str) else json.dumps(content))

    def report(self, *, trouble: str = "", ok: tuple[bool | None, ...] = (True, True, None), **machine: str) -> None:
        checks = [{"check": f"check {i}", "ok": each, "failure": "wrong" * (not each)} for i, each in enumerate(ok)]
        wheel = {"version": "2.8.3", "contents": "0123456789abcdef", "damaged": []}
        content = {"date": "2026-12-01", "machine": machine, "wheel": wheel, "checks": checks, "trouble": trouble}
        self.answer("flash_attn.selftest.json", content)

    def program(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def emulator(self, name: str, parts: dict[str, str]) -> None:
        text = _ROCJITSU.replace("NAME", name)
        for word, part in parts.items():
            text = text.replace(word, part)
        self.program(self.root / "bin" / name, text)

    def uv(self, command: list[Any], *, cwd: Path | None = None) -> None:  # noqa: ARG002
        words = [str(word) for word in command]
        if words[1] == "venv":
            binaries = Path(words[-1]) / "bin"
            python = _PYTHON.format(python=sys.executable, log=str(self.log), answers=str(self.answers))
            self.program(binaries / "python", python)
            answers = f'init*) ;; "path --root") echo {shlex.quote(str(self.root))} ;; version*) echo 10.1.0 ;;'
            self.program(binaries / "rocm-sdk", f'#!/bin/sh\ncase "$1 $2" in\n{answers}\n*) exit 2 ;;\nesac\n')
        else:
            self.installed.append(" ".join(words[words.index("--python") + 2 :]))

    def calls(self) -> list[list[Any]]:
        """The commands of the environment's Python: whether it ran under the emulator, and its arguments."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sdk:
    stand_in = Sdk(tmp_path)
    stand_in.emulator("rocjitsu", _VERBS)
    monkeypatch.setattr(verify, "run_installer", stand_in.uv)
    return stand_in


def emulate(tmp_path: Path, *arguments: str) -> int:
    wheel = tmp_path / "flash_attn-2.8.3+rocm-cp310-abi3-manylinux_2_17_x86_64.whl"
    return cli.main(["emulate", "gfx942", "--wheel", str(wheel), "--out", str(tmp_path / "out"), *arguments])


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_selftest_and_the_tests_run_under_the_emulator(
    sdk: Sdk, tmp_path: Path, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (sdk.root / "bin/rocjitsu").unlink()
    sdk.emulator(*PROGRAMS[program])
    assert emulate(tmp_path, "--minutes", "7", "--summary", str(tmp_path / "summary.md")) == 0
    torch, tests, wheel = sdk.installed
    assert torch.endswith("torch[device-gfx942] rocm[libraries,devel]")
    assert "--index-url https://stable.repo.amd.com/" in torch
    assert "--require-hashes" in tests
    assert wheel.endswith(".whl")
    under, arguments = zip(*((call[0], call[1:]) for call in sdk.calls()), strict=True)
    assert under == (False, False, True, True, True)
    assert arguments[3][:5] == ["-m", "flash_attn.selftest", "--minutes", "7", "--json"]
    assert arguments[4][:2] == ["-m", "pytest"]
    assert "--minutes 7 --report" in " ".join(arguments[4])
    assert [Path(word).name for word in arguments[4][-2:]] == ["test_gpu.py", "test_fa3.py"]
    said = capsys.readouterr().out
    assert said.startswith("### gfx942, emulated, by AMD's rocjitsu, version 0.3.0\n")
    assert "Nothing ran on hardware." in said
    assert "| selftest | 2 | 0 | 0 |\n| wheel_tests | 2 | 0 | 1 |\n" in said
    assert (tmp_path / "summary.md").read_text().strip() == said.strip()
    result = json.loads((tmp_path / "out/gfx942.json").read_text())
    assert (result["emulator"], result["version"], result["rocm"]) == ("rocjitsu", "0.3.0", "10.1.0")
    assert result["wheel"] == "2.8.3, contents 0123456789ab"


def test_a_failure_is_named_and_time_that_is_over_is_none(
    sdk: Sdk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sdk.report(emulator="rocjitsu", trouble="90 minutes are over: 41 of 92 steps did not run")
    assert emulate(tmp_path) == 0
    assert "| selftest | 2 | 0 | 41 |" in capsys.readouterr().out
    sdk.report(emulator="rocjitsu", ok=(True, False), trouble="the process of the selftest ended 3 times")
    assert emulate(tmp_path) == 1
    said = capsys.readouterr().out
    assert "| selftest | 1 | 2 | 0 |" in said
    assert "- check 1: wrong\n- the process of the selftest ended 3 times\n" in said
    sdk.report(emulator="rocjitsu", ok=(), trouble="90 minutes are over: 92 of 92 steps did not run")
    assert emulate(tmp_path) == 1, "nothing ran"


def test_a_report_that_does_not_name_the_emulator_is_refused(sdk: Sdk, tmp_path: Path) -> None:
    sdk.report()
    with pytest.raises(VerifyFailed, match="could be taken for one of hardware"):
        emulation.run("gfx942", ["flash_attn"], minutes=1, output=tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.json"))


@pytest.mark.parametrize("shown", ["gfx950|rocjitsu", "gfx942|"])
def test_another_gpu_than_the_wanted_one_is_refused(sdk: Sdk, tmp_path: Path, shown: str) -> None:
    sdk.answer("gpu", shown)
    with pytest.raises(VerifyFailed, match="not an emulated gfx942"):
        emulation.run("gfx942", ["flash_attn"], minutes=1, output=tmp_path / "out")


def test_what_is_missing_is_named(sdk: Sdk, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no configuration for gfx1030"):
        emulation.run("gfx1030", ["flash_attn"], minutes=1, output=tmp_path / "out")
    (sdk.answers / "pytest.json").unlink()
    with pytest.raises(VerifyFailed, match="pytest wrote no report"):
        emulation.run("gfx942", ["flash_attn"], minutes=1, output=tmp_path / "out")
    (sdk.root / "share/rocjitsu/configs" / emulation.CONFIGURATIONS["gfx942"]).unlink()
    with pytest.raises(VerifyFailed, match=r"has no .*gfx942_cdna3.json"):
        emulation.run("gfx942", ["flash_attn"], minutes=1, output=tmp_path / "out")
    (sdk.root / "bin/rocjitsu").unlink()
    with pytest.raises(VerifyFailed, match=r"has no .*bin/rocjitsu"):
        emulation.run("gfx942", ["flash_attn"], minutes=1, output=tmp_path / "out")


@pytest.mark.usefixtures("sdk")
def test_the_newest_release_is_the_default(
    sdk: Sdk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["emulate", "gfx942", "--repo", "owner/name", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(tryout, "listing", lambda _: None)
    assert cli.main(arguments) == 0
    assert "nothing is published yet" in capsys.readouterr().out
    assert not sdk.installed
    newest = {"torch": "", "yanked": None, "flash_attn": "2.8.3", "version": "2.8.3+rocm", "index": "simple/"}
    monkeypatch.setattr(tryout, "listing", lambda _: {"wheels": [newest]})
    assert cli.main(arguments) == 0
    expected = "flash_attn==2.8.3+rocm --extra-index-url https://owner.github.io/name/simple/"
    assert sdk.installed[-1] == expected


def test_the_workflow_runs_every_target_that_can_be_emulated() -> None:
    job = load("emulator.yml")["jobs"]["emulate"]
    assert job["strategy"]["matrix"]["target"] == list(emulation.CONFIGURATIONS)
    known = versions.load().targets
    families = [known[target].family for target in emulation.CONFIGURATIONS]
    assert len(set(families)) == len(families)
