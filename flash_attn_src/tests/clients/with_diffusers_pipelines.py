"""Whole pipelines of diffusers with small random weights, by flash_attn against PyTorch's math path.

    python with_diffusers_pipelines.py [--kernels]

Stable Diffusion (head dims 40, 80, 160), SDXL (64), Flux and Wan (128), each with its VAE (Stable Diffusion's: one head
of 512). Ways: PyTorch's scaled_dot_product_attention under `flash_attn.use_for_sdpa()`; for Flux and Wan also the
attention backends "flash" and "flash_varlen" of diffusers.

With a GPU in bf16. Without a GPU in fp32: tensors of the CPU then count as tensors of a GPU, and PyTorch's operations
serve them, or with --kernels the Triton kernels in Triton's interpreter (the caller sets TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
import flash_attn
import torch
from diffusers.models import attention_dispatch
from flash_attn.attention import backends
from flash_attn.attention.backends import triton
from flash_attn.sdpa import attention as door
from torch.nn.attention import SDPBackend, sdpa_kernel

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
STEPS = 2


def _seeded(build: Callable[[], torch.nn.Module], dtype: torch.dtype) -> Any:
    """A model with the same random weights in every dtype. No parameter is zero, so that every branch counts."""
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return model.to(DEVICE, dtype).eval()


def _draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def _image_vae(channels: tuple[int, ...], latents: int, dtype: torch.dtype) -> Any:
    down, up = (tuple([f"{way}EncoderBlock2D"] * len(channels)) for way in ("Down", "Up"))
    up = tuple(name.replace("Encoder", "Decoder") for name in up)
    return _seeded(
        lambda: diffusers.AutoencoderKL(
            block_out_channels=channels, down_block_types=down, up_block_types=up, layers_per_block=1,
            latent_channels=latents, norm_num_groups=8, sample_size=16, shift_factor=0.1,
        ), dtype,
    )  # fmt: skip


def stable_diffusion(dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Head dims 40, 80 and 160 in the UNet, one head of 512 in the VAE."""
    unet = _seeded(
        lambda: diffusers.UNet2DConditionModel(
            sample_size=8, block_out_channels=(40, 80, 160), layers_per_block=1, norm_num_groups=8,
            attention_head_dim=1, cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        ), dtype,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        vae=_image_vae((32, 512), 4, dtype), unet=unet, text_encoder=None,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        tokenizer=None, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    prompts = {
        "prompt_embeds": _draw(1, 77, 32, dtype=dtype),
        "negative_prompt_embeds": _draw(1, 77, 32, dtype=dtype) * 0.5,
    }
    return pipeline, {"height": 16, "width": 16, **prompts}


def sdxl(dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Head dim 64 in the UNet."""
    unet = _seeded(
        lambda: diffusers.UNet2DConditionModel(
            sample_size=8, block_out_channels=(64, 128), layers_per_block=1, norm_num_groups=8,
            attention_head_dim=(1, 2), transformer_layers_per_block=(1, 2), cross_attention_dim=64,
            use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=32 + 6 * 8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ), dtype,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=_image_vae((32, 64), 4, dtype), unet=unet, scheduler=diffusers.EulerDiscreteScheduler(),
        text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None,
        add_watermarker=False, force_zeros_for_empty_prompt=False,
    )  # fmt: skip
    prompts = {
        "prompt_embeds": _draw(1, 77, 64, dtype=dtype),
        "negative_prompt_embeds": _draw(1, 77, 64, dtype=dtype) * 0.5,
        "pooled_prompt_embeds": _draw(1, 32, dtype=dtype),
        "negative_pooled_prompt_embeds": _draw(1, 32, dtype=dtype) * 0.5,
    }
    return pipeline, {"height": 16, "width": 16, **prompts}


def flux(dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Head dim 128, text and image in one sequence."""
    transformer = _seeded(
        lambda: diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=128, num_attention_heads=2,
            joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(16, 56, 56),
        ), dtype,
    )  # fmt: skip
    pipeline = diffusers.FluxPipeline(
        transformer=transformer, vae=_image_vae((32, 64), 4, dtype),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), text_encoder=None, text_encoder_2=None,
        tokenizer=None, tokenizer_2=None,
    )  # fmt: skip
    prompts = {"prompt_embeds": _draw(1, 19, 32, dtype=dtype), "pooled_prompt_embeds": _draw(1, 16, dtype=dtype)}
    return pipeline, {"height": 32, "width": 32, **prompts}


def wan(dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Head dim 128, five frames of video."""
    transformer = _seeded(
        lambda: diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=32, freq_dim=64,
            ffn_dim=64, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
        ), dtype,
    )  # fmt: skip
    vae = _seeded(
        lambda: diffusers.AutoencoderKLWan(
            base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ), dtype,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipeline = diffusers.WanPipeline(
        transformer=transformer, vae=vae, scheduler=scheduler, text_encoder=None, tokenizer=None
    )
    prompts = {
        "prompt_embeds": _draw(1, 33, 32, dtype=dtype),
        "negative_prompt_embeds": _draw(1, 33, 32, dtype=dtype) * 0.5,
    }
    return pipeline, {"height": 32, "width": 48, "num_frames": 5, **prompts}


PIPELINES = {"Stable Diffusion": stable_diffusion, "SDXL": sdxl, "Flux": flux, "Wan": wan}
WITH_BACKENDS = ("Flux", "Wan")
BACKENDS = ("flash", "flash_varlen")


def generate(name: str, dtype: torch.dtype, backend: str = "native") -> torch.Tensor:
    """The pictures or the video of a pipeline as float64, by an attention backend of diffusers."""
    pipeline, options = PIPELINES[name](dtype)
    pipeline.set_progress_bar_config(disable=True)
    if name in WITH_BACKENDS:  # this sets the backend of later models too
        pipeline.transformer.set_attention_backend(backend)
    out = pipeline(
        **options, num_inference_steps=STEPS, guidance_scale=3.0, output_type="pt",
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    return torch.as_tensor(out.frames if name == "Wan" else out.images).double().cpu()


@dataclass
class Count:
    """Calls of the functions that diffusers' backends took from flash_attn."""

    calls: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Count]:
    count = Count()
    names = ("flash_attn_func", "flash_attn_varlen_func")
    real = {name: getattr(attention_dispatch, name) for name in names}

    def through(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count.calls += 1
            return real[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(attention_dispatch, name, through(name))
        yield count
    finally:
        for name in names:
            setattr(attention_dispatch, name, real[name])


def compare(label: str, got: torch.Tensor, rough: torch.Tensor, exact: torch.Tensor, calls: int) -> None:
    """Within twice the error of the math path in the same dtype, and a floor; exact is the math path in fp32."""
    error, own = (float((x - exact).abs().max()) for x in (got, rough))
    bar = 2.0 * own + 2e-5
    assert calls > 0, f"{label}: flash_attn was not called"
    assert exact.std() > 0.01, f"{label}: the result is constant"
    assert error <= bar, f"{label}: error {error:.2e}, bar {bar:.2e}"
    print(f"{label}: {calls} calls, largest error {error:.1e} of {tuple(exact.shape)}")


def main() -> None:
    diffusers.utils.logging.set_verbosity_error()
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", action="store_true", help="Triton's kernels in its interpreter, without a GPU")
    served_by = triton if parser.parse_args().kernels else None
    if not GPU:
        door.is_on_gpu = lambda _: True
    for name in PIPELINES:
        with sdpa_kernel(SDPBackend.MATH):
            exact = generate(name, torch.float32)
            rough = generate(name, DTYPE) if GPU else exact
        with backends.using(served_by) if served_by else contextlib.nullcontext():
            before = flash_attn.sdpa_report()
            with flash_attn.use_for_sdpa():
                got = generate(name, DTYPE)
            after = flash_attn.sdpa_report()
            assert after.passed_on == before.passed_on, f"{name}: {after}"
            compare(f"{name}, SDPA", got, rough, exact, after.served - before.served)
            for backend in BACKENDS if name in WITH_BACKENDS else ():
                with counted() as count:
                    got = generate(name, DTYPE, backend)
                compare(f"{name}, {backend}", got, rough, exact, count.calls)
    print(f"diffusers {diffusers.__version__}, {'Triton kernels, ' if served_by else ''}{DEVICE}, {DTYPE}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
