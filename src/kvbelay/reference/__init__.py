"""A small paged-KV engine in numpy: the test oracle and the engine of the demo. It is not fast.

`load_model` gives a `Model`, a `PagedCache` holds its keys and values, an `Engine` computes with both. Importing the
package raises `kvbelay.errors.MissingExtra` where numpy is not installed.
"""

from __future__ import annotations

from kvbelay.errors import MissingExtra

try:
    import numpy as np  # noqa: F401 (only to say what is missing)
except ModuleNotFoundError as exc:
    raise MissingExtra(
        "the reference engine needs numpy", remedy="install the extra: pip install 'kvbelay[demo]'"
    ) from exc

from kvbelay.reference.engine import Answer, Engine
from kvbelay.reference.held import HeldBlocks
from kvbelay.reference.load import load_model
from kvbelay.reference.model import Model, ModelConfig
from kvbelay.reference.paged import PagedCache
from kvbelay.reference.tiny import tiny_model
from kvbelay.reference.tokenizer import Tokenizer

__all__ = [
    "Answer",
    "Engine",
    "HeldBlocks",
    "Model",
    "ModelConfig",
    "PagedCache",
    "Tokenizer",
    "load_model",
    "tiny_model",
]
