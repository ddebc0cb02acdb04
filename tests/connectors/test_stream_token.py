"""The shared token: what file is taken, and attacks on the handshake, with sockets of the attacker's own."""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvbelay.connectors.stream.frames import Hello, Ping
from kvbelay.errors import AuthenticationFailed, ConfigError, KvbelayError, ProtocolViolation, UnknownShape
from kvbelay.net import token
from kvbelay.net.auth import OPENING, OPENING_MAGIC, TOKEN, digest_of
from kvbelay.net.frames import VERSION, encode
from kvbelay.runtime.deadline import Until

PROOF = token.PROOF_NBYTES
CALLER, CALLED = token._CALLER, token._CALLED


def receive(sock: socket.socket, nbytes: int) -> bytes:
    got = bytearray()
    while len(got) < nbytes and (part := sock.recv(nbytes - len(got))):
        got += part
    return bytes(got)


def rest_of(sock: socket.socket) -> bytes:
    """All that comes until the other side ends the connection, also in a hurry."""
    got = bytearray()
    try:
        while part := sock.recv(1 << 16):
            got += part
    except ConnectionResetError:
        pass
    return bytes(got)


def opening(hello: Hello, *, nonce: bytes = b"n" * 32, version: int = VERSION) -> bytes:
    return OPENING.pack(OPENING_MAGIC, version, TOKEN, nonce, digest_of(hello))


def proof(secret: bytes, role: bytes, caller: bytes, called: bytes) -> bytes:
    return hmac.digest(secret, role + caller + called, "sha256")


@pytest.fixture
def secret(token_file: str) -> bytes:
    return Path(token_file).read_bytes().strip()


@pytest.fixture
def hello(tcp: Any) -> Hello:
    return Hello(tcp.fingerprint, 7)


@pytest.mark.parametrize("flaw", ["short", "long", "open", "missing", "folder"])
def test_files_that_are_refused(tcp: Any, tmp_path: Path, flaw: str) -> None:
    """A token that is too short or long, readable by others, or not there: refused, and never quoted."""
    path = tmp_path / "secret"
    content = {"short": b"s3cret" * 5 + b"x\n", "long": b"s3cret" * 1000}.get(flaw, b"s3cret" * 8)
    if flaw == "folder":
        path.mkdir()
    elif flaw != "missing":
        path.write_bytes(content)
        path.chmod(0o640 if flaw == "open" else 0o600)
    with pytest.raises(ConfigError, match="token_file: ") as refused:
        tcp.open(token_file=str(path))
    assert "s3cret" not in str(refused.value)
    assert str(path) in str(refused.value)
    assert refused.value.remedy


def test_white_space_is_no_token(tcp: Any, token_file: str, secret: bytes, tmp_path: Path) -> None:
    """A token is the same with and without the line's end that an editor adds, and that alone has no bytes."""
    source = tcp.source(token_file=token_file)
    other = tmp_path / "other"
    other.write_bytes(b"\n" + secret + b"\r\n")
    other.chmod(0o600)
    tcp.open(token_file=str(other), peers=(source.address,)).probe(Until(5.0))
    other.write_bytes(b" " * 64)
    with pytest.raises(ConfigError, match="has to have 32 to 4096 bytes"):
        tcp.open(token_file=str(other))


def test_another_token(tcp: Any, token_file: str, tmp_path: Path) -> None:
    """Whoever has another token is told so, and not what either of them is."""
    other = tmp_path / "other"
    other.write_bytes(b"o" * 64)
    other.chmod(0o600)
    source = tcp.source(token_file=token_file)
    with pytest.raises(AuthenticationFailed, match="does not prove that it knows the token of this side; give both"):
        tcp.open(token_file=str(other), peers=(source.address,)).probe(Until(5.0))


def test_by_the_book(tcp: Any, raw: Any, token_file: str, secret: bytes, hello: Hello) -> None:
    """A client of the test's own making, written from the protocol's description, is let in: the attacks below fail
    for what they change and for nothing else.
    """
    sock = raw(tcp.source(token_file=token_file).address)
    ours = opening(hello)
    sock.sendall(ours)
    theirs = receive(sock, OPENING.size)
    assert receive(sock, PROOF) == proof(secret, CALLED, ours, theirs)
    sock.sendall(proof(secret, CALLER, ours, theirs) + encode(hello) + encode(Ping()))
    header = receive(sock, 12)
    assert header.startswith(b"KVBS")


class Seen(NamedTuple):
    """What a client knows before it has to prove itself; an attacker that is no client lacks the secret."""

    secret: bytes
    ours: bytes
    theirs: bytes
    proof: bytes


ATTACKS: dict[str, Callable[[Seen], bytes]] = {
    "a guess": lambda _: bytes(PROOF),
    "the server's own proof, reflected": lambda seen: seen.proof,
    "openings swapped": lambda seen: proof(seen.secret, CALLER, seen.theirs, seen.ours),
    "a proof of another connection": lambda seen: proof(
        seen.secret, CALLER, seen.ours, seen.theirs[:8] + b"m" * 32 + seen.theirs[40:]
    ),
    "a proof of another hello": lambda seen: proof(seen.secret, CALLER, seen.ours[:40] + bytes(32), seen.theirs),
    "another token": lambda seen: proof(b"x" * 32, CALLER, seen.ours, seen.theirs),
    "all but the last bit": lambda seen: (
        (good := proof(seen.secret, CALLER, seen.ours, seen.theirs))[:-1] + bytes([good[-1] ^ 1])
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_false_proofs(tcp: Any, raw: Any, token_file: str, caplog: Any, attack: str) -> None:
    """A proof that is not the caller's own, of this connection, ends it: what follows is not even decoded."""
    caplog.set_level(logging.INFO)
    secret = Path(token_file).read_bytes().strip()
    hello = Hello(tcp.fingerprint, 7)
    sock = raw(tcp.source(token_file=token_file).address)
    ours = opening(hello)
    sock.sendall(ours)
    seen = Seen(secret, ours, receive(sock, OPENING.size), receive(sock, PROOF))
    sock.sendall(ATTACKS[attack](seen) + encode(hello) + b"KVBS" + b"\xff" * 100)
    assert rest_of(sock) == b""
    (record,) = caplog.records
    assert "a client does not prove that it knows the token" in record.getMessage()
    assert secret.decode() not in caplog.text


def test_replay(tcp: Any, raw: Any, token_file: str) -> None:
    """What a good client said, recorded and said again, gets nobody in."""
    source = tcp.source(token_file=token_file)
    said: list[bytes] = []
    port = int(source.address.rsplit(":", 1)[1])
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(("127.0.0.1", port)) as there:
        tap = threading.Thread(target=relay, args=(listener, there, said))
        tap.start()
        peer = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        reader = tcp.open(token_file=token_file, peers=(peer,))
        reader.probe(Until(5.0))
        reader.close()
        tap.join()
    recorded = b"".join(said)
    assert Path(token_file).read_bytes().strip() not in recorded
    sock = raw(source.address)
    sock.sendall(recorded)
    answer = rest_of(sock)
    assert len(answer) == OPENING.size + PROOF


def relay(listener: socket.socket, there: socket.socket, said: list[bytes]) -> None:
    """Between a caller and the called, one message at a time; keeps what the caller says."""
    here, _ = listener.accept()

    def back() -> None:
        while part := there.recv(1 << 16):
            here.sendall(part)

    with here:
        thread = threading.Thread(target=back)
        thread.start()
        while part := here.recv(1 << 16):
            said.append(part)
            there.sendall(part)
        there.shutdown(socket.SHUT_RDWR)
        thread.join()


def impostor(answer: Callable[[bytes], bytes]) -> tuple[str, Callable[[], bytes]]:
    """Takes one opening and answers; returns its address, and what ends it and tells what the caller said next."""
    listener = socket.create_server(("127.0.0.1", 0))
    after: list[bytes] = []

    def run() -> None:
        with listener:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(10)
                sock.sendall(answer(receive(sock, OPENING.size)))
                after.append(rest_of(sock))

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> bytes:
        thread.join(15.0)
        return after[0]

    return f"tcp://127.0.0.1:{listener.getsockname()[1]}", end


FALSE_PEERS: dict[str, tuple[Callable[[bytes], bytes], type[KvbelayError], str]] = {
    "reflects": (lambda theirs: theirs + theirs[:PROOF], AuthenticationFailed, "does not prove"),
    "guesses": (lambda theirs: theirs[:8] + bytes(64 + PROOF), AuthenticationFailed, "does not prove"),
    "says hello at once": (lambda _: b"KVBS" + b"\xff" * 200, AuthenticationFailed, "answers without proving"),
    "is something else": (lambda _: b"HTTP/1.1 400 Bad\r\n" * 9, ProtocolViolation, "begins with b'HTTP/1.1'"),
    "speaks another version": (
        lambda theirs: theirs[:4] + b"\x00\x09" + theirs[6:] + bytes(PROOF),
        UnknownShape,
        "speaks version 9 .*, this side version",
    ),
    "demands what nobody knows": (
        lambda theirs: theirs[:6] + b"?" + theirs[7:] + bytes(PROOF),
        AuthenticationFailed,
        "demands something unknown",
    ),
}


@pytest.mark.parametrize("case", FALSE_PEERS)
def test_false_peers(tcp: Any, token_file: str, case: str) -> None:
    """A peer that does not prove that it knows the token gets no proof of ours, no hello and no request."""
    answer, expected, text = FALSE_PEERS[case]
    peer, end = impostor(answer)
    with pytest.raises(expected, match=text):
        tcp.open(token_file=token_file, peers=(peer,)).probe(Until(8.0))
    assert end() == b""


def test_hellos_are_proved(tcp: Any, raw: Any, token_file: str, secret: bytes, hello: Hello) -> None:
    """Neither side takes another hello than the one that the other's proof covers."""
    sock = raw(tcp.source(token_file=token_file).address)
    ours = opening(hello)
    sock.sendall(ours)
    theirs = receive(sock, OPENING.size)
    receive(sock, PROOF)
    sock.sendall(proof(secret, CALLER, ours, theirs) + encode(Hello(tcp.fingerprint, 8)))
    assert rest_of(sock) == b""

    def other(caller: bytes) -> bytes:
        called = opening(hello)
        return called + proof(secret, CALLED, caller, called) + encode(Hello(tcp.fingerprint, 8))

    peer, _ = impostor(other)
    with pytest.raises(ProtocolViolation, match="says another hello than the one that it proved"):
        tcp.open(token_file=token_file, peers=(peer,)).probe(Until(5.0))


def test_nonces_are_fresh(tcp: Any, raw: Any, token_file: str, hello: Hello) -> None:
    """No two connections get the same nonce, nor the same proof for the same opening."""
    source = tcp.source(token_file=token_file)
    seen = set()
    for _ in range(8):
        sock = raw(source.address)
        sock.sendall(opening(hello))
        seen.add(receive(sock, OPENING.size)[8:40])
        seen.add(receive(sock, PROOF))
    assert len(seen) == 16


def test_other_version_is_told_ours(tcp: Any, raw: Any, token_file: str, hello: Hello) -> None:
    """A client of another version hears which version this side speaks."""
    sock = raw(tcp.source(token_file=token_file).address)
    sock.sendall(opening(hello, version=VERSION + 1))
    assert OPENING.unpack(rest_of(sock)[: OPENING.size])[1] == VERSION
