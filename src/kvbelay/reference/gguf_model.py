"""Llama-architecture models from GGUF files: their sizes, weights and vocabulary, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvbelay.errors import ConfigError, MissingExtra
from kvbelay.reference.model import Floats, ModelConfig, Weights
from kvbelay.reference.tokenizer import BpeTokenizer, Vocabulary

if TYPE_CHECKING:
    from gguf import ReaderTensor

T = TypeVar("T")

CONTROL = 3
"""``tokenizer.ggml.token_type`` of control tokens, in the GGUF specification."""

UNSUPPORTED = ("llama.rope.scaling.type", "llama.expert_count", "llama.attention.sliding_window")
"""Fields that change the arithmetic in ways that the engine does not know, unless they say that there is none."""


class GgufFile:
    """One file, read and checked when this is made. Raises `ConfigError` that names the file and the field,
    `MissingExtra` without the package ``gguf``.
    """

    def __init__(self, path: Path, revision: str) -> None:
        self._path = path
        try:
            from gguf import GGUFReader  # noqa: PLC0415 (an extra)
        except ImportError as exc:
            raise MissingExtra(
                "this model needs the package gguf",
                source=str(path),
                remedy="install the extra: pip install 'kvbelay[demo]'",
            ) from exc
        with self._broken_if_raised():
            reader = GGUFReader(path)
            self._fields: Mapping[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config(revision)
        self.vocabulary = self._read_vocabulary()
        BpeTokenizer(self.vocabulary, source=str(path))  # to find now what it refuses, before the weights are written
        self._check_tensors()

    def fill(self, weights: Weights) -> None:
        """Dequantize everything into ``weights``, one tensor at a time."""
        heads = self.config.heads * self.config.head_dim
        kv = self.config.kv_heads * self.config.head_dim
        weights.embed[:] = self._tensor("token_embd.weight")
        weights.norm[:] = self._tensor("output_norm.weight")
        if not self.config.tied:
            weights.output[:] = self._tensor("output.weight")
        for number, layer in enumerate(weights.layers):
            block = f"blk.{number}"
            layer.attn_norm[:] = self._tensor(f"{block}.attn_norm.weight")
            layer.qkv[:, :heads] = self._tensor(f"{block}.attn_q.weight").T
            layer.qkv[:, heads : heads + kv] = self._tensor(f"{block}.attn_k.weight").T
            layer.qkv[:, heads + kv :] = self._tensor(f"{block}.attn_v.weight").T
            layer.attn_out[:] = self._tensor(f"{block}.attn_output.weight").T
            layer.ffn_norm[:] = self._tensor(f"{block}.ffn_norm.weight")
            layer.gate_up[:, : self.config.ffn] = self._tensor(f"{block}.ffn_gate.weight").T
            layer.gate_up[:, self.config.ffn :] = self._tensor(f"{block}.ffn_up.weight").T
            layer.down[:] = self._tensor(f"{block}.ffn_down.weight").T

    def _tensor(self, name: str) -> Floats:
        """Shape (out, in), as its matrix product with a column reads."""
        from gguf.quants import dequantize  # noqa: PLC0415 (an extra)

        tensor = self._tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as exc:
            raise self._refused(name, f"quantized as {tensor.tensor_type.name}, which cannot be read") from exc

    def _read_config(self, revision: str) -> ModelConfig:
        self._must_be("general.architecture", "llama")
        for field in UNSUPPORTED:
            if self._fields.get(field, 0) not in (0, "none"):
                raise self._refused(field, f"{self._fields[field]!r:.80} is not supported")
        dim = self._size("llama.embedding_length")
        heads = self._size("llama.attention.head_count")
        kv_heads = self._size("llama.attention.head_count_kv", heads)
        head_dim = self._size("llama.attention.key_length", dim // heads)
        if heads % kv_heads:
            raise self._refused("llama.attention.head_count_kv", f"{heads} heads cannot share {kv_heads} KV heads")
        if self._size("llama.rope.dimension_count", head_dim) != head_dim or head_dim % 2:
            raise self._refused("llama.rope.dimension_count", f"only a part of the {head_dim} dimensions is rotated")
        return ModelConfig(
            name=self._get("general.name", str, self._path.stem),
            revision=revision,
            vocab=len(self._get("tokenizer.ggml.tokens", list)),
            dim=dim,
            layers=self._size("llama.block_count"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=self._size("llama.feed_forward_length"),
            context=self._size("llama.context_length"),
            rope_base=self._get("llama.rope.freq_base", float, 10_000.0),
            norm_eps=self._get("llama.attention.layer_norm_rms_epsilon", float),
            tied="output.weight" not in self._tensors,
        )

    def _read_vocabulary(self) -> Vocabulary:
        self._must_be("tokenizer.ggml.model", "gpt2")
        self._must_be("tokenizer.ggml.pre", "smollm")
        types = self._get("tokenizer.ggml.token_type", list)
        tokens = self._get("tokenizer.ggml.tokens", list)
        if len(types) != len(tokens):
            raise self._refused("tokenizer.ggml.token_type", f"{len(types)} types for {len(tokens)} tokens")
        return Vocabulary(
            tokens=tuple(map(str, tokens)),
            merges=tuple(map(str, self._get("tokenizer.ggml.merges", list))),
            control=tuple(index for index, kind in enumerate(types) if kind == CONTROL),
            end=self._get("tokenizer.ggml.eos_token_id", int),
        )

    def _check_tensors(self) -> None:
        if self.config.layers > len(self._tensors):
            raise self._refused("llama.block_count", f"{self.config.layers} blocks in {len(self._tensors)} tensors")
        expected = self._expected()
        for name, shape in expected.items():
            if name not in self._tensors:
                raise self._refused(name, "the tensor is missing")
            found = tuple(int(size) for size in reversed(self._tensors[name].shape))
            if found != shape:
                raise self._refused(name, f"its shape is {found}, and the sizes in the file say {shape}")
        for name in self._tensors:
            if name not in expected:
                raise self._refused(name, "the reference engine does not know this tensor")

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """The shape, (out, in), of every tensor that a model of these sizes has."""
        c = self.config
        heads, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        expected: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (c.vocab, c.dim),
            "output_norm.weight": (c.dim,),
        }
        if not c.tied:
            expected["output.weight"] = (c.vocab, c.dim)
        for number in range(c.layers):
            expected |= {
                f"blk.{number}.attn_norm.weight": (c.dim,),
                f"blk.{number}.attn_q.weight": (heads, c.dim),
                f"blk.{number}.attn_k.weight": (kv, c.dim),
                f"blk.{number}.attn_v.weight": (kv, c.dim),
                f"blk.{number}.attn_output.weight": (c.dim, heads),
                f"blk.{number}.ffn_norm.weight": (c.dim,),
                f"blk.{number}.ffn_gate.weight": (c.ffn, c.dim),
                f"blk.{number}.ffn_up.weight": (c.ffn, c.dim),
                f"blk.{number}.ffn_down.weight": (c.dim, c.ffn),
            }
        return expected

    def _get(self, field: str, kind: type[T], default: T | None = None) -> T:
        value = self._fields.get(field, default)
        if value is None:
            raise self._refused(field, "the field is missing")
        if not isinstance(value, kind):
            raise self._refused(field, f"{value!r:.80} is not of the type {kind.__name__}")
        return value

    def _size(self, field: str, default: int | None = None) -> int:
        value = self._get(field, int, default)
        if not 0 < value < 1 << 31:
            raise self._refused(field, f"{value} is no size")
        return value

    def _must_be(self, field: str, wanted: str) -> None:
        value = self._get(field, str)
        if value != wanted:
            raise self._refused(field, f"{value!r}, and the reference engine reads {wanted!r} only")

    def _refused(self, field: str, what: str) -> ConfigError:
        return ConfigError(what, source=str(self._path), field=field, remedy="use SmolLM2 or another file of its kind")

    @contextmanager
    def _broken_if_raised(self) -> Iterator[None]:
        """What gguf and numpy raise on a file that ends early, is empty, or is no GGUF at all."""
        try:
            yield
        except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as exc:
            msg = f"this is no whole GGUF file ({type(exc).__name__}: {exc})"
            raise ConfigError(
                msg,
                source=str(self._path),
                remedy="it may have been cut short: fetch it again",
            ) from exc
