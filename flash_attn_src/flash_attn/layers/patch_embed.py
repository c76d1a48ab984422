"""Images as patches in a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from flash_attn.ops.checks import check_int, check_switches, check_tensor


def _pair(name: str, size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return check_int(name, height, 1), check_int(name, width, 1)


class PatchEmbed(nn.Module):
    """Patches of an image (batch, in_chans, *img_size), each through one linear layer: its weight is that of a
    convolution with the patch as kernel and stride, (embed_dim, in_chans * rows * columns). norm_layer: called with
    embed_dim, after it. flatten: patches in one row. fused_bias_fc is refused: there is no fused linear layer here."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[[int], nn.Module] | None = None,
        flatten: bool = True,
        bias: bool = True,
        fused_bias_fc: bool = False,
    ) -> None:
        super().__init__()
        check_switches(flatten=flatten, bias=bias, fused_bias_fc=fused_bias_fc)
        if fused_bias_fc:
            raise NotImplementedError("fused_bias_fc: got True, wanted False: there is no fused linear layer here")
        self.img_size = _pair("img_size", img_size)
        self.patch_size = _pair("patch_size", patch_size)
        if any(whole % part for whole, part in zip(self.img_size, self.patch_size, strict=True)):
            raise ValueError(f"img_size: got {self.img_size}, wanted multiples of patch_size, {self.patch_size}")
        self.grid_size = (self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1])
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        self.proj = nn.Linear(check_int("in_chans", in_chans, 1) * self.patch_size[0] * self.patch_size[1],
                              check_int("embed_dim", embed_dim, 1), bias=bias)  # fmt: skip
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, num_patches, embed_dim), or without flatten (batch, *grid_size, embed_dim)."""
        check_tensor("x", x, ("batch", "in_chans", "height", "width"))
        if tuple(x.shape[2:]) != self.img_size:
            raise ValueError(f"x: got an image of {tuple(x.shape[2:])}, wanted {self.img_size}, img_size")
        (rows, columns), (height, width) = self.grid_size, self.patch_size
        patches = x.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        x = self.proj(patches)
        return self.norm(x.flatten(1, 2) if self.flatten else x)
