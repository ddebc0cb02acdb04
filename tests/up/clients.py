"""Many clients of the official library, and what became of their requests."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import openai

CLIENTS = 8
"""At a time."""
TOKENS = 12
PATIENCE_S = 60.0
PLACES = ["Lisbon", "Cairo", "Oslo", "Lima", "Quito", "Tunis", "Delhi", "Seoul", "Hanoi", "Paris", "Vienna", "Havana"]
CLERK = "A patient clerk copied the ledger of the harbour by hand, ship after ship, and left no line out. "


def prompt(number: int) -> str:
    """Prompt ``number``, some 75 tokens of SmolLM2; two prompts share no first block."""
    place = PLACES[number % len(PLACES)]
    return f"{place} {number}. {CLERK * 2}\nQuestion: Where is {place}, and what is it known for?\nAnswer: {place} is"


@dataclass
class Answer:
    """What one client got for one request."""

    number: int
    text: str = ""
    ends: int = 0
    """How often it was told that the answer is over."""
    path: str = ""
    """The header ``x-kvbelay-path``."""
    error: str = ""
    """Empty where there is an answer."""


@dataclass
class Storm:
    """What became of all requests, in the order in which they ended."""

    answers: list[Answer] = field(default_factory=list)

    def lost(self) -> list[Answer]:
        """Requests without an answer."""
        return [answer for answer in self.answers if answer.error]

    def wrong(self, right: Mapping[int, str]) -> list[Answer]:
        """Answers that are not the plain engine's."""
        return [answer for answer in self.answers if not answer.error and answer.text != right[answer.number]]

    def recomputed(self) -> int:
        """How many were served without prefill, as the router says."""
        return sum("fallback=recompute" in answer.path for answer in self.answers)


def storm(
    base: str,
    model: str,
    numbers: Sequence[int],
    at: Mapping[int, Callable[[], None]] | None = None,
    *,
    clients: int = CLIENTS,
) -> Storm:
    """Ask for all of them, every second one as a stream. ``at`` names what happens before the request of an index."""
    said = Storm()
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        def one(index: int) -> None:
            happens = (at or {}).get(index)
            if happens is not None:
                happens()
            said.answers.append(ask(client, model, numbers[index], stream=index % 2 == 1))

        with ThreadPoolExecutor(clients) as pool:
            for done in [pool.submit(one, index) for index in range(len(numbers))]:
                done.result()
    return said


def ask(client: openai.OpenAI, model: str, number: int, *, stream: bool) -> Answer:
    """One request."""
    answer = Answer(number)
    try:
        raw = client.completions.with_raw_response.create(
            model=model, prompt=prompt(number), max_tokens=TOKENS, temperature=0.0, stream=stream
        )
        answer.path = raw.headers.get("x-kvbelay-path", "")
        pieces = raw.parse()
        for piece in pieces if stream else [pieces]:
            for choice in piece.choices:
                answer.text += choice.text
                answer.ends += choice.finish_reason is not None
    except openai.OpenAIError as exc:
        answer.error = repr(exc)
    if not answer.error and answer.ends != 1:
        answer.error = f"it was told {answer.ends} times that the answer is over"
    return answer


def prefilled(base: str, model: str, number: int) -> bool:
    """Whether the router has a request prefilled."""
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        answer = ask(client, model, number, stream=False)
    return not answer.error and "prefill=none" not in answer.path and "fallback=none" in answer.path


def healthy(base: str, path: str = "/health") -> bool:
    """Whether a server says that it is ready."""
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=5.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
