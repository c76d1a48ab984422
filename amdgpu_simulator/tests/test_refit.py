"""The clock's latencies from a report of firstlight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from amdgpu_simulator import refit
from amdgpu_simulator.clock import latencies as table
from amdgpu_simulator.clock.latencies import Latencies, latencies

GHZ = 1.7


class Loops(refit.Player):
    """Loops that take their latency and ten cycles. Transcendentals have no latency here."""

    def cycles(self, name: str, latencies: Latencies) -> float:
        return 5.0 if name == "vector" else 20.0 if name == "trans" else getattr(latencies, name) + 10.0


def report(player: refit.Player, hidden: Latencies) -> dict[str, object]:
    """The report of a GPU with hidden latencies."""
    times: list[dict[str, object]] = [
        {"probe": name, "ns": player.cycles(name, hidden) / GHZ} for name in ("vector", *refit.LATENCIES)
    ]
    machine = {"target": player.target, "device": "RX 9070 XT", "hip": "7.2.1", "driver": "6.16.6"}
    return {
        "firstlight": 1,
        "ok": False,
        "date": "2026-11-29",
        "wheel": {"version": "2.8.3"},
        "machine": machine,
        "probes": [*times, {"probe": "b", "gbps": 512.0}],
    }


def hide(target: str) -> Latencies:
    now = latencies(target)
    trans = now.trans + 7 if now.trans else 0
    return replace(
        now, shared=now.shared + 21, cached=now.cached + 33, memory=now.memory - 111, barrier=now.barrier + 9,
        trans=trans,
    )  # fmt: skip


def test_the_latencies_of_a_report_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = tmp_path / "report.json", tmp_path / "measured.json"
    kept.write_text("{}")
    monkeypatch.setattr(table, "MEASURED", kept)
    table.measured.cache_clear()
    hidden = hide("gfx1201")
    path.write_text(json.dumps(report(Loops("gfx1201"), hidden)))
    try:
        said = list(refit.lines(path, merge=False, player=Loops))
        assert said[0] == "RX 9070 XT (gfx1201), 1.70 GHz by its vector instructions"
        assert "| shared | 61.0 | 40.0 | 30 | 51 |" in said
        assert "| trans | 20.0 | 20.0 | 6 | no value explains it |" in said
        assert said[-1] == "\nb: 512.0 GB/s"
        assert json.loads(kept.read_text()) == {}
        said = list(refit.lines(path, merge=True, player=Loops))
        assert said[-1].startswith("The report says that something is wrong")
        row = json.loads(kept.read_text())["gfx1201"]
        assert (row["ghz"], row["hip"], row["driver"], row["wheel"]) == (GHZ, "7.2.1", "6.16.6", "2.8.3")
        said = list(refit.lines(path, merge=True, player=Loops))
        assert "\nreplaced: the latencies of RX 9070 XT, 2026-11-29" in said
        assert latencies("gfx1201") == replace(hidden, trans=6)
        assert latencies("gfx1200").shared == 30
    finally:
        monkeypatch.undo()
        table.measured.cache_clear()
    path.write_text('{"probes": []}')
    for bad in (path, tmp_path / "missing.json"):
        with pytest.raises(ValueError, match=r"is no report of `python -m flash_attn\.firstlight`"):
            list(refit.lines(bad, merge=False))


@pytest.mark.long
@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1201"])
def test_hidden_latencies_are_found(target: str) -> None:
    """The compiled probes on the simulator, played with other latencies."""
    player, hidden = refit.Player(target), hide(target)
    ghz, rows = refit.fit(report(player, hidden), player)
    assert ghz == pytest.approx(GHZ)
    result = {row.name: row.new for row in rows if row.new is not None}
    expected = {name: getattr(hidden, name) for name in refit.LATENCIES if name != "trans" or hidden.trans}
    assert result == pytest.approx(expected, abs=1)
