"""What a connector may leave behind when it is closed: nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_SHM = Path("/dev/shm")  # noqa: S108  # where Linux shows shared memory segments; only listed


class Residue:
    """Threads, descriptors, shared memory segments and files that came since it was made.

    Parameters
    ----------
    directory
        Where the connectors under test may keep files.
    keeps
        Patterns (relative to ``directory``) of files that may outlive them.
    """

    def __init__(self, directory: Path, keeps: Iterable[str]) -> None:
        self._directory = directory
        self._keeps = tuple(keeps)
        # A segment of somebody else's that dies meanwhile is mapped by nobody: it must not look like one of ours.
        self._before = {*self._now(), *_named(_all_segments())}

    def found(self, patience_s: float) -> list[str]:
        """What is left, as one line each; waits up to ``patience_s`` seconds for it to go."""
        give_up = time.monotonic() + patience_s
        while True:
            left = self._now() - self._before
            if not left or time.monotonic() > give_up:
                return sorted(left)
            time.sleep(0.005)

    def _now(self) -> set[str]:
        return {*_threads(), *_descriptors(), *_segments(), *self._files()}

    def _files(self) -> set[str]:
        files = {path for path in self._directory.rglob("*") if not path.is_dir()}
        for pattern in self._keeps:
            files -= set(self._directory.glob(pattern))
        return {f"file {path}" for path in files}


def _threads() -> set[str]:
    return {f"thread {thread.name!r} ({thread.ident})" for thread in threading.enumerate()}


def _descriptors() -> set[str]:
    links = (_PROC / "self" / "fd").iterdir()
    return {f"descriptor {link.name} -> {target}" for link in links if (target := _target(link))}


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except FileNotFoundError:  # closed meanwhile, as the one that listed the directory
        return None


def _segments() -> set[str]:
    """Shared memory segments that no other process maps: those are theirs."""
    names = _all_segments()
    return _named(names - _mapped_elsewhere()) if names else set()


def _all_segments() -> set[str]:
    # A directory is somebody's temporary one: a segment is a file.
    return {str(path) for path in _SHM.iterdir() if path.is_file()} if _SHM.is_dir() else set()


def _named(segments: set[str]) -> set[str]:
    return {f"shared memory {name}" for name in segments}


def _mapped_elsewhere() -> set[str]:
    mapped: set[str] = set()
    for process in _PROC.iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # gone meanwhile, or somebody else's
            continue
        mapped.update(line.split(maxsplit=5)[5] for line in lines if str(_SHM) in line)
    return mapped
