"""A prefill side that dies: before, between and in the middle of transfers; and one that comes back as another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import httpx
from dance import Answer, decode, prefill
from pair import SETTLE_S, Trio, failures, loaded, pulled
from server import until

LATE = range(7, 11)
"""Of twenty requests in the order in which they are prefilled, those that are in mid-transfer when the end comes."""
FAILED = r"WARNING .*kvbelay: load of request .* failed \(NixlConnector: TransferFailed: "


def test_killed_after_a_handshake_then_back_as_another(trio: Trio) -> None:
    """Stock vLLM answers 500. The guard computes it here; and the new instance at the old address serves at once."""
    trio.shake_hands(40, 41)
    with ThreadPoolExecutor(4) as pool:
        params = dict(zip(range(42, 45), pool.map(lambda n: prefill(trio.prefill, n), range(42, 45)), strict=True))
    trio.prefill.kill()
    with trio.with_stock() as stock:
        answer = decode(stock, 43, params[43])
        assert answer.status == 500, "stock vLLM survives a dead prefill side by now"

    before, mark = failures(trio.decode, "TransferFailed"), trio.decode.mark()
    answer = decode(trio.decode, 42, params[42])
    trio.right(42, answer)
    assert failures(trio.decode, "TransferFailed") == before + 1
    assert trio.decode.said(FAILED, mark)

    trio.start()
    before = loaded(trio.decode), pulled(trio.decode)
    trio.right(44, decode(trio.decode, 44, params[44]))  # it names the instance that is gone
    assert (loaded(trio.decode), pulled(trio.decode)) == before
    fresh = prefill(trio.prefill, 45)
    assert fresh["remote_engine_id"] != params[44]["remote_engine_id"]
    trio.right(45, decode(trio.decode, 45, fresh))
    assert loaded(trio.decode) == before[0] + 1


def test_killed_in_the_middle_of_twenty(trio: Trio) -> None:
    """All twenty are answered, and rightly: what was pulled, what was being pulled, and what never was prefilled."""
    numbers = range(46, 66)
    go, turns, lock = Event(), [], Lock()

    def dance(number: int) -> Answer:
        try:
            params = prefill(trio.prefill, number)
        except httpx.HTTPError:
            return decode(trio.decode, number, None)  # as a router does that hands the request back
        with lock:
            turns.append(number)
            turn = len(turns)
        if turn in LATE:
            go.wait(SETTLE_S)
        return decode(trio.decode, number, params)

    before = loaded(trio.decode), failures(trio.decode, "TransferFailed")
    with ThreadPoolExecutor(len(numbers)) as pool:
        answers = {number: pool.submit(dance, number) for number in numbers}
        until(lambda: len(turns) >= LATE.stop - 1, "some are under way", SETTLE_S)
        until(lambda: loaded(trio.decode) > before[0], "one has been pulled", SETTLE_S)
        trio.prefill.freeze()
        go.set()  # the late ones pull from now on, and get nothing
        until(lambda: trio.loads() >= len(LATE), "they wait for their KV", SETTLE_S)
        trio.prefill.kill()
        for number, answer in answers.items():
            trio.right(number, answer.result())
    assert failures(trio.decode, "TransferFailed") >= before[1] + len(LATE)


def test_killed_before_the_first_handshake(trio: Trio) -> None:
    """Stock vLLM answers 500 after 5 s. The guard computes it here, and names its cause."""
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(lambda number: prefill(trio.prefill, number), (12, 13))
    trio.prefill.kill()
    before, mark = failures(trio.decode, "TransferFailed"), trio.decode.mark()
    with trio.with_stock() as stock, ThreadPoolExecutor(2) as pool:
        answer, their_answer = pool.map(decode, (trio.decode, stock), (12, 13), (ours, theirs))
    assert their_answer.status == 500, "stock vLLM survives a dead prefill side by now"
    trio.right(12, answer)
    assert failures(trio.decode, "TransferFailed") == before + 1
    assert trio.decode.said(FAILED, mark)
