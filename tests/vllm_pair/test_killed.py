"""A prefill side that dies: before, between and in the middle of transfers; and one that comes back as another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock

import httpx
from dance import Answer, decode, prefill
from pair import SETTLE_S, Pair, failures, loaded, pulled
from server import until

LATE = range(7, 11)
"""Of twenty requests in the order in which they are prefilled, those that are in mid-transfer when the end comes."""
FAILED = r"WARNING .*kvbelay: load of request .* failed \(NixlConnector: TransferFailed: "


def test_killed_after_a_handshake_then_back_as_another(pair: Pair) -> None:
    """Stock vLLM answers 500. The guard computes it here; and the new instance at the old address serves at once."""
    pair.shake_hands(40, 41)
    with ThreadPoolExecutor(4) as pool:
        params = dict(zip(range(42, 45), pool.map(lambda n: prefill(pair.prefill, n), range(42, 45)), strict=True))
    pair.prefill.kill()
    with pair.with_stock() as stock:
        answer = decode(stock, 43, params[43])
        assert answer.status == 500, "stock vLLM survives a dead prefill side by now"

    before, mark = failures(pair.decode, "TransferFailed"), pair.decode.mark()
    answer = decode(pair.decode, 42, params[42])
    pair.right(42, answer)
    assert failures(pair.decode, "TransferFailed") == before + 1
    assert pair.decode.said(FAILED, mark)

    pair.mend()
    before = loaded(pair.decode), pulled(pair.decode)
    pair.right(44, decode(pair.decode, 44, params[44]))  # it names the instance that is gone
    assert (loaded(pair.decode), pulled(pair.decode)) == before
    fresh = prefill(pair.prefill, 45)
    assert fresh["remote_engine_id"] != params[44]["remote_engine_id"]
    pair.right(45, decode(pair.decode, 45, fresh))
    assert loaded(pair.decode) == before[0] + 1


def test_killed_in_the_middle_of_twenty(pair: Pair) -> None:
    """All twenty are answered, and rightly: what was pulled, what was being pulled, and what never was prefilled."""
    numbers = range(50, 70)
    go, turns, lock = Event(), [], Lock()

    def dance(number: int) -> Answer:
        try:
            params = prefill(pair.prefill, number)
        except httpx.HTTPError:
            return decode(pair.decode, number, None)  # as a router does that hands the request back
        with lock:
            turns.append(number)
            turn = len(turns)
        if turn in LATE:
            go.wait(SETTLE_S)
        return decode(pair.decode, number, params)

    before = loaded(pair.decode), failures(pair.decode, "TransferFailed")
    with ThreadPoolExecutor(len(numbers)) as pool:
        answers = {number: pool.submit(dance, number) for number in numbers}
        until(lambda: len(turns) >= LATE.stop - 1, "some are under way", SETTLE_S)
        pair.prefill.freeze()
        go.set()  # the late ones pull from now on, and get nothing
        until(lambda: pair.loads() >= len(LATE), "they wait for their KV", SETTLE_S)
        pair.prefill.kill()
        for number, answer in answers.items():
            pair.right(number, answer.result())
    assert loaded(pair.decode) > before[0]
    assert failures(pair.decode, "TransferFailed") >= before[1] + len(LATE)


def test_killed_before_the_first_handshake(pair: Pair) -> None:
    """Stock vLLM answers 500 after 5 s. The guard computes it here, and names its cause."""
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(lambda number: prefill(pair.prefill, number), (70, 71))
    pair.prefill.kill()
    before, mark = failures(pair.decode, "TransferFailed"), pair.decode.mark()
    with ThreadPoolExecutor(2) as pool, pair.with_stock() as stock:
        answer, their_answer = pool.map(decode, (pair.decode, stock), (70, 71), (ours, theirs))
    assert their_answer.status == 500, "stock vLLM survives a dead prefill side by now"
    pair.right(70, answer)
    assert failures(pair.decode, "TransferFailed") == before + 1
    assert pair.decode.said(FAILED, mark)
