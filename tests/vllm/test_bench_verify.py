"""``kvbelay bench verify``: it hashes what it says, on one thread, and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvbelay.cli.bench import verify
from kvbelay.cli.bench.command import bench
from kvbelay.cli.bench.hosted import hashing


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All its figures are there, of every form, and in the record."""
    for name, value in (("BLOCKS", 8), ("HASHED", 5)):
        monkeypatch.setattr(hashing, name, value)
    monkeypatch.setattr(verify, "ROUNDS", 2)
    written = tmp_path / "verify.json"
    result = CliRunner().invoke(bench, ["verify", "--json", str(written), "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert "float32, the CPU's kernels" in result.stdout
    rows = json.loads(written.read_bytes())["measured"]["hashing"]
    assert [row["what"] for row in rows] == [form.what for form in hashing.FORMS]
    assert len({row["form"] for row in rows}) == len(rows) - 1  # which axis lies outermost is no part of it
    for row, form in zip(rows, hashing.FORMS, strict=True):
        assert row["bytes"] == 4 * 5 * 8 * 32 * 256 * form.dtype.itemsize
        assert len(row["hash_s"]) == len(row["copy_s"]) == len(row["piece_s"]) == 2
        assert min(row["hash_s"] + row["copy_s"] + row["piece_s"]) > 0


def test_the_copy_is_of_the_same_blocks() -> None:
    """What the digest is compared with moves every byte of the hashed blocks, and nothing else."""
    for form in hashing.FORMS:
        caches = [hashing.cache(form, layer) for layer in range(2)]
        copied = hashing.Copy(caches, [3, 1])
        copied()
        for layer, source in enumerate(caches):
            for place, block in enumerate((3, 1)):
                there = copied.buffer[layer, place].view(torch.uint8).flatten()
                assert there.bincount().equal(source[block].contiguous().view(torch.uint8).flatten().bincount())
