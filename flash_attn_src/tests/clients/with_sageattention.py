"""diffusers' six backends of sageattention, and models that are set to two of them, against PyTorch's own attention.

diffusers' checks for a GPU are off, which is its default.
"""

from __future__ import annotations

import importlib.metadata

import diffusers
import sageattention
import torch
from diffusers.models import attention_dispatch as dispatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = (
    "sage", "sage_varlen", "_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90", "_sage_qk_int8_pv_fp16_cuda",
    "_sage_qk_int8_pv_fp16_triton",
)  # fmt: skip


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def model() -> torch.nn.Module:
    """A transformer of Flux with two blocks and random weights."""
    torch.manual_seed(0)
    flux = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return flux.to(DEVICE, torch.bfloat16).eval()


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tensors = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32), "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(8, 3),
        "timestep": torch.tensor([1.0]),
    }  # fmt: skip
    return {name: x.to(DEVICE, torch.bfloat16) for name, x in tensors.items()}


@torch.no_grad()
def main() -> None:
    assert dispatch._CAN_USE_SAGE_ATTN, "diffusers does not see sageattention"
    assert dispatch.sageattn is sageattention.sageattn, "diffusers has not imported the six names"
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 4, 64, device=DEVICE, dtype=torch.float16) for _ in range(3))
    native = dispatch.AttentionBackendName("native")
    for name in BACKENDS:
        backend = dispatch.AttentionBackendName(name)
        dispatch._check_attention_backend_requirements(backend)
        result = []
        for causal in (False, True):
            expected = dispatch.dispatch_attention_fn(q.float(), k.float(), v.float(), is_causal=causal, backend=native)
            got = dispatch.dispatch_attention_fn(q, k, v, is_causal=causal, backend=backend)
            result.append(error(got, expected))
        assert max(result) < 0.02, result
        print(f"backend {name}: relative error {max(result):.1e}")
    # The forward of context parallelism reads the logsumexp.
    _, lse = dispatch._sage_attention_forward_op(None, q, k, v, return_lse=True)
    scores = (q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)) / 8
    assert lse.shape == (2, 40, 4)
    assert (lse - scores.logsumexp(-1).transpose(1, 2)).abs().max() < 0.05
    mask = torch.arange(40, device=DEVICE) < torch.tensor([40, 25], device=DEVICE)[:, None]
    expected = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask[:, None, None], backend=native)
    got = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=dispatch.AttentionBackendName("sage_varlen"))
    assert error(got, expected) < 0.02
    flux = model()
    expected = flux(**inputs()).sample
    for name in ("sage", "sage_varlen"):
        flux.set_attention_backend(name)
        got = flux(**inputs()).sample
        assert not torch.equal(got, expected), "another attention has run"
        assert error(got, expected) < 0.03, error(got, expected)
        print(f"model: set_attention_backend({name!r}), relative error {error(got, expected):.1e}")
    print(f"diffusers {diffusers.__version__}, sageattention {importlib.metadata.version('sageattention')}, {DEVICE}")


if __name__ == "__main__":
    main()
