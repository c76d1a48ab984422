"""Keeps results of benchmarks and says what became slower: an archive, a baseline per device, intervals, a plot.

    python benchmarks/trend.py results/*.json --archive benchmarks/archive [--bound 5] [--plot trend]
    python benchmarks/trend.py --archive benchmarks/archive --plot trend       # plot what is there

Results are compared with the baseline of the same device, benchmark and configuration: the first that was archived,
until --accept makes today's the baseline. Each figure is a ratio of medians, new by old, with a 95 % bootstrap
interval; smaller is better. Exit code 1: the whole interval of some figure lies above the bound, or a figure of the
baseline is gone. The interval knows the spread within two runs, not that between runs: the bound, in percent, has to
be wider than the latter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BASELINE = "baseline"
REGRESSION, IMPROVEMENT, UNCHANGED = "regression", "improvement", "within the bound"
_RESAMPLES = 2000
_SEED = 0
_WANTED = ("benchmark", "environment", "config", "samples")
_OF_A_MACHINE = ("device", "target", "date", "torch", "flash_attn")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure against its baseline: medians in the figure's unit, their ratio and its 95 % interval."""

    device: str
    benchmark: str
    figure: str
    baseline_date: str
    baseline: float
    median: float
    ratio: float
    low: float
    high: float
    status: str


def load(path: Path) -> dict[str, Any]:
    """What a benchmark wrote. SystemExit if it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in _WANTED if key not in content]
        missing = missing or [f"{key} of an environment" for key in _OF_A_MACHINE if key not in content["environment"]]
        if missing:
            raise ValueError(f"it has no {', '.join(missing)}")
        if not all(values and all(value > 0 for value in values) for values in content["samples"].values()):
            raise ValueError("samples are to be lists of numbers above 0")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SystemExit(f"error: {path} is no result of a benchmark: {error}") from None
    return dict(content)


def place(archive: Path, result: Mapping[str, Any]) -> Path:
    """The directory of results that can be compared: same device, benchmark and configuration."""
    digest = hashlib.sha256(json.dumps(result["config"], sort_keys=True).encode()).hexdigest()[:8]
    device = re.sub(r"[^A-Za-z0-9]+", "-", f"{result['environment']['device']} {result['environment']['target']}")
    return archive / device.strip("-") / f"{result['benchmark']}-{digest}"


def add(directory: Path, result: Mapping[str, Any], *, accept: bool) -> dict[str, Any] | None:
    """Archives a result; gives the baseline that it is to be compared with, None where it becomes that itself."""
    directory.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^0-9T]", "", result["environment"]["date"][:19]) + ".json"
    (directory / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    marker = directory / BASELINE
    before = marker.read_text(encoding="utf-8").strip() if marker.is_file() else None
    if before is None or accept:
        marker.write_text(name + "\n", encoding="utf-8")
    return load(directory / before) if before not in (None, name) else None


def interval(old: Sequence[float], new: Sequence[float], seed: str) -> tuple[float, float]:
    """95 % interval of median(new) / median(old), by resampling both; the same inputs give the same interval."""
    generator = random.Random(f"{_SEED} {seed}")
    ratios = sorted(
        statistics.median(generator.choices(new, k=len(new))) / statistics.median(generator.choices(old, k=len(old)))
        for _ in range(_RESAMPLES)
    )
    return ratios[int(0.025 * _RESAMPLES)], ratios[int(0.975 * _RESAMPLES) - 1]


def compare(result: Mapping[str, Any], baseline: Mapping[str, Any], bound: float) -> Iterator[Comparison]:
    """Every figure that both have; `bound` is a fraction."""
    for figure, new in result["samples"].items():
        old = baseline["samples"].get(figure)
        if old is None:
            continue
        low, high = interval(old, new, f"{result['benchmark']} {figure}")
        status = REGRESSION if low > 1 + bound else IMPROVEMENT if high < 1 - bound else UNCHANGED
        yield Comparison(
            device=result["environment"]["device"],
            benchmark=result["benchmark"],
            figure=figure,
            baseline_date=baseline["environment"]["date"],
            baseline=statistics.median(old),
            median=statistics.median(new),
            ratio=statistics.median(new) / statistics.median(old),
            low=low,
            high=high,
            status=status,
        )


def missing(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    """Figures of the baseline that this run did not measure: what did so may no longer run."""
    return [f"{result['benchmark']}, {figure}" for figure in baseline["samples"] if figure not in result["samples"]]


def summary(
    results: Sequence[Mapping[str, Any]],
    compared: Sequence[Comparison],
    gone: Sequence[str],
    first: Sequence[str],
    bound: float,
) -> dict[str, Any]:
    """JSON-ready; part of a wheel's verdict. `gone` are figures that only the baseline has, `first` benchmarks that
    had no baseline."""
    return {
        "environment": dict(results[0]["environment"]),
        "bound": bound,
        "regressions": sum(each.status == REGRESSION for each in compared),
        "comparisons": [asdict(each) for each in compared],
        "missing": list(gone),
        "without_baseline": list(first),
    }


def markdown(found: Mapping[str, Any]) -> str:
    machine = found["environment"]
    lines = [
        f"## Trend on {machine['device']}",
        "",
        f"flash_attn {machine['flash_attn']}, torch {machine['torch']}; a figure that is more than "
        f"{100 * found['bound']:g} % above its baseline, with its whole 95 % interval, is a regression.",
        "",
    ]
    if found["comparisons"]:
        lines += ["| benchmark | figure | baseline | now | ratio | 95 % interval | |", "|-|-|-|-|-|-|-|"]
    for each in found["comparisons"]:
        status = f"**{each['status']}**" if each["status"] == REGRESSION else each["status"]
        lines.append(
            f"| {each['benchmark']} | {each['figure']} | {each['baseline']:.4g} | {each['median']:.4g} "
            f"| {each['ratio']:.3f} | {each['low']:.3f} to {each['high']:.3f} | {status} |"
        )
    lines += [f"\n**{figure}: in the baseline, not in this run.**" for figure in found["missing"]]
    lines += [f"\n{name}: no baseline yet, this is the first." for name in found["without_baseline"]]
    return "\n".join(lines)


def histories(archive: Path) -> Iterator[tuple[str, list[dict[str, Any]], str]]:
    """(title, results by date, date of the baseline) of every directory of the archive."""
    for marker in sorted(archive.glob(f"*/*/{BASELINE}")):
        results = [load(path) for path in sorted(marker.parent.glob("*.json"))]
        start = load(marker.parent / marker.read_text(encoding="utf-8").strip())["environment"]["date"]
        yield f"{results[-1]['environment']['device']}, {results[-1]['benchmark']}", results, start


def plot(archive: Path, prefix: Path, bound: float) -> list[Path]:
    """A panel for each figure: medians and quartiles over the runs, and the band of the bound about the baseline."""
    import plotting

    pyplot = plotting.load()
    panels = [
        (title, figure, [result for result in results if figure in result["samples"]], start)
        for title, results, start in histories(archive)
        for figure in results[-1]["samples"]
    ]
    if not panels:
        raise SystemExit(f"error: {archive} holds no results to plot")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.4 * columns, 2.6 * rows), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, name, results, start) in zip(grid.flat, panels, strict=False):
        samples = [sorted(result["samples"][name]) for result in results]
        medians = [statistics.median(values) for values in samples]
        spread = [
            [middle - values[len(values) // 4], values[-1 - len(values) // 4] - middle]
            for values, middle in zip(samples, medians, strict=True)
        ]
        dates = [result["environment"]["date"] for result in results]
        base = next((middle for date, middle in zip(dates, medians, strict=True) if date == start), None)
        if base is not None:
            axes.axhspan(base * (1 - bound), base * (1 + bound), color="#eeeeee", zorder=0)
            axes.axhline(base, color=plotting.COLOURS[1], linewidth=1, linestyle="--")
        above = base is not None and medians[-1] > base * (1 + bound)
        axes.errorbar(range(len(medians)), medians, list(zip(*spread, strict=True)), fmt="o-", capsize=2,
                      color=plotting.COLOURS[2])  # fmt: skip
        axes.plot(len(medians) - 1, medians[-1], "o", color=plotting.COLOURS[0 if above else 2], markersize=7, zorder=5)
        step = -(-len(dates) // 5)
        axes.set_xticks(range(0, len(dates), step), [date[5:10] for date in dates[::step]])
        axes.set_xlim(-0.5, max(len(dates) - 0.5, 1.5))
        axes.margins(y=0.25)
        words = name.split()
        axes.set_ylabel(words[-1])
        axes.set_title(f"{title}\n{' '.join(words[:-1])}", loc="left", fontsize=8)
    return plotting.save(figure, prefix)


def percent(text: str) -> float:
    """A bound as a fraction."""
    value = float(text) / 100
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no percentage between 0 and 100")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="JSON of benchmarks, of one device")
    parser.add_argument("--archive", type=Path, required=True, metavar="DIR", help="where results are kept")
    parser.add_argument("--bound", type=percent, default=0.05, metavar="PERCENT", help="of a regression (5)")
    parser.add_argument("--accept", action="store_true", help="make these results the baseline, after comparing them")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="write PREFIX.png and PREFIX.svg of the archive")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="append the table to this Markdown file")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the comparison here")
    options = parser.parse_args(argv)
    if not options.results and options.plot is None:
        parser.error("name results to compare, or --plot to plot the archive")
    if options.plot is not None:
        import plotting

        plotting.load()
    loaded = [load(path) for path in options.results]
    if len({str(place(options.archive, result).parent) for result in loaded}) > 1:
        parser.error("these results are of several devices: compare those of one at a time")

    compared: list[Comparison] = []
    gone: list[str] = []
    first = []
    for result in loaded:
        baseline = add(place(options.archive, result), result, accept=options.accept)
        if baseline is None:
            first.append(result["benchmark"])
        else:
            compared += compare(result, baseline, options.bound)
            gone += missing(result, baseline)
    regressions = [each for each in compared if each.status == REGRESSION]
    if loaded:
        report = summary(loaded, compared, gone, first, options.bound)
        print(markdown(report))
        if options.output_json is not None:
            options.output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if options.summary is not None:
            with options.summary.open("a", encoding="utf-8") as file:
                file.write(markdown(report) + "\n")
    if options.plot is not None:
        print("\n".join(map(str, plot(options.archive, options.plot, options.bound))))
    for each in regressions:
        print(
            f"regression: {each.benchmark}, {each.figure}: {each.ratio:.3f} times {each.baseline_date}", file=sys.stderr
        )
    for figure in gone:
        print(f"regression: {figure}: the baseline has it, this run has not (--accept, if it should)", file=sys.stderr)
    return 1 if regressions or gone else 0


if __name__ == "__main__":
    sys.exit(main())
