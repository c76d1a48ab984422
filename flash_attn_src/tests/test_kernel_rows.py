"""The rows of kernels/operations.py and kernels/targets.py: the rows agree with the kernels and the GPUs."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path

import pytest
from flash_attn import kernels
from flash_attn.kernels import flags, modifiers, providers, targets, tuning
from flash_attn.kernels.operation import Operation
from flash_attn.kernels.operations import OPERATIONS
from flash_attn.kernels.targets import TARGETS
from flash_attn.kernels.tuning.config import MODIFIERS, Config, tiles
from flash_attn.kernels.variants import Variant


@pytest.mark.parametrize("row", OPERATIONS.values(), ids=list(OPERATIONS))
def test_a_row_names_arguments_and_constants_that_its_kernel_has(row: Operation) -> None:
    function = getattr(importlib.import_module(f"flash_attn.kernels.{row.module}"), row.function)
    parameters = inspect.signature(function.fn).parameters.values()
    taken = {parameter.name for parameter in parameters if parameter.annotation == "tl.constexpr"}
    typed = [name for names in row.types.values() for name in names.split()]
    assert len(set(typed)) == len(typed)
    assert set(typed) <= set(function.arg_names) - taken
    assert {*row.constants, *row.fixed} == taken
    pointers = {name for type_, names in row.types.items() if type_.startswith("*") for name in names.split()}
    assert set(row.aligned) <= pointers
    assert set(row.fp32_arguments) <= {name for names in row.types.values() for name in names.split()} | {
        *("weight", "bias", "residual", "z", "dz", "dresidual")  # the forward and the backward of a norm share a list
    }


@pytest.mark.parametrize("row", OPERATIONS.values(), ids=list(OPERATIONS))
def test_every_size_and_kind_of_a_row_has_a_variant(row: Operation) -> None:
    assert list(row.sizes) == sorted(set(row.sizes))
    assert all(set(row.sizes_for(kind)) <= set(row.sizes) for kind in row.kinds)
    assert row.tile_of is None or OPERATIONS[row.tile_of].tuning == "table"
    assert row.dtypes_for(targets.get("gfx90a" if row.needs_range else "gfx1201"))


def test_the_digest_of_a_row_changes_with_each_fact_that_shapes_the_object() -> None:
    row = OPERATIONS["fwd"]
    others = (
        replace(row, types=row.types | {"*i64": "rng_state stride_qb"}),
        replace(row, aligned=row.aligned[1:]),
        replace(row, fp32_arguments=("lse", "out")),
        replace(row, fixed={"PAGE_MODE": 1}),
        replace(row, function="attn_other"),
    )
    digests = [each.digest("bf16") for each in (row, *others)] + [row.digest("fp16")]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("target", "wavefront", "fp8", "matrix_unit"),
    [
        ("gfx90a", 64, None, "mfma"),
        ("gfx942", 64, "fp8e4b8", "mfma"),
        ("gfx950", 64, "fp8e4nv", "mfma"),
        ("gfx1010", 32, None, None),
        ("gfx1030", 32, None, None),
        ("gfx1100", 32, None, "wmma"),
        ("gfx1151", 32, None, "wmma"),
        ("gfx1201", 32, "fp8e4nv", "wmma"),
        ("sm_80", 32, None, "mma"),
        ("sm_90", 32, "fp8e4nv", "wgmma"),
    ],
)
def test_facts_of_a_target(target: str, wavefront: int, fp8: str | None, matrix_unit: str | None) -> None:
    row = targets.get(target)
    assert (row.name, row.wavefront, row.fp8, row.matrix_unit) == (target, wavefront, fp8, matrix_unit)


@pytest.mark.parametrize(
    ("device", "hip", "served"),
    [
        ("gfx1103", "6.4.43482-0f2d60242", ("gfx1103", "gfx11-generic")),
        ("gfx1103", "7.14.0", ("gfx1103", "gfx11-generic")),
        ("gfx1103", "6.3.42131", ("gfx1103",)),
        ("gfx1012", "7.2.26015", ("gfx1012", "gfx10-1-generic")),
        ("gfx1030", "10.1.26015", ("gfx1030", "gfx10-3-generic")),
        ("gfx1200", "6.4", ("gfx1200", "gfx12-generic")),
        ("gfx90a:sramecc+:xnack-", "7.2.26015", ("gfx90a",)),
        ("gfx803", "7.2.26015", ("gfx803",)),
        ("gfx1103", None, ("gfx1103",)),
        ("sm_90", None, ("sm_90",)),
    ],
)
def test_which_targets_a_device_loads(device: str, hip: str | None, served: tuple[str, ...]) -> None:
    assert targets.serving_targets(device, hip) == served


def test_a_generic_target_takes_the_facts_that_its_whole_family_has() -> None:
    for name, row in TARGETS.items():
        if row.generic is None:
            continue
        generic = TARGETS[row.generic]
        assert generic.made_for is not None
        assert TARGETS[generic.made_for].generic == row.generic
        same = ("family", "wavefront", "matrix_unit", "fp8", "num_xcds", "half_up", "dropout_bits")
        assert [getattr(row, fact) for fact in same] == [getattr(generic, fact) for fact in same], name
        assert generic.registers <= row.registers, name
        assert generic.shared_memory <= row.shared_memory, name


def test_every_target_has_a_table_of_tiles() -> None:
    for target in TARGETS:
        table = tuning.rows(target)
        assert {op for op, _, _ in table} >= {"fwd", "bwd-dq", "bwd-dkdv", "decode", "extend"}
        assert ("fp8-fwd", 8, 128) in table or TARGETS[target].fp8 is None


def test_the_facts_of_a_target_for_its_store() -> None:
    generic, gpu, cuda = (targets.facts(name) for name in ("gfx11-generic", "gfx90a", "sm_80"))
    assert (generic["gpus"], generic["min_hip"]) == (
        ["gfx1100", "gfx1101", "gfx1151", "gfx1102", "gfx1103", "gfx1150", "gfx1152", "gfx1153"],
        [6, 4],
    )
    assert (gpu["gpus"], gpu["min_hip"], gpu["errata"]) == (["gfx90a"], None, ["flushes_subnormals"])
    assert (gpu["wavefront"], gpu["family"], gpu["matrix_unit"], gpu["elf_machine"]) == (64, "cdna", "mfma", 0x3F)
    assert (cuda["gpus"], cuda["elf_machine"]) == (["sm_80"], 0)
    for name, row in TARGETS.items():
        served = [gpu for gpu in TARGETS if name in targets.serving_targets(gpu, "6.4")]
        # A generic target is the device of no machine.
        assert targets.facts(name)["gpus"] == [gpu for gpu in served if not (row.is_generic and gpu == name)], name


def test_the_providers_of_a_target_for_its_store() -> None:
    for target in TARGETS:
        choice = providers.choice(target)
        rows = [providers.Row(target=target, **row) for row in choice["rows"]]
        assert rows == [row for row in providers.ROWS if row.target == target]
        assert {*choice["default"], *choice["larger"]} <= {*providers.SOURCES}
    assert {row.target for row in providers.ROWS} <= {*TARGETS}


def test_elf_machines_equal_llvms() -> None:
    """By the compiler that kernels are made with."""
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    for name, row in TARGETS.items():
        if row.vendor == "amd":
            image = bytes(amd.assemble_amdgcn(f'.amdgcn_target "amdgcn-amd-amdhsa--{name}"', name, ""))
            assert image[48] == row.elf_machine != 0, name
            assert targets.by_elf_machine(row.elf_machine) == name
    assert targets.by_elf_machine(0) is None


def test_a_family_without_tiles_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = replace(targets.get("gfx1201"), name="gfx1300", family="rdna5")  # type: ignore[arg-type]
    monkeypatch.setitem(TARGETS, "gfx1300", made_up)
    targets.get.cache_clear()
    with pytest.raises(ValueError, match="no tiles for rdna5, the family of gfx1300"):
        tuning.rows("gfx1300")
    with pytest.raises(ValueError, match="no tiles for rdna5, the family of gfx1300"):
        tuning.config("gfx1300", Variant("fwd", "bf16", 64, "plain"))
    targets.get.cache_clear()


@pytest.mark.parametrize(
    ("name", "relative"),
    [
        ("gfx1031", ("gfx1030", "10.3.0")),
        ("gfx1036", ("gfx1030", "10.3.0")),
        ("gfx1103", ("gfx1100", "11.0.0")),
        ("gfx1030", None),
        ("gfx1151", None),
        ("gfx90a", None),
        ("gfx803", None),
    ],
)
def test_the_relative_whose_kernels_a_gpu_runs(name: str, relative: tuple[str, str] | None) -> None:
    assert targets.override(name) == relative


@pytest.mark.parametrize("name", ["gfx803", "sm_9", "banana", ""])
def test_an_unknown_target_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown GPU target {name!r}: add a row to flash_attn/kernels/targets"):
        targets.get(name)
    assert targets.fp8_format(name) is None


def test_no_device_function_has_more_than_24_parameters() -> None:
    """`kernels.groups` has the named tuples. Kernels alone keep the flat list of the launcher."""
    outermost = {(row.module, row.function) for row in OPERATIONS.values()}
    outermost.add(("lazy_rescale", "_scale"))  # tl.map_elementwise passes each number of a pack by itself
    long = [
        f"{file}: {function.name} has {len(function.args.args)}"
        for file, function in _device_functions()
        if len(function.args.args) > 24 and (file.removesuffix(".py"), function.name) not in outermost
    ]
    assert long == []


def _device_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions that Triton compiles, with the names of their files."""
    for path in sorted(Path(kernels.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(one) for one in node.decorator_list
            ):
                yield path.name, node


def test_kernels_have_nothing_that_the_oldest_triton_refuses() -> None:
    """Triton 3.3 compiles no chain of three conditions without parentheses and no None in a tuple."""
    refused = [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for file, function in _device_functions()
        for node in ast.walk(function)
        if (isinstance(node, ast.BoolOp) and len(node.values) > 2)
        or (isinstance(node, ast.Assign) and any(ast.unparse(one) == "None" for one in getattr(node.value, "elts", ())))
    ]
    assert refused == []


def test_triton_specializes_the_numbers_of_a_tuple_against_the_wish_of_the_kernel() -> None:
    """The reason why kernels take a flat list. Where this fails, a kernel can take `kernels.groups` as they are."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.amd.compiler import HIPBackend

    wish = (False, False, True)  # no pointer to constants, no specialization, alignment
    assert native_specialize_impl(HIPBackend, 16, *wish) == ("i32", None)
    assert native_specialize_impl(HIPBackend, (16,), *wish) == (("i32",), ("D",))


def test_a_row_of_tiles_has_one_configuration_for_each_score_modifier() -> None:
    few, many, other = Config(16, 16, 4), Config(32, 16, 4), Config(64, 16, 4)
    assert tiles(few) == dict.fromkeys(MODIFIERS, few)
    row = tiles({"plain alibi": few, "others": many})
    assert row == {"plain": few, "alibi": few, "dropout": many, "softcap": many, "any": many}
    assert tiles({"dropout": other}, base=row) == {**row, "dropout": other}
    for wrong in ({"plain": few}, {"plain": few, "plain any": many, "others": few}, {"sinks": few, "others": many}):
        with pytest.raises(ValueError, match="each of plain, alibi, dropout, softcap, any needs one configuration"):
            tiles(wrong)


def test_bits_of_modifiers_are_their_own() -> None:
    """No flag of an attention kernel has the bit of a score modifier."""
    shared = ("HAS_", "QUERY_", "ROTARY_", "PACKED_", "SINKS_", "BIAS_IS_")
    bits = [row.flag for row in modifiers.PER_HEAD]
    bits += [x for name, x in vars(flags).items() if name.startswith(shared) and name != "HAS_OFFSETS"]
    assert sum(bits) == reduce(or_, bits)
    assert all(bit.bit_count() == 1 for bit in bits)
