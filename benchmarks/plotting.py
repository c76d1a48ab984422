"""Plots of the benchmarks: one look, PNG and SVG. matplotlib is optional, and asked for before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#c1272d", "#4d4d4d", "#0072b2", "#009e73", "#e69f00", "#7b3294")
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "flash_attn",
    "figure.constrained_layout.use": True,
}


def load() -> Any:
    """matplotlib.pyplot without a display. SystemExit, with the remedy, where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit(
            "error: a plot needs matplotlib\n"
            "Measure with --json FILE, run ./build_rocm.sh --setup benchmarks, then this with "
            "build/env-benchmarks/bin/python and --plot-from FILE."
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(_STYLE)
    return pyplot


def lengths(axes: Any, values: Sequence[int]) -> None:
    """A logarithmic x axis of sequence lengths: 512, 1k, 2k."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(each) if each < 1024 or each % 1024 else f"{each // 1024}k" for each in values])
    axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
    axes.minorticks_off()
    axes.set_xlabel("sequence length")


def save(figure: Any, prefix: Path) -> list[Path]:
    """Writes <prefix>.png and <prefix>.svg."""
    paths = [prefix.with_name(prefix.name + suffix) for suffix in (".png", ".svg")]
    for path in paths:
        # No date in the file: the same results give the same bytes.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    return paths
