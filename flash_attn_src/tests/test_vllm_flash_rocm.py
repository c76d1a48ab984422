"""The plug-in for vLLM against dense attention in fp32.

It runs on vLLM's own classes where vLLM can be imported, else on stand-ins of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pickle
import subprocess
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clients import stand_ins, vllm_stand_in
from flash_attn.kernels.targets import TARGETS
from reference import attention, visible

REAL = importlib.util.find_spec("vllm") is not None
if not REAL:
    vllm_stand_in.install()

import vllm_flash_rocm  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm_flash_rocm import backend, cache  # noqa: E402
from vllm_flash_rocm.backend import FlashRocmBackend, FlashRocmImpl  # noqa: E402
from vllm_flash_rocm.metadata import FlashRocmMetadataBuilder  # noqa: E402

HEADS, HEADS_K, DIM, PAGE = 4, 2, 32, 16
FP8 = torch.float8_e4m3fn
SCALE = DIM**-0.5
PREFILL, DECODE = [(7, 7), (18, 18)], [(1, 5), (1, 33), (1, 16)]
BATCHES = {
    "prefill": PREFILL,
    "decode": DECODE,
    "mixed": DECODE + PREFILL,
    "chunked": [(5, 29), (3, 48), (16, 17)],
    "speculative": [(3, 20), (3, 37)],
    "padded": [(1, 5), (1, 33), (0, 0)],
}


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _layer() -> Any:
    return SimpleNamespace(_k_scale=torch.tensor(0.25), _v_scale=torch.tensor(0.5))


def _builder() -> FlashRocmMetadataBuilder:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1), speculative_config=None
    )
    return FlashRocmMetadataBuilder(None, ["layer"], config, torch.device("cpu"))


def _impl(**options: Any) -> FlashRocmImpl:
    """A layer of the plug-in. vLLM asks its process groups in __new__, which need a whole engine."""
    made = object.__new__(FlashRocmImpl)
    FlashRocmImpl.__init__(made, HEADS, options.pop("head_size", DIM), SCALE, HEADS_K, **options)
    return made


class Step:
    """A batch of sequences (queries, keys), its cache with pages in no order, and a step's metadata."""

    def __init__(self, batch: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16, head_major: bool = True):
        self.batch = batch
        self.k, self.v = ([_draw(keys, HEADS_K, DIM, seed=seed + i) for i, (_, keys) in enumerate(batch)]
                          for seed in (10, 50))  # fmt: skip
        self.q = _draw(sum(queries for queries, _ in batch), HEADS, DIM, seed=1)
        width = 1 + max(keys for _, keys in batch) // PAGE
        order = torch.randperm(width * len(batch), generator=torch.Generator().manual_seed(3)) + 1
        self.table = order.view(len(batch), width).int()
        shape = (width * len(batch) + 1, HEADS_K, PAGE, 2 * DIM)
        self.cache = torch.zeros(shape if head_major else (shape[0], PAGE, HEADS_K, 2 * DIM), dtype=dtype)
        if not head_major:
            self.cache = self.cache.transpose(1, 2)

    def slots(self, index: int, first: int, stop: int) -> torch.Tensor:
        places = torch.arange(first, stop)
        return self.table[index, places // PAGE].long() * PAGE + places % PAGE

    def run(self, impl: FlashRocmImpl, **changes: Any) -> torch.Tensor:
        """The context is in the cache already; the step's own keys are written as vLLM writes them."""
        new_k, new_v, slots = [], [], []
        for index, (queries, keys) in enumerate(self.batch):
            context = keys - queries
            impl.do_kv_cache_update(
                _layer(), self.k[index][:context], self.v[index][:context], self.cache, self.slots(index, 0, context)
            )
            new_k.append(self.k[index][context:])
            new_v.append(self.v[index][context:])
            slots.append(self.slots(index, context, keys))
        impl.do_kv_cache_update(_layer(), torch.cat(new_k), torch.cat(new_v), self.cache, torch.cat(slots))
        output = torch.full_like(self.q, torch.nan)
        metadata = _builder().build(0, self.metadata(**changes))
        got = impl.forward(_layer(), self.q, self.q, self.q, self.cache, metadata, output)
        assert got is output
        return output

    def metadata(self, **changes: Any) -> CommonAttentionMetadata:
        starts = torch.tensor([0, *(queries for queries, _ in self.batch)]).cumsum(0).int()
        given: dict[str, Any] = {
            "query_start_loc": starts, "query_start_loc_cpu": starts,
            "seq_lens": (lengths := torch.tensor([keys for _, keys in self.batch]).int()),
            "seq_lens_cpu_upper_bound": lengths, "num_reqs": len(self.batch),
            "num_actual_tokens": int(starts[-1]), "max_query_len": max(queries for queries, _ in self.batch),
            "max_seq_len": max(keys for _, keys in self.batch), "block_table_tensor": self.table,
            "slot_mapping": torch.zeros(0),
        }  # fmt: skip
        return CommonAttentionMetadata(**{**given, **changes})

    def wanted(
        self, fp8: bool = False, images: Any = None, window: tuple[int, int] = (-1, -1), **options: Any
    ) -> torch.Tensor:
        result, first = [], 0
        for index, (queries, keys) in enumerate(self.batch):
            k, v = self.k[index].float(), self.v[index].float()
            if fp8:
                k, v = (x.div(scale).to(FP8).float() * scale for x, scale in ((k, 0.25), (v, 0.5)))
            q = self.q[None, first : first + queries]
            mask = visible(queries, keys, True, window)
            for start, end in (images or {}).get(index, []):
                in_image = torch.arange(keys).ge(start) & torch.arange(keys).le(end)
                mask |= in_image[keys - queries :, None] & in_image
            hidden = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
            result.append(attention(q, k[None], v[None], attn_bias=hidden, softmax_scale=SCALE, **options)[0][0])
            first += queries
        return torch.cat(result)


def _check(step: Step, impl: FlashRocmImpl, **expected: Any) -> None:
    torch.testing.assert_close(step.run(impl).float(), step.wanted(**expected), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_major", [True, False], ids=["head_major", "key_major"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str, head_major: bool) -> None:
    _check(Step(BATCHES[name], head_major=head_major), _impl())


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window": ({"sliding_window": 6}, {"window": (5, 0)}),
    "softcap": ({"logits_soft_cap": 0.5}, {"softcap": 0.5}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.1, 0.05]}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])}),
    "sinks": ({"sinks": torch.tensor([2.0, -1.0, 0.5, 4.0])}, {"s_aux": torch.tensor([2.0, -1.0, 0.5, 4.0])}),
}


# Of sequences: behind an image, without any, with two, after a prefix, half in the prefix cache, without any, padding.
IMAGES: Any = {0: [(3, 9)], 2: [(0, 7), (15, 20)], 3: [(28, 35), (2, 6)], 4: [(18, 25)], 5: []}
WITH_IMAGES = [(1, 33), (7, 7), (30, 30), (12, 40), (9, 30), (18, 18), (0, 0)]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("window", [None, 8])
def test_tokens_of_an_image_attend_to_later_ones(
    window: int | None, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "current_platform", SimpleNamespace(fp8_dtype=lambda: FP8))
    step = Step(WITH_IMAGES, torch.uint8 if fp8 else torch.bfloat16)
    got = step.run(_impl(sliding_window=window, kv_cache_dtype="fp8" if fp8 else "auto"), mm_req_doc_ranges=IMAGES)
    expected = step.wanted(fp8, IMAGES, (-1, -1) if window is None else (window - 1, 0))
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


def test_a_step_without_tokens_of_images_is_one_launch_for_each_kind() -> None:
    given = Step(WITH_IMAGES).metadata(mm_req_doc_ranges={2: [(30, 40)], 3: [(0, 20), (39, 39)], 4: [(15, 21)]})
    built = _builder().build(0, given)
    assert built.mm_prefix_range is None
    assert len(built.parts) == 2


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "current_platform", SimpleNamespace(fp8_dtype=lambda: FP8))
    given, expected = OPTIONS[name]
    step = Step(BATCHES["mixed"], torch.uint8 if fp8 else torch.bfloat16)
    _check(step, _impl(**given, kv_cache_dtype="fp8" if fp8 else "auto"), fp8=fp8, **expected)


@pytest.mark.parametrize("name", BATCHES)
def test_a_cache_in_fp8_with_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "current_platform", SimpleNamespace(fp8_dtype=lambda: FP8))
    _check(Step(BATCHES[name], torch.uint8), _impl(kv_cache_dtype="fp8_e4m3"), fp8=True)


def test_slots_below_zero_and_rows_beyond_the_mapping_are_not_written() -> None:
    kv_cache = torch.zeros(3, HEADS_K, PAGE, 2 * DIM, dtype=torch.bfloat16)
    k, v = _draw(5, HEADS_K, DIM, seed=1), _draw(5, HEADS_K, DIM, seed=2)
    _impl().do_kv_cache_update(_layer(), k, v, kv_cache, torch.tensor([PAGE + 3, -1, 0, 2 * PAGE]))
    keys, values = cache.key_and_value(kv_cache, DIM, None)
    for page, place, row in ((1, 3, 0), (0, 0, 2), (2, 0, 3)):
        assert torch.equal(keys[page, place], k[row])
        assert torch.equal(values[page, place], v[row])
    assert int(kv_cache.count_nonzero()) == 3 * HEADS_K * 2 * DIM


def test_fp8_saturates_instead_of_becoming_nan() -> None:
    kv_cache = torch.zeros(1, HEADS_K, PAGE, 2 * DIM, dtype=torch.uint8)
    k = torch.full((1, HEADS_K, DIM), 1e4).bfloat16()
    caches = cache.key_and_value(kv_cache, DIM, FP8)
    cache.write(k, -k, caches, torch.tensor([0]), "fp8", torch.tensor(1.0), torch.tensor(1.0))
    assert float(caches[0][0, 0].float().min()) == 448.0
    assert float(caches[1][0, 0].float().max()) == -448.0


def test_a_profiling_run_gives_zeros() -> None:
    q = _draw(3, HEADS, DIM, seed=1)
    assert not _impl().forward(_layer(), q, q, q, q, None, torch.ones_like(q)).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_type": "encoder_only"}, "attn_type: got encoder_only"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: got fp8_e5m2"),
        ({"head_size": 36}, "head_size: got 36"),
        ({"sinks": torch.zeros(3)}, "sinks: got 3 values"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes: got 1 values"),
        ({"chunk_lookback": 1}, "chunk_lookback"),
    ],
)
def test_a_layer_refuses_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=words):
        _impl(**options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"causal": False}, "causal: got False"),
        ({"dcp_local_seq_lens": torch.zeros(1)}, "dcp_local_seq_lens"),
        ({"rswa_prefix_lens": torch.zeros(1)}, "rswa_prefix_lens"),
    ],
)
def test_a_step_refuses_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        _builder().build(0, Step(DECODE).metadata(**changes))


def test_cascade_attention_and_quantized_output_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="common_prefix_len: got 16"):
        _builder().build(16, Step(DECODE).metadata())
    q = _draw(1, HEADS, DIM, seed=1)
    with pytest.raises(NotImplementedError, match="output_scale: got a tensor"):
        _impl().forward(_layer(), q, q, q, q, None, q, output_scale=q)


def test_what_the_selector_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = FlashRocmBackend
    assert [size for size in (64, 80, 96, 128, 256, 512, 100, 520) if not chosen.supports_head_size(size)] == [100, 520]
    assert chosen.supports_dtype(torch.float16)
    assert not chosen.supports_dtype(torch.float32)
    assert chosen.supports_kv_cache_dtype("fp8")
    assert not chosen.supports_kv_cache_dtype("int8_per_token_head")
    assert chosen.supports_sink()
    assert chosen.supports_sliding_window()
    assert not chosen.is_mla()
    assert not chosen.forward_includes_kv_cache_update
    assert chosen.get_supported_kernel_block_sizes()[0].base == PAGE  # type: ignore[union-attr]
    more: Any = (16, False, False, False, False, None)
    assert "multiple of 16" in str(chosen.supports_combination(72, torch.float16, "fp8", *more))
    assert "bfloat16 differs" in str(chosen.supports_combination(64, torch.float16, "bfloat16", *more))
    assert chosen.supports_combination(64, torch.float16, "auto", *more) is None
    assert chosen.supports_mm_prefix()
    served = [(9, 0), (9, 4), (9, 5), (10, 1), (10, 3), (11, 0), (11, 5), (12, 0)]
    for is_rocm in (True, False):
        monkeypatch.setattr(backend, "current_platform", SimpleNamespace(is_rocm=lambda is_rocm=is_rocm: is_rocm))
        for major, minor in [*served, (8, 0), (12, 5), (13, 0)]:
            gpu = SimpleNamespace(major=major, minor=minor)
            assert chosen.supports_compute_capability(gpu) == (is_rocm and (major, minor) in served), (major, minor)


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1151", "gfx1201"])
def test_a_cache_in_fp8_is_refused_where_no_kernel_reads_it(target: str) -> None:
    gpu = SimpleNamespace(major=int(target[3:-2]), minor=int(target[-2]))
    for dtype in (torch.float16, torch.bfloat16):
        reason = FlashRocmBackend.supports_combination(128, dtype, "fp8", 16, False, False, False, False, gpu)
        if TARGETS[target].fp8:
            assert reason is None
        else:
            assert target in str(reason)
            assert f"--kv-cache-dtype {str(dtype).removeprefix('torch.')}," in str(reason)


@pytest.mark.skipif(REAL, reason="vLLM's own base of latent attention needs a whole engine")
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_latent_attention(fp8: bool, queries: int) -> None:
    from vllm_flash_rocm.mla import FlashRocmMLABackend, FlashRocmMLAImpl

    assert FlashRocmMLABackend.is_mla()
    assert FlashRocmMLABackend.supports_head_size(576)
    assert not FlashRocmMLABackend.supports_head_size(320)
    places: list[Any] = [HEADS, 576, 0.05, 1, None, None, "fp8" if fp8 else "auto", None, "decoder", None]
    sizes: dict[str, Any] = {
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192,
        "v_head_dim": 128, "kv_b_proj": None,
    }  # fmt: skip
    impl = FlashRocmMLAImpl(*places, **sizes)
    table, lengths = torch.tensor([[4, 1], [2, 3]]).int(), torch.tensor([21, 9]).int()
    pages = _draw(5, PAGE, 576, seed=4)
    held, wide = (pages.to(FP8).view(torch.uint8), pages.to(FP8).float() * 0.25) if fp8 else (pages, pages.float())
    q = _draw(2 * queries, HEADS, 576, seed=5)
    step: Any = SimpleNamespace(causal=True, decode=SimpleNamespace(block_table=table, seq_lens=lengths))
    whole, lse = impl.forward_mqa(q, held, step, _layer())
    split, _ = impl.forward_mqa((q[..., :512], q[..., 512:]), held, step, _layer())
    assert lse is None
    assert torch.equal(whole, split)
    for row, length in enumerate(lengths.tolist()):
        keys = wide[table[row].long()].flatten(0, 1)[None, :length, None]
        own = slice(row * queries, (row + 1) * queries)
        expected, _ = attention(q[None, own], keys, keys[..., :512], causal=True, softmax_scale=0.05)
        torch.testing.assert_close(whole[own].float(), expected[0], rtol=2e-2, atol=2e-2)
    with pytest.raises(NotImplementedError, match="causal"):
        impl.forward_mqa(q, held, SimpleNamespace(causal=False), _layer())  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="sliding_window: got 5"):
        FlashRocmMLAImpl(*places[:5], 5, *places[6:], **sizes)


def test_registering_twice_and_pickling() -> None:
    for _ in range(2):
        vllm_flash_rocm.register()
    assert {
        name: AttentionBackendEnum[name].get_path() for name in vllm_flash_rocm.BACKENDS
    } == vllm_flash_rocm.BACKENDS
    member = AttentionBackendEnum["FLASH_ROCM"]
    assert pickle.loads(pickle.dumps(member)) is member
    assert FlashRocmBackend.get_name() in vllm_flash_rocm.BACKENDS


@pytest.mark.parametrize("lacks", ["register", "module"])
def test_a_vllm_that_cannot_have_the_backends_starts_with_a_warning(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = sys.modules[vllm_stand_in.REGISTRY]
    if lacks == "module":
        monkeypatch.setitem(sys.modules, vllm_stand_in.REGISTRY, None)
    else:
        old = Enum("AttentionBackendEnum", {"FLASH_ATTN": "path"})
        monkeypatch.setattr(registry, "AttentionBackendEnum", old)
    vllm_flash_rocm.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert all(words in record.getMessage() for words in (*vllm_flash_rocm.RAN_WITH, "pip uninstall vllm-flash-rocm"))


def test_the_wheel_and_its_page_name_the_releases_that_were_run() -> None:
    folder = Path(vllm_flash_rocm.__file__).parent
    for page in (folder / "pyproject.toml", folder.parents[1] / "docs/vllm.md"):
        text = page.read_text(encoding="utf-8")
        assert all(release in text for release in vllm_flash_rocm.RAN_WITH), page


def test_a_spawned_process_unpickles_a_backend_before_it_loads_plugins() -> None:
    vllm_flash_rocm.register()
    said = pickle.dumps(AttentionBackendEnum["FLASH_ROCM_MLA"])
    start = "" if REAL else "from clients import vllm_stand_in; vllm_stand_in.install();"
    code = f"{start} import pickle; print(pickle.loads({said!r}).name)"
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"], capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert done.stdout.split()[-1] == "FLASH_ROCM_MLA"


def test_the_wheel_has_the_entry_point(tmp_path: Path) -> None:
    folder = Path(vllm_flash_rocm.__file__).parent
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index",
         f"--target={tmp_path}", str(folder)], check=True, capture_output=True,
    )  # fmt: skip
    (result,) = importlib.metadata.distributions(name="vllm-flash-rocm", path=[str(tmp_path)])
    (entry,) = result.entry_points.select(group="vllm.general_plugins")
    assert (entry.name, entry.value) == ("flash_rocm", "vllm_flash_rocm:register")
    assert entry.load() is vllm_flash_rocm.register
    assert {path.name for path in folder.glob("*.py")} == {
        path.name for path in (tmp_path / "vllm_flash_rocm").glob("*.py")
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [("num_reqs: int", "number: int"), ("max_seq_len: int", "longest: int"), ("register_backend(", "add_backend(")],
)
def test_the_check_of_the_stand_ins_sees_a_change(before: str, after: str, tmp_path: Path) -> None:
    source = Path(vllm_stand_in.__file__).read_text(encoding="utf-8")
    for module in vllm_stand_in.MODULES:
        path = tmp_path / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert stand_ins.differences(vllm_stand_in, tmp_path) == []
    for path in tmp_path.rglob("*.py"):
        path.write_text(source.replace(before, after), encoding="utf-8")
    assert len(stand_ins.differences(vllm_stand_in, tmp_path)) == 1
