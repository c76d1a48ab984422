"""The attention code of programs from their checkouts, by flash_attn against PyTorch's math path.

    python with_checkouts.py PROGRAM=DIRECTORY ...

PROGRAM: comfyui, flashvsr, kjnodes, nanotron, radialattn, sglang, vllm, wanvideo, xformers, xtuner. DIRECTORY holds the
program's package (`comfy`, `nanotron`, ...), or is the checkout of ComfyUI's nodes. Only the modules that call
attention are imported. Modules that they import and that need more than PyTorch are stand-ins whose functions return
None.

With a GPU in bf16. Without a GPU in fp32: tensors of the CPU count as tensors of a GPU, and operators that a program
registers for GPUs alone are registered for every device.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import logging
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_attn
import torch
import torch.distributed as dist
import two_ranks
from flash_attn.sdpa import attention as door
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as pytorch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPE = torch.bfloat16 if GPU else torch.float32
TINY = {torch.bfloat16: 2e-2, torch.float32: 2e-5}

Tensors = tuple[torch.Tensor, ...]


def draw(*shape: int, count: int = 3, dtype: torch.dtype = DTYPE) -> Tensors:
    generator = torch.Generator().manual_seed(sum(shape))
    return tuple(torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for _ in range(count))


def math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention of tensors (batch, seqlen, heads, head_dim) in fp32."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out: torch.Tensor = pytorch(*(x.float().transpose(1, 2) for x in (q, k, v)), **options)
    return out.transpose(1, 2)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], **options: Any) -> torch.Tensor:
    """The same for packed sequences (total, heads, head_dim)."""
    parts = (x.split(lengths) for x in (q, k, v))
    return torch.cat([math(*(x[None] for x in one), **options)[0] for one in zip(*parts, strict=True)])


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def close(name: str, got: torch.Tensor, wanted: torch.Tensor, leaves: Tensors = (), bar: float | None = None) -> None:
    """The result, and the gradients of leaves. bar: the largest relative error, where it is not the type's."""
    bar = TINY[got.dtype] if bar is None else bar
    error = _error(got, wanted)
    said = f"{name}: error {error:.1e}"
    worst = error
    if leaves:
        dout = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
        ours, theirs = (torch.autograd.grad(x, leaves, dout.to(x.dtype)) for x in (got, wanted))
        worst = max(_error(x, y) for x, y in zip(ours, theirs, strict=True))
        said += f", of gradients {worst:.1e}"
    assert max(error, worst) <= bar, f"{said}; bar {bar:.0e}"
    print(said)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, wanted {tuple(expected.shape)}"
    difference = (got.detach().double() - expected.detach().double()).abs().max()
    return float(difference / expected.detach().double().abs().max())


class _StandIn(types.ModuleType):
    """A module that has every name. Its functions return None."""

    __path__: list[str] = []  # noqa: RUF012 - a package is told by this attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def stand_in(*names: str, **attributes: Any) -> None:
    for name in names:
        module = _StandIn(name)
        vars(module).update(attributes)
        sys.modules[name] = module


def package(name: str, directory: Path) -> None:
    """A package whose modules are found in a directory. Its own __init__ does not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(directory)]
    sys.modules[name] = module


def comfyui(directory: Path) -> None:
    """`--use-flash-attention`, the SDPA path and the VAE's attention, with the shapes of SD 1.5, SDXL, Flux, Wan."""
    sys.path.insert(0, str(directory))
    sys.argv = ["main.py", "--use-flash-attention", *([] if GPU else ["--cpu"])]
    importlib.import_module("comfy.options").enable_args_parsing()
    attention = importlib.import_module("comfy.ldm.modules.attention")
    vae = importlib.import_module("comfy.ldm.modules.diffusionmodules.model")
    assert attention.optimized_attention is attention.attention_flash
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    before = flash_attn.sdpa_report().served
    for model, heads, dim in (("SD 1.5", 8, 40), ("SD 1.5", 8, 80), ("SD 1.5", 8, 160), ("SDXL", 10, 64)):
        q, k, v = draw(2, 64, heads * dim)
        expected = math(*(x.unflatten(-1, (heads, dim)) for x in (q, k, v))).flatten(2)
        for name in ("flash", "pytorch"):
            got = attention.get_attention_function(name)(q, k, v, heads)
            close(f"ComfyUI, {model}, head dim {dim}, {name}", got, expected)
    for model, heads in (("Flux", 24), ("Wan", 12)):
        q, k, v = draw(1, heads, 72, 128)
        expected = math(*(x.transpose(1, 2) for x in (q, k, v))).flatten(2)
        for name in ("flash", "pytorch"):
            got = attention.get_attention_function(name)(q, k, v, heads, skip_reshape=True)
            close(f"ComfyUI, {model}, head dim 128, {name}", got, expected)
    assert not warned, warned
    q, k, v = draw(2, 64, 8 * 40)
    mask = torch.zeros(64, 64, device=DEVICE, dtype=DTYPE).masked_fill(
        torch.ones(64, 64, device=DEVICE).triu(1) > 0, -1e4
    )
    expected = math(*(x.unflatten(-1, (8, 40)) for x in (q, k, v)), attn_mask=mask.float()).flatten(2)
    for name in ("flash", "pytorch"):
        close(f"ComfyUI, a mask, {name}", attention.get_attention_function(name)(q, k, v, 8, mask=mask), expected)
    assert [text for text in warned if "Mask must not be set" in text] == warned != []  # "flash" gives it to SDPA
    q, k, v = draw(1, 512, 8, 8)
    expected = math(*(x.flatten(2).mT[:, :, None] for x in (q, k, v)))[:, :, 0].mT.unflatten(-1, (8, 8))
    close("ComfyUI, VAE, one head of 512, pytorch", vae.pytorch_attention(q, k, v), expected)
    assert flash_attn.sdpa_report().served - before == 9, flash_attn.sdpa_report()


def kjnodes(directory: Path) -> None:
    """ComfyUI-KJNodes: "Patch Flash Attention KJ" and each mode of "Patch Sage Attention KJ"."""
    if "comfy" not in sys.modules:
        sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests/support/comfy_stand_in"))
    theirs = importlib.import_module("comfy.ldm.modules.attention")
    tree = ast.parse((directory / "nodes/model_optimization_nodes.py").read_text())
    names = {"get_sage_func", "PathchSageAttentionKJ", "get_flash_func", "PatchFlashAttentionKJ", "sageattn_modes"}
    tree.body = [x for x in tree.body if {getattr(x, "name", ""), *_assigned(x)} & names]
    nodes: dict[str, Any] = {**vars(theirs), "torch": torch, "logging": logging}
    exec(compile(tree, "model_optimization_nodes.py", "exec"), nodes)
    patcher = importlib.import_module("comfy.model_patcher").ModelPatcher(torch.nn.Linear(1, 1), DEVICE, DEVICE)
    patched = {"flash": nodes["PatchFlashAttentionKJ"]().patch(patcher)[0]}
    for mode in nodes["sageattn_modes"]:
        if mode != "disabled" and "sageattn3" not in mode:  # a package of its own, for Blackwell
            patched[mode] = nodes["PathchSageAttentionKJ"]().patch(patcher, mode)[0]
    q, k, v = (x.detach().half() for x in draw(2, 72, 4 * 64))
    expected = math(*(x.unflatten(-1, (4, 64)) for x in (q, k, v))).flatten(2)
    for name, model in patched.items():
        options = model.model_options["transformer_options"]
        got = theirs.attention_pytorch(q, k, v, 4, transformer_options=options)
        close(f"KJNodes, {name}", got, expected, bar=1e-3 if name == "flash" else 3e-2)
    seen = torch.ones(72, 72, dtype=torch.bool, device=DEVICE).tril()
    expected = math(*(x.unflatten(-1, (4, 64)) for x in (q, k, v)), attn_mask=seen).flatten(2)
    options = patched["auto"].model_options["transformer_options"]
    got = theirs.attention_pytorch(q, k, v, 4, mask=seen, transformer_options=options)
    close("KJNodes, auto, a mask", got, expected, bar=3e-2)


def _assigned(node: ast.stmt) -> list[str]:
    return [x.id for x in getattr(node, "targets", ()) if isinstance(x, ast.Name)]


def wanvideo(directory: Path) -> None:
    """ComfyUI-WanVideoWrapper's attention: its modes for FlashAttention-2, SDPA and SageAttention."""
    package("wanvideo", directory / "wanvideo")
    package("wanvideo.modules", directory / "wanvideo/modules")
    attention = importlib.import_module("wanvideo.modules.attention").attention
    q, k, v = (x.detach().bfloat16() for x in draw(2, 72, 4, 128))
    for mode in ("flash_attn_2", "sdpa", "sageattn"):
        got = attention(q, k, v, attention_mode=mode)
        close(f"WanVideoWrapper, {mode}", got, math(q, k, v), bar=3e-2 if mode == "sageattn" else None)
    lengths = torch.tensor([50, 72], dtype=torch.int32)
    got = attention(q, k, v, k_lens=lengths, attention_mode="flash_attn_2")
    seen = torch.arange(72)[None, None, None] < lengths[:, None, None, None]
    close("WanVideoWrapper, flash_attn_2, lengths of keys", got, math(q, k, v, attn_mask=seen))


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor, size: int = 128) -> torch.Tensor:
    """`math` where blocks (batch, heads, queries / size, keys / size) are seen. A query that sees no key gets 0."""
    seen = blocks.bool().repeat_interleave(size, -2).repeat_interleave(size, -1)
    return math(q, k, v, attn_mask=seen).nan_to_num()


def flashvsr(directory: Path) -> None:
    """A block of ComfyUI-FlashVSR's model, "block_sparse_attention": six frames, then two after the cache of keys."""
    package("flashvsr", directory / "src/models")
    dit = importlib.import_module("flashvsr.wan_video_dit")
    dit.USE_BLOCK_ATTN = True
    assert dit.BLOCK_ATTN_AVAILABLE
    heads, dim, height, width = 2, 128, 16, 24
    torch.manual_seed(0)
    block = dit.DiTBlock(heads * dim, heads, 512).to(DEVICE, DTYPE).requires_grad_(False)
    block.cross_attn.init_cache(draw(1, 9, heads * dim, count=1)[0].detach())
    axes, steps = dit.precompute_freqs_cis_3d(dim), draw(1, 6, heads * dim, count=1)[0].detach()
    ours, calls = dit.flash_attention, 0

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_heads: int, **options: Any) -> torch.Tensor:
        nonlocal calls
        q, k, v = (x.unflatten(-1, (num_heads, -1)) for x in (q, k, v))
        blocks = options.get("attention_mask")
        calls += blocks is not None and 0 < blocks.float().mean() < 1
        return (math(q, k, v) if blocks is None else masked(q, k, v, blocks)).flatten(2).to(q.dtype)

    kept: dict[str, Tensors] = {"ours": (), "dense": ()}
    for start, frames in ((0, 6), (6, 2)):
        (x,) = (x.detach() for x in draw(1, frames * height * width, heads * dim, count=1))
        places = (
            axes[0][start : start + frames, None, None],
            axes[1][None, :height, None],
            axes[2][None, None, :width],
        )
        freqs = torch.cat([x.expand(frames, height, width, -1) for x in places], -1).reshape(-1, 1, dim // 2).to(DEVICE)
        out: dict[str, torch.Tensor] = {}
        for name, function in (("ours", ours), ("dense", dense)):
            dit.flash_attention = function
            before = dict(zip(("pre_cache_k", "pre_cache_v"), kept[name], strict=False))
            out[name], *cache = block(
                x, None, steps, freqs, frames, height, width, topk=8, kv_len=3, is_stream=True, local_range=1, **before
            )
            kept[name] = tuple(cache)
        close(f"FlashVSR, frames {start} to {start + frames}", out["ours"], out["dense"])
    assert calls == 2, calls


def radialattn(directory: Path) -> None:
    """ComfyUI-RadialAttn's attention for Wan, whose blocks are given to `spas_sage_attn`."""
    if "comfy" not in sys.modules:
        sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests/support/comfy_stand_in"))
        importlib.import_module("comfy.ldm.modules.attention").optimized_attention = None
    package("radialattn", directory)
    nodes, masks = (importlib.import_module(f"radialattn.{name}") for name in ("nodes", "attn_mask"))
    frames, tokens, heads = 6, 256, 2
    q, k, v = (x.detach().bfloat16() for x in draw(1, frames * tokens, heads * 64))
    shape = frames * tokens, heads, 64
    # As torch for ROCm names a gfx1030, and an MI200, for which the masks are made as for an H100.
    for size, arch in itertools.product((64, 128), ("sm103", "sm90")):
        masks._cuda_archs = {None: arch, 0: arch}
        got = nodes.get_radial_attn_func(frames * tokens, frames, size, 0.2, False)(q, k, v, heads)
        blocks = masks.queryLogMask(frames * tokens, frames, shape, q.device, "radial", size, 0.2, "wan")
        if size == 64:  # two blocks of queries, or of keys, are one
            axis = int(arch == "sm90")
            blocks = blocks.unflatten(axis, (-1, 2)).any(axis + 1).repeat_interleave(2, axis)
        assert 0 < blocks.float().mean() < 1
        expected = masked(*(x.unflatten(-1, (heads, 64)) for x in (q, k, v)), blocks[None, None], size).flatten(2)
        close(f"RadialAttn, Wan, blocks of {size}, {arch}", got, expected)


RING = [24, 16]


def _ring(directory: Path, rank: int) -> list[tuple[int, list[torch.Tensor]]]:
    """nanotron's ring attention: a process has one half of each sequence.

    In bf16, because its dq in fp32 is wrong: it adds up in a buffer that it uses again.
    """
    package("nanotron", directory / "nanotron")
    ring = importlib.import_module("nanotron.nn.ring_attention").ring_flash_attn_varlen_func
    halves = [length // 2 for length in RING]
    leaves = [
        torch.cat([part.split(half)[rank] for part, half in zip(x.split(RING), halves, strict=True)]).detach()
        for x in draw(sum(RING), 4, 32, dtype=torch.bfloat16)
    ]
    leaves = [x.to(two_ranks.device(rank)).requires_grad_() for x in leaves]
    cu_seqlens = offsets(halves).to(two_ranks.device(rank))
    (out,) = ring(None, *leaves, cu_seqlens, max(halves), scaling=0.2, causal=True, ring_pg=dist.group.WORLD)
    out.backward(torch.ones_like(out))
    return [(rank, [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))])]


def nanotron(directory: Path) -> None:
    """Its attention functions, ring attention of two processes, rotary embedding and norm."""
    package("nanotron", directory / "nanotron")
    stand_in("nanotron.logging")
    attention = importlib.import_module("nanotron.nn.attention")
    halves = [length // 2 for length in RING]
    q, k, v = draw(sum(RING), 4, 32, dtype=torch.bfloat16)
    out = packed(q, k, v, RING, is_causal=True, scale=0.2)
    expected = (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))
    for rank, parts in two_ranks.run(functools.partial(_ring, directory)):
        for name, whole, part in zip(("out", "dq", "dk", "dv"), expected, parts, strict=True):
            mine = torch.cat([x.split(half)[rank] for x, half in zip(whole.split(RING), halves, strict=True)])
            close(f"nanotron, ring attention, rank {rank}, {name}", part.to(DEVICE), mine)
    q, k, v = draw(2, 24, 4, 32)
    module = types.SimpleNamespace(local_num_heads=4, local_num_kv_heads=4, head_dim=32)
    got = attention.flash_attention_forward(module, q, k, v, None, 24, scaling=0.2)[0]
    expected = math(q, k, v, is_causal=True, scale=0.2)
    close("nanotron, flash attention", got, expected.reshape(got.shape), (q, k, v))
    norm = importlib.import_module("nanotron.nn.layer_norm").TritonRMSNorm(64, device=DEVICE, dtype=DTYPE)
    (x,) = draw(3, 7, 64, count=1)
    close("nanotron, TritonRMSNorm", norm(x), torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-5), (x,))
    importlib.import_module("nanotron.nn.rotary")
    from flash_attn.modules.mha import flash_attn_varlen_kvpacked_func  # as nanotron.models.qwen imports it

    assert flash_attn_varlen_kvpacked_func is flash_attn.flash_attn_varlen_kvpacked_func


def sglang(directory: Path) -> None:
    """Vision towers on ROCm by SDPA; diffusion models by flash_attn_func."""
    package("sglang", directory / "sglang")
    srt, media = "sglang.srt", "sglang.multimodal_gen.runtime"
    for name in (srt, "sglang.multimodal_gen", media):
        package(name, directory / name.replace(".", "/"))
    stand_in(
        "sglang.utils",
        *(f"{srt}.{name}" for name in ("distributed", "environ", "models", "models.utils", "platforms")),
        f"{srt}.runtime_context", f"{srt}.utils",
        *(f"{srt}.layers.{name}" for name in ("layernorm", "linear", "quantization", "rotary_embedding")),
        f"{srt}.layers.rotary_embedding.utils", f"{srt}.layers.dp_attention", f"{srt}.utils.multi_stream_utils",
        "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.layernorm", "sglang.kernels.ops.layernorm.norm",
        "sglang.kernels.ops.attention", "sglang.kernels.ops.attention.prefill_attention",
        f"{media}.platforms", f"{media}.utils", f"{media}.utils.logging_utils",
    )  # fmt: skip
    for name in (f"{srt}.layers", f"{srt}.layers.attention", f"{media}.layers", f"{media}.layers.attention"):
        package(name, directory / name.replace(".", "/"))
    vision = importlib.import_module(f"{srt}.layers.attention.vision")
    lengths = [16, 20, 28]
    q, k, v = draw(sum(lengths), 4, 80)
    before = flash_attn.sdpa_report().served
    layer = vision.VisionSdpaAttention(80, 4, 4, flatten_batch=True)
    close("SGLang, ViT by SDPA", layer(q, k, v, bsz=1, cu_seqlens=offsets(lengths)), packed(q, k, v, lengths))
    assert flash_attn.sdpa_report().served == before + 1
    stand_in(f"{media}.layers.attention.backends.attention_backend", AttentionBackend=object, AttentionImpl=object)
    package(f"{media}.layers.attention.backends", directory / media.replace(".", "/") / "layers/attention/backends")
    backend = importlib.import_module(f"{media}.layers.attention.backends.flash_attn_2")
    q, k, v = draw(2, 48, 4, 128)
    got = backend.FlashAttention2Impl(4, 128, causal=False, softmax_scale=0.1).forward(q, k, v, None)
    close("SGLang, diffusion by FA2", got, math(q, k, v, scale=0.1))


def vllm(directory: Path) -> None:
    """On ROCm: the choice of flash_attn_varlen_func, and the vision towers' call of it."""
    package("vllm", directory / "vllm")
    platform = _StandIn("platform")
    vars(platform).update(is_rocm=lambda: True)
    stand_in("vllm.logger", "vllm._custom_ops", "vllm._aiter_ops", "vllm.platforms.rocm", "vllm.utils")
    stand_in("vllm.platforms", current_platform=platform)
    stand_in("vllm.utils.gpu_sync_debug", gpu_sync_allowed=torch.no_grad)
    stand_in("vllm.utils.torch_utils", "vllm.v1.kv_cache_interface")
    choice = importlib.import_module("vllm.v1.attention.backends.fa_utils")
    assert choice.flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert choice.is_flash_attn_varlen_func_available()
    wrapper = importlib.import_module("vllm.v1.attention.ops.vit_attn_wrappers").flash_attn_maxseqlen_wrapper
    lengths = [16, 20, 28]
    q, k, v = draw(1, sum(lengths), 4, 80)
    with torch.no_grad():
        got = wrapper(q, k, v, 1, False, None, 0.1, offsets(lengths), torch.tensor(max(lengths)))
    close("vLLM, ViT", got[0], packed(q[0], k[0], v[0], lengths, scale=0.1))


def xformers(directory: Path) -> None:
    """0.0.30, the last with a dispatch to the package flash_attn: operators `flash_fwd` and `flash_bwd`."""
    sys.modules["flash_attn_interface"] = None  # type: ignore[assignment] # it fails beside the wheel flash-attn-3
    os.environ["XFORMERS_IGNORE_FLASH_VERSION_CHECK"] = "1"  # it takes 2.7.1 to 2.7.4
    sys.path.insert(0, str(directory))
    flash = importlib.import_module("xformers.ops.fmha.flash")
    del sys.modules["flash_attn_interface"]
    assert flash_attn.__version__ == flash.FLASH_VERSION
    for causal in (False, True):
        q, k, v = draw(2, 40, 4, 64, dtype=torch.bfloat16)  # its backward takes no fp32
        inputs = flash.Inputs(q, k, v, attn_bias=flash.LowerTriangularMask() if causal else None)
        out, context = flash.FwOp.apply(inputs, needs_gradient=True)
        expected = math(q, k, v, is_causal=causal)
        close(f"xformers, causal {causal}", out, expected)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
        got = flash.BwOp.apply(context, inputs, dout)
        gradients = torch.autograd.grad(expected, (q, k, v), dout.float())
        for name, one, other in zip(("dq", "dk", "dv"), (got.dq, got.dk, got.dv), gradients, strict=True):
            close(f"xformers, causal {causal}, {name}", one, other)


def xtuner(directory: Path) -> None:
    """Its functions for packed sequences over FlashAttention-2 and -3 (the wheel flash-attn-3)."""
    for name in ("xtuner", "xtuner.v1", "xtuner.v1.ops"):
        package(name, directory / name.replace(".", "/"))
    package("xtuner.v1.ops.flash_attn", directory / "xtuner/v1/ops/flash_attn")
    functions = importlib.import_module("xtuner.v1.ops.flash_attn.gpu")
    lengths = [19, 13]
    longest = torch.tensor(max(lengths))
    for name in ("flash_attn_varlen_func_v2", "gpu_flash_varlen_attn_v3"):
        q, k, v = draw(sum(lengths), 4, 64)
        got = getattr(functions, name)(q, k, v, *[offsets(lengths)] * 2, longest, longest, causal=True)
        close(f"xtuner, {name}", got, packed(q, k, v, lengths, is_causal=True), (q, k, v))


PROGRAMS: dict[str, Callable[[Path], None]] = {
    "comfyui": comfyui, "flashvsr": flashvsr, "kjnodes": kjnodes, "nanotron": nanotron, "radialattn": radialattn,
    "sglang": sglang, "vllm": vllm, "wanvideo": wanvideo, "xformers": xformers, "xtuner": xtuner,
}  # fmt: skip


def main(words: list[str]) -> None:
    if not GPU:
        door.is_on_gpu = lambda _: True
        register = torch.library.custom_op
        torch.library.custom_op = lambda *names, device_types=None, **more: register(*names, **more)  # noqa: ARG005
    flash_attn.use_for_sdpa()
    for word in words:
        name, _, directory = word.partition("=")
        PROGRAMS[name](Path(directory))
    print(f"flash_attn {flash_attn.__version__}, {DEVICE}, {DTYPE}")


if __name__ == "__main__":
    main(sys.argv[1:])
