"""The table that the page to choose a wheel looks its answers up in: `advice.answer` for every kind of machine.

An axis of versions is a list of bounds: a version belongs to the last bound that is not above it, and class 0 stands
for no version. GPUs with the same facts share a class, and their answers name them as {gpu}.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from rocm_wheels.package_modules import single_file
from rocm_wheels.tables import version_key

advice = single_file("diagnosis.advice")
MAKERS = ("pytorch", "amd")
_UNKNOWN = "gfx000"  # stands for every GPU that versions.toml does not list


def table(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The answers, JSON-ready.

    gpus: target -> its class, and its rank on each system. runs: the numbers of the answers, "3*12" for twelve times
    the third, in the order gpu, system, python, torch, ROCm, maker, of which the last changes first.
    """
    classes = {"": "", _UNKNOWN: _UNKNOWN}  # facts of a class -> a GPU of it
    gpus: dict[str, list[int]] = {}
    for gpu, row in facts["targets"].items():
        same = repr({name: fact for name, fact in row.items() if name != "products"})
        classes.setdefault(same, gpu)
        ranks = [advice.rank(facts, gpu, system) for system in advice.SYSTEMS]
        gpus[gpu] = [list(classes).index(same), *ranks]
    bounds = {
        "python": _pythons(facts),
        "torch": _torches(facts),
        "rocm": ["0.0", *_with_newer(sorted(facts["rocm"], key=version_key))],
    }
    axes = [list(classes.values()), advice.SYSTEMS, *(["", *bounds[name]] for name in bounds), MAKERS]
    answers: dict[str, dict[str, Any]] = {}
    runs: list[list[int]] = []
    for gpu, system, python, torch, rocm, maker in itertools.product(*axes):
        made = advice.answer(facts, gpu, system, python, (torch, rocm, maker), "{devices}" if gpu in gpus else "")
        content = _named(made._asdict(), gpu)
        number = list(answers).index(key) if (key := repr(content)) in answers else len(answers)
        answers.setdefault(key, content)
        if runs and runs[-1][0] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return {
        "gpus": gpus,
        "bounds": bounds,
        "sizes": [len(axis) for axis in axes],
        "answers": list(answers.values()),
        "runs": " ".join(f"{number}*{count}" for number, count in runs),
        "beside": advice.BESIDE,
        "states": advice.STATES,
        "systems": advice.SYSTEMS,
        "elsewhere": advice.answer(facts, "", "", "", ("", "", ""), "").reason,
        "free_threaded": advice.answer(facts, "", "linux", "{python}t", ("", "", ""), "").reason,
        "pytorch_label": advice.PYTORCH_LABEL,
        "products": {product: gpu for gpu, row in facts["targets"].items() for product in row["products"]},
    }


def _named(content: Any, gpu: str) -> Any:
    """The answer with {gpu} in place of the GPU's name."""
    if isinstance(content, str):
        return content.replace(gpu, "{gpu}") if gpu else content
    if isinstance(content, Mapping):
        return {name: _named(value, gpu) for name, value in content.items()}
    return [_named(value, gpu) for value in content] if isinstance(content, Sequence) else content


def _pythons(facts: Mapping[str, Any]) -> list[str]:
    """The bounds of Python: every version for which other torch releases exist than for the version before it."""
    bounds, last = ["0.0"], None
    for python in _with_newer(facts["python"]):
        served = [python in release["python"] for release in facts["torch"].values()], python in facts["amd_python"]
        newer = python not in facts["python"]
        if (served, newer) != last:
            bounds.append(python)
        last = (served, newer)
    return bounds


def _torches(facts: Mapping[str, Any]) -> list[str]:
    """The bounds of torch: too old, supported, newer than the newest one that is known."""
    newest = max(facts["torch"], key=version_key)
    return ["0.0", facts["oldest_torch"], _next(newest)]


def _with_newer(versions: Sequence[str]) -> list[str]:
    """The versions, and one that is newer than all."""
    return [*versions, _next(versions[-1])]


def _next(version: str) -> str:
    """The minor version after a version."""
    major, minor = version_key(version)[:2]
    return f"{major}.{minor + 1}"
