"""The table of Composable Kernel instances and its division into units."""

from __future__ import annotations

import collections
import re

import pytest

from rocm_wheels.compile.ck import compiler as ck_compiler
from rocm_wheels.compile.ck import instances as ck_instances
from rocm_wheels.compile.ck.units import ComposableKernel


def test_the_table_follows_from_the_axes() -> None:
    counts = collections.Counter(instance.op for instance in ck_instances.table())
    assert counts == {
        "fwd": 144, "dqdkdv": 128, "dot": 16, "convert": 32, "splitkv": 72, "combine": 32, "appendkv": 48,
    }  # fmt: skip


def test_names_are_unique_and_make_symbols() -> None:
    table = ck_instances.table()
    assert len({instance.name for instance in table}) == len({instance.symbol for instance in table}) == len(table)
    for instance in table:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", instance.name)
        assert re.fullmatch(r"ck_[a-z0-9_]+", instance.symbol)
        assert len(instance.name) < 64  # FLASH_ATTN_CK_MAX_NAME


def test_types_are_unique_so_no_kernel_is_compiled_twice() -> None:
    types = [instance.type for instance in ck_instances.table()]
    assert len(set(types)) == len(types)


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("fwd-bf16-d96-batch", "Forward<bf16, 96, false, false, Bias::none, false, false>"),
        ("fwd-fp16-d64-group-mask-softcap", "Forward<fp16, 64, true, true, Bias::none, true, false>"),
        ("dqdkdv-bf16-d128-group-alibi-dropout", "Backward<bf16, 128, true, Bias::alibi, true, false>"),
        ("convert-fp16-d256-batch-deterministic", "BackwardConvert<fp16, 256, false, true>"),
        ("splitkv-bf16-d32-group-paged-alibi", "Split<bf16, 32, true, true, Bias::alibi, false>"),
        ("combine-fp16-d64-batch-splits7", "Combine<fp16, 64, false, 7>"),
        ("appendkv-bf16-d128-paged-half", "Append<bf16, 128, true, Rotary::half>"),
        ("appendkv-bf16-d128", "Append<bf16, 128, false, Rotary::none>"),
    ],
)
def test_types(name: str, type_: str) -> None:
    (instance,) = (instance for instance in ck_instances.table() if instance.name == name)
    assert instance.type == type_


def test_units_hold_every_instance_once() -> None:
    units = ck_instances.units()
    assert len({name for name, _ in units}) == len(units)
    held = [instance for _, instances in units for instance in instances]
    assert sorted(held) == sorted(ck_instances.table())
    assert max(len(instances) for _, instances in units) <= 24


def test_a_pattern_leaves_instances_out_of_the_same_units() -> None:
    every = dict(ck_instances.units())
    some = dict(ck_instances.units("fwd-bf16-d128*"))
    assert sum(map(len, some.values())) == 12
    for name, instances in some.items():
        assert set(instances) <= set(every[name])
    assert ck_instances.units("nothing") == ()


@pytest.mark.parametrize(("target", "dtypes"), [("gfx90a", {"bf16"}), ("gfx942", {"bf16", "fp16"})])
def test_a_target_has_no_units_of_a_dtype_whose_range_it_loses(target: str, dtypes: set[str]) -> None:
    assert {instance.dtype for unit in ComposableKernel().units(target) for instance in unit.content} == dtypes


def test_a_unit_has_a_line_for_each_instance() -> None:
    _, instances = ck_instances.units("dot-fp16-d32-*")[0]
    assert ck_compiler.source(instances).splitlines() == [
        '#include "device.hpp"',
        "FLASH_ATTN_CK_ENTRY(ck_dot_fp16_d32_batch, BackwardDot<fp16, 32, false>)",
        "FLASH_ATTN_CK_ENTRY(ck_dot_fp16_d32_group, BackwardDot<fp16, 32, true>)",
    ]
