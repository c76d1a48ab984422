"""What the flash_attn on the path offers of contract.toml, as JSON: a line for each release that is asked for.

Arguments: a version that the package gets, "=", the release to compare with. torch is imported once for all of them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib
import torch


def signature(function: Any) -> str:
    """Parameters with their defaults. For a custom op, the parameters of its function."""
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters.values()
    return ", ".join(str(parameter.replace(annotation=parameter.empty)).replace(" = ", "=") for parameter in parameters)


def look_up(module: str, name: str) -> Any:
    result: Any = importlib.import_module(module)
    for part in name.split("."):
        result = getattr(result, part)
    return result


def count(result: Any) -> int:
    return len(result) if isinstance(result, tuple) else 1


def near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Padding the head dim may change the order of a sum."""
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)


def results(version: str) -> dict[str, tuple[int, bool]]:
    """For every private function, the number of results and whether they equal the public function's results."""
    from flash_attn import bert_padding, flash_attn_func
    from flash_attn import flash_attn_interface as interface

    window = ((-1, -1),) if version.startswith("2.6") else (-1, -1)
    torch.manual_seed(0)
    dim = 12  # of no multiple of 8: 2.6 pads it
    q, k, v = (torch.randn(2, 5, 2, dim, requires_grad=True) for _ in range(3))
    expected, wanted_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    dout = torch.randn_like(q)
    gradients = torch.autograd.grad(expected, (q, k, v), dout)
    q, k, v = (x.detach() for x in (q, k, v))
    ends = torch.tensor([0, 5, 10], dtype=torch.int32)
    scale = dim**-0.5
    result = {}
    for varlen in (False, True):
        words = "_varlen" if varlen else ""
        lengths = (ends, ends, 5, 5) if varlen else ()

        def shaped(x: torch.Tensor) -> torch.Tensor:
            return x.flatten(0, 1) if varlen else x  # noqa: B023

        forward: Callable[..., Any] = getattr(interface, f"_flash_attn{words}_forward")
        given = forward(*map(shaped, (q, k, v)), *lengths, 0.0, scale, True, *window, 0.0, None, False)
        out = given[0]
        if version.startswith("2.6"):
            _, padded_q, padded_k, padded_v, padded_out, lse = given[:6]
        else:
            padded_q, padded_k, padded_v, padded_out, lse = *map(shaped, (q, k, v)), *given[:2]
        flat_lse = wanted_lse.transpose(0, 1).flatten(1) if varlen else wanted_lse
        right = near(out, shaped(expected)) and near(lse, flat_lse)
        result[f"_flash_attn{words}_forward"] = (count(given), right)

        backward: Callable[..., Any] = getattr(interface, f"_flash_attn{words}_backward")
        makes_buffers = varlen and version.startswith("2.6")
        buffers = [None if makes_buffers else torch.empty_like(x) for x in (padded_q, padded_k, padded_v)]
        given = backward(
            shaped(dout), padded_q, padded_k, padded_v, padded_out, lse, *buffers, *lengths,
            0.0, scale, True, *window, 0.0, None, False, None,
        )  # fmt: skip
        if makes_buffers:
            buffers = given[:3]
        right = all(near(got[..., :dim], shaped(want)) for got, want in zip(buffers, gradients, strict=True))
        result[f"_flash_attn{words}_backward"] = (count(given), right)
    given = bert_padding.unpad_input(torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]))
    result["unpad_input"] = (count(given), given[2].tolist() == [0, 2, 5] and given[3] == 3)
    return result


def report(release: str) -> None:
    contract = tomllib.loads(Path(__file__).with_name("contract.toml").read_text())
    import flash_attn

    version = flash_attn.__version__
    expected: dict[str, dict[str, str]] = {}
    tables = (contract["all"], contract.get(contract["like"].get(release), {}), contract[release])
    for table in tables:
        for module, names in table.items():
            expected.setdefault(module, {}).update(names)
    missing = [
        f"{module}.{name}" for module, names in contract["names"].items() for name in names
        if not hasattr(importlib.import_module(module), name)
    ]  # fmt: skip
    offered = {module: {name: signature(look_up(module, name)) for name in names} for module, names in expected.items()}
    has_triton = "triton" in sys.modules
    json.dump(
        {
            "file": flash_attn.__file__,
            "version": version,
            "wanted": expected,
            "offered": offered,
            "missing": missing,
            "results": results(release),
            "has triton": has_triton,
        },
        sys.stdout,
    )
    print(flush=True)


def main() -> None:
    info = Path(sys.path[1]) / "flash_attn/_build_info.json"
    for argument in sys.argv[1:]:
        version, _, release = argument.partition("=")
        info.write_text(json.dumps({"version": version}))
        child = os.fork()
        if child == 0:
            report(release)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            raise SystemExit(f"the report of {argument} failed")


if __name__ == "__main__":
    main()
