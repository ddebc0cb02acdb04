"""NixlConnector beside the host's ExampleConnector, whose folder is deleted meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

from children import files, nixl
from pair import loaded, pulled
from stage import Stage


def test_stores_and_hits_then_its_folder_is_deleted(stage: Stage, tmp_path: Path) -> None:
    """Both children serve; without its folder the cache only misses, or fails alone, and the answers stay right."""
    folder = tmp_path / "cache"
    pair = stage.pair("files", [nixl(), files(folder)], options={}, blocks=20)
    for number in range(12):
        pair.right(number, pair.dance(number))
    assert pulled(pair.decode) > 0
    assert any(folder.iterdir())
    for number in range(12):  # the prefill side has forgotten the first ones
        pair.right(number, pair.dance(number))
    assert loaded(pair.decode, child="NixlConnector") > 0
    assert pair.prefill.metric("vllm:external_prefix_cache_hits_total") > 0
    shutil.rmtree(folder)
    for number in range(12):
        pair.right(number, pair.dance(number))
    pair.settle()
