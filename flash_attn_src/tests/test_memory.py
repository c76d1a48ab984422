"""Which tensors share memory, against the set of their bytes; and outputs that overlap inputs, in every function."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from assert_close import assert_close
from flash_attn.call import memory
from public_calls import Call, calls

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="addresses are alike everywhere")


def _bytes(x: torch.Tensor, buffer: torch.Tensor) -> list[int]:
    places = torch.arange(buffer.numel() // x.element_size()).as_strided(x.shape, x.stride(), x.storage_offset())
    return [p * x.element_size() + byte for p in places.flatten().tolist() for byte in range(x.element_size())]


def test_random_layouts() -> None:
    """Against every byte: 1000 pairs of strided tensors of two types, and each with itself."""
    rng, buffer = random.Random(0), torch.zeros(512, dtype=torch.int8)
    shared = own = 0
    for _ in range(1000):
        pair = []
        for dtype in rng.choices((torch.int8, torch.float32), k=2):
            view = buffer.view(dtype)
            shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
            strides = [rng.choice((0, 1, 2, 3, 4, 6, 8, 12)) for _ in shape]
            room = view.numel() - sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            pair.append(view.as_strided(shape, strides, rng.randrange(min(room, 40))))
        x, y = pair
        one, other = _bytes(x, buffer), _bytes(y, buffer)
        expected = bool(set(one) & set(other))
        assert memory.shares_memory(x, y) == memory.shares_memory(y, x) == expected
        assert memory.overlaps_itself(x) == (len(set(one)) < len(one))
        shared, own = shared + expected, own + memory.overlaps_itself(x)
    assert 150 < shared < 850
    assert 150 < own < 950


def test_parts_of_a_packed_tensor_share_nothing() -> None:
    packed = torch.zeros(2, 1000, 3, 8, 128, dtype=torch.float16)
    q, k, v = packed.unbind(2)
    assert memory.check_outputs({"dq": q, "dk": k}, {"v": v}) == []
    assert memory.shares_memory(packed, v)


WRITTEN = {name: call for name, call in calls().items() if call.written}


def _outcome(call: Call, changed: dict[str, torch.Tensor]) -> Any:
    try:
        return [x.clone() for x in call.run(**changed)]
    except (ValueError, RuntimeError) as error:
        return str(error)


def _bare(text: str) -> str:
    """A name as flash_attn has it, without upstream's underscores: kcache and k_cache, dq_ and dq."""
    return text.replace("_", "")


@pytest.mark.parametrize("name", WRITTEN)
def test_outputs_that_share_memory_are_right_or_refused(name: str) -> None:
    """Places each output of each function in the memory of every other tensor of its type that is large enough."""
    call = WRITTEN[name]
    expected = call.fresh().run()
    for output in call.written:
        for other in call.tensors:
            fresh = call.fresh()
            x, y = fresh.tensors[output], fresh.tensors[other]
            if other == output or x.dtype is not y.dtype or x.numel() > y.numel():
                continue
            if "cache" in output or (name.endswith("cache") and output in ("k", "v")) or output in ("x", "qkv", "kv"):
                y.view(-1)[: x.numel()].copy_(x.view(-1))  # it is read, too
                again = Call(
                    call.function, {n: t.clone() for n, t in fresh.tensors.items()}, call.options, call.written
                )
                best = again.run()
            else:
                best = expected
            got = _outcome(fresh, {output: y.view(-1)[: x.numel()].view(x.shape)})
            if isinstance(got, str):
                assert _bare(output) in _bare(got), (output, other, got)
                assert _bare(other) in _bare(got), (output, other, got)
                continue
            results = len(got) - len(call.written)
            assert results > 0 or output in call.written
            for one, two in zip(got[:results], best[:results], strict=True):
                assert_close(f"{output} in {other}", one, two)
            assert_close(output, got[results + call.written.index(output)], best[results + call.written.index(output)])


@pytest.mark.parametrize("name", WRITTEN)
def test_outputs_that_overlap_themselves_are_refused(name: str) -> None:
    call = WRITTEN[name]
    for output in call.written:
        fresh = call.fresh()
        x = fresh.tensors[output]
        got = _outcome(fresh, {output: x[:1].expand(x.shape)})
        assert isinstance(got, str), output
        assert _bare(got).startswith(f"{_bare(output)}: got"), (output, got)
