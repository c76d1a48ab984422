"""What to install on a machine: the torch, the variables, or the reason why nothing serves it.

`advise` is the one place that decides it. The doctor calls it, and `which.py` carries this file; the page to choose a
wheel looks its answers up in a table that `rocm_wheels.publish.answers` made with it. Standard library only, and no
syntax newer than Python 3.8: a Python that is too old for the wheels gets a message.

`facts` is what `rocm_wheels.matrix.advice_facts` wrote: versions.toml, as far as advice needs it. Its tables may come
in any order, because a wheel holds them sorted by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

PYTORCH_INDEX = "https://download.pytorch.org/whl"
STATES = INSTALL, TORCH, REFUSE = "install", "torch", "refuse"  # what comes next, from the best to the worst
SYSTEMS = ("linux", "windows")
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
# What PyTorch's own wheels have after the + of their version. AMD's have three numbers from ROCm 7 on, or rocmsdk.
PYTORCH_LABEL = r"rocm(\d+\.\d+|6\.\d+\.\d+)"
# On GPUs of the machine that do not count, such as the one inside the processor.
BESIDE = "This is for the card. If a program uses the {others} instead, HIP_VISIBLE_DEVICES selects the card."

Facts = Mapping[str, Any]


class Question(NamedTuple):
    """A machine. gpus: targets such as gfx1201, in torch's order. python: "3.12"; "" for any. torch: the version of the
    installed torch, "" for none. hip: the HIP that it is built for, "" for none. pinned: torch and ROCm (minor
    versions) that an installed wheel requires.
    """

    gpus: Sequence[str] = ()
    system: str = "linux"
    python: str = ""
    torch: str = ""
    hip: str = ""
    pinned: tuple[str, str] = ("", "")


class Advice(NamedTuple):
    """What to do on a machine.

    state: INSTALL: the wheel can be installed. TORCH: `torch` comes first, because of `reason`. REFUSE: nothing serves
    the machine, because of `reason`. torch: pip's arguments that install torch for ROCm, "" where there is none.
    remove: whether pip must remove the other torch first. variables: set before Python starts. notes: sentences.
    """

    state: str
    reason: str = ""
    torch: str = ""
    remove: bool = False
    variables: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


def advise(facts: Facts, question: Question) -> Advice:
    """The answer for a machine with any number of GPUs: that of its best GPUs, which are the cards."""
    gpus = counting(facts, question.gpus, question.system) or ("",)
    torch, hip = minor(question.torch), minor(question.hip)
    maker = "pytorch" if question.system == "linux" and of_pytorch(question.torch) else "amd"
    extras = devices(facts, gpus)
    answers = [
        answer(facts, gpu, question.system, question.python, (torch, hip, maker), extras, question.pinned)
        for gpu in gpus
    ]
    worst = max(answers, key=lambda advice: STATES.index(advice.state))
    others = ", ".join(dict.fromkeys(gpu for gpu in question.gpus if gpu not in gpus))
    return worst._replace(notes=(*worst.notes, *([BESIDE.format(others=others)] if others else [])))


def counting(facts: Facts, gpus: Iterable[str], system: str) -> tuple[str, ...]:
    """The GPUs that the advice is for: the cards that wheels serve, else the GPUs in processors, else all."""
    distinct = tuple(dict.fromkeys(gpu for gpu in gpus if gpu))
    best = min((rank(facts, gpu, system) for gpu in distinct), default=0)
    return tuple(gpu for gpu in distinct if rank(facts, gpu, system) == best)


def rank(facts: Facts, gpu: str, system: str) -> int:
    """0: a card that wheels serve, 1: a GPU in a processor that wheels serve, 2: another GPU."""
    row = facts["targets"].get(gpu)
    if row is None or (system == "windows" and not row["windows"]):
        return 2
    return 1 if row["integrated"] else 0


def place(facts: Facts, gpus: Sequence[str], served: Sequence[bool]) -> int:
    """The number of the GPU that counts, of a machine with at least one: a card before a GPU in a processor, then one
    that the wheel serves, then the first. Without facts, all GPUs are cards.
    """
    in_processor = [bool(facts) and facts["targets"].get(gpu, {}).get("integrated", False) for gpu in gpus]
    # A card that no wheel serves, such as an RX 580, does not count beside a GPU that one does.
    useless = [bool(facts) and gpu not in facts["targets"] and any(served) for gpu in gpus]
    return min(range(len(gpus)), key=lambda number: (useless[number], in_processor[number], not served[number]))


def answer(
    facts: Facts,
    gpu: str,
    system: str,
    python: str,
    installed: tuple[str, str, str],
    extras: str,
    pinned: tuple[str, str] = ("", ""),
) -> Advice:
    """The answer for one GPU ("" if it is not known), from minor versions. installed: torch, its ROCm, and its maker,
    "pytorch" or "amd". extras: the packages of torch's kernels for all GPUs that count, as `devices` writes them.
    """
    refusal = _refusal(facts, gpu, system, python)
    if refusal:
        return Advice(REFUSE, refusal)
    torch, rocm, maker = installed
    line, remove = torch_line(facts, gpu, system, python, rocm, extras, pinned)
    why = _unsuitable(facts, gpu, system, installed)
    if why and not line:
        newest = facts["amd_python"][-1]
        why += f" None is known for Python {python}: use Python {facts['python'][0]} to {newest}."
        return Advice(REFUSE, why)
    if why:
        return Advice(TORCH, why, line, remove and bool(torch))
    variables = {}
    notes = []
    row = facts["targets"].get(gpu)
    if row and system == "linux" and not _serves(facts, row, rocm, maker):
        variables[OVERRIDE] = row["override"]
        torch_has = "and torch" if _below(rocm, facts["generic_since"]) else "because torch"
        notes.append(
            f"With {OVERRIDE} the {gpu} runs the kernels of {row['runs_as']}, {torch_has} has none for {gpu}. AMD does "
            "not support it."
        )
        if line:
            gone = "pip uninstall -y torch torchvision torchaudio && " if remove else ""
            notes.append(f"A torch with kernels of its own is better: {gone}pip {line}")
    notes += _unknown(facts, python, torch, rocm)
    return Advice(INSTALL, "", line, remove, variables, tuple(notes))


def _refusal(facts: Facts, gpu: str, system: str, python: str) -> str:
    """The reason why no wheel serves the machine, whatever torch it has; "" if one does."""
    oldest = facts["python"][0]
    if system not in SYSTEMS:
        return f"The wheels are for Linux and Windows on x86_64, not for {system or 'this system'}."
    if python.endswith("t"):
        return f"The wheels are not for free-threaded Python {python}. Use Python {python[:-1]}."
    if python and _below(python, oldest):
        return f"This Python is too old: the wheels are for Python {oldest} and newer."
    row = facts["targets"].get(gpu)
    if gpu and row is None:
        return f"No wheel has kernels for {gpu}."
    if row and system == "windows" and not row["windows"]:
        return f"AMD's torch for Windows does not serve {gpu}. Linux does."
    return ""


def _unsuitable(facts: Facts, gpu: str, system: str, installed: tuple[str, str, str]) -> str:
    """Why another torch has to be installed; "" if the installed one works with the wheel on this GPU."""
    torch, rocm, maker = installed
    row = facts["targets"].get(gpu)
    if not torch:
        return "torch for ROCm comes first."
    if not rocm:
        return "This torch is not built for ROCm."
    if _below(torch, facts["oldest_torch"]):
        return f"This torch is too old: the wheels are for torch {facts['oldest_torch']} and newer."
    oldest = min(facts["rocm"], key=numbers)
    if _below(rocm, oldest):
        return f"This torch is for a ROCm that is too old: the wheels are for ROCm {oldest} and newer."
    if row is None:
        return ""
    if _below(rocm, row["since"]):
        return f"The {gpu} needs torch for ROCm {row['since']} or newer, and this torch is for an older ROCm."
    if system == "linux" and not _serves(facts, row, rocm, maker) and not row["override"]:
        since = f" before ROCm {row['pytorch']}" if row["pytorch"] else ""
        return f"PyTorch's torch has no kernels for {gpu}{since}."
    return ""


def _serves(facts: Facts, row: Facts, rocm: str, maker: str) -> bool:
    """Whether torch, and the wheel under that ROCm, have kernels for a GPU without a variable."""
    of_torch = maker == "amd" or bool(row["pytorch"] and not _below(rocm, row["pytorch"]))
    return of_torch and not (row["generic"] and _below(rocm, facts["generic_since"]))


def _unknown(facts: Facts, python: str, torch: str, rocm: str) -> list[str]:
    """Notes on versions that are newer than what this project knows."""
    notes = []
    for name, version, known in (
        ("Python", python, facts["python"][-1]),
        ("torch", torch, minor(max(facts["torch"], key=numbers))),
        ("ROCm", rocm, max(facts["rocm"], key=numbers)),
    ):
        if version and _below(known, version):
            notes.append(f"This {name} is newer than {known}, the newest that was tested.")
    return notes


def torch_line(
    facts: Facts,
    gpu: str,
    system: str,
    python: str = "",
    rocm: str = "",
    extras: str = "",
    pinned: tuple[str, str] = ("", ""),
) -> tuple[str, bool]:
    """(pip's arguments that install torch for ROCm, whether pip would keep another torch); ("", False) if no torch is
    known. It names the label of torch's version: without the label, pip keeps another build of that version.

    rocm: of the installed torch, which chooses AMD's index. Uncertain versions are named for a pinned wheel alone.
    """
    row = facts["targets"].get(gpu) or {"since": "0.0", "pytorch": "0.0"}
    releases = [] if system == "windows" else list(_releases(facts, row, python, pinned))
    if releases:
        best = max(releases, key=lambda each: (each[1] == facts["recommended"], numbers(each[1]), numbers(each[0])))
        version, its_rocm, directory = best
        packages = f"[{extras}]" if extras and not _below(its_rocm, facts["device_packages"]) else ""
        return f'install "torch{packages}=={version}+{directory}" --index-url {PYTORCH_INDEX}/{directory}', False
    if python and python not in facts["amd_python"]:
        return "", False
    extra = extras or "device-all"
    names = f'"torch[{extra}]"' if system == "linux" else f'"torch[{extra}]" "torchvision[{extra}]" torchaudio'
    return f"install {names} --index-url {amd_index(facts, rocm)}", True


def _releases(facts: Facts, row: Facts, python: str, pinned: tuple[str, str]) -> Iterable[tuple[str, str, str]]:
    """(torch, ROCm, directory) of the wheels on PyTorch's index that have kernels for a GPU."""
    torch, rocm = pinned
    for version, release in facts["torch"].items():
        for its_rocm, directory in release["rocm"].items():
            certain = not release["uncertain"] and not facts["rocm"][its_rocm]["uncertain"]
            if torch and (minor(version) != torch or (rocm and its_rocm != rocm)):
                continue
            serves = row["pytorch"] and not _below(its_rocm, row["pytorch"]) and not _below(its_rocm, row["since"])
            if not torch and not (certain and serves):
                continue
            if not python or python in release["python"]:
                yield version, its_rocm, directory


def amd_index(facts: Facts, rocm: str) -> str:
    """AMD's index of torch for a ROCm: the newest one that is not for a newer ROCm, else the oldest."""
    indexes = sorted((numbers(name), row["amd_index"]) for name, row in facts["rocm"].items() if row["amd_index"])
    fit = [index for since, index in indexes if rocm and since <= numbers(rocm)[:2]]
    return str(fit[-1] if fit else indexes[0][1])


def devices(facts: Facts, gpus: Iterable[str]) -> str:
    """The extras of torch with its kernels for GPUs: "device-gfx1101"; "" if no package is known for one of them."""
    named = sorted({gpu for gpu in gpus if gpu})
    return ",".join(f"device-{gpu}" for gpu in named) if all(gpu in facts["targets"] for gpu in named) else ""


def of_pytorch(torch: str) -> bool:
    """Whether PyTorch built a torch, by its version; True for a bare version, as a user types it."""
    label = torch.partition("+")[2]
    return not label or re.fullmatch(PYTORCH_LABEL, label) is not None


def target(facts: Facts, name: str) -> str:
    """The GPU target of a name that a user types: gfx942:sramecc+:xnack-, MI300X, "RX 7900 XTX"; "" for another."""
    plain = re.sub(r"amd|instinct|radeon|ryzen|graphics|pro|\(tm\)|zluda|[^a-z0-9]", "", name.split(":")[0].lower())
    if re.match(r"gfx[0-9a-f]{3,5}$", plain):
        return plain
    products = {product: target for target, row in facts["targets"].items() for product in row["products"]}
    return str(products.get(plain) or products.get(f"rx{plain}") or products.get(f"mi{plain}") or "")


def minor(version: str) -> str:
    """The minor version: "2.5.1+rocm6.2" gives 2.5; "" if there is none."""
    match = re.match(r"\d+\.\d+", version or "")
    return match[0] if match else ""


@lru_cache(maxsize=4096)
def numbers(version: str) -> tuple[int, ...]:
    """Sort key of a dotted version."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _below(version: str, other: str) -> bool:
    return numbers(version)[:2] < numbers(other)[:2]
