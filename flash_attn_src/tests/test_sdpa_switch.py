"""The switch of SDPA, and every way by which a program reaches SDPA while it is on.

On a CPU the door is a stand-in, as in test_sdpa.py. Both kernels give the same result: the report says which ran.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn import sdpa_report, use_for_sdpa
from flash_attn.core.store import KernelError
from flash_attn.sdpa import attention as door
from flash_attn.sdpa import causal_bias, override
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

functional: Any = torch.nn.functional
attend = functional.scaled_dot_product_attention
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not GPU:
        monkeypatch.setattr(door, "is_on_gpu", lambda _: True)
    torch.compiler.reset()
    yield
    assert not override.active
    assert functional.scaled_dot_product_attention is attend


def _counts() -> tuple[int, int]:
    report = sdpa_report()
    return report.served, sum(report.passed_on.values())


def _counted(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """(result, calls served, calls passed on)."""
    served, passed = _counts()
    result = work()
    after = _counts()
    return result, after[0] - served, after[1] - passed


def _result(work: Callable[[], Any]) -> Any:
    """What a call returns, or its error as text."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _qkv(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(3)]


class Block(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _names_in_modules() -> dict[str, Any]:
    before, late = types.ModuleType("sdpa_before"), types.ModuleType("sdpa_late")
    exec("from torch.nn.functional import scaled_dot_product_attention as f", before.__dict__)
    with use_for_sdpa():
        exec("from torch.nn.functional import scaled_dot_product_attention as f", late.__dict__)
    return {"imported before": before.f, "imported while it was on": late.f}  # type: ignore[attr-defined]


def _ways() -> dict[str, Callable[..., torch.Tensor]]:
    named: dict[str, Any] = {name: functools.partial(f, is_causal=True) for name, f in _names_in_modules().items()}
    return named | {
        "module": Block(),
        "torch.jit.script": torch.jit.script(Block()),
        "torch.fx": torch.fx.symbolic_trace(Block()),
        "pickle of a partial": pickle.loads(pickle.dumps(functools.partial(attend, is_causal=True))),
        "deepcopy": copy.deepcopy(Block()),
        "torch.ops": functools.partial(torch.ops.aten.scaled_dot_product_attention, is_causal=True),
        "torch._C._nn": functools.partial(torch._C._nn.scaled_dot_product_attention, is_causal=True),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_every_name_is_served_while_it_is_on_and_pytorchs_after(grad: bool) -> None:
    inputs = [x.requires_grad_(grad) for x in _qkv(1, 2, 5, 8)]
    expected = attend(*inputs, is_causal=True)
    ways = _ways()
    active = use_for_sdpa()
    for name, f in ways.items():
        out, served, passed = _counted(lambda f=f: f(*inputs))
        assert (served, passed) == (1, 0), name
        torch.testing.assert_close(out, expected, msg=name)
        assert out.requires_grad is grad
    active.off()
    for name, f in ways.items():
        out, served, passed = _counted(lambda f=f: f(*inputs))
        assert (served, passed) == (0, 0), name
        assert torch.equal(out, expected), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_made_while_it_is_on_are_those_of_pytorch() -> None:
    inputs = _qkv(1, 2, 5, 8)
    expected = attend(*inputs, is_causal=True)
    with use_for_sdpa():
        scripted = torch.jit.script(Block())
        traced = torch.fx.symbolic_trace(Block())
        exported = torch.export.export(Block(), tuple(inputs), strict=True)
        exported_loosely = torch.export.export(Block(), tuple(inputs), strict=False)
        encoder = torch.jit.script(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True).eval())
        pickled = pickle.dumps(functools.partial(attend, is_causal=True))
    encoder(torch.randn(1, 3, 16))
    for program in (scripted, traced, exported.module(), exported_loosely.module(), pickle.loads(pickled)):
        assert torch.equal(program(*inputs), expected)
    for program in (exported, exported_loosely):
        assert not [node for node in program.graph.nodes if "flash_attn::" in str(node.target)]


@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("rows", "keys"), [(4, 6), (6, 4), (5, 5)])
def test_causal_biases_of_pytorch(make: Any, rows: int, keys: int) -> None:
    q, k, v = _qkv(2, 4, 6, 8)
    q, k, v = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
    expected, served = attend(q, k, v, attn_mask=make(rows, keys)), sdpa_report().served
    with use_for_sdpa():
        torch.testing.assert_close(attend(q, k, v, attn_mask=make(rows, keys)), expected, equal_nan=True)
    if rows <= keys:  # PyTorch has results of its own for more queries than keys
        assert sdpa_report().served == served + 1


def test_a_module_of_causal_biases_that_is_imported_later_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds to import, so an import of flash_attn leaves it to the program."""
    name = "torch.nn.attention.bias"
    monkeypatch.setattr(torch.nn.attention, "bias", sys.modules[name])
    monkeypatch.delitem(sys.modules, name)
    finders = list(sys.meta_path)
    causal_bias.serve(lambda query, *_: query)
    bias = importlib.import_module(name)
    assert sys.meta_path == finders
    q, k, v = _qkv(2, 4, 6, 8)
    assert attend(q[:, :, :4], k, v, attn_mask=bias.causal_lower_right(4, 6)).data_ptr() == q.data_ptr()


def test_torch_function_modes_see_pytorchs_function() -> None:
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with use_for_sdpa(), Watch():
        _, served, _ = _counted(lambda: attend(*_qkv(1, 2, 5, 8)))
    assert attend in seen
    assert served == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_give_pytorchs_result(layout: torch.layout) -> None:
    rows = [torch.randn(3, 2, 8), torch.randn(4, 2, 8)]
    if layout is torch.strided:
        rows = [x.transpose(0, 1).contiguous() for x in rows]
    nested = torch.nested.nested_tensor(rows, layout=layout, device=DEVICE)
    if layout is torch.jagged:
        nested = nested.transpose(1, 2)
    expected = attend(nested, nested, nested)
    with use_for_sdpa():
        out = attend(nested, nested, nested)
    for got, wanted in zip(out.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(got, wanted)


def test_subclasses_transforms_and_forward_mode_are_pytorchs() -> None:
    inputs = _qkv(1, 2, 5, 8)

    class Kept(torch.Tensor):
        pass

    def square(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend(q, *inputs[1:]).square().sum()
        return out

    works: dict[str, Callable[[], Any]] = {
        "subclass": lambda: attend(inputs[0].as_subclass(Kept), *inputs[1:]),  # type: ignore[no-untyped-call]
        "grad": lambda: torch.func.grad(square)(inputs[0]),
        "vmap": lambda: torch.func.vmap(attend)(*(x[None] for x in inputs)),
        "jvp": lambda: torch.func.jvp(square, (inputs[0],), (inputs[1],))[1],
    }
    for name, work in works.items():
        expected = _result(work)
        with use_for_sdpa():
            out, served, _ = _counted(lambda work=work: _result(work))
        assert served == 0, name
        if isinstance(expected, str):
            assert out == expected, name
        else:
            assert torch.equal(out, expected), name
    assert type(works["subclass"]()) is Kept


def test_handles_are_independent() -> None:
    inputs = _qkv(1, 2, 5, 8)

    def served() -> int:
        return _counted(lambda: attend(*inputs))[1]

    first, second = use_for_sdpa(), use_for_sdpa()
    first.off()
    assert served() == 1
    second.off()
    assert served() == 0
    with first:
        assert served() == 1
        with second:
            pass
        assert served() == 1
    assert served() == 0
    first.off()
    assert served() == 0
    with pytest.raises(ZeroDivisionError), use_for_sdpa():
        raise ZeroDivisionError
    assert served() == 0


def test_threads_share_the_switch_and_lose_no_count() -> None:
    inputs = _qkv(1, 2, 5, 8)

    def work() -> None:
        for _ in range(200):
            with use_for_sdpa():
                attend(*inputs)

    threads = [threading.Thread(target=work) for _ in range(8)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert _counted(run)[1:] == (1600, 0)
    assert not override.active


@pytest.mark.parametrize(
    "options",
    [
        {"scale": True}, {"scale": 10**30}, {"scale": 1e-39}, {"scale": float("nan")}, {"scale": float("inf")},
        {"scale": -0.5}, {"scale": 0.0}, {"scale": "x"}, {"is_causal": 1}, {"is_causal": "x"}, {"enable_gqa": "x"},
        {"is_causal": torch.tensor(True)}, {"dropout_p": -0.1}, {"dropout_p": "x"}, {"attn_mask": "x"}, {"wrong": 1},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_mean_what_they_mean_to_pytorch(options: dict[str, Any]) -> None:
    inputs = _qkv(1, 2, 5, 8)

    expected = _result(lambda: attend(*inputs, **options))
    with use_for_sdpa():
        out, served, passed = _counted(lambda: _result(lambda: attend(*inputs, **options)))
    if isinstance(expected, str):
        assert out == expected
        assert served == 0
    else:
        torch.testing.assert_close(out, expected, equal_nan=True)
        assert served + passed == 1


@pytest.mark.parametrize("kind", [KernelError, NotImplementedError])
def test_a_kernel_that_cannot_be_compiled_goes_to_pytorch_and_is_reported(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = f"fwd_64: Triton cannot compile it for gfx000 ({kind.__name__})"

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise kind(why)

    inputs = _qkv(1, 2, 5, 8)
    expected = attend(*inputs)
    monkeypatch.setattr(door, "attention", refuse)
    with use_for_sdpa():
        out, served, passed = _counted(lambda: attend(*inputs))
    assert torch.equal(out, expected)
    assert (served, passed) == (0, 1)
    assert sdpa_report().passed_on[f"no kernel: {why}"] == 1


def test_a_call_that_raises_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(door, "attention", fail)
    before = _counts()
    with use_for_sdpa(), pytest.raises(torch.OutOfMemoryError):
        attend(*_qkv(1, 2, 5, 8))
    assert _counts() == before


LAYOUTS = {
    "BHSD": lambda: torch.randn(2, 4, 6, 8),
    "BSHD": lambda: torch.randn(2, 6, 4, 8).transpose(1, 2),
    "packed": lambda: torch.randn(2, 6, 3, 4, 8)[:, :, 0].transpose(1, 2),
    "SBHD": lambda: torch.randn(6, 2, 4, 8).permute(1, 2, 0, 3),
    "strided rows": lambda: torch.randn(2, 4, 8, 6).transpose(2, 3),
    "odd head dim": lambda: torch.randn(2, 4, 6, 12),
    "3 dimensions": lambda: torch.randn(4, 6, 8),
}


@pytest.mark.skipif(GPU, reason="PyTorch's layouts are those of its kernels, which differ by GPU")
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_strides_of_the_result_are_pytorchs(layout: str, mask: bool, grad: bool, backend: str | None) -> None:
    q = LAYOUTS[layout]().requires_grad_(grad)
    options = {"attn_mask": torch.zeros(6, 6)} if mask else {}
    expected = attend(q, q, q, **options)
    call = (
        attend if backend is None else torch.compile(lambda *x, **y: attend(*x, **y), backend=backend, fullgraph=True)
    )
    with use_for_sdpa():
        out, served, _ = _counted(lambda: call(q, q, q, **options))
    assert served == 1
    assert out.stride() == expected.stride()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["served", "passed on"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_call_counts_once(backend: str, dtype: torch.dtype, grad: bool) -> None:
    x = _qkv(1, 2, 5, 8, dtype=dtype)[0].requires_grad_(grad)
    f = torch.compile(lambda a: attend(a, a, a), backend=backend, fullgraph=True)
    with use_for_sdpa():
        _, served, passed = _counted(lambda: f(x))
    assert (served, passed) == ((1, 0) if dtype is torch.float32 else (0, 1))


@pytest.mark.parametrize("first", [False, True])
def test_compiled_code_follows_the_switch(first: bool) -> None:
    """Dynamo's guards see it. Each of the two graphs counts its call when it is compiled, and not again."""
    x = _qkv(1, 2, 5, 8)[0]
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        def keep(lowered: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
            graphs.append(
                any(
                    "flash_attn::" in str(node.target) or "flash_attn." in str(node.target)
                    for node in lowered.graph.nodes
                )
            )
            return lowered.forward

        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=keep)(graph, inputs)

    f = torch.compile(lambda a: attend(a, a, a), backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            if first:
                f(x)
            with use_for_sdpa():
                f(x)
            f(x)
    assert graphs == ([False, True] if first else [True, False])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_with_block_inside_of_a_compiled_function(backend: str, grad: bool) -> None:
    x = _qkv(1, 2, 5, 8)[0].requires_grad_(grad)

    def work(a: torch.Tensor) -> torch.Tensor:
        with use_for_sdpa():
            served: torch.Tensor = attend(a, a, a)
        return served + attend(a, a, a, is_causal=True)

    f = torch.compile(work, backend=backend, fullgraph=True)
    expected = attend(x, x, x) + attend(x, x, x, is_causal=True)
    out, served, passed = _counted(lambda: f(x))
    assert (served, passed) == (1, 0)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(f(x), expected)
    assert not override.active


@pytest.mark.parametrize("dynamic", [True, None])
def test_compiled_for_other_shapes(dynamic: bool | None) -> None:
    def work(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor:
        out: torch.Tensor = attend(q, k, k, attn_mask=mask, is_causal=is_causal)
        return out

    f = torch.compile(work, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    for rows in (5, 9, 17):
        q, k = torch.randn(2, 4, rows, 16, device=DEVICE), torch.randn(2, 4, rows + 3, 16, device=DEVICE)
        for mask, is_causal in ((None, False), (torch.zeros(rows, rows + 3, device=DEVICE), False), (None, True)):
            with use_for_sdpa():
                out = f(q, k, mask, is_causal)
            torch.testing.assert_close(out, work(q, k, mask, is_causal))


def test_the_first_use_within_a_compiled_function(tmp_path: Path) -> None:
    """It drops graphs of before, among them the graph that runs."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import flash_attn, torch
            from flash_attn.sdpa import attention
            attention.is_on_gpu = lambda _: True
            attend = torch.nn.functional.scaled_dot_product_attention

            @torch.compiler.disable
            def inside(x):
                with flash_attn.use_for_sdpa():
                    return attend(x, x, x)

            @torch.compile(backend="aot_eager")
            def outside(x):
                return inside(x + 1) + attend(x, x, x)

            x = torch.randn(1, 2, 5, 8)
            wanted = attend(x + 1, x + 1, x + 1) + attend(x, x, x)
            for _ in range(2):
                torch.testing.assert_close(outside(x), wanted)
            print(flash_attn.sdpa_report().served)
        """),
        encoding="utf-8",
    )
    assert _program(tmp_path, str(program)) == "2"


def test_a_trace_that_fails_inside_of_a_with_block_leaves_it_off() -> None:
    def work(a: torch.Tensor) -> torch.Tensor:
        with use_for_sdpa():
            out: torch.Tensor = attend(a, a, a[..., :3])
            return out @ a

    with pytest.raises(Exception, match=r"."):
        torch.compile(work, backend="aot_eager", fullgraph=True)(_qkv(1, 2, 5, 8)[0])
    assert not override.active


def test_the_compilers_caches_hold_both_kinds_of_graphs_apart() -> None:
    config = getattr(torch.compiler, "config", None)
    if not hasattr(config, "cache_key_tag"):
        pytest.skip("this torch caches no graph by its program")
    before = config.cache_key_tag
    config.cache_key_tag = "mine"
    try:
        with use_for_sdpa(), use_for_sdpa():
            assert config.cache_key_tag not in ("mine", "")
            assert config.cache_key_tag.startswith("mine")
        assert config.cache_key_tag == "mine"
    finally:
        config.cache_key_tag = before


def _program(tmp_path: Path, *words: str, **variables: str) -> str:
    environment = {"PYTHONPATH": str(Path(door.__file__).parents[2]), **variables}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_programs_path_is_what_python_makes_it(tmp_path: Path) -> None:
    """sys.path of a file, a directory and a module, with and without -P, as without flash_attn.sdpa."""
    folder = tmp_path / "place" / "tool"
    folder.mkdir(parents=True)
    code = textwrap.dedent("""
        import sys
        print([entry for entry in sys.path])
    """)
    for path in (folder / "__main__.py", tmp_path / "place" / "script.py"):
        path.write_text(code, encoding="utf-8")
    asked: list[tuple[list[str], list[str]]] = [([], ["place/tool"]), ([], ["-m", "place.script"])]
    if sys.version_info >= (3, 11):
        asked.append((["-P"], ["place/script.py"]))
    for flags, words in asked:
        expected = _program(tmp_path, *flags, *words)
        assert _program(tmp_path, *flags, "-m", "flash_attn.sdpa", *words) == expected, (flags, words)
