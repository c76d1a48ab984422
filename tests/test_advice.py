"""One adviser: the page's table, `which.py` of a site and the doctor give one answer, and a second program agrees."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import advice_oracle
import pytest
from flash_attn.core.build_info import BuildInfo
from flash_attn.diagnosis import advice, commands, survey
from py_mini_racer import MiniRacer

from rocm_wheels.matrix import advice_facts, versions
from rocm_wheels.publish import answers, which
from rocm_wheels.publish.templates import TEMPLATES

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = [f"3.{minor}" for minor in range(8, 17)]
TORCHES = ["", *(f"2.{minor}" for minor in range(3, 17))]
ROCMS = ["", "5.7", "6.0", *advice_oracle.DATA["rocm"], "10.2"]
FACTS = advice_facts.facts(versions.load())
Machine = tuple[str, str, str, str, str]


def machines() -> Iterator[Machine]:
    """(GPU, system, Python, torch, ROCm): every combination."""
    for gpu, system in itertools.product(["", *advice_oracle.GPUS, "gfx906"], advice.SYSTEMS):
        for python, torch, rocm in itertools.product(PYTHONS, TORCHES, ROCMS):
            if torch or not rocm:
                yield gpu, system, python, torch, rocm


def question(machine: Machine) -> advice.Question:
    gpu, system, python, torch, rocm = machine
    label = f"{torch}.0+rocm{rocm}" if torch and rocm else torch and f"{torch}.0+cu124"
    return advice.Question((gpu,) if gpu else (), system, python, label, rocm)


@pytest.fixture(scope="module")
def told() -> dict[Machine, advice.Advice]:
    return {machine: advice.advise(FACTS, question(machine)) for machine in machines()}


@pytest.fixture(scope="module")
def page() -> MiniRacer:
    """The page's script without a page, and its table."""
    engine = MiniRacer()
    engine.eval((TEMPLATES / "chooser.js").read_text(encoding="utf-8"))
    engine.eval(f"const known = {json.dumps(answers.table(FACTS))}")
    return engine


def on_page(page: MiniRacer, wants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    script = f"JSON.stringify({json.dumps(wants)}.map((want) => advise(known, want)))"
    return list(json.loads(str(page.eval(script))))


def want(asked: advice.Question) -> dict[str, Any]:
    """A question as the page has it after a paste."""
    label = asked.torch.partition("+")[2]
    versions_ = {"python": asked.python, "torch": advice.minor(asked.torch), "rocm": advice.minor(asked.hip)}
    return {"gpus": list(asked.gpus), "platform": asked.system, **versions_, "label": label}


def as_json(given: advice.Advice) -> dict[str, Any]:
    return {**given._asdict(), "variables": dict(given.variables), "notes": list(given.notes)}


def test_a_second_program_agrees(told: dict[Machine, advice.Advice]) -> None:
    assert len(told) > 90_000
    for machine, given in told.items():
        index = advice_oracle.index_of(given.torch)
        result = advice_oracle.Expected(given.state, index, given.variables.get(advice.OVERRIDE, ""))
        assert result == advice_oracle.expected(*machine), machine


def test_the_page_agrees(told: dict[Machine, advice.Advice], page: MiniRacer) -> None:
    for machine, shown in zip(told, on_page(page, [want(question(machine)) for machine in told]), strict=True):
        assert shown == as_json(told[machine]), machine


def test_the_script_of_a_site_and_the_doctor_agree(told: dict[Machine, advice.Advice]) -> None:
    """The script carries the adviser as a text, and reads the facts from the site."""
    script: dict[str, Any] = {"__name__": "which"}
    exec(which.standalone("https://example.org/"), script)
    site = json.loads(json.dumps({"advice": FACTS}, sort_keys=True))  # as in the build info of a wheel
    build = BuildInfo(label="rocm", targets=("gfx942",), advice=site["advice"])
    for machine in itertools.islice(told, 0, None, 11):
        asked, given = question(machine), told[machine]
        assert as_json(script["advice"].advise(site["advice"], asked)) == as_json(given), machine
        gpus = [{"name": "", "target": gpu, "memory_mib": 1} for gpu in asked.gpus]
        installed = {"version": asked.torch, "hip": asked.hip or None, "cuda": None}
        probe = {"torch": installed, "devices": gpus} if asked.torch else {"torch_error": "", "devices": gpus}
        facts = survey.Facts(python=f"{asked.python}.1", windows=asked.system == "windows", build=build, probe=probe)
        assert facts.advise() == given, machine
        line = commands.install_torch(facts)
        assert given.torch in line
        assert not given.torch or line.count(" install ") == 1


def test_what_no_source_confirmed_is_never_recommended(told: dict[Machine, advice.Advice]) -> None:
    lines = {given.torch for given in told.values()}
    assert len(lines) > 20
    data = advice_oracle.DATA
    unsure = [torch for torch, release in data["torch"].items() if "uncertain" in release]
    unsure += [f"rocm{rocm}" for rocm, release in data["rocm"].items() if "uncertain" in release]
    assert unsure
    assert not [line for line in lines if any(name in line for name in unsure)]
    devices = {name for line in lines for name in re.findall(r"device-([\w-]+)", line)}
    assert devices <= {*advice_oracle.GPUS, "all"}


@pytest.mark.parametrize(
    ("gpus", "system", "torch", "hip", "state", "words"),
    [
        # From a card and the GPU in a processor, the card; of two cards, both.
        (("gfx1036", "gfx1101"), "windows", "", "", "torch", "torch[device-gfx1101]"),
        (("gfx1036",), "windows", "", "", "torch", "torch[device-gfx1036]"),
        (("gfx803", "gfx1036"), "windows", "", "", "torch", "torch[device-gfx1036]"),
        (("gfx1201", "gfx1100"), "windows", "", "", "torch", "torch[device-gfx1100,device-gfx1201]"),
        (("gfx1036", "gfx1201"), "linux", "2.14.1+rocm7.2", "7.2.1", "install", "gfx1036 instead, HIP_VISIBLE_DEV"),
        # The worst answer of two cards: this torch has kernels for one of them.
        (("gfx942", "gfx1201"), "linux", "2.5.1+rocm6.2", "6.2.4", "torch", "gfx1201 needs torch for ROCm 6.4"),
        # Who built a torch decides what it has: PyTorch's has no RDNA 1, AMD's has.
        (("gfx1010",), "linux", "2.13.0+rocm7.2", "7.2.1", "torch", "PyTorch's torch has no kernels for gfx1010"),
        (("gfx1010",), "linux", "2.12.0+rocm7.14.0", "7.14.1", "install", ""),
        (("gfx1103",), "linux", "2.9.1+rocmsdk20260116", "7.2.5", "install", ""),
        (("gfx1103",), "linux", "2.6.0+rocm6.2.4", "6.2.4", "install", "runs the kernels of gfx1100"),
        (("gfx1152",), "linux", "2.14.1+rocm7.2", "7.2.1", "torch", "PyTorch's torch has no kernels for gfx1152"),
        # ROCm 10 is not sent back to 7.14.
        (("gfx1201",), "windows", "2.13.0+rocm10.0.0", "10.0.1", "install", "rocm/whl-next/"),
        (("gfx942",), "darwin", "2.13.0", "", "refuse", "for Linux and Windows on x86_64, not for darwin"),
    ],
)
def test_machines(
    page: MiniRacer, gpus: tuple[str, ...], system: str, torch: str, hip: str, state: str, words: str
) -> None:
    asked = advice.Question(gpus, system, "3.12", torch, hip)
    given = advice.advise(FACTS, asked)
    assert given.state == state, given
    assert words in " ".join([given.reason, given.torch, *given.notes])
    if system in advice.SYSTEMS:
        assert on_page(page, [want(asked)]) == [as_json(given)]


_ON_PAGES = re.compile(r"""pip (install "?torch(?![a-z])[^`\n]*--index-url [^`\s]+)""")


def test_the_pages_install_what_the_adviser_recommends() -> None:
    """For a GPU that a line names, on Linux or Windows, with a torch for another ROCm or without one."""
    lines = []
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        lines += [(path.name, line) for line in _ON_PAGES.findall(path.read_text(encoding="utf-8"))]
    assert {page for page, _ in lines} >= {"README.md", "windows.md", "comfyui.md", "gpus.md"}
    for page, line in lines:
        if "TORCH" in line or "GPU" in line:  # troubleshooting.md, README.md: the doctor or the reader fills it in
            continue
        gpus = re.findall(r"device-(gfx\w+)", line) or ["gfx1201"]
        asked = [(system, hip) for system in advice.SYSTEMS for hip in ("", "10.0")]
        told = {
            advice.torch_line(FACTS, gpu, system, "", hip, advice.devices(FACTS, [gpu]))[0]
            for gpu in gpus
            for system, hip in asked
        }
        # A table may name AMD's torch beside PyTorch's, which is the one that is recommended.
        told |= {
            f'install "torch[device-{gpu}]" --index-url {advice.amd_index(FACTS, hip)}'
            for gpu in gpus
            for hip in ("", "10.0")
        }
        assert line in told, page


def test_free_threaded_pythons_are_refused() -> None:
    assert "not for free-threaded Python 3.13t" in advice.advise(FACTS, advice.Question(python="3.13t")).reason


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"), ("mi300x", "gfx942"), ("AMD Instinct MI300X", "gfx942"),
        ("300x", "gfx942"),
        ("7900 XTX", "gfx1100"), ("AMD Radeon RX 7900 XTX", "gfx1100"), ("AMD Radeon Pro W7900", "gfx1100"),
        ("AMD Radeon RX 7900 XTX [ZLUDA]", "gfx1100"), ("AMD Radeon 780M Graphics", "gfx1103"), ("RTX 4090", ""),
        ("AMD Radeon(TM) Graphics", ""), ("", ""),
    ],
)  # fmt: skip
def test_gpus_by_the_names_that_users_type(name: str, target: str) -> None:
    assert advice.target(FACTS, name) == target
