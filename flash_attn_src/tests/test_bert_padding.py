from __future__ import annotations

from collections.abc import Callable

import flash_attn
import pytest
import torch
from assert_close import assert_close
from flash_attn import bert_padding
from flash_attn.bert_padding import (
    IndexFirstAxis,
    IndexFirstAxisResidual,
    IndexPutFirstAxis,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)


def _mask(lengths: list[int], seqlen: int) -> torch.Tensor:
    return (torch.arange(seqlen) < torch.tensor(lengths)[:, None]).int()


def test_unpad_gives_tokens_places_and_lengths() -> None:
    hidden = torch.arange(3 * 4 * 2, dtype=torch.float32).view(3, 4, 2)
    tokens, indices, cu_seqlens, longest, counted = unpad_input(hidden, _mask([2, 0, 3], 4))
    assert indices.tolist() == [0, 1, 8, 9, 10]
    assert indices.dtype is torch.int64
    assert cu_seqlens.tolist() == [0, 2, 2, 5]
    assert cu_seqlens.dtype is torch.int32
    assert longest == 3
    assert type(longest) is int
    assert counted.tolist() == [2, 0, 3]
    assert torch.equal(tokens, hidden.view(12, 2)[indices])


def test_unused_tokens_keep_their_place_and_do_not_count() -> None:
    hidden = torch.randn(2, 4, 3)
    mask = _mask([2, 1], 4)
    unused = _mask([3, 3], 4) - mask
    tokens, indices, cu_seqlens, longest, counted = unpad_input(hidden, mask, unused)
    assert cu_seqlens.tolist() == [0, 3, 6]
    assert longest == 3
    assert counted.tolist() == [2, 1]
    assert torch.equal(tokens, hidden.view(8, 3)[indices])


def test_sizes_may_be_tensors() -> None:
    tokens, indices = torch.randn(3, 2), torch.tensor([0, 2, 5])
    expected = pad_input(tokens, indices, 2, 4)
    assert torch.equal(pad_input(tokens, indices, torch.tensor(2), torch.tensor(4)), expected)
    with pytest.raises(ValueError, match="seqlen: got -1"):
        pad_input(tokens, indices, 2, torch.tensor(-1))


def test_bool_masks() -> None:
    hidden = torch.randn(2, 4)
    mask = _mask([2, 4], 4)
    for got, expected in zip(unpad_input(hidden, mask.bool()), unpad_input(hidden, mask), strict=True):
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))
    unused = torch.zeros(2, 4, dtype=torch.bool)
    assert unpad_input(hidden, mask.bool(), unused)[3] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_pad_inverts_unpad(dtype: torch.dtype) -> None:
    """Tests token embeddings (floats) and token numbers (ints)."""
    hidden = torch.randint(2, (3, 5, 2, 4)).to(dtype)
    mask = _mask([5, 1, 0], 5)
    tokens, indices, *_ = unpad_input(hidden, mask)
    assert torch.equal(pad_input(tokens, indices, 3, 5), hidden * mask[:, :, None, None])


def test_gradients() -> None:
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    mask = _mask([3, 2], 4)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        tokens, indices, *_ = unpad_input(x, mask)
        return pad_input(tokens.sin(), indices, 2, 4)

    assert torch.autograd.gradcheck(there_and_back, (hidden,))
    indices = torch.tensor([4, 0, 2])
    rows = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), (rows,))
    values = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x, indices, 6), (values,))


def test_rows_that_hold_several_sequences() -> None:
    hidden = torch.randn(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert cu_seqlens.tolist() == [0, 2, 5, 9]
    assert cu_seqlens.dtype is torch.int32
    assert longest == 4
    assert torch.equal(tokens, hidden.view(12, 3)[indices])


def test_rows_with_the_residual() -> None:
    x = torch.randn(4, 2)
    rows, residual = index_first_axis_residual(x, torch.tensor([2, 0]))
    assert torch.equal(rows, x[[2, 0]])
    assert torch.equal(residual, x)
    x.requires_grad_()
    rows, residual = index_first_axis_residual(x, torch.tensor([2, 0]))
    (rows.sum() + 10.0 * residual.sum()).backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [11.0, 10.0, 11.0, 10.0]


def _there_and_back(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tokens, indices, cu_seqlens, longest, _ = unpad_input(x, mask)
    out = flash_attn.flash_attn_varlen_func(tokens, tokens, tokens, cu_seqlens, cu_seqlens, longest, longest)
    return pad_input(out, indices, *mask.shape)


def _several_in_a_row(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    tokens, _, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    return flash_attn.flash_attn_varlen_func(tokens, tokens, tokens, cu_seqlens, cu_seqlens, longest, longest)


@pytest.mark.parametrize("function", [_there_and_back, _several_in_a_row], ids=lambda f: f.__name__)
def test_traces_whole(function: Callable[..., torch.Tensor]) -> None:
    """Lengths from the values of a tensor stay symbolic in torch.export, and in torch.compile if it captures them."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return function(x, y)

    x, y = torch.randn(2, 5, 2, 8), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        exported = torch.export.export(Module(), (x, y), strict=False).module()
        for given in (y, y.flip(0), torch.ones_like(y)):
            for traced in (compiled, exported):
                assert_close("traced", traced(x, given), function(x, given))


def test_int32_indices() -> None:
    """transformers makes int32 indices when it generates from a padded batch."""
    x, indices = torch.randn(3, 2), torch.tensor([4, 0, 2])
    assert torch.equal(pad_input(x, indices.int(), 1, 5), pad_input(x, indices, 1, 5))
    assert torch.equal(index_first_axis(x, indices.int() // 2), index_first_axis(x, indices // 2))


def test_einops_and_autograd_functions_under_the_names_that_clients_import() -> None:
    """rearrange as verl and OpenRLHF use it, `apply` as dolomite-engine does."""
    from flash_attn.bert_padding import rearrange, repeat

    hidden = torch.randn(2, 4)
    indices = torch.tensor([1, 2, 7])
    tokens = index_first_axis(rearrange(hidden.unsqueeze(-1), "b s ... -> (b s) ..."), indices)
    assert torch.equal(tokens[:, 0], hidden.flatten()[indices])
    assert repeat(indices, "n -> n d", d=3).shape == (3, 3)
    rows = hidden.view(8, 1)
    assert torch.equal(IndexFirstAxis.apply(rows, indices), tokens)
    assert torch.equal(IndexPutFirstAxis.apply(tokens, indices, 8), index_put_first_axis(tokens, indices, 8))
    assert torch.equal(IndexFirstAxisResidual.apply(rows, indices)[0], tokens)
    with pytest.raises(AttributeError, match="has no attribute 'reduce'"):
        _ = bert_padding.reduce
