"""Lists the instruction forms of kernels, and which of them tests executed (`isa.forms` records that)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from amdgpu_simulator.isa import assembly, decoding
from amdgpu_simulator.isa.assembly import Kernel
from amdgpu_simulator.isa.forms import form


def kernels(paths: Iterable[Path]) -> Iterator[Kernel]:
    """The kernels in assembly texts and kernel stores. Raises ValueError for another file."""
    for path in paths:
        if path.suffix in (".s", ".amdgcn"):
            yield assembly.parse(path.read_text(encoding="utf-8"))
        elif path.suffix == ".zip":
            yield from _stored(path)
        else:
            raise ValueError(f"{path} is neither an assembly text (.s, .amdgcn) nor a kernel store (.zip)")


def _stored(path: Path) -> Iterator[Kernel]:
    from flash_attn.core.store import Store

    from amdgpu_simulator.isa import disassembly

    for _, image in Store(path).images():
        yield disassembly.kernel(image)


def table(paths: Iterable[Path], executed: Path | None) -> Iterator[str]:
    """Yields a line for each mnemonic and state: number of forms, number of instructions, most frequent form."""
    known = set(executed.read_text(encoding="utf-8").splitlines()) if executed and executed.exists() else set()
    forms: dict[tuple[str, str], Counter[str]] = {}
    read = 0
    for kernel in kernels(paths):
        read += 1
        refused = {text.partition(": ")[0] for text in decoding.decode(kernel).refused}
        for part in (part for parts in kernel.instructions for part in parts):
            name = form(part)
            state = "refused" if part.text in refused else "executed" if name in known else "never"
            forms.setdefault((part.mnemonic, state), Counter())[name] += 1
    yield f"{'mnemonic':32} state     forms  instructions  most frequent form"
    for (mnemonic, state), tally in sorted(forms.items()):
        yield f"{mnemonic:32} {state:8} {len(tally):6} {tally.total():13}  {tally.most_common(1)[0][0]}"
    totals = Counter[str]()
    for (_, state), tally in forms.items():
        totals[state] += len(tally)
    counts = ", ".join(f"{totals[state]} {state}" for state in ("executed", "refused", "never"))
    yield f"{read} kernels, {totals.total()} forms: {counts}"
