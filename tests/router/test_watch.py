"""Limits on what a task waits for."""

from __future__ import annotations

import asyncio

import pytest

from kvbelay.errors import DeadlineExceeded, PeerLost
from kvbelay.router.watch import Watch

from .fakes import run


def late() -> DeadlineExceeded:
    return DeadlineExceeded("late")


async def waits(*times: float) -> None:
    """For ever, under a watch with these limits, one after the other."""
    with Watch() as watch:
        for at in times:
            watch.until(at, late)
        await asyncio.sleep(60)


def test_time_is_over() -> None:
    """The block ends with the error of its time; the task can go on."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(DeadlineExceeded, match="late"):
            await waits(loop.time() + 0.01)
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert not hasattr(task, "cancelling") or task.cancelling() == 0

    run(main())


def test_a_limit_that_moves() -> None:
    """A later limit replaces an earlier one, and an earlier one a later one."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with Watch() as watch:
            watch.until(loop.time() + 0.01, late)
            watch.until(loop.time() + 60, late)
            await asyncio.sleep(0.05)
        with pytest.raises(DeadlineExceeded):
            await waits(loop.time() + 60, loop.time() + 0.01)

    run(main())


def test_told_to_end() -> None:
    """Whoever holds the watch can end the block; before and after it that does nothing."""

    async def main() -> None:
        among: set[Watch] = set()
        loop = asyncio.get_running_loop()
        watch = Watch(among)
        watch.end(PeerLost("early"))

        async def block() -> None:
            with watch:
                assert among == {watch}
                loop.call_later(0.01, watch.end, PeerLost("down"))
                await asyncio.sleep(60)

        with pytest.raises(PeerLost, match="down"):
            await block()
        assert among == set()
        watch.end(PeerLost("again"))
        await asyncio.sleep(0)

    run(main())


def test_a_cancellation_passes() -> None:
    """A cancellation from outside is not turned into an error, even together with the watch's own end."""

    async def main() -> None:
        for both in (False, True):
            watches: set[Watch] = set()

            async def wait(watches: set[Watch] = watches) -> None:
                with Watch(watches):
                    await asyncio.sleep(60)

            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            (watch,) = watches
            if both and hasattr(task, "cancelling"):
                watch.end(PeerLost("down"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())


def test_an_error_of_its_own() -> None:
    """What the block raises itself passes as it is."""

    async def block() -> None:
        with Watch() as watch:
            watch.until(asyncio.get_running_loop().time() + 60, late)
            raise ValueError("mine")

    async def main() -> None:
        with pytest.raises(ValueError, match="mine"):
            await block()

    run(main())
