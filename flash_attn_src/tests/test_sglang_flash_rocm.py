"""The plug-in for SGLang against dense attention in fp32.

It runs on SGLang's own classes where SGLang can be imported, else on stand-ins of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clients import sglang_stand_in, stand_ins
from reference import attention
from torch.fx.experimental.proxy_tensor import make_fx

REAL = importlib.util.find_spec("sglang") is not None
if not REAL:
    sglang_stand_in.install()

import sglang_flash_rocm  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang_flash_rocm import refusals  # noqa: E402
from sglang_flash_rocm.backend import FlashRocmAttnBackend  # noqa: E402

HEADS, HEADS_K, DIM, CONTEXT, ROWS = 4, 2, 32, 96, 8
FP8 = torch.float8_e4m3fn
SCALE = DIM**-0.5
PAGES = [1, 2, 16, 48]
BATCHES = {
    "prefill": [(7, 7), (18, 18)],
    "prefix": [(5, 29), (3, 48), (16, 17)],
    "mixed": [(1, 5), (9, 33), (1, 16), (4, 4)],
    "decode": [(1, 5), (1, 33), (1, 16)],
}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks a running server for its process groups, and there is none."""
    monkeypatch.setattr(refusals, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1, attn_cp_size=1))


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _order(pages: int, seed: int) -> torch.Tensor:
    """The pages of a pool but 0, which SGLang keeps for padding, in no order."""
    return torch.randperm(pages, generator=torch.Generator().manual_seed(seed)) + 1


def _layer(layer_id: int = 0, *, scales: bool = False, **options: Any) -> Any:
    layer = RadixAttention(HEADS, DIM, SCALE, HEADS_K, layer_id, **options)
    if scales:
        layer.k_scale, layer.v_scale = torch.tensor(0.25), torch.tensor(0.5)
    return layer


class Server:
    """SGLang's tables and its pool, and the backend over them."""

    def __init__(
        self, page: int = 16, cache: torch.dtype = torch.bfloat16, v_dim: int = DIM, windows: bool = False, **other: Any
    ) -> None:
        count = ROWS * CONTEXT // page
        starts = _order(count, 3).view(ROWS, -1)[:, :, None] * page
        self.table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
        self.table[1:] = (starts + torch.arange(page)).view(ROWS, CONTEXT)
        shape: Any = {"page_size": page, "dtype": cache, "head_num": HEADS_K, "head_dim": DIM, "device": "cpu"}
        size = count * page
        if windows:
            self.pool = SWAKVPool(
                size=size, size_swa=size, swa_attention_layer_ids=[1], full_attention_layer_ids=[0], **shape
            )
            slots = (_order(count, 4)[:, None] * page + torch.arange(page)).flatten()
            self.pool.register_mapping(torch.cat([torch.arange(page), slots, torch.tensor([-1])]))
        else:
            self.pool = MHATokenToKVPool(size=size, layer_num=2, enable_memory_saver=False, v_head_dim=v_dim, **shape)
        runner: dict[str, Any] = {
            "token_to_kv_pool": self.pool, "page_size": page, "dtype": torch.bfloat16, "kv_cache_dtype": cache,
            "req_to_token_pool": SimpleNamespace(req_to_token=self.table), "use_mla_backend": False,
            "model_config": SimpleNamespace(is_encoder_decoder=False), "attention_chunk_size": None,
            "spec_algorithm": SimpleNamespace(is_speculative=lambda: False), "prefill_aware_swa": False,
            "kv_index_translator": SimpleNamespace(is_translating=False),
        }  # fmt: skip
        self.runner: Any = SimpleNamespace(**{**runner, **other})
        self.backend = FlashRocmAttnBackend(self.runner)

    def step(self, lengths: list[tuple[int, int]], rows: list[int], mode: Any = None) -> Any:
        """A batch of sequences (queries, keys) in these rows of the table, which the backend knows."""
        decodes = all(queries == 1 for queries, _ in lengths)
        new, old = torch.tensor([x for x, _ in lengths]), torch.tensor([y - x for x, y in lengths])
        slots = [self.table[row, keys - queries : keys] for row, (queries, keys) in zip(rows, lengths, strict=True)]
        batch = ForwardBatch(
            forward_mode=mode or (ForwardMode.DECODE if decodes else ForwardMode.EXTEND), batch_size=len(lengths),
            input_ids=torch.zeros(int(new.sum()), dtype=torch.int64), req_pool_indices=torch.tensor(rows),
            seq_lens=old + new, out_cache_loc=torch.cat(slots).long(), seq_lens_sum=int((old + new).sum()),
        )  # fmt: skip
        if not decodes:
            batch.extend_seq_lens, batch.extend_prefix_lens = new.int(), old.int()
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = new.tolist(), old.tolist()
        self.backend.init_forward_metadata(batch)
        return batch


class Run:
    """A batch of sequences (queries, keys), by the backend and by dense attention."""

    def __init__(self, lengths: list[tuple[int, int]], v_dim: int = DIM) -> None:
        self.lengths, self.rows = lengths, [ROWS - 2 * i for i in range(len(lengths))]
        self.q = _draw(sum(queries for queries, _ in lengths), HEADS * DIM, seed=1)
        self.k, self.v = (
            [_draw(keys, HEADS_K, dim, seed=seed + i) for i, (_, keys) in enumerate(lengths)]
            for seed, dim in ((10, DIM), (50, v_dim))
        )

    def keep_prefixes(self, server: Server, layer: Any) -> None:
        """Writes the keys of earlier steps, by the backend."""
        old = {i: keys - queries for i, (queries, keys) in enumerate(self.lengths) if keys > queries}
        if old:
            batch = server.step([(n, n) for n in old.values()], [self.rows[i] for i in old], ForwardMode.EXTEND)
            k, v = (torch.cat([x[i][:n] for i, n in old.items()]) for x in (self.k, self.v))
            server.backend.forward(k.new_zeros(k.shape[0], HEADS * DIM), k, v, layer, batch)

    def new(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = [keys - queries for queries, keys in self.lengths]
        k, v = (torch.cat([x[n:] for x, n in zip(xs, first, strict=True)]) for xs in (self.k, self.v))
        return k, v

    def run(self, server: Server, layer: Any, mode: Any = None, **named: Any) -> torch.Tensor:
        self.keep_prefixes(server, layer)
        batch = server.step(self.lengths, self.rows, mode)
        k, v = self.new()
        return server.backend.forward(self.q, k, v, layer, batch, **named)

    def wanted(self, fp8: bool = False, **options: Any) -> torch.Tensor:
        result, first = [], 0
        for k, v, (queries, _) in zip(self.k, self.v, self.lengths, strict=True):
            k, v = k.float(), v.float()
            if fp8:
                k, v = (x.div(scale).to(FP8).float() * scale for x, scale in ((k, 0.25), (v, 0.5)))
            q = self.q[None, first : first + queries].unflatten(-1, (HEADS, DIM))
            result.append(attention(q, k[None], v[None], causal=True, softmax_scale=SCALE, **options)[0][0])
            first += queries
        return torch.cat(result).flatten(1)


def _close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str, page: int) -> None:
    run = Run(BATCHES[name])
    mode = ForwardMode.MIXED if name == "mixed" else None
    _close(run.run(Server(page), _layer(), mode), run.wanted())


SINKS = torch.tensor([2.0, -1.0, 0.5, 4.0]).bfloat16()
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "window": ({"sliding_window_size": 5}, {}, {"window": (5, 0)}),
    "softcap": ({"logit_cap": 0.5}, {}, {"softcap": 0.5}),
    "sinks": ({}, {"sinks": SINKS}, {"s_aux": SINKS}),
}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("batch", ["mixed", "decode"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, batch: str, fp8: bool) -> None:
    of_layer, given, expected = OPTIONS[name]
    run = Run(BATCHES[batch])
    server = Server(cache=FP8 if fp8 else torch.bfloat16)
    _close(run.run(server, _layer(scales=fp8, **of_layer), **given), run.wanted(fp8=fp8, **expected))


@pytest.mark.parametrize("name", BATCHES)
def test_values_with_a_head_dim_of_their_own(name: str) -> None:
    run = Run(BATCHES[name], v_dim=16)
    got = run.run(Server(v_dim=16), _layer(v_head_dim=16))
    assert got.shape == (run.q.shape[0], HEADS * 16)
    _close(got, run.wanted())


def test_a_cache_in_fp8_without_scales() -> None:
    run = Run(BATCHES["decode"])
    run.k, run.v = ([x.to(FP8).bfloat16() for x in xs] for xs in (run.k, run.v))
    _close(run.run(Server(cache=FP8), _layer()), run.wanted())


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("layer_id", [0, 1])
def test_a_pool_with_a_part_for_windows(layer_id: int, name: str, page: int) -> None:
    server, run = Server(page, windows=True), Run(BATCHES[name])
    layer = _layer(layer_id, sliding_window_size=(-1, 5)[layer_id])
    _close(run.run(server, layer), run.wanted(window=((-1, -1), (5, 0))[layer_id]))
    assert server.backend.forward_metadata.window_slots is not None


def test_keys_that_are_in_the_pool_are_not_written() -> None:
    run, server = Run(BATCHES["decode"]), Server()
    expected = run.run(server, _layer())
    before = [x.clone() for x in server.pool.get_kv_buffer(0)]
    batch = server.step(run.lengths, run.rows)
    k, v = (torch.full_like(x, torch.nan) for x in run.new())
    assert torch.equal(server.backend.forward(run.q, k, v, _layer(), batch, save_kv_cache=False), expected)
    assert torch.equal(server.backend.forward(run.q, None, None, _layer(), batch), expected)
    assert all(torch.equal(x, y) for x, y in zip(before, server.pool.get_kv_buffer(0), strict=True))


@pytest.mark.parametrize("windows", [False, True])
def test_a_replayed_graph_follows_its_inputs(windows: bool) -> None:
    """As SGLang's runner does: the graph has static inputs, and a replay runs nothing but what was captured.

    make_fx stands for the capture: it records the operators of the metadata and of the layer, as a graph does.
    """
    server, layer = Server(windows=windows), _layer(1, sliding_window_size=5 if windows else -1)
    run = Run([(1, 7), (1, 33), (1, 20)])
    run.keep_prefixes(server, layer)
    k, v = run.new()
    backend = server.backend
    backend.init_cuda_graph_state(4, 4)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    static = server.step([(1, fill)] * 4, [0] * 4)
    static.out_cache_loc.zero_()

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        static.seq_lens, static.req_pool_indices, static.out_cache_loc = inputs
        backend.init_forward_metadata_in_graph(static)
        return backend.forward(q, k, v, layer, static)

    padded = [torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (run.q, k, v)]
    empty = [torch.zeros_like(x) for x in padded]
    lengths, rows, slots = static.seq_lens, static.req_pool_indices, static.out_cache_loc
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    graph = make_fx(step)(*empty, lengths, rows, slots)
    batch = server.step(run.lengths, run.rows)
    backend.init_forward_metadata_out_graph(batch)
    lengths[:3], rows[:3], slots[:3] = batch.seq_lens, batch.req_pool_indices, batch.out_cache_loc
    got = graph(*padded, lengths, rows, slots)
    _close(got[:3], run.wanted(window=(5, 0) if windows else (-1, -1)))
    assert got[3].isfinite().all()


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "SPLIT_PREFILL", "DLLM_EXTEND"])
def test_a_step_refuses_by_name(mode: str) -> None:
    with pytest.raises(NotImplementedError, match=f"forward_mode: got {mode}"):
        Server().step(BATCHES["prefill"], [1, 2], ForwardMode[mode])


def test_a_full_graph_of_prefill_is_refused() -> None:
    server = Server()
    batch = server.step(BATCHES["prefill"], [1, 2])
    with pytest.raises(NotImplementedError, match=r"EXTEND in a full graph.*cuda-graph-backend-prefill=breakable"):
        server.backend.init_forward_metadata_out_graph(batch, in_capture=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_mla_backend": True}, r"latent attention \(MLA\)"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
        ({"spec_algorithm": SimpleNamespace(is_speculative=lambda: True)}, "speculative decoding"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"prefill_aware_swa": True}, "keep the prompt"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "enable-unified-memory"),
        ({"dtype": torch.float32}, "--dtype: got torch.float32"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "--kv-cache-dtype: got torch.float8_e5m2"),
        ({"kv_cache_dtype": torch.float16}, "--kv-cache-dtype: got torch.float16"),
    ],
)
def test_a_server_refuses_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        Server(**changes)


@pytest.mark.parametrize("name", ["attn_dcp_size", "attn_cp_size"])
def test_context_parallelism_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SimpleNamespace(**{"attn_dcp_size": 1, "attn_cp_size": 1, name: 2})
    monkeypatch.setattr(refusals, "get_parallel", lambda: sizes)
    with pytest.raises(NotImplementedError, match=f"--{name.replace('_', '-').replace('attn-dcp', 'dcp')} above 1"):
        Server()


@pytest.mark.parametrize(
    ("options", "named", "words"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "attn_type: got encoder_only"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}, "attn_type: got decoder_bidirectional"),
        ({"is_cross_attention": True}, {}, "is_cross_attention: got True"),
        ({"pos_encoding_mode": "ALIBI"}, {}, "pos_encoding_mode: got 'ALIBI'"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, {}, "logit_capping_method: got 'sigmoid'"),
        ({}, {"score_mod": lambda x: x}, "score_mod: got function"),
        ({}, {"return_lse": True}, "return_lse: got bool"),
    ],
)
def test_a_layer_refuses_by_name(options: dict[str, Any], named: dict[str, Any], words: str) -> None:
    run = Run(BATCHES["prefill"])
    with pytest.raises(NotImplementedError, match=words):
        run.run(Server(), _layer(**options), **named)


def test_a_layer_with_tempered_attention_and_another_layout_are_refused() -> None:
    run, server, layer = Run(BATCHES["prefill"]), Server(), _layer()
    layer.xai_temperature_len = 1024
    with pytest.raises(NotImplementedError, match="xai_temperature_len: got 1024"):
        run.run(server, layer)
    server.pool.get_kv_buffer = lambda _layer_id: (torch.zeros(6, 2, 16, 32),) * 2
    with pytest.raises(NotImplementedError, match=r"\(6, 2, 16, 32\).*SGLANG_USE_HND_KVCACHE"):
        run.run(server, _layer())


def test_registering_twice() -> None:
    for _ in range(2):
        sglang_flash_rocm.register()
    choices: list[str] = sglang_stand_in.ATTENTION_BACKEND_CHOICES
    if REAL:
        choices = importlib.import_module("sglang.srt.arg_groups.choices").ATTENTION_BACKEND_CHOICES
    assert choices.count("flash_rocm") == 1
    assert isinstance(ATTENTION_BACKENDS["flash_rocm"](Server().runner), FlashRocmAttnBackend)


def test_models_read_the_pools_from_the_backend() -> None:
    """SGLang's `get_token_to_kv_pool` and `get_req_to_token_pool`, which Qwen3-MoE and others call in each forward."""
    server = Server(16)
    assert server.backend.token_to_kv_pool is server.pool
    assert server.backend.req_to_token_pool.req_to_token is server.table


def test_an_sglang_that_cannot_have_the_backend_starts_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.attention_registry", None)
    sglang_flash_rocm.register()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert all(
        words in record.getMessage() for words in (*sglang_flash_rocm.RAN_WITH, "pip uninstall sglang-flash-rocm")
    )


def test_the_wheel_and_its_page_name_the_releases_that_were_run() -> None:
    folder = Path(sglang_flash_rocm.__file__).parent
    for page in (folder / "pyproject.toml", folder.parents[1] / "docs/sglang.md"):
        text = page.read_text(encoding="utf-8")
        assert all(release in text for release in sglang_flash_rocm.RAN_WITH), page


def test_the_wheel_has_the_entry_point(tmp_path: Path) -> None:
    folder = Path(sglang_flash_rocm.__file__).parent
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index",
         f"--target={tmp_path}", str(folder)], check=True, capture_output=True,
    )  # fmt: skip
    (result,) = importlib.metadata.distributions(name="sglang-flash-rocm", path=[str(tmp_path)])
    (entry,) = result.entry_points.select(group="sglang.srt.plugins")
    assert (entry.name, entry.value) == ("flash_rocm", "sglang_flash_rocm:register")
    assert entry.load() is sglang_flash_rocm.register
    assert {path.name for path in folder.glob("*.py")} == {
        path.name for path in (tmp_path / "sglang_flash_rocm").glob("*.py")
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [("extend_seq_lens_cpu: Any", "lengths: Any"), ("sliding_window_size: int", "window: int"),
     ("register_attention_backend(name", "register_attention_backend(key")],
)  # fmt: skip
def test_the_check_of_the_stand_ins_sees_a_change(before: str, after: str, tmp_path: Path) -> None:
    source = Path(sglang_stand_in.__file__).read_text(encoding="utf-8")
    for module in sglang_stand_in.MODULES:
        path = tmp_path / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert stand_ins.differences(sglang_stand_in, tmp_path) == []
    for path in tmp_path.rglob("*.py"):
        path.write_text(source.replace(before, after), encoding="utf-8")
    assert len(stand_ins.differences(sglang_stand_in, tmp_path)) == 1
