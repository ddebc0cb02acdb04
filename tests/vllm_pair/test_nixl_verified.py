"""The KV that comes is not the KV that was offered, and NIXL reports success: stock vLLM answers wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dance import complete, decode, prefill
from pair import SETTLE_S, Trio, failures, loaded, pulled
from sabotage import blocks_of, can_be_told
from server import Server, until

from kvbelay.link.events import Source, Told
from kvbelay.link.links import Links
from kvbelay.link.messages import Offer
from kvbelay.net.endpoint import Endpoint

WRONG = r"WARNING .*kvbelay: load of request .* failed \(NixlConnector: CorruptData: block "


@pytest.fixture
def links() -> Iterator[Links]:
    """A third engine's links."""
    links = Links(Endpoint(listen="tcp://127.0.0.1:0"), engine="test")
    yield links
    links.close()


def hashed(links: Links, params: dict[str, Any]) -> None:
    """Wait until the prefill side has hashed what it offers: from then on its blocks are known."""
    ours = params["kvbelay"]
    named = Source(ours["endpoint"], ours["incarnation"], ours["host"]), ours["request"]
    heard: list[Any] = []
    links.want(*named)
    until(lambda: bool(heard.extend(links.take()) or heard), "the digests are there", SETTLE_S)
    assert isinstance(heard[0], Told), heard
    assert isinstance(heard[0].message, Offer), heard
    assert not heard[0].message.unverified, heard


def same(server: Server) -> float:
    """Loads that were compared and found right."""
    return server.metric("kvbelay_verified_loads_total", result="same")


def test_healthy(linked: Trio) -> None:
    """What is pulled is compared, all of it, and is what was offered: prompts of every length, many at once."""
    linked.shake_hands(0)
    before = same(linked.decode), pulled(linked.decode)
    numbers = range(1, 9)
    with ThreadPoolExecutor(4) as pool:
        params = dict(zip(numbers, pool.map(lambda number: prefill(linked.prefill, number), numbers), strict=True))
        answers = pool.map(lambda number: decode(linked.decode, number, params[number]), numbers)
        for number, answer in zip(numbers, answers, strict=True):
            linked.right(number, answer)
    assert same(linked.decode) == before[0] + len(numbers)
    blocks = sum(len(blocks_of(offer)) for offer in params.values())
    assert pulled(linked.decode) == before[1] + blocks * linked.block_bytes
    assert linked.decode.metric("kvbelay_verified_loads_total", result="different") == 0


def spoilt(linked: Trio, links: Links, how: str, number: int) -> dict[str, Any]:
    """An offer of which something is not what it was when it was hashed."""
    params = prefill(linked.prefill, number)
    hashed(links, params)
    if how == "stale":
        other = prefill(linked.prefill, number + 2)
        params["remote_block_ids"] = [
            theirs[: len(mine)]
            for mine, theirs in zip(params["remote_block_ids"], other["remote_block_ids"], strict=True)
        ]
    else:
        can_be_told(linked.prefill, how, blocks=blocks_of(params))
    return params


@pytest.mark.parametrize(("how", "number"), [("fill", 10), ("flip", 14), ("stale", 18)])
def test_what_was_offered_is_not_there(linked: Trio, links: Links, how: str, number: int) -> None:
    """Overwritten when it was hashed and before it is pulled; one bit of one layer flipped; another prompt's blocks."""
    linked.shake_hands(40, 41)
    with linked.with_stock() as stock:
        before = pulled(stock)
        answer = decode(stock, number, spoilt(linked, links, how, number))
        assert answer.status == 200
        assert answer.text != linked.plain[number], "stock vLLM notices by now"
        assert pulled(stock) > before
    params, mark = spoilt(linked, links, how, number + 1), linked.decode.mark()
    before = pulled(linked.decode), failures(linked.decode, "CorruptData")
    linked.right(number + 1, decode(linked.decode, number + 1, params))
    assert pulled(linked.decode) == before[0] + len(blocks_of(params)) * linked.block_bytes, "it was not pulled"
    assert failures(linked.decode, "CorruptData", operation="verify") == before[1] + 1
    assert linked.decode.said(WRONG, mark)


def test_success_without_a_transfer(linked: Trio) -> None:
    """NIXL says that it has pulled, and has not."""
    linked.shake_hands(40, 41)
    with linked.with_stock() as stock:
        can_be_told(stock, "lie")
        answer = decode(stock, 22, prefill(linked.prefill, 22))
        assert answer.status == 200
        assert answer.text != linked.plain[22], "stock vLLM notices by now"
        can_be_told(stock, "go")
    before, mark = failures(linked.decode, "CorruptData"), linked.decode.mark()
    can_be_told(linked.decode, "lie")
    linked.right(23, decode(linked.decode, 23, prefill(linked.prefill, 23)))
    can_be_told(linked.decode, "go")
    assert failures(linked.decode, "CorruptData", operation="verify") == before + 1
    assert linked.decode.said(WRONG, mark)


def pulled_too_late(linked: Trio, server: Server, number: int) -> str:
    """A pull that begins in time and goes on when the blocks are another request's; returns the answer's text."""
    params, since = prefill(linked.prefill, number), linked.prefill.mark()
    can_be_told(server, "hold")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode, server, number, params)
        until(lambda: linked.prefill.said("Releasing expired KV blocks", since), "the lease ends", SETTLE_S)
        for other in range(80, 96):  # by now each block of the small cache has been used again
            complete(linked.prefill, other, None, tokens=1)
        can_be_told(server, "go")
        said = answer.result()
    assert said.status == 200, said
    return said.text


def test_the_lease_ends_in_mid_pull(linked: Trio) -> None:
    """No load outlasts the lease of what it pulls; and if it did, it would be found not to be what was offered."""
    linked.shake_hands(40, 41)
    with linked.with_stock() as stock:
        assert pulled_too_late(linked, stock, 24) != linked.plain[24], "stock vLLM notices by now"
    before = failures(linked.decode, "DeadlineExceeded"), failures(linked.decode, "CorruptData")
    assert pulled_too_late(linked, linked.decode, 25) == linked.plain[25]
    assert failures(linked.decode, "DeadlineExceeded") + failures(linked.decode, "CorruptData") == sum(before) + 1


def test_death_is_heard_before_the_child_notices(linked: Trio) -> None:
    """The prefill side dies while it is pulled from: the link says so, and NIXL is not waited for."""
    linked.shake_hands(40)
    params = prefill(linked.prefill, 26)
    before, mark = failures(linked.decode, "PeerLost"), linked.decode.mark()
    can_be_told(linked.decode, "hold")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(decode, linked.decode, 26, params)
        until(lambda: linked.loads() == 1, "it waits for its KV", SETTLE_S)
        linked.prefill.kill()
        linked.right(26, answer.result())  # while what NIXL thinks of it is still held
    assert failures(linked.decode, "PeerLost") == before + 1
    assert linked.decode.metric("kvbelay_quarantined_blocks") > 0, "NIXL may still write"
    assert linked.decode.said(r"WARNING .*kvbelay: an engine that has offered KV is dead: ", mark)
    can_be_told(linked.decode, "go")


def test_dead_before_the_first_handshake(linked: Trio) -> None:
    """Nobody is waited for who is known to be dead: NIXL would for 5 s, and stock vLLM answers 500 after them."""
    params = prefill(linked.prefill, 27)
    linked.prefill.kill()
    before, mark = loaded(linked.decode), linked.decode.mark()
    linked.right(27, decode(linked.decode, 27, params))
    assert loaded(linked.decode) == before
    assert linked.decode.said(r"WARNING .*kvbelay: an engine that has offered KV is dead: ", mark)
