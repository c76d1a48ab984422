"""`python -m flash_attn.why`: what it counts, what it says, and that it leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from flash_attn import why
from flash_attn.attention import backends
from flash_attn.diagnosis import costs
from flash_attn.sdpa import override

PROGRAM = """
import sys, torch
from flash_attn import flash_attn_func
q = torch.randn(1, 16, 2, 32, requires_grad=True)
for _ in range(3):
    flash_attn_func(q, q, q, causal=True).sum().backward()
x = torch.randn(1, 2, 16, 32)
torch.nn.functional.scaled_dot_product_attention(x, x, x)
assert sys.argv[1:] == ["--steps", "3"], sys.argv
if LAST: raise KeyError("the program's own")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_calls_are_counted_by_kind_and_reason(
    fails: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("LAST", str(fails)), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["why"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = backends._chosen, backends._cpu
    if fails:
        with pytest.raises(KeyError):
            why.main([str(program), "--steps", "3"])
    else:
        why.main([str(program), "--steps", "3"])
    assert (backends._chosen, backends._cpu) == before
    assert (override.active, override.watch) == (False, None)
    said = capsys.readouterr().err
    rows = {line.split("  ")[-1].split(":")[0]: line.split() for line in said.splitlines() if " float32 " in line}
    counts = {name: int(words[1]) for name, words in rows.items() if words[0] != "-"}
    assert counts == {
        "forward float32 1 x 16 x 2 x 32, keys up to 16, causal": 3,
        "backward float32 1 x 16 x 2 x 32, keys up to 16, causal": 3,
        "SDPA float32 1 x 2 x 16 x 32": 1,
    }
    assert "not flash_attn: tensors that are not on one GPU" in said
    assert said.index("What would be faster:") > said.index("attention took")


def test_no_program_is_a_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        why.main(["no-such-file.py"])
    assert stopped.value.code == 2
    assert "no program no-such-file.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [(1.0, 3.0, "served well"), (3.0, 1.0, "leave these calls to PyTorch"), (1.0, 1.05, "equally fast")],
)
def test_a_comparison_says_what_follows(
    ours: float, theirs: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = iter((ours, theirs))
    monkeypatch.setattr(costs, "milliseconds", lambda call, _: call() is None or next(taken))
    shape = torch.Size((1, 8, 2, 32))
    example = costs.Example((shape, shape, shape), torch.float32, torch.device("cpu"), True)
    assert words in costs._beside_sdpa(example)


def test_a_comparison_that_fails_names_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise NotImplementedError("no kernel\nmore")

    monkeypatch.setattr(costs, "milliseconds", fail)
    shape = torch.Size((1, 8, 2, 32))
    example = costs.Example((shape, shape, shape), torch.float32, torch.device("cpu"), False)
    assert "NotImplementedError: no kernel" in costs._beside_sdpa(example)


def test_calls_beyond_the_timed_ones_take_the_mean() -> None:
    assert costs.Cost(calls=11, times=[100.0, 2.0, 4.0]).milliseconds == 100.0 + 10 * 3.0
    assert costs.Cost(calls=4, times=[2.0]).milliseconds == 8.0
    assert costs.Cost(calls=4).milliseconds == 0.0  # in graphs alone
