"""Mutual TLS: which certificates and files are taken, and what those hear whose are not."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbelay.connectors.spans import CHUNK
from kvbelay.errors import AuthenticationFailed, ConfigError, KvbelayError
from kvbelay.net.tls import RECORD_NBYTES, TlsConfig, _records
from kvbelay.runtime.deadline import Until


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory, certify: Any) -> Path:
    """Certificates of another authority."""
    return certify(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, authority: Path, certify: Any) -> Path:
    """A certificate of our authority that names another address and a name."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("authority.key", "authority.pem"):
        shutil.copy(authority / name, folder)
    return certify(folder, "IP:192.0.2.1,DNS:prefill.kv")


def tls(folder: Path, **changes: str) -> dict[str, TlsConfig]:
    paths = {"cert": "node.pem", "key": "node.key", "ca": "authority.pem"}
    return {"tls": TlsConfig(**{**{name: str(folder / path) for name, path in paths.items()}, **changes})}


def test_another_authority(tcp: Any, authority: Path, stranger: Path) -> None:
    """A certificate of another authority is refused on either side, in words that say which side's it is."""
    with pytest.raises(AuthenticationFailed, match=r"the certificate of tcp://.* is not trusted: "):
        tcp.open(peers=(tcp.source(**tls(stranger)).address,), **tls(authority)).probe(Until(10.0))
    trusting = tls(stranger, ca=str(authority / "authority.pem"))
    with pytest.raises(
        AuthenticationFailed, match=r"tcp://.* refused the certificate of this side, or its TLS: .*ALERT"
    ):
        tcp.open(peers=(tcp.source(**tls(authority)).address,), **trusting).probe(Until(10.0))


def test_names(tcp: Any, authority: Path, elsewhere: Path) -> None:
    """A certificate has to name the address that was dialled, or the name that the configuration says."""
    source = tcp.source(**tls(elsewhere))
    with pytest.raises(AuthenticationFailed, match=r"is not trusted: IP address mismatch"):
        tcp.open(peers=(source.address,), **tls(authority)).probe(Until(10.0))
    with pytest.raises(AuthenticationFailed, match=r"is not trusted: Hostname mismatch"):
        tcp.open(peers=(source.address,), **tls(authority, server_name="decode.kv")).probe(Until(10.0))
    tcp.open(peers=(source.address,), **tls(authority, server_name="prefill.kv")).probe(Until(10.0))


def hostile_context(folder: Path, case: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if case == "an old version":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(folder / "node.pem", folder / "node.key")
    return context


def heard(context: ssl.SSLContext, sock: socket.socket) -> bytes:
    """What the server says to a client that shakes hands with this context, and says something."""
    got = bytearray()
    with contextlib.suppress(OSError), context.wrap_socket(sock) as secured:
        secured.sendall(b"KVBS" * 8)
        while part := secured.recv(1 << 16):
            got += part
    return bytes(got)


@pytest.mark.parametrize("case", ["no certificate", "an old version"])
def test_clients_that_prove_nothing(tcp: Any, raw: Any, authority: Path, case: str) -> None:
    """A client without a certificate, or with a TLS that is too old, gets no byte of the protocol."""
    source = tcp.source(**tls(authority))
    assert heard(hostile_context(authority, case), raw(source.address)) == b""
    tcp.open(peers=(source.address,), **tls(authority)).probe(Until(10.0))


NOISE: dict[str, bytes] = {
    "a record of nothing": b"\x16\x03\x01\x00\x00",
    "a record that is too long": b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "an alert": b"\x16\x03\x01\x00\x02\x02\x28",
    "noise": b"\x16" + bytes(range(256)) * 300,
    "the end": b"\x16\x03",
}


@pytest.mark.parametrize("case", NOISE)
def test_noise_for_a_handshake(tcp: Any, raw: Any, authority: Path, case: str) -> None:
    """Whatever begins like TLS and is none ends the connection, and nothing else."""
    source = tcp.source(**tls(authority))
    sock = raw(source.address)
    with contextlib.suppress(OSError):  # cut off already
        sock.sendall(NOISE[case])
        sock.shutdown(socket.SHUT_WR)
    until = Until(10.0)
    while len(source._server._clients):
        until.sleep(0.005)
    tcp.open(peers=(source.address,), **tls(authority)).probe(until)


@pytest.mark.parametrize("flaw", ["missing", "open", "encrypted", "no PEM", "of another key"])
def test_files_that_are_refused(tcp: Any, authority: Path, stranger: Path, tmp_path: Path, flaw: str) -> None:
    """A key that cannot be used is refused when the connector opens, and no terminal is asked for its password."""
    key = tmp_path / "key"
    shutil.copy((stranger if flaw == "of another key" else authority) / "node.key", key)
    key.chmod(0o600)
    if flaw == "missing":
        key.unlink()
    elif flaw == "open":
        key.chmod(0o640)
    elif flaw == "no PEM":
        key.write_text("secret")
    elif flaw == "encrypted":
        command = ["openssl", "ec", "-aes256", "-passout", "pass:word", "-in", authority / "node.key", "-out", key]
        subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match=r"tls\.(key|cert): .*key") as refused:
        tcp.open(**tls(authority, key=str(key)))
    assert refused.value.remedy
    for field in ("ca", "cert"):
        with pytest.raises(ConfigError, match=rf"tls\.{field}: .*nowhere"):
            tcp.open(**tls(authority, **{field: "/nowhere"}))


@pytest.fixture
def trickling(authority: Path) -> Iterator[Callable[[bytes], str]]:
    """A TLS server that shakes hands, says something of the plain text, and half a record more; then nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "node.pem", authority / "node.key")
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def serve(listener: socket.socket, text: bytes) -> None:
        with listener:
            sock, _ = listener.accept()
            with context.wrap_socket(sock, server_side=True) as secured:
                secured.sendall(text)
                socket.socket.sendall(secured, b"\x17\x03\x03\x40\x00" + bytes(100))
                stop.wait(30.0)

    def make(text: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        threads.append(threading.Thread(target=serve, args=(listener, text)))
        threads[-1].start()
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    yield make
    stop.set()
    for thread in threads:
        thread.join()


def test_half_a_record(tcp: Any, authority: Path, trickling: Callable[[bytes], str]) -> None:
    """A peer that stops in the middle of a record holds nobody beyond his deadline, and what it wrote is no message."""
    reader = tcp.open(peers=(trickling(b"KVBS"),), **tls(authority))
    began = time.monotonic()
    with pytest.raises(KvbelayError):
        reader.probe(Until(0.3))
    assert time.monotonic() - began < 3.0


def test_connections_are_replaced(tcp: Any, authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that has carried as many records as its key is good for is not used again."""
    reader = tcp.open(peers=(tcp.source(**tls(authority)).address,), **tls(authority))
    reader.probe(Until(10.0))
    ((_, first),) = reader._pool._idle
    reader.probe(Until(10.0))
    assert reader._pool._idle[0][1] is first
    monkeypatch.setattr("kvbelay.net.tls.MAX_RECORDS", 1)
    reader.probe(Until(10.0))
    assert not reader._pool._idle


def test_records_keep_the_bytes() -> None:
    """Small views are joined, large ones are sent as they are, and all bytes keep their order."""
    full = RECORD_NBYTES
    for sizes in ([], [0], [5] * 10_000, [full], [1, full, 2, full - 2, 3], [CHUNK, 7, CHUNK]):
        views = [memoryview(bytes([index % 251]) * size) for index, size in enumerate(sizes)]
        parts = _records(views)
        assert b"".join(parts) == b"".join(views)
        assert all(len(part) <= full or part in views for part in parts)
        assert len(parts) <= 2 * (sum(sizes) // full + 1) + 1
