"""Running engines and routers: what they say, what they do not, and how long that may take."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvbelay.doctor import fetch
from kvbelay.doctor.fetch import Answer, Series, get
from kvbelay.doctor.finding import Finding, Level, exit_code
from kvbelay.doctor.url import LOOKS, check_urls

P, D = "http://p:1", "http://d:2"
IDLE = 'vllm:num_requests_running{engine="0",model_name="m"} 0.0\nvllm:generation_tokens_total{engine="0"} 5.0\n'
BUSY = "vllm:num_requests_running 3.0\nvllm:generation_tokens_total {}\n"
FETCHING = (
    'vllm:num_requests_running 0.0\nvllm:num_requests_kv_fetch_by_stage{{stage="in_progress"}} 2.0\n'
    'kvbelay_outcomes_total{{side="load",result="loaded",child="NixlConnector"}} {}\n'
)
Pages = dict[str, "Answer | list[Answer]"]


def answers(metrics: str | list[str] = IDLE, version: str = "0.32.0", **more: Answer) -> Pages:
    pages = [metrics] if isinstance(metrics, str) else metrics
    return {
        "/health": Answer(200, b"", skew_s=0.0),
        "/version": Answer(200, f'{{"version":"{version}"}}'.encode()),
        "/metrics": [Answer(200, page.encode()) for page in pages],
        **{f"/{name}": answer for name, answer in more.items()},
    }


def ask(*servers: Pages) -> tuple[list[Finding], list[float]]:
    """Findings, and the pauses that were made."""
    urls = [P, D][: len(servers)]
    known = dict(zip(urls, servers, strict=True))
    slept: list[float] = []

    def fetched(url: str) -> Answer:
        server, _, path = url.rpartition("/")
        answer = known[server][f"/{path}"]
        if isinstance(answer, list):
            return answer.pop(0) if len(answer) > 1 else answer[0]
        return answer

    return check_urls(urls, fetched, slept.append), slept


def only(findings: list[Finding]) -> Finding:
    (one,) = [found for found in findings if found.level is not Level.NOTE]
    return one


def test_idle_engine_is_healthy() -> None:
    """It is looked at once, and only notes are told."""
    findings, slept = ask(answers())
    assert exit_code(findings) == 0
    assert not slept
    assert any("vLLM 0.32.0" in found.what for found in findings)


def test_progress_is_seen_at_the_second_look() -> None:
    """Counters that move end the looking."""
    findings, slept = ask(answers([BUSY.format(5), BUSY.format(6)]))
    assert exit_code(findings) == 0
    assert len(slept) == 1


def test_an_engine_that_does_nothing() -> None:
    """HTTP 200 for its health, requests that run, and counters that stand still: a problem."""
    findings, slept = ask(answers(BUSY.format(5)))
    found = only(findings)
    assert (found.check, found.level) == ("url.progress", Level.PROBLEM)
    assert "3 requests run" in found.what
    assert len(slept) == LOOKS - 1


def test_loads_that_do_not_end() -> None:
    """Told while none of them ends; the end of one is progress."""
    assert only(ask(answers(FETCHING.format(7)))[0]).check == "url.transfers"
    findings, slept = ask(answers([FETCHING.format(7), FETCHING.format(7), FETCHING.format(8)]))
    assert exit_code(findings) == 0
    assert len(slept) == 2


def test_quarantine_and_circuits() -> None:
    """What the guard shows is told by child, with its failures."""
    page = IDLE + (
        "kvbelay_quarantined_blocks 12.0\n"
        'kvbelay_circuit_open{child="Lm"} 1.0\nkvbelay_circuit_open{child="Nixl"} 0.5\n'
        'kvbelay_circuit_open{child="Fine"} 0.0\nkvbelay_peers_open{child="Nixl"} 2.0\n'
        'kvbelay_failures_total{child="Lm",operation="get_finished",kind="ForeignError"} 9.0\n'
    )
    findings = [found for found in ask(answers(page))[0] if found.level is not Level.NOTE]
    said = {(found.check, found.level) for found in findings}
    assert said == {
        ("url.quarantine", Level.WARNING),
        ("url.circuit", Level.PROBLEM),
        ("url.circuit", Level.WARNING),
    }
    (opened,) = [found for found in findings if found.level is Level.PROBLEM]
    assert "'Lm'" in opened.what
    assert "get_finished: ForeignError 9 times" in opened.cause


def test_router() -> None:
    """Its instances by name, and requests that neither begin nor end."""
    page = (
        'kvbelay_router_peer_up{role="prefill",peer="p1"} 0.0\nkvbelay_router_peer_up{role="decode",peer="d1"} 1.0\n'
        'kvbelay_router_peer_circuit_open{role="prefill",peer="p1"} 1.0\nkvbelay_router_open_requests 4.0\n'
        'kvbelay_router_requests_total{endpoint="completions",result="answered"} 7.0\n'
    )
    findings, _ = ask({**answers(page), "/version": Answer(404, b"")})
    assert [found.check for found in findings] == ["url.circuit", "url.circuit", "url.progress"]
    assert "prefill p1 of http://p:1 is down" in findings[0].what


def test_versions_and_clocks_of_two() -> None:
    """Engines of different versions, and a clock that is off, are told once."""
    other = answers(version="0.30.0")
    other["/health"] = Answer(200, b"", skew_s=-40.0)
    findings = [found for found in ask(answers(), other)[0] if found.level is not Level.NOTE]
    assert {(found.check, found.level) for found in findings} == {
        ("url.version", Level.PROBLEM),
        ("url.clocks", Level.WARNING),
    }
    (clocks,) = [found for found in findings if found.check == "url.clocks"]
    assert "40 s ahead" in clocks.what


@pytest.mark.parametrize(
    ("pages", "check", "level"),
    [
        (answers(health=Answer(503, b"")), "url.health", Level.PROBLEM),
        (answers(health=Answer(0, b"", "no answer within 5 s", frozen=True)), "url.health", Level.PROBLEM),
        (answers(health=Answer(0, b"", "Connection refused")), "url.reach", Level.UNCHECKED),
        (answers(metrics="python_info 1.0\n"), "url.metrics", Level.UNCHECKED),
        ({**answers(), "/metrics": Answer(404, b"")}, "url.metrics", Level.UNCHECKED),
        ({**answers(), "/metrics": [Answer(200, BUSY.encode()), Answer(0, b"", "gone")]}, "url.health", Level.PROBLEM),
    ],
)
def test_servers_that_are_not_well(pages: Pages, check: str, level: Level) -> None:
    """Each with its own words; what could not be seen is no health."""
    found = only(ask(pages)[0])
    assert (found.check, found.level) == (check, level)
    assert found.cause


@pytest.mark.parametrize("body", [b"[1]", b"{", b"[" * 100_000])
def test_a_version_that_is_none(body: bytes) -> None:
    """What is no version is left out."""
    findings, _ = ask({**answers(), "/version": Answer(200, body)})
    assert all(found.check != "url.version" for found in findings)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000", "http://"])
def test_what_is_no_address(url: str) -> None:
    """Nothing but http and https is asked."""
    (found,) = check_urls([url], lambda _: pytest.fail("asked"))
    assert found.level is Level.UNCHECKED


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/health")
        elif self.path == "/broken":
            self.send_response(500)
        else:
            self.send_response(200)
        self.end_headers()
        if self.path == "/health":
            self.wfile.write(b"well")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


def test_get_from_a_server(server: str) -> None:
    """Status, body and the difference of clocks; errors and redirections are answers."""
    answer = get(f"{server}/health")
    assert (answer.status, answer.body) == (200, b"well")
    assert answer.skew_s is not None
    assert abs(answer.skew_s) < 60
    assert get(f"{server}/broken").status == 500
    assert get(f"{server}/moved").status == 302


def test_get_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused is not frozen; a server that takes a connection and says nothing is."""
    monkeypatch.setattr(fetch, "WAIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/health"
        answer = get(url)
        assert (answer.status, answer.frozen) == (0, True)
    answer = get(url)
    assert (answer.status, answer.frozen) == (0, False)
    assert "refused" in answer.why


@pytest.mark.parametrize("said", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort"])
def test_get_from_a_server_that_breaks_off(said: bytes) -> None:
    """Whatever it says, an answer comes back."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            link, _ = listening.accept()
            with link:
                link.recv(4096)
                link.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        answer = get(f"http://127.0.0.1:{listening.getsockname()[1]}/x")
        thread.join()
    assert answer.status == 0 or answer.body in {b"", b"short"}


def test_series() -> None:
    """Labels with escapes, other numbers than plain ones, comments and junk."""
    page = b'# HELP a b\na{x="1",y="q\\"}{"} 2\na{x="2"} +Inf 123\nb 1e3\nc{} NaN\njunk\n{} 3\nd x\n'
    series = Series(page)
    assert series.sum("a", x="1") == 2
    assert series.each("a")[0][0]["y"] == 'q\\"}{'
    assert series.sum("b") == 1000
    assert "b" in series
    assert "d" not in series
