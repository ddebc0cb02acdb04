"""A model as a folder: the float32 weights in one file that processes map, the rest as JSON beside it."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import numpy as np

from kvbelay.errors import ConfigError
from kvbelay.reference.model import Model, ModelConfig, Weights, carve, weight_count
from kvbelay.reference.tokenizer import BpeTokenizer, Vocabulary

WEIGHTS = "weights.f32"
ABOUT = "model.json"


class Source(Protocol):
    """Where a model comes from."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    def fill(self, weights: Weights) -> None:
        """Write all weights."""
        ...


def store_model(source: Source, folder: Path) -> None:
    """Make the folder, whole or not at all. Nothing happens if another process makes it first."""
    try:
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as workplace:
            made = Path(workplace) / "model"
            made.mkdir()
            _write(source, made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    except OSError as exc:
        msg = f"the model's weights cannot be written ({exc.strerror or exc})"
        raise ConfigError(
            msg,
            source=str(folder.parent),
            remedy=f"name a directory that can be written, with {4 * weight_count(source.config) >> 20} MiB free",
        ) from exc


def map_model(folder: Path) -> Model:
    """The model in the folder, its weights mapped read-only. Raises `ConfigError` if the folder is not whole."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        config = ModelConfig(**about["config"])
        said = about["vocabulary"]
        vocabulary = Vocabulary(tuple(said["tokens"]), tuple(said["merges"]), tuple(said["control"]), said["end"])
        flat = np.memmap(folder / WEIGHTS, np.float32, mode="r", shape=(weight_count(config),)).view(np.ndarray)
    except (OSError, ValueError, TypeError, KeyError) as exc:
        msg = f"the stored model is damaged ({exc})"
        raise ConfigError(msg, source=str(folder), remedy="remove the folder; it is made again") from exc
    return Model(config, carve(config, flat), BpeTokenizer(vocabulary, source=str(folder)))


def _write(source: Source, folder: Path) -> None:
    about = {"config": asdict(source.config), "vocabulary": asdict(source.vocabulary)}
    (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
    count = weight_count(source.config)
    with (folder / WEIGHTS).open("wb") as file:
        # Reserved before it is mapped: a full disk is an error here, and a signal that kills once it is mapped.
        os.posix_fallocate(file.fileno(), 0, 4 * count)
    flat = np.memmap(folder / WEIGHTS, np.float32, mode="r+", shape=(count,))
    source.fill(carve(source.config, flat.view(np.ndarray)))
    flat.flush()
