"""Flash attention against standard attention over sequence lengths: time, memory, difference of the results.

    python benchmarks/benchmark_flash_attn.py [--backward] [--json results.json] [--plot attention]
    python benchmarks/benchmark_flash_attn.py --plot-from results.json --plot attention

Standard attention is softmax(q k^T / sqrt(head_dim)) v with whole matrices of scores, by PyTorch's operations. Times
are medians over rounds in which both take turns; memory is the peak during one call above what its inputs take, on a
GPU. Where the scores do not fit the table says "out of memory". --plot writes PNG and SVG; it needs matplotlib, the
dependency group `benchmarks`, which --plot-from needs alone: it plots the JSON of another machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plotting

if TYPE_CHECKING:
    import torch

SEQLENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
NAMES = ("flash", "standard")
OUT_OF_MEMORY = "out of memory"
# Calls in one burst: enough for about this time.
_BURST_MS, _MAX_BURST = 20.0, 50
_COLUMNS = {
    "seqlen": 8,
    "flash ms": 12,
    "standard ms": 15,
    "speed-up": 11,
    "flash MiB": 12,
    "standard MiB": 15,
    "memory": 10,
    "max difference": 17,
}


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    import flash_attn

    return flash_attn.flash_attn_func(q, k, v, causal=causal)


def standard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    import torch

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def calls(seqlen: int, config: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed: the forward, or forward and backward, giving the output."""
    import torch

    torch.manual_seed(0)
    size = (config["batch"], seqlen, config["heads"], config["head_dim"])
    dtype = getattr(torch, config["dtype"])
    q, k, v, dout = (torch.randn(size, device=config["device"], dtype=dtype) for _ in range(4))
    inputs = [x.requires_grad_(config["backward"]) for x in (q, k, v)]

    def call(attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        out = attention(*inputs, config["causal"])
        if config["backward"]:
            torch.autograd.grad(out, inputs, dout)
        return out.detach()

    return {"flash": lambda: call(flash), "standard": lambda: call(standard)}


def why_not(work: Callable[[], object]) -> str | None:
    """Does it; why that could not be, or None."""
    import torch

    try:
        work()
    except (torch.OutOfMemoryError, MemoryError):
        return OUT_OF_MEMORY
    except RuntimeError as error:
        words = str(error).strip().splitlines()[0]
        return OUT_OF_MEMORY if "can't allocate memory" in words else words  # how a CPU's allocator says it
    return None


def measure(seqlen: int, config: dict[str, Any]) -> dict[str, Any]:
    """{"flash": {"ms": [...], "mib": ...} or {"why": ...}, "standard": ..., "max_difference": ... or None}."""
    import torch
    from measuring import milliseconds

    device = torch.device(config["device"])
    figures: dict[str, dict[str, Any]] = {name: {"ms": [], "mib": None} for name in NAMES}
    outputs: dict[str, torch.Tensor] = {}
    bursts: dict[str, int] = {}
    made = calls(seqlen, config)

    def prepare(name: str) -> None:
        made[name]()  # compiles, allocates workspaces
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        outputs[name] = made[name]()
        if device.type == "cuda":
            figures[name]["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        bursts[name] = max(1, min(_MAX_BURST, int(_BURST_MS / max(milliseconds(made[name], 1, device), 1e-3))))

    def take_turn(name: str) -> None:
        figures[name]["ms"].append(milliseconds(made[name], bursts[name], device))

    for work in (prepare, *[take_turn] * config["rounds"]):
        for name in NAMES:
            if "why" not in figures[name] and (why := why_not(lambda: work(name))):  # noqa: B023 - called at once
                figures[name] = {"why": why}
                outputs.pop(name, None)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    difference = None
    if len(outputs) == len(NAMES):
        difference = float((outputs["flash"].float() - outputs["standard"].float()).abs().max())
    return {"seqlen": seqlen, **figures, "max_difference": difference}


def median(found: dict[str, Any]) -> float | None:
    return statistics.median(found["ms"]) if "ms" in found else None


def ratio(row: dict[str, Any], value: Callable[[dict[str, Any]], float | None]) -> float | None:
    """Standard's divided by flash's; None where one of them is not there."""
    theirs, ours = value(row["standard"]), value(row["flash"])
    return theirs / ours if theirs and ours else None


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table; "–" is what was not measured."""

    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    times = [entry["why"] if "why" in entry else f"{median(entry):.3f}" for entry in (row[name] for name in NAMES)]
    memory = [shown(row[name].get("mib"), "{:.1f}") for name in NAMES]
    saved = ratio(row, lambda entry: entry.get("mib"))
    return [str(row["seqlen"]), *times, shown(ratio(row, median), "{:.2f}x"), *memory, shown(saved, "{:.1f}x"),
            shown(row["max_difference"], "{:.1e}")]  # fmt: skip


def line(texts: Sequence[str]) -> str:
    """Right-aligned; a long reason gets the room that it takes."""
    return "".join(f"  {text:>{width - 2}}" for text, width in zip(texts, _COLUMNS.values(), strict=True))


def plot(content: dict[str, Any], prefix: Path) -> list[Path]:
    """Time, speed-up and memory over the sequence length."""
    pyplot = plotting.load()
    rows, config, machine = content["metrics"], content["config"], content["environment"]
    figure, (times, speed, memory) = pyplot.subplots(1, 3, figsize=(13, 4.2))
    every = [row["seqlen"] for row in rows]
    for name, colour in zip(NAMES, plotting.COLOURS, strict=False):
        for axes, value in ((times, median), (memory, lambda entry: entry.get("mib"))):
            points = [(row["seqlen"], value(row[name])) for row in rows if value(row[name])]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"{name} attention")
            lost = [row["seqlen"] for row in rows if row[name].get("why") == OUT_OF_MEMORY]
            for index, seqlen in enumerate(lost):
                label = f"{name}: out of memory" if index == 0 else None
                axes.plot(seqlen, 0.97, "x", color=colour, label=label, transform=axes.get_xaxis_transform())
    points = [(row["seqlen"], ratio(row, median)) for row in rows if ratio(row, median)]
    if points:
        speed.plot(*zip(*points, strict=True), "o-", color=plotting.COLOURS[0])
        for seqlen, value in points:
            speed.annotate(f"{value:.1f}", (seqlen, value), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    speed.axhline(1.0, color=plotting.COLOURS[1], linewidth=1, linestyle="--")
    speed.set_ylim(0, 1.15 * max([1.0, *(value for _, value in points)]))
    times.set_yscale("log")
    times.yaxis.set_major_formatter("{x:g}")
    memory.set_yscale("log", base=2)
    memory.yaxis.set_major_formatter(lambda mib, _: f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB")
    passes = "forward and backward" if config["backward"] else "forward"
    for axes, title, unit in (
        (times, f"Time, {passes}", "ms"),
        (speed, "Speed-up over standard attention", "times"),
        (memory, "Peak memory beside the inputs", ""),
    ):
        plotting.lengths(axes, every)
        axes.set_title(title, loc="left")
        axes.set_ylabel(unit)
    times.legend(loc="upper left")
    if not memory.lines:
        memory.set_yticks([])
        memory.text(0.5, 0.5, "not measured on a CPU", ha="center", transform=memory.transAxes)
    figure.suptitle(
        f"{machine['device']}, torch {machine['torch']}, flash_attn {machine['flash_attn']}; batch {config['batch']}, "
        f"{config['heads']} heads of {config['head_dim']}, {config['dtype']}{', causal' * config['causal']}",
        fontsize=10,
        color="#4d4d4d",
    )
    return plotting.save(figure, prefix)


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Measures, prints the table line by line, and gives the results."""
    import torch
    from measuring import environment, results

    host = environment(torch.device(config["device"]))
    passes = "forward and backward" if config["backward"] else "forward"
    print(f"{host['device']} ({host['target']}), torch {host['torch']}, flash_attn {host['flash_attn']}, {passes}")
    print(", ".join(f"{name} {value}" for name, value in config.items() if name != "seqlens"))
    print(line(list(_COLUMNS)), flush=True)
    rows = []
    for seqlen in config["seqlens"]:
        rows.append(measure(seqlen, config))
        print(line(cells(rows[-1])), flush=True)
    print("speed-up, memory: standard's divided by flash's")
    return results(
        "flash_attn",
        host,
        config,
        metrics=rows,
        summary=[
            {
                "seqlen": row["seqlen"],
                "speed_up": ratio(row, median),
                "memory_reduction": ratio(row, lambda each: each.get("mib")),
                "max_difference": row["max_difference"],
            }
            for row in rows
        ],
        samples={f"flash {row['seqlen']} ms": row["flash"]["ms"] for row in rows if "ms" in row["flash"]},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", type=int, nargs="+", default=list(SEQLENS), metavar="N", help="(128 to 32768)")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--heads", type=int, default=16, metavar="N", help="(16)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="(128)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--causal", action="store_true", help="with a causal mask")
    parser.add_argument("--backward", action="store_true", help="time forward and backward (forward alone)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times each is measured (5)")
    parser.add_argument("--device", metavar="NAME", help="cuda or cpu (cuda)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here too")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="write PREFIX.png and PREFIX.svg")
    parser.add_argument("--plot-from", type=Path, metavar="FILE", help="plot this JSON, measure nothing")
    arguments = parser.parse_args(argv)
    if arguments.plot_from is not None:
        try:
            content = json.loads(arguments.plot_from.read_text(encoding="utf-8"))
            written = plot(content, arguments.plot or arguments.plot_from.with_suffix(""))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"error: {arguments.plot_from} is not what --json wrote: {error!r}") from None
        print("\n".join(map(str, written)))
        return
    numbers = ("batch", "heads", "head_dim", "rounds")
    if bad := [name for name in numbers if getattr(arguments, name) < 1] or [n for n in arguments.seqlens if n < 1]:
        raise SystemExit(f"error: {bad[0]} is to be above 0")
    if arguments.plot is not None:
        plotting.load()
    from measuring import chosen_device, writable, write

    for path in filter(None, (arguments.json, arguments.plot)):
        writable(str(path))
    config = {name: value for name, value in vars(arguments).items() if name not in ("json", "plot", "plot_from")}
    config["device"] = str(chosen_device(arguments.device))
    content = run(config)
    if arguments.json is not None:
        write(arguments.json, content)
    if arguments.plot is not None:
        print("\n".join(map(str, plot(content, arguments.plot))))


if __name__ == "__main__":
    main()
