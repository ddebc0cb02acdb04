"""How a layer's KV lies in its cache tensor: which of its values stands where in a block.

vLLM registers one tensor a layer, logically ``[kernel blocks, heads, tokens, values of a token]``, with any strides.
What stands within one head's part of a block is the attention backend's own matter: most keep a token's key and value
in one row, the CPU's kernels transpose the keys, and those for AMX interleave both. A digest has to know, since a
request's last block holds only some tokens, and what stands in the rest of it is nobody's.

The forms are those of vLLM 0.32. ``CPU_ATTN`` is checked against its own kernels by this project's tests; the rows of
the others were read off their code. Whatever is not known here is refused by name, other versions included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvbelay.errors import UnverifiableLayout
from kvbelay.vllm import host

Interior = Callable[[int, int, int], torch.Tensor]
"""(tokens, values of a key, values of a value) -> which value stands where in one head's part of a kernel block: int64
``[tokens, values of a token]`` in the order of the memory, each ``token * values of a token + number of the value``."""

LATENT = "MLAAttentionSpec"
SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", LATENT})
"""Classes of vLLM's descriptions; by name, since versions differ in which they have. What derives from one may keep
something else."""
PLAIN = "NONE"
QUANTISED = frozenset({PLAIN, "FP8_PER_TENSOR"})
"""Modes that keep no scales beside the values."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""By their bytes."""
REMEDY = "set verify to 'prefer' or 'off' for this model, or choose an attention backend that is known"


def rows(tokens: int, key: int, value: int) -> torch.Tensor:
    """A token's key and value side by side, token after token."""
    return torch.arange(tokens * (key + value)).view(tokens, key + value)


def transposed_keys(tokens: int, key: int, value: int) -> torch.Tensor:
    """All keys, value by value, and then all values, token by token."""
    plain = rows(tokens, key, value)
    return torch.cat([plain[:, :key].t().reshape(-1), plain[:, key:].reshape(-1)]).view(plain.shape)


def interleaved(tokens: int, key: int, value: int) -> torch.Tensor:
    """Keys in tiles of 16 tokens and pairs of values, values in tiles of 16 and pairs of tokens."""
    plain = rows(tokens, key, value)
    keys = plain[:, :key].reshape(tokens // 16, 16, key // 2, 2).permute(0, 2, 1, 3)
    values = plain[:, key:].reshape(tokens // 2, 2, value // 16, 16).permute(2, 0, 3, 1)
    return torch.cat([keys.reshape(-1), values.reshape(-1)]).view(plain.shape)


ROWS = frozenset(
    {
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASHINFER",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASH_ATTN_MLA",
        "FLEX_ATTENTION",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
        "TRITON_MLA",
    }
)
"""Backends that keep `rows`."""
CPU: dict[str, Interior] = {"vec": transposed_keys, "vec16": transposed_keys, "amx": interleaved}
"""What ``CPU_ATTN`` keeps, by the name of its kernels."""


@dataclass(frozen=True)
class Layout:
    """One layer's cache on this rank."""

    AXES: ClassVar = ("kernel blocks", "heads", "tokens of a kernel block", "values of a token")
    words: torch.Tensor
    """The cache, of these axes and any strides but the last, with its rows read as integers of up to 32 bits."""
    itemsize: int
    """Bytes of a value."""
    where: torch.Tensor
    """An `Interior`'s answer."""
    form: str
    """What the other side has to have in common, so that equal KV has equal digests."""
    ratio: int = 1
    """Kernel blocks in a block."""
    first_head: int = 0
    """Number, in the whole model, of the first head here."""
    counts: bool = True
    """Whether this rank adds these heads to the sum: of several that hold the same ones, the first does."""

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.ratio * int(self.words.shape[2])


@dataclass(frozen=True)
class Share:
    """Which part of a layer's heads a rank holds."""

    tp_rank: int
    tp_size: int
    total_heads: int

    def of(self, heads: int) -> tuple[int, bool] | None:
        """Number of the first of ``heads`` heads here, and whether they count; None where the numbers do not fit."""
        shards, left = divmod(self.total_heads, heads)
        if left or not shards or self.tp_size % shards:
            return None
        replicas = self.tp_size // shards
        return self.tp_rank // replicas * heads, self.tp_rank % replicas == 0


def layer_layout(
    name: str, cache: Any, spec: Any, *, blocks: int, backend: str, isa: str | None, share: Share
) -> Layout:
    """The layout of one layer.

    ``spec`` is vLLM's ``KVCacheSpec`` of the layer, ``blocks`` the number of blocks that the scheduler counts,
    ``backend`` the name of the attention backend and ``isa``, for ``CPU_ATTN``, that of its kernels. Raises
    `UnverifiableLayout` naming the layer and what is not known about it.
    """
    unknown = _unknown_spec(spec) or _unknown_cache(cache, spec, blocks)
    if unknown:
        raise refused(name, unknown)
    tokens, key, value = int(cache.shape[2]), int(spec.head_size), int(spec.head_size_v)
    interior = _interior(backend, isa, tokens, key, value, quantised=spec.kv_quant_mode.name != PLAIN)
    if interior is None or (interior is not rows and not cache[0, 0].is_contiguous()):
        said = (
            f"the attention backend {backend}{f' ({isa})' if isa else ''} may keep KV in a form that is not known here"
        )
        raise refused(name, said)
    part = share.of(int(cache.shape[1]))
    if part is None:
        said = f"{cache.shape[1]} heads of this rank do not fit {share.total_heads} on {share.tp_size} ranks"
        raise refused(name, said)
    form = (
        f"{interior.__name__}{'' if interior is rows else f'/{tokens}'} {spec.block_size} tokens x "
        f"{share.total_heads} heads x {key}+{value} {cache.dtype} {spec.kv_quant_mode.name}"
    )
    words = cache.view(_word(cache))
    return Layout(words, cache.element_size(), interior(tokens, key, value), form, cache.shape[0] // blocks, *part)


def refused(layer: str, what: str) -> UnverifiableLayout:
    """The error for a layer."""
    return UnverifiableLayout(f"layer {layer!r}: {what}", layer=layer, operation="digest", remedy=REMEDY)


def _unknown_spec(spec: Any) -> str:
    if type(spec).__name__ not in SPECS:
        return f"{type(spec).__name__} describes no blocks of tokens with a key and a value each, or none known here"
    if (
        spec.kv_quant_mode.name not in QUANTISED
        or spec.state_content_bytes is not None
        or spec.num_head_slots is not None
    ):
        return f"a packed form ({spec.kv_quant_mode.name}), perhaps with scales beside the values"
    if spec.tokens_per_state != 1:
        return f"{spec.tokens_per_state} tokens share a stored state"
    return ""


def _unknown_cache(cache: Any, spec: Any, blocks: int) -> str:
    if not isinstance(cache, torch.Tensor) or cache.dim() != len(Layout.AXES):
        return "its cache is no tensor of four dimensions"
    kernel_blocks, heads, tokens, values = map(int, cache.shape)
    ratio = kernel_blocks // max(1, blocks)
    expected = (blocks * ratio, int(spec.num_kv_heads), spec.block_size, int(spec.head_size + spec.head_size_v))
    if (kernel_blocks, heads, ratio * tokens, values) != expected or cache.element_size() not in WORDS:
        return f"a cache of {tuple(cache.shape)} {cache.dtype} for {blocks} blocks does not fit its {spec}"
    per_word = _word(cache).itemsize // cache.element_size()
    if cache.stride(3) != 1 or any(part % per_word for part in (*cache.stride()[:3], cache.storage_offset())):
        return f"a cache with strides {cache.stride()} cannot be read in words"
    return ""


def _word(cache: torch.Tensor) -> torch.dtype:
    """The largest word that a row consists of."""
    row_bytes = cache.shape[3] * cache.element_size()
    return next(WORDS[size] for size in sorted(WORDS, reverse=True) if row_bytes % size == 0)


def _interior(backend: str, isa: str | None, tokens: int, key: int, value: int, *, quantised: bool) -> Interior | None:
    if backend in ROWS:
        return rows
    if backend != "CPU_ATTN" or quantised or key != value or tokens % 16 or key % 16:
        return None
    return CPU.get(isa or "")


def group_layouts(
    kv_caches: Mapping[str, Any], kv_cache_config: Any, vllm_config: Any
) -> list[dict[str, Layout] | UnverifiableLayout]:
    """Of each KV cache group: the layouts of its layers on this rank by name, or why it cannot be verified.

    ``kv_caches`` is what ``register_kv_caches`` was given. A layer that shares another one's cache is left out.
    """
    return [
        _group(group, kv_caches, kv_cache_config.num_blocks, vllm_config) for group in kv_cache_config.kv_cache_groups
    ]


def _group(
    group: Any, kv_caches: Mapping[str, Any], blocks: int, vllm_config: Any
) -> dict[str, Layout] | UnverifiableLayout:
    try:
        return dict(_layers(group, kv_caches, blocks, vllm_config))
    except UnverifiableLayout as refusal:
        return refusal


def _layers(group: Any, kv_caches: Mapping[str, Any], blocks: int, vllm_config: Any) -> Iterator[tuple[str, Layout]]:
    parallel = vllm_config.parallel_config
    seen: set[tuple[object, ...]] = set()
    for name in group.layer_names:
        if host.version() not in host.TESTED:
            raise refused(name, f"how vLLM {host.version()} keeps KV is not known here")
        cache, layer = kv_caches.get(name), vllm_config.compilation_config.static_forward_context.get(name)
        if cache is None or layer is None:
            raise refused(name, "its cache or its attention is not known on this rank")
        if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
            raise refused(name, "context parallelism spreads a block's tokens over ranks")
        if isinstance(cache, torch.Tensor):
            place = (cache.data_ptr(), cache.shape, cache.stride())
            if place in seen:
                continue
            seen.add(place)
        spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        size = parallel.tensor_parallel_size
        share = Share(parallel.rank % size, size, _heads(spec, vllm_config))
        isa = getattr(layer, "isa", None)
        yield name, layer_layout(name, cache, spec, blocks=blocks, backend=_backend(layer), isa=isa, share=share)


def _backend(layer: Any) -> str:
    ask = getattr(layer, "get_attn_backend", None)
    return type(layer).__name__ if ask is None else str(ask().get_name())


def _heads(spec: Any, vllm_config: Any) -> int:
    """Heads of a layer in the whole model; 0 where the model's number and this rank's do not fit."""
    here, ranks = int(getattr(spec, "num_kv_heads", 0)), int(vllm_config.parallel_config.tensor_parallel_size)
    if ranks == 1 or type(spec).__name__ not in SPECS - {LATENT}:
        return here
    if spec.max_tp_shards:
        return here * min(int(spec.max_tp_shards), ranks)
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    return total if here == max(1, total // ranks) else 0
