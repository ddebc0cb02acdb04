"""Addresses and the sockets behind them: what is accepted, what is refused, what is left."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.stream import StreamConfig
from kvbelay.errors import ConfigError
from kvbelay.net.sockets import Address, Listener, parse
from kvbelay.runtime.deadline import Until


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:///tmp/a b", Address(path="/tmp/a b")),  # noqa: S108  # only parsed
        ("tcp://127.0.0.1:0", Address(host="127.0.0.1", port=0)),
        ("tcp://127.8.0.1:65535", Address(host="127.8.0.1", port=65535)),
        ("tcp://10.0.0.1:80", Address(host="10.0.0.1", port=80)),
        ("tcp://[fd00::1]:80", Address(host="fd00::1", port=80)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    """An address is read, and written as it was."""
    assert parse(text, field="listen") == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix://relative",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1",
        "tcp://127.1:80",
        "tcp://::1:80",
        "tcp://[127.0.0.1]:80",
        "tcp://[::ffff:127.0.0.1]:80",
        "tcp://[fe80::1%lo]:80",
        "tcp://localhost:80",
        "tcp://example.org:80",
        "tcp://:80",
        "http://127.0.0.1:80",
    ],
)
def test_no_address(text: str) -> None:
    """What is no address is refused with the shapes that are."""
    with pytest.raises(ConfigError, match=r"listen: .* is not an address; write unix:///path"):
        parse(text, field="listen")


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "[fd00::1]", "128.0.0.1"])  # noqa: S104
def test_loopback_only(rig: Any, host: str) -> None:
    """Without a token or TLS any host but loopback is refused in plain words, before anything opens."""
    refused = "beyond it a shared token or mutual TLS is due; set token_file or tls"
    with pytest.raises(ConfigError, match=f"listen: .*{refused}"):
        rig.open(listen=f"tcp://{host}:0")
    with pytest.raises(ConfigError, match=rf"peers\[1\]: .*{refused}"):
        rig.open(listen=rig.address(), peers=("tcp://127.0.0.1:1", f"tcp://{host}:1"))
    with pytest.raises(ConfigError, match=f"advertise: .*{refused}"):
        rig.open(listen=rig.address(), advertise=f"tcp://{host}:1")
    assert list(rig.scratch.iterdir()) == []


def test_addresses_of_this_host() -> None:
    """Only unix sockets and loopback addresses count as local; only all-zero ones as wildcards."""
    local = ["unix:///x", "tcp://127.0.0.1:1", "tcp://127.200.3.4:1", "tcp://[::1]:1"]
    wildcards = ["tcp://0.0.0.0:1", "tcp://[::]:1"]
    texts = [*local, *wildcards, "tcp://10.0.0.1:1", "tcp://[fd00::1]:1"]
    addresses = [parse(text, field="x") for text in texts]
    assert [str(address) for address in addresses if address.local] == local
    assert [str(address) for address in addresses if address.wildcard] == wildcards


def test_ipv6(rig: Any) -> None:
    """A source on IPv6's loopback is reached there."""
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    source = rig.open(listen="tcp://[::1]:0")
    rig.open(peers=(source.address,)).probe(Until(5.0))


def test_long_path_is_refused() -> None:
    """A path that does not fit into a unix socket's name is refused with the limit."""
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        parse(f"unix:///{'p' * 107}", field="listen")


def test_unix_socket_file(rig: Any) -> None:
    """The socket's file is for this user only, and goes with the connector."""
    path = rig.scratch / "s"
    source = rig.open(listen=f"unix://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    source.close()
    assert not path.exists()


def test_stale_socket_is_replaced(rig: Any) -> None:
    """The file that a dead process left is replaced."""
    path = rig.scratch / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    rig.open(listen=f"unix://{path}").probe(Until(5.0))


def test_address_in_use(rig: Any) -> None:
    """An address that somebody serves is refused as in use, and he goes on serving."""
    first = rig.source()
    with pytest.raises(ConfigError, match=r"listen: .* is in use"):
        rig.open(listen=first.address)
    first.probe(Until(5.0))


def test_other_files_are_left_alone(rig: Any) -> None:
    """A file that is no socket is neither replaced nor removed, nor is a socket that took the place of ours."""
    path = rig.scratch / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="in use: a file that is no socket"):
        rig.open(listen=f"unix://{path}")
    assert path.read_text() == "precious"
    path.unlink()
    ours = Listener(Address(path=str(path)), field="listen")
    path.unlink()
    theirs = Listener(Address(path=str(path)), field="listen")
    ours.close()
    assert path.exists()
    theirs.close()
    assert not path.exists()


def test_directory_that_is_not_there(rig: Any) -> None:
    """What the system refuses is told with its own words and the field."""
    with pytest.raises(ConfigError, match=r"listen: .*cannot be listened on: No such file or directory"):
        rig.open(listen=f"unix://{rig.scratch}/no/where")


def test_ticket_bears_the_real_port(rig: Any) -> None:
    """Where the system chose the port, tickets and the connector name the one it chose."""
    source = rig.open(listen="tcp://127.0.0.1:0")
    part = rig.part([(1, 64)])
    ticket = source.put(part.batch, Until(5.0))
    assert ticket.peer == source.address
    assert not ticket.peer.endswith(":0")


@pytest.mark.parametrize(
    "config",
    [
        {"listens": "unix:///x"},
        {"listen": 7},
        {"peers": "unix:///x"},
        {"connections": 0},
        {"connections": 17},
        {"lease_s": 0},
        {"max_clients": 0},
        {"max_published": 0},
        {"token_file": ""},
        {"token_file": "a\0b"},
        {"tls": {"cert": "c", "key": "k"}},
        {"tls": {"cert": "c", "key": "k", "ca": "a", "server_name": ".x"}},
    ],
)
def test_bad_configuration(config: dict[str, object]) -> None:
    """Unknown keys, wrong types and values outside their ranges do not pass the configuration's decoder."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(config, StreamConfig)


def test_nothing_opens_behind_a_bad_address(rig: Any, tmp_path: Path) -> None:
    """A connector that could not be opened leaves no file and no descriptor (the warning filter sees sockets)."""
    before = list(tmp_path.iterdir())
    with pytest.raises(ConfigError):
        rig.open(listen=f"unix://{tmp_path}/s", peers=("nobody",))
    assert list(tmp_path.iterdir()) == before
