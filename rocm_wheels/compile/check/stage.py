"""The check: takes an assembly text and returns the text without hazards, or raises CompileFailed.

text, report = checked(assembly, "gfx950", "fwd-bf16-d128 for gfx950")

A text without findings is returned unchanged.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rocm_wheels.compile import sources
from rocm_wheels.compile.check import (
    counters,
    exchanges,
    forms,
    hazards,
    pending,
    prologue,
    reserve,
    resources,
    scalars,
    scan,
)
from rocm_wheels.compile.check.cures import cured
from rocm_wheels.compile.check.instructions import Kernel, kernels
from rocm_wheels.errors import CompileFailed

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the check found and rewrote.

    pairs: number of dual instructions that break GFX11's rule. found: number of instructions by rule. added: number of
    inserted instructions. unjudged: number of barriers and accesses of LDS that it could not judge.
    """

    pairs: int
    found: dict[str, int]
    added: int
    unjudged: int


def modules() -> tuple[ModuleType, ...]:
    """This folder's modules and flash_attn's that they read. Their sources are part of the key of each code object."""
    here = [importlib.import_module(f"{__package__}.{name}") for _, name, _ in pkgutil.iter_modules([str(_FOLDER)])]
    return (*here, *(sources.module(f"kernels.{name}") for name in ("vopd", "pairing", "targets")))


def checked(assembly: str, target: str, where: str, *, own_barriers: bool = False) -> tuple[str, Report]:
    """The text of one or more kernels without hazards. Raises CompileFailed, which names the instruction and the rule,
    or a target of AMD without rules.

    where: the name of the text in the error. own_barriers: whether the source places barriers and the waits before them
    by itself: Composable Kernel leaves copies to LDS under way at barriers on purpose. Code for NVIDIA is not checked:
    its assembler waits by itself.
    """
    row = sources.module("kernels.targets").get(target)
    if row.vendor == "nvidia":
        return assembly, Report(pairs=0, found={}, added=0, unjudged=0)
    vopd, pairing = sources.module("kernels.vopd"), sources.module("kernels.pairing")
    text, pairs = assembly, 0
    try:
        if row.vopd_hazard:
            pairs = len(vopd.conflicts(text))
            text = pairing.repair(text) if pairs else text
        text, unbegun = prologue.begun(text, target)
        text, before, rewritten = reserve.exact(text, list(kernels(text)), target)
        judged = {kernel.symbol: _judged(kernel, target, own_barriers) for kernel in before}
        problems = {symbol: one.findings for symbol, one in judged.items()}
        if any(problems.values()):
            text = cured(text, [(kernel, problems[kernel.symbol]) for kernel in before])
        after = before if not any(problems.values()) else list(kernels(text))
        rewritten_kernels = after if after is not before else []
        left = [str(hit) for kernel in rewritten_kernels for hit in _judged(kernel, target, own_barriers).findings]
        left += [problem for kernel in after for problem in resources.findings(kernel, target)]
        left += [problem for kernel in after for problem in forms.findings(kernel, target)]
        left += [f"{line} ({vopd.RULE})" for line in (vopd.conflicts(text) if pairs else ())]
    except ValueError as error:
        raise CompileFailed(f"{where}: {error}") from error
    if left:
        raise CompileFailed(f"{where} breaks a rule of the hardware: {left[0]}")
    names = Counter(finding.rule for findings in problems.values() for finding in findings)
    names += Counter({reserve.RULE: rewritten, prologue.RULE: unbegun})
    unjudged = sum(len(one.unknown) for one in judged.values())
    added = text.count("\n") - assembly.count("\n")
    return text, Report(pairs=pairs, found=dict(names), added=added, unjudged=unjudged)


def _judged(kernel: Kernel, target: str, own_barriers: bool) -> exchanges.Judged:
    found = scan.findings(kernel, target) + pending.findings(kernel, target)
    found += scalars.findings(kernel) if "sgpr_rewrite" in hazards.of(target) else []
    waits = counters.findings(kernel, target)
    if own_barriers:
        return exchanges.Judged([*found, *(wait for wait in waits if wait.rule == counters.WAIT_RULE)], [])
    judged = exchanges.judged(kernel, target)
    return exchanges.Judged(found + waits + judged.findings, judged.unknown)
