"""Which tile of a kernel is fastest on this GPU: every one that `compile --tiles` made, with the wheel's own compiler.

    python -m rocm_wheels compile --target gfx942 --only 'fwd-bf16-d128*' --tiles     # anywhere; prints the archive
    python benchmarks/tune.py gfx942.zip [--json results.json] [--rounds 9] [--least 1.02]

The archive needs no compiler here, only a wheel of the same sources. For each kernel in it all tiles are timed in a few
calls (2 x 4096 tokens without a mask, causal, and with a window; 8192 and more keys of a cache), by graphs that are
replayed, and checked against the result of the table's own; the best ones are then timed in turn with it. A figure is
how many times as fast as the table's own a tile is, the geometric mean of the calls. What wins by --least is printed
as the row that belongs into kernels/tuning/. `python -m flash_attn.firstlight` compares Triton's kernels with AMD's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import measuring
import torch
from kernel_calls import Call, calls

FINALISTS = 5
DEVICE = torch.device("cuda", 0)


class Tile(NamedTuple):
    """One candidate: its name in the archive, its row of the tuning table, and its kernel."""

    name: str
    row: Any
    kernel: Any


class Timed(NamedTuple):
    """A tile, what times it, and how many times as fast as the table's own it is in each call."""

    tile: Tile
    graphs: dict[str, Callable[[], float]]
    calls: dict[str, float]

    def order(self) -> float:
        """The fastest first."""
        return -statistics.geometric_mean(self.calls.values())


def tiles(path: Path) -> dict[Any, list[Tile]]:
    """The tiles of every kernel in an archive that fit this GPU, the table's own first. SystemExit where the archive
    is not of this GPU and this wheel."""
    from flash_attn.core import device, store, stored
    from flash_attn.kernels import tuning, variants

    target = device.of(0).target
    try:
        archive, installed = store.Store(path), store.open_store(target)
    except store.KernelError as error:
        raise SystemExit(f"error: {error.__cause__ or error}: give what `compile --tiles` printed") from None
    if archive.target != target:
        raise SystemExit(f"error: {path} is for {archive.target}, this GPU is {target}")
    if installed is None:
        raise SystemExit(f"error: the flash_attn here has no kernels for {target}: install a wheel that has")
    known = {variant.name: variant for variant in variants.table(target)}
    choices: dict[Any, list[Tile]] = {}
    for name, entry in archive.kernels.items():
        variant = known.get(name.partition("@")[0])
        if variant is None or installed.kernels.get(variant.name, {}).get("params") != entry["params"]:
            raise SystemExit(f"error: {name} is not of the sources of the flash_attn here: make both from the same")
        options = dict(entry["options"])
        block_k = entry["constants"].get("BLOCK_K", 0) % variant.block_d
        row = tuning.config(target, variant)._replace(
            block_m=entry["constants"]["BLOCK_M"], block_n=entry["constants"]["BLOCK_N"], block_k=block_k,
            num_warps=options.pop("num_warps"), num_stages=options.pop("num_stages"), options=tuple(options.items()),
        )  # fmt: skip
        try:
            kernel = stored.StoreKernel(archive, name, 0)
            choices.setdefault(variant, []).append(Tile(name, row, kernel))
        except RuntimeError as error:  # more shared memory than a program may have
            print(f"  {name}: {error}", flush=True)
    for variant, those in choices.items():
        own = tuning.config(target, variant)
        own = own._replace(block_k=own.block_k % variant.block_d)
        those.sort(key=lambda tile: tile.row != own)
        if those[0].row != own:
            raise SystemExit(f"error: {path} lacks the table's own tile of {variant.name}: make it with `--tiles`")
    return choices


def install(variant: Any, tile: Tile) -> None:
    """Makes a tile the kernel that the next calls take, on the GPU or, where there is none, in Triton's interpreter."""
    from flash_attn.core import device

    device.clear_kernels()
    device.kernels[0 if torch.cuda.is_available() else -1, variant] = tile.kernel


class _TakenError(Exception):
    """A kernel was about to run that only tells so."""


def check_taken(variant: Any, tile: Tile, timed: dict[str, Call]) -> None:
    """Raises NotImplementedError where a call takes another kernel, whose time would say nothing."""

    def refuse(*_: object) -> None:
        raise _TakenError

    parts = ("block_m", "block_n", "num_xcds", "arguments")
    kernel = SimpleNamespace(launch=refuse, **{part: getattr(tile.kernel, part) for part in parts})
    install(variant, tile._replace(kernel=kernel))
    for name, call in timed.items():
        try:
            call()
        except _TakenError:
            continue
        raise NotImplementedError(f"{variant.name}: the call {name!r} takes another kernel")


def right(call: Call, wanted: list[torch.Tensor], most: float) -> bool:
    """Whether results differ by an RMS error of at most so much of their RMS; NaN does."""
    for result in call():
        result.fill_(float("nan"))  # what a kernel leaves out must not be right by what lay there before
    return all(
        bool((out - other).float().square().mean().sqrt() <= most * other.float().square().mean().sqrt())
        for out, other in zip(call(), wanted, strict=True)
    )


def graphs(variant: Any, tile: Tile, timed: dict[str, Call]) -> dict[str, Callable[[], float]]:
    """Milliseconds of each call with a tile, as what measures it once."""
    install(variant, tile)
    return {name: measuring.replayed(call, 3) for name, call in timed.items()}


def search(variant: Any, those: list[Tile], rounds: int) -> list[dict[str, Any]]:
    """How fast the best tiles are beside the first, the fastest first."""
    timed = calls(variant, DEVICE)
    check_taken(variant, those[0], timed)
    install(variant, those[0])
    expected = {name: [x.clone() for x in call()] for name, call in timed.items()}
    own = graphs(variant, those[0], timed)
    # What another order of sums changes, and in FP8 other maxima by which the probabilities are rounded.
    most = 0.05 if variant.op == "fp8-fwd" else 0.01
    best: list[Timed] = []
    for tile in those:
        try:
            install(variant, tile)
            if not all(right(call, expected[name], most) for name, call in timed.items()):
                print(f"  {tile.name}: a wrong result, left out", flush=True)
                continue
            mine = graphs(variant, tile, timed)
        except RuntimeError as error:  # what a driver refuses to start
            print(f"  {tile.name}: {str(error).splitlines()[0]}", flush=True)
            continue
        best = sorted([*best, Timed(tile, mine, speeds(own, mine, 2))], key=Timed.order)[:FINALISTS]
    final = sorted((each._replace(calls=speeds(own, each.graphs, rounds)) for each in best), key=Timed.order)
    return [
        {"tile": each.tile.name, "row": each.tile.row, "speed": -each.order(), "calls": each.calls} for each in final
    ]  # fmt: skip


def speeds(own: dict[str, Callable[[], float]], other: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Of each call the median of own time / other time, timed in turn."""
    return {name: statistics.median(own[name]() / other[name]() for _ in range(rounds)) for name in own}


def spelled(row: Any) -> str:
    """A launch configuration as the tables write it."""
    text = ", ".join(map(str, row[:4]))
    if row.block_k:
        text += f", block_k={row.block_k}"
    return f"C({text}{f', options={row.options}' if row.options else ''})"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="what `python -m rocm_wheels compile --tiles` printed")
    parser.add_argument("--json", type=measuring.writable, metavar="FILE", help="write every figure here too")
    parser.add_argument(
        "--rounds", type=measuring.count, default=9, metavar="N", help="times the best tiles are measured (9)"
    )
    parser.add_argument("--least", type=float, default=1.02, metavar="X", help="what a new row has to win (1.02)")
    options = parser.parse_args(argv)
    label = measuring.installed()
    measuring.chosen_device(None)
    choices = tiles(options.archive)

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, flash_attn {label}; the table's own tile: 1")
    rows, changes = [], []
    for variant, those in choices.items():
        try:
            ranked = search(variant, those, options.rounds)
        except NotImplementedError as error:
            print(f"  {error}", flush=True)
            continue
        print(f"{variant.name}: {len(those)} tiles", flush=True)
        for entry in ranked:
            each = "  ".join(f"{name} {speed:.2f}" for name, speed in entry["calls"].items())
            print(f"  {entry['speed']:.3f}  {entry['tile'].partition('@')[2]:32} {each}", flush=True)
        rows.append({"kernel": variant.name, "tiles": len(those), "best": ranked})
        if ranked[0]["speed"] >= options.least:
            bits = 32 if variant.dtype == "fp32" else 8 if variant.op.startswith("fp8") else 16
            key = (variant.op, bits, variant.block_d)
            changes.append(f"{key} {variant.kind}: {spelled(ranked[0]['row'])}  # {ranked[0]['speed']:.3f}")
    if not rows:
        raise SystemExit("error: nothing was timed, as said above")
    print("\n".join(changes) if changes else f"no row changes: nothing is {options.least} times as fast as it is")
    if options.json is not None:
        machine, config = measuring.environment(DEVICE), {"rounds": options.rounds, "archive": options.archive.name}
        measuring.write(options.json, measuring.results(
            "tune", machine, config, metrics=rows, summary={"rows": changes}, samples={}
        ))  # fmt: skip


if __name__ == "__main__":
    main()
