"""Addresses, and the sockets behind them: what to listen on, whom to dial, and how every connection is tuned."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbelay.errors import ConfigError, PeerLost

SLICE_S = 0.05
"""Longest stay in one system call: how late a deadline, a cancellation or a close may be noticed."""
BUFFER_NBYTES = 1 << 20
"""Of each socket, both ways. Measured on loopback: 4 MiB is slower, as the data leaves the processor's cache."""
BACKLOG = 256
"""Connections that wait to be accepted; the system may allow fewer (``net.core.somaxconn``)."""
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""A peer whose host vanished without a word is known to be gone after about a minute of silence."""
MAX_PORT = 0xFFFF
UNIX_PATH_NBYTES = 107
"""Linux: ``sun_path`` has 108 bytes, one of them the terminator."""

_TIMEVAL = struct.Struct("@ll")
_TCP = re.compile(r"tcp://(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<four>[0-9.]+)):(?P<port>[0-9]{1,5})", re.ASCII)
_SHAPES = "write unix:///path/of/socket, tcp://10.0.0.1:port or tcp://[fd00::1]:port; no name is looked up"
_CONNECTED = frozenset({0, errno.EISCONN})
_WAITING = frozenset({errno.EINPROGRESS, errno.EALREADY, errno.EAGAIN, errno.EINTR})


class Address(msgspec.Struct, frozen=True):
    """A unix socket (``path``), or a TCP port (``port``) of an IPv4 or IPv6 address (``host``)."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """Of the socket."""
        if self.path:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def target(self) -> str | tuple[str, int]:
        """As ``bind`` and ``connect`` take it."""
        return self.path or (self.host, self.port)

    @property
    def local(self) -> bool:
        """Whether only this host can reach it."""
        return bool(self.path) or ipaddress.ip_address(self.host).is_loopback

    @property
    def wildcard(self) -> bool:
        """Whether it stands for every address of this host, and hence is none that a peer could dial."""
        return not self.path and ipaddress.ip_address(self.host).is_unspecified


def parse(text: str, *, field: str) -> Address:
    """The address that ``text`` writes down. Raises `ConfigError` for ``field`` if it is none."""
    if text.startswith("unix:///"):
        path = text.removeprefix("unix://")
        if "\0" in path or len(os.fsencode(path)) > UNIX_PATH_NBYTES:
            msg = f"{text!r}: the path of a unix socket has at most {UNIX_PATH_NBYTES} bytes, none of them zero"
            raise ConfigError(msg, field=field, remedy="choose a shorter path")
        return Address(path=path)
    match = _TCP.fullmatch(text)
    if match is not None and int(match["port"]) <= MAX_PORT:
        with contextlib.suppress(ipaddress.AddressValueError):
            if match["six"] is None:
                return Address(host=str(ipaddress.IPv4Address(match["four"])), port=int(match["port"]))
            six = ipaddress.IPv6Address(match["six"])
            if six.ipv4_mapped is None:  # what it maps would slip through the questions that `Address` answers
                return Address(host=str(six), port=int(match["port"]))
    msg = f"{text!r} is not an address"
    raise ConfigError(msg, field=field, remedy=_SHAPES)


def tune(sock: socket.socket) -> None:
    """Blocking in slices of `SLICE_S`. ``settimeout`` would make it non-blocking, and MSG_WAITALL void."""
    sock.setblocking(True)
    timeval = _TIMEVAL.pack(int(SLICE_S), round(SLICE_S % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, timeval)
    _size_buffers(sock)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def dial(address: Address, ask: Callable[[], object]) -> socket.socket:
    """A tuned connection. ``ask`` is called at least every `SLICE_S` seconds, and ends the wait by raising."""
    with contextlib.ExitStack() as unless_done:
        sock = unless_done.enter_context(socket.socket(address.family, socket.SOCK_STREAM))
        tune(sock)
        _connect(sock, address, ask)
        unless_done.pop_all()
    return sock


class Listener:
    """A socket that listens. A unix socket's file is readable by this user only, and goes with `close`.

    Raises `ConfigError` naming ``field`` if the address is in use or cannot be bound. The file that a dead process
    left is replaced.
    """

    def __init__(self, address: Address, *, field: str) -> None:
        self.sock = socket.socket(address.family, socket.SOCK_STREAM)
        self._inode: tuple[int, int] | None = None
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(self._close, address)
            self._listen(address, field)
            unless_done.pop_all()
        self.address = address if address.path else Address(host=address.host, port=self.sock.getsockname()[1])

    def close(self) -> None:
        """Let go of the address."""
        self._close(self.address)

    def _listen(self, address: Address, field: str) -> None:
        remedy = "choose another address, or one that this user may use"
        try:
            if address.path:
                _clear_stale(address.path, field)
            else:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not held up by TIME_WAIT
            _size_buffers(self.sock)  # accepted sockets inherit it, early enough for TCP's window
            self.sock.bind(address.target)
            if address.path:
                self._inode = _inode_of(address.path)
                Path(address.path).chmod(0o600)
            self.sock.listen(BACKLOG)
        except OSError as exc:
            what = "is in use" if exc.errno == errno.EADDRINUSE else f"cannot be listened on: {exc.strerror}"
            msg = f"{address} {what}"
            raise ConfigError(msg, field=field, remedy=remedy) from exc

    def _close(self, address: Address) -> None:
        with contextlib.suppress(OSError):  # the file may have been removed, or be another's by now
            if self._inode is not None and self._inode == _inode_of(address.path):
                Path(address.path).unlink()
        self._inode = None
        self.sock.close()


def _connect(sock: socket.socket, address: Address, ask: Callable[[], object]) -> None:
    remedy = "see whether the peer runs and listens there"
    while (code := sock.connect_ex(address.target)) not in _CONNECTED:
        if code not in _WAITING:
            msg = f"cannot connect to {address}: {os.strerror(code)}"
            raise PeerLost(msg, remedy=remedy) from OSError(code, os.strerror(code))
        ask()
    if address.port and sock.getsockname()[:2] == address.target:
        # TCP connects a port to itself when nobody listens there and the system happens to choose it as ours. The
        # peer's name cannot be asked for: one that dies may have reset the connection by now.
        msg = f"cannot connect to {address}: nobody listens there"
        raise PeerLost(msg, remedy=remedy) from ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")


def _size_buffers(sock: socket.socket) -> None:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_NBYTES)


def _inode_of(path: str) -> tuple[int, int]:
    found = Path(path).lstat()
    return found.st_dev, found.st_ino


def _clear_stale(path: str, field: str) -> None:
    try:
        mode = Path(path).lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        msg = f"unix://{path} is in use: a file that is no socket"
        raise ConfigError(msg, field=field, remedy="choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code != errno.ECONNREFUSED:
        msg = f"unix://{path} is in use by a process that runs"
        raise ConfigError(msg, field=field, remedy="choose another path, or stop that process")
    Path(path).unlink()
