"""Cases of the ComfyUI node, run in a process of their own: `python comfy_cases.py COMFYUI`.

COMFYUI is a folder with ComfyUI's package `comfy`: a checkout, or comfy_stand_in beside this file. Tensors of the CPU
stand for tensors of a GPU, and flash_attn's backend `torch` serves them. Prints the names of the cases that passed.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [sys.argv[1], str(ROOT / "flash_attn_src")]
words, sys.argv = sys.argv, [sys.argv[0], "--cpu"]

IS_REAL = (Path(words[1]) / "comfyui_version.py").exists()
if IS_REAL:
    import comfy.options  # type: ignore[import-not-found]

    comfy.options.enable_args_parsing()

import comfy.model_patcher  # noqa: E402
from comfy.ldm.modules import attention as theirs  # noqa: E402
from flash_attn.sdpa import attention as door  # noqa: E402
from flash_attn.sdpa import sdpa_report  # noqa: E402

CPU = torch.device("cpu")
shown: list[tuple[str, str]] = []
sys.modules["server"] = SimpleNamespace(  # type: ignore[assignment]
    PromptServer=SimpleNamespace(
        instance=SimpleNamespace(send_progress_text=lambda text, node_id: shown.append((node_id, text)))
    )
)


def load_node() -> Any:
    """The node, loaded as ComfyUI loads a folder of custom_nodes."""
    name = str(ROOT / "comfyui").replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, ROOT / "comfyui" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.NODE_CLASS_MAPPINGS["FlashAttentionROCm"]()


node = load_node()
is_on_gpu = door.is_on_gpu


def everywhere(x: torch.Tensor) -> bool:  # noqa: ARG001
    """The stand-in for a GPU."""
    return True


def patcher(model: torch.nn.Module | None = None) -> Any:
    return comfy.model_patcher.ModelPatcher(model or torch.nn.Linear(1, 1), CPU, CPU)


def options_of(model: Any) -> dict[str, Any]:
    options: dict[str, Any] = model.model_options["transformer_options"]
    return options


def patched(model: Any = None, node_id: str = "7") -> Any:
    (result,) = node.patch(model or patcher(), node_id)
    return result


def finish(model: Any) -> str:
    """What the node shows at the end of a sampling."""
    shown.clear()
    model.cleanup()
    ((node_id, text),) = shown
    assert node_id == "7"
    return text


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[wanted.dtype]
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def both(func: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> str:
    """A call with the node and without: the results are the same. Returns what the node shows."""
    model = patched()
    got = func(*args, **kwargs, transformer_options=options_of(model))
    close(got, func(*args, **kwargs, transformer_options={}))
    return finish(model)


SERVED = "flash_attn served 1 attention calls; 0 went elsewhere"


def case_layouts_and_types() -> None:
    for dtype, skip, skip_output in itertools.product(
        (torch.float32, torch.float16, torch.bfloat16), (False, True), (False, True)
    ):
        shapes = ((2, 3, 19, 40), (2, 3, 11, 40)) if skip else ((2, 19, 120), (2, 11, 120))
        q, k, v = draw(*shapes[0], dtype=dtype), *(draw(*shapes[1], dtype=dtype, seed=s) for s in (1, 2))
        options = {"skip_reshape": skip, "skip_output_reshape": skip_output, "low_precision_attention": False}
        assert both(theirs.attention_pytorch, q, k, v, 3, attn_precision=torch.float32, **options) == SERVED


def case_masks() -> None:
    q, k, v = draw(2, 19, 64), draw(2, 11, 64, seed=1), draw(2, 11, 64, seed=2)
    for shape in ((19, 11), (2, 19, 11), (2, 1, 19, 11), (2, 2, 19, 11), (1, 1, 1, 11), (2, 1, 11)):
        assert both(theirs.attention_pytorch, q, k, v, 2, draw(*shape, seed=3)) == SERVED
        seen = draw(*shape, seed=3) > -1
        seen[..., 0] = True
        assert both(theirs.attention_pytorch, q, k, v, 2, mask=seen) == SERVED


def case_masks_of_attention_basic() -> None:
    q, k, v = draw(2, 19, 64), draw(2, 11, 64, seed=1), draw(2, 11, 64, seed=2)
    assert both(theirs.attention_basic, q, k, v, 2, mask=draw(2, 19, 11, seed=3)) == SERVED
    seen = draw(2, 11, seed=3) > 0
    assert "1 x a boolean mask for attention_basic" in both(theirs.attention_basic, q, k, v, 2, mask=seen)


def case_gqa_and_scale() -> None:
    q, k, v = draw(2, 4, 19, 32), draw(2, 2, 11, 32, seed=1), draw(2, 2, 11, 32, seed=2)
    options: list[dict[str, Any]] = [{}, {"scale": 0.5}]
    for scale in options:
        assert both(theirs.attention_pytorch, q, k, v, 4, skip_reshape=True, enable_gqa=True, **scale) == SERVED
        flat = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
        assert both(theirs.attention_pytorch, *flat, 4, enable_gqa=True, **scale) == SERVED


def case_passed_on() -> None:
    q, k, v = draw(1, 5, 1040), draw(1, 6, 1040, seed=1), draw(1, 6, 1040, seed=2)
    pytorch = theirs.attention_pytorch
    assert "1 x head dims outside of 1 to 512" in both(pytorch, q, k, v, 2)
    assert "1 x an argument that this node does not know: later" in both(pytorch, q, k, v, 4, later=1)
    assert "1 x attn_mask: its last axis" in both(pytorch, q, k, v, 4, mask=draw(5, 1))
    wide = [x.repeat_interleave(2, 0) for x in (q, k[:, :5], v[:, :5])]
    wide[1], wide[2] = wide[1][:1], wide[2][:1]
    heads = [x.reshape(x.shape[0], 5, 8, 130).transpose(1, 2) for x in wide]
    assert "1 x a batch, heads or keys that are broadcast" in both(pytorch, *heads, 8, skip_reshape=True)
    door.is_on_gpu = is_on_gpu
    assert "1 x tensors that are not on one GPU" in both(pytorch, q, k, v, 4)
    door.is_on_gpu = everywhere


def case_other_models_are_untouched() -> None:
    base = patcher()
    model = patched(base)
    assert not options_of(base)
    later = model.clone()  # as a LoRA after the node does
    q = draw(1, 9, 64)
    theirs.attention_pytorch(q, q, q, 2, transformer_options=options_of(later))
    assert finish(later) == SERVED
    assert finish(model).startswith("flash_attn served 0 attention calls")


def case_node_twice() -> None:
    model = patched(patched(node_id="6"))
    q = draw(1, 9, 64)
    theirs.attention_pytorch(q, q, q, 2, transformer_options=options_of(model))
    assert finish(model) == SERVED


def case_node_twice_around_another() -> None:
    """The later node serves and counts; a node between that declines asks its own predecessor, as sparse nodes do."""
    first = patched(node_id="6")
    previous = options_of(first)["optimized_attention_override"]
    options_of(first)["optimized_attention_override"] = lambda func, *args, **kwargs: previous(func, *args, **kwargs)
    model, q = patched(first), draw(1, 9, 64)
    theirs.attention_pytorch(q, q, q, 2, transformer_options=options_of(model))
    assert finish(model) == SERVED


def case_unpatched() -> None:
    """A model without the node computes as before, and the node's clone goes on serving."""
    base, q = patcher(), draw(1, 9, 64)
    for _ in range(2):
        model = patched(base)
        theirs.attention_pytorch(q, q, q, 2, transformer_options=options_of(base))
        theirs.attention_pytorch(q, q, q, 2, transformer_options=options_of(model))
        assert finish(model) == SERVED


def new_case_tensor_containers() -> None:
    """ComfyUI since 0.33: tensors in containers. Later also an attention that the checkpoint prefers."""
    q = draw(1, 9, 64)
    model, expected = patched(), theirs.attention_pytorch(q, q, q, 2)
    preferred: dict[str, Any] = {}
    if "preferred_attention" in inspect.getsource(theirs.wrap_attn):
        preferred["preferred_attention"] = SimpleNamespace(function=lambda q, *_args, **_kwargs: torch.zeros_like(q))
        assert not theirs.attention_pytorch(q, q, q, 2, **preferred).any()
    containers = [theirs.AttentionTensorContainer(q.clone()) for _ in range(3)]
    close(theirs.attention_pytorch(*containers, 2, **preferred, transformer_options=options_of(model)), expected)
    assert all(container.tensor is None for container in containers)
    assert finish(model) == SERVED


def new_case_native_backend_nodes() -> None:
    """ "Model Attention Backend" replaces what is there. Before this node it goes on answering."""
    q = draw(1, 9, 64)
    for is_after in (False, True):
        base = patcher()
        model = patched(base) if is_after else base
        if IS_REAL:
            from comfy_extras.nodes_model_advanced import ModelAttentionBackend  # type: ignore[import-not-found]

            (model,) = ModelAttentionBackend().patch(model, "pytorch attention")
        else:
            model.set_model_optimized_attention(theirs.attention_pytorch)
        model = model if is_after else patched(model)
        theirs.attention_pytorch(q, q, q, 2, transformer_options=options_of(model))
        elsewhere = "0" if is_after else "1"
        assert finish(model).startswith(f"flash_attn served 0 attention calls; {elsewhere} went elsewhere")


def case_after_another_override() -> None:
    q, seen = draw(1, 9, 64), torch.ones(9, 9, dtype=torch.bool).tril()
    base = patcher()
    options_of(base)["optimized_attention_override"] = lambda func, *args, **kwargs: func(*args, mask=seen, **kwargs)
    model = patched(base)
    got = theirs.attention_pytorch(q, q, q, 2, transformer_options=options_of(model))
    close(got, theirs.attention_pytorch(q, q, q, 2, mask=seen))
    assert finish(model) == SERVED
    options_of(base)["optimized_attention_override"] = lambda _func, q, *_args, **_kwargs: torch.zeros_like(q)
    model = patched(base)
    assert not theirs.attention_pytorch(q, q, q, 2, transformer_options=options_of(model)).any()
    assert "1 x another node's attention answered" in finish(model)


def case_threads() -> None:
    model, q = patched(), draw(1, 9, 64)
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(theirs.attention_pytorch, q, q, q, 2, transformer_options=options_of(model)) for _ in range(200)
        ]
        for call in calls:
            call.result()
    assert finish(model) == "flash_attn served 200 attention calls; 0 went elsewhere"


def case_cross_attention() -> None:
    block, model = theirs.CrossAttention(64, 48, heads=2, dim_head=32), patched()
    for name, parameter in enumerate(block.parameters()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(name))
    x, context = draw(2, 19, 64), draw(2, 7, 48, seed=1)
    for mask in (None, draw(2, 19, 7, seed=2)):
        got = block(x, context, mask=mask, transformer_options=options_of(model))
        close(got, block(x, context, mask=mask))
    assert finish(model) == "flash_attn served 2 attention calls; 0 went elsewhere"


def case_compiled() -> None:
    model, q = patched(), draw(1, 9, 64)
    compiled = torch.compile(theirs.attention_pytorch, backend="aot_eager", fullgraph=True)
    before = sdpa_report().served
    got = compiled(q, q, q, 2, transformer_options=options_of(model))
    close(got, theirs.attention_pytorch(q, q, q, 2))
    assert sdpa_report().served == before + 1


def _tiny(model: torch.nn.Module) -> torch.nn.Module:
    for index, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(index))
    return model.eval()


def real_case_use_flash_attention() -> None:
    """The function of `--use-flash-attention`: where the node is too, the node answers."""
    q, seen = draw(1, 9, 64), torch.ones(9, 9, dtype=torch.bool).tril()
    flash = vars(theirs)["attention_flash"]
    for options in ({}, {"mask": seen}):
        model = patched()
        got = flash(q, q, q, 2, **options, transformer_options=options_of(model))
        close(got, theirs.attention_pytorch(q, q, q, 2, **options))
        assert finish(model) == SERVED


def real_case_unet() -> None:
    """A UNet as that of Stable Diffusion 1.5, but small."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # type: ignore[import-not-found]

    unet = _tiny(
        UNetModel(
            image_size=8, in_channels=4, model_channels=32, out_channels=4, num_res_blocks=[1, 1], channel_mult=(1, 2),
            num_heads=2, use_spatial_transformer=True, transformer_depth=[1, 1], transformer_depth_middle=1,
            transformer_depth_output=[1, 1, 1, 1], context_dim=24, dims=2, dtype=torch.float32,
        )
    )  # fmt: skip
    model = patched(patcher(unet))
    x, t, context = draw(2, 4, 16, 16), torch.tensor([3.0, 500.0]), draw(2, 7, 24, seed=1)
    got = unet(x, t, context=context, transformer_options=options_of(model).copy())
    text = finish(model)
    expected = unet(x, t, context=context, transformer_options={})
    assert expected.std() > 0
    close(got, expected)
    assert text == "flash_attn served 14 attention calls; 0 went elsewhere", text


def real_case_flux() -> None:
    """A transformer as that of Flux, but small."""
    import comfy.ops  # type: ignore[import-not-found]
    from comfy.ldm.flux.model import Flux  # type: ignore[import-not-found]

    flux = _tiny(
        Flux(
            in_channels=4, out_channels=4, vec_in_dim=16, context_in_dim=24, hidden_size=64, mlp_ratio=2.0, num_heads=2,
            depth=2, depth_single_blocks=2, axes_dim=[8, 12, 12], theta=10000, patch_size=2, qkv_bias=True,
            guidance_embed=True, txt_ids_dims=[], dtype=torch.float32, device=CPU,
            operations=comfy.ops.disable_weight_init,
        )
    )  # fmt: skip
    model = patched(patcher(flux))
    x, t, context, y = draw(1, 4, 8, 8), torch.tensor([0.5]), draw(1, 7, 24, seed=1), draw(1, 16, seed=2)
    arguments = {"timestep": t, "context": context, "y": y, "guidance": torch.tensor([3.5])}
    got = flux(x, **arguments, transformer_options=options_of(model).copy())
    text = finish(model)
    expected = flux(x, **arguments, transformer_options={})
    assert expected.std() > 0
    close(got, expected)
    assert text == "flash_attn served 4 attention calls; 0 went elsewhere", text


def main() -> None:
    door.is_on_gpu = everywhere
    is_new = hasattr(theirs, "AttentionTensorContainer")
    for name, case in list(globals().items()):
        kinds = ("case_", "real_case_" if IS_REAL else "case_", "new_case_" if is_new else "case_")
        if name.startswith(kinds):
            with torch.inference_mode(name != "case_compiled"):
                case()
            print(name)


if __name__ == "__main__":
    main()
