"""Where the values of a block stand, against what writes them; and what is refused."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvbelay.errors import UnverifiableLayout
from kvbelay.vllm import host
from kvbelay.vllm.digest import Hasher
from kvbelay.vllm.layouts import Layout, Share, group_layouts, layer_layout
from vllm import _custom_ops as ops

BLOCKS, HEADS = 3, 2
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def spec(cache: torch.Tensor, cls: type = FullAttentionSpec, **more: Any) -> Any:
    known = {"block_size": cache.shape[2], "num_kv_heads": cache.shape[1], "head_size": cache.shape[3] // 2}
    return cls(**{**known, "dtype": cache.dtype, **more})


def found(cache: Any, spec_: Any, backend: str = "CPU_ATTN", isa: str | None = "vec", **more: Any) -> Layout:
    share = Share(0, 1, spec_.num_kv_heads)
    return layer_layout("a", cache, spec_, **{"blocks": BLOCKS, "backend": backend, "isa": isa, "share": share, **more})


def tokens_of(count: int, values: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEADS, values, generator=dice).to(dtype)


@pytest.mark.parametrize(
    ("isa", "dtype", "tokens", "values"),
    [
        ("vec", torch.float32, 32, 32),
        ("vec", torch.bfloat16, 32, 64),
        ("vec", torch.float16, 64, 128),
        ("vec16", torch.float32, 16, 80),
        ("vec16", torch.bfloat16, 32, 80),
        ("amx", torch.bfloat16, 32, 32),
        ("amx", torch.bfloat16, 64, 128),
    ],
)
def test_cpu_attention(isa: str, dtype: torch.dtype, tokens: int, values: int) -> None:
    """What the CPU's own kernels write stands where the layout says, bit for bit."""
    cache = torch.zeros(BLOCKS, HEADS, tokens, 2 * values, dtype=dtype)
    key, value = tokens_of(tokens, values, dtype, 1), tokens_of(tokens, values, dtype, 2)
    keys, vals = cache.view(BLOCKS, HEADS, 2 * tokens, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, keys, vals, torch.arange(tokens, 2 * tokens), isa)
    layout = found(cache, spec(cache), isa=isa)
    plain = torch.cat([key, value], 2).view(BITS[dtype])
    for head in range(HEADS):
        assert cache[1, head].view(BITS[dtype]).equal(plain[:, head].flatten()[layout.where])


def test_mla_on_a_cpu() -> None:
    """The latent form has one row a token, and no values beside it."""
    cache = torch.zeros(BLOCKS, 1, 16, 24)
    layout = found(cache, spec(cache, MLAAttentionSpec, head_size=24, num_kv_heads=1), "CPU_MLA", None)
    latent, position = torch.randn(16, 16), torch.randn(16, 1, 8)
    CPUMLAImpl.do_kv_cache_update(None, latent, position, cache, torch.arange(16, 32), "auto", torch.ones(()))
    plain = torch.cat([latent, position[:, 0]], 1)
    assert cache[1, 0].equal(plain.flatten()[layout.where])


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize(("ratio", "valid"), [(1, 19), (2, 19), (2, 32), (2, 45)])
def test_only_valid_tokens_count(isa: str, ratio: int, valid: int) -> None:
    """In a block with few tokens the rest may hold anything, wherever the kernels put what is valid."""
    digests, one_more = set(), set()
    for noise in range(3):
        cache = torch.full((BLOCKS * ratio, HEADS, 32, 64), float(noise), dtype=torch.bfloat16)
        key, value = tokens_of(valid, 32, torch.bfloat16, 1), tokens_of(valid, 32, torch.bfloat16, 2)
        keys, vals = cache.view(BLOCKS * ratio, HEADS, 64, -1).chunk(2, dim=2)
        slots = torch.arange(32 * ratio, 32 * ratio + valid)
        ops.cpu_attn_reshape_and_cache(key, value, keys, vals, slots, isa)
        hasher = Hasher([{"a": found(cache, spec(cache, block_size=32 * ratio), isa=isa)}])
        digests |= set(hasher.digests(0, [1], 0, valid))
        one_more |= set(hasher.digests(0, [1], 0, valid + 1))
    assert len(digests) == 1
    assert len(one_more) == 3


CACHE = torch.zeros(BLOCKS, HEADS, 32, 64)
MAMBA = MambaSpec(block_size=32, shapes=((2, 3),), dtypes=(torch.float32,))
SINK = SinkFullAttentionSpec(block_size=32, num_kv_heads=HEADS, head_size=32, dtype=torch.float32, sink_len=4)
INT8 = {"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}
UNKNOWN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "MambaSpec": ((CACHE,), MAMBA, {"share": Share(0, 1, 1)}),
    "SinkFullAttentionSpec": (CACHE, SINK, {}),
    "INT8_PER_TOKEN_HEAD": (CACHE, spec(CACHE, **INT8), {}),
    "packed": (CACHE, spec(CACHE, state_content_bytes=256), {}),
    "share a stored state": (CACHE, spec(CACHE, tokens_per_state=4), {}),
    "1/2 tokens share": (CACHE, spec(CACHE, tokens_per_state=Fraction(1, 2)), {}),
    "four dimensions": (CACHE.view(BLOCKS, 2, 1, 32, 64), spec(CACHE), {}),
    "no tensor": ([CACHE, CACHE], spec(CACHE), {}),
    "does not fit its": (CACHE[..., :60], spec(CACHE), {}),
    "for 2 blocks": (CACHE, spec(CACHE), {"blocks": 2}),
    "for 0 blocks": (CACHE, spec(CACHE), {"blocks": 0}),
    "for 5 blocks": (CACHE, spec(CACHE), {"blocks": 5}),
    "torch.float64": (CACHE.double(), spec(CACHE), {}),
    "cannot be read in words": (
        CACHE.bfloat16().view(-1)[1:-63].as_strided((2, 2, 32, 64), (4096, 2048, 64, 1)),
        spec(CACHE, dtype=torch.bfloat16),
        {"blocks": 2},
    ),
    "TURBOQUANT": (CACHE, spec(CACHE), {"backend": "TURBOQUANT"}),
    "\\(neon\\)": (CACHE, spec(CACHE), {"isa": "neon"}),
    "CPU_ATTN may": (CACHE, spec(CACHE), {"isa": None}),
    "form that is not known": (CACHE.transpose(1, 2).contiguous().transpose(1, 2), spec(CACHE), {}),
    "2 heads of this rank do not fit 3 on 2 ranks": (CACHE, spec(CACHE), {"share": Share(0, 2, 3)}),
    "do not fit 3 on 8": (CACHE[:, :1], spec(CACHE[:, :1]), {"share": Share(0, 8, 3), "backend": "FLASH_ATTN"}),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_refused(what: str) -> None:
    """What is not known is refused with an error that names the layer, what is not known, and a remedy."""
    cache, spec_, more = UNKNOWN[what]
    given = {"blocks": BLOCKS, "backend": "CPU_ATTN", "isa": "vec", "share": Share(0, 1, HEADS), **more}
    with pytest.raises(UnverifiableLayout, match=what) as refusal:
        layer_layout("model.layers.3.attn", cache, spec_, **given)
    assert refusal.value.layer == "model.layers.3.attn"
    assert "'model.layers.3.attn'" in str(refusal.value)
    assert refusal.value.remedy


def test_the_form_tells_what_differs() -> None:
    """Caches whose digests cannot be compared have different forms."""
    small, brief = torch.zeros(BLOCKS, HEADS, 32, 32), torch.zeros(BLOCKS, HEADS, 16, 64)
    half = CACHE.half()
    layouts = [
        found(CACHE, spec(CACHE)),
        found(CACHE, spec(CACHE), "FLASH_ATTN"),
        found(half, spec(half)),
        found(half.bfloat16(), spec(half.bfloat16())),
        found(half.bfloat16(), spec(half.bfloat16()), isa="amx"),
        found(small, spec(small)),
        found(brief, spec(brief), isa="vec16"),
        found(CACHE, spec(CACHE), share=Share(0, 2, 4)),
    ]
    assert len({layout.form for layout in layouts}) == len(layouts)
    assert found(CACHE, spec(CACHE), share=Share(1, 2, 4)).form == layouts[-1].form
    window = spec(CACHE, SlidingWindowSpec, sliding_window=64)
    chunked = spec(CACHE, ChunkedLocalAttentionSpec, attention_chunk_size=64)
    assert {found(CACHE, window).form, found(CACHE, chunked).form} == {layouts[0].form}


@pytest.mark.parametrize(
    ("ranks", "total", "firsts", "counting"),
    [(1, 4, [0], [0]), (2, 4, [0, 2], [0, 1]), (4, 4, [0, 1, 2, 3], [0, 1, 2, 3]), (4, 2, [0, 0, 1, 1], [0, 2])],
)
def test_shares(ranks: int, total: int, firsts: list[int], counting: list[int]) -> None:
    """Ranks split the heads in their order; of those that hold the same ones the first counts."""
    parts = [Share(rank, ranks, total).of(max(1, total // ranks)) for rank in range(ranks)]
    assert [part[0] for part in parts if part] == firsts
    assert [rank for rank, part in enumerate(parts) if part and part[1]] == counting


def engine(
    specs: dict[str, Any], *, group_spec: Any = None, ranks: int = 1, rank: int = 0, dcp: int = 1, heads: int = 2
) -> Any:
    """What `group_layouts` reads of a host's configurations: one group of these layers."""
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASH_ATTN"))
    parallel = SimpleNamespace(rank=rank, tensor_parallel_size=ranks, decode_context_parallel_size=dcp)
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(specs, layer)),
    )
    group = SimpleNamespace(layer_names=list(specs), kv_cache_spec=group_spec or next(iter(specs.values())))
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group]), config


def test_layers_that_share_a_cache() -> None:
    """A cache that two layers of a group use is hashed once."""
    (layouts,) = group_layouts({"a": CACHE, "b": CACHE, "c": CACHE.clone()}, *engine(dict.fromkeys("abc", spec(CACHE))))
    assert set(layouts) == {"a", "c"}


def test_a_spec_for_each_layer() -> None:
    """In a group whose layers differ, each has its own description."""
    wide = torch.zeros(BLOCKS, HEADS, 32, 128)
    specs = {"a": spec(CACHE), "b": spec(wide)}
    group = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
    (layouts,) = group_layouts({"a": CACHE, "b": wide}, *engine(specs, group_spec=group))
    assert [layout.where.shape[1] for layout in layouts.values()] == [64, 128]


def test_heads_of_a_rank() -> None:
    """A layer's heads in the whole model come from its description, or from the model."""
    own = spec(CACHE, max_tp_shards=2)
    latent = spec(CACHE[:, :1], MLAAttentionSpec, head_size=64, num_kv_heads=1)
    for spec_, cache, first, counts in ((own, CACHE, 2, True), (latent, CACHE[:, :1], 0, False)):
        (layouts,) = group_layouts({"a": cache}, *engine({"a": spec_}, ranks=4, rank=2, heads=99))
        assert (layouts["a"].first_head, layouts["a"].counts) == (first, counts)
    (layouts,) = group_layouts({"a": CACHE}, *engine({"a": spec(CACHE)}, ranks=4, rank=3, heads=8))
    assert layouts["a"].first_head == 6
    for heads in (4, 9):
        (refusal,) = group_layouts({"a": CACHE}, *engine({"a": spec(CACHE)}, ranks=4, rank=3, heads=heads))
        assert isinstance(refusal, UnverifiableLayout)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version keeps where has to be looked at first."""
    monkeypatch.setattr(host, "version", lambda: "0.33.0")
    (refusal,) = group_layouts({"a": CACHE}, *engine({"a": spec(CACHE)}))
    assert "0.33.0" in str(refusal)


@pytest.mark.parametrize(("caches", "dcp", "what"), [({}, 1, "not known on this rank"), ({"a": CACHE}, 2, "context")])
def test_groups_that_are_refused(caches: dict[str, Any], dcp: int, what: str) -> None:
    """A group is refused as a whole, with the first layer's reason."""
    (refusal,) = group_layouts(caches, *engine({"a": spec(CACHE)}, dcp=dcp))
    assert what in str(refusal)
    assert refusal.layer == "a"
