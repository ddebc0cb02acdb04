"""The P/D dance: prefill here, decode there, as a router has it done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from server import Server

TOKENS = 12
"""Length of an answer."""
LONG_TOKENS = 96
KNOWN = range(66)
"""Prompts whose right answers are known."""
LONG = range(66, 72)
"""Prompts whose right long answers are known."""
OFFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to the prefill side."""
PLACES = ["Lisbon", "Cairo", "Oslo", "Lima", "Quito", "Tunis", "Delhi", "Seoul", "Hanoi", "Paris", "Vienna", "Havana"]
CLERK = "A patient clerk copied the ledger of the harbour by hand, ship after ship, and left no line out. "


def prompt(number: int) -> str:
    """Prompt ``number``, some 95 tokens; two prompts share no first block."""
    place = PLACES[number % len(PLACES)]
    return f"{place} {number}. {CLERK * 3}\nQuestion: Where is {place}, and what is it known for?\nAnswer: {place} is"


@dataclass
class Answer:
    """What a client got."""

    status: int
    text: str
    """The completion, or the error's own words."""
    seconds: float


def complete(
    server: Server, number: int, params: Mapping[str, Any] | None, *, tokens: int = TOKENS, patience_s: float = 180.0
) -> dict[str, Any]:
    """A completion's body. Raises where the server does not answer with one; the client hangs up after a while."""
    body = {"model": "m", "prompt": prompt(number), "max_tokens": tokens, "temperature": 0.0}
    if tokens == LONG_TOKENS:  # these are to hold their blocks until the end
        body["ignore_eos"] = True
    if params is not None:
        body["kv_transfer_params"] = params
    response = server.client.post("/v1/completions", json=body, timeout=httpx.Timeout(patience_s, connect=30.0))
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def prefill(server: Server, number: int) -> dict[str, Any]:
    """Have a prompt's KV made; returns the ``kv_transfer_params`` that the decode side needs."""
    params: dict[str, Any] = complete(server, number, OFFER, tokens=1)["kv_transfer_params"]
    assert params["remote_block_ids"][0], params
    return params


def decode(server: Server, number: int, params: Mapping[str, Any] | None) -> Answer:
    """A prompt's answer, whose KV stands where ``params`` say."""
    began = time.monotonic()
    try:
        text = complete(server, number, params)["choices"][0]["text"]
    except httpx.HTTPStatusError as exc:
        return Answer(exc.response.status_code, exc.response.text, time.monotonic() - began)
    return Answer(httpx.codes.OK, text, time.monotonic() - began)


def hang_up(server: Server, number: int, params: Mapping[str, Any], after_s: float) -> None:
    """Ask for an answer, and do not wait for it."""
    try:
        complete(server, number, params, patience_s=after_s)
    except httpx.ReadTimeout:
        return
    msg = f"prompt {number} was answered within {after_s} s"
    raise AssertionError(msg)


@dataclass
class Plain:
    """What an engine answers that computes everything itself: the right answers, by prompt."""

    short: Mapping[int, str]
    long: Mapping[int, str]
    """Of `LONG_TOKENS`."""

    @classmethod
    def ask(cls, server: Server) -> Plain:
        """Ask an engine for all of them at once."""

        def text(number: int, tokens: int) -> str:
            said: str = complete(server, number, None, tokens=tokens)["choices"][0]["text"]
            return said

        with ThreadPoolExecutor(32) as pool:
            long = {number: pool.submit(text, number, LONG_TOKENS) for number in LONG}
            short = {number: pool.submit(text, number, TOKENS) for number in KNOWN}
            return cls(
                {number: said.result() for number, said in short.items()},
                {number: said.result() for number, said in long.items()},
            )

    def __getitem__(self, number: int) -> str:
        return self.short[number]
