"""What stands between the load and the engines: the router, and nginx where it is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from kvbelay.errors import PeerLost

START_S = 30.0
END_S = 5.0
TICKS = os.sysconf("SC_CLK_TCK")
LOOPBACK = "127.0.0.1"

NGINX = """\
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/log;
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000;
    upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
}}
"""


class Server:
    """A process that listens on ``port``."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    def cpu_s(self) -> float:
        """Processor time that it has used, in steps of the kernel's clock (10 ms)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss_nbytes(self) -> int:
        """Its resident set."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def nginx_there() -> str | None:
    """Where nginx is; Debian keeps it from the path of ordinary users."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def router(prefill: int, decode: int) -> Iterator[Server]:
    """``kvbelay route`` between these ports."""
    port = _free_port()
    command = [sys.executable, "-m", "kvbelay", "route", "--port", str(port)]
    command += ["--prefill", f"http://{LOOPBACK}:{prefill}", "--decode", f"http://{LOOPBACK}:{decode}"]
    with TemporaryDirectory(prefix="kvbelay-") as folder, _running(command, port, Path(folder) / "log") as server:
        yield server


@contextlib.contextmanager
def nginx(program: str, engine: int) -> Iterator[Server]:
    """One process of nginx, in front of one engine."""
    port = _free_port()
    with TemporaryDirectory(prefix="kvbelay-") as folder:
        file = Path(folder) / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, engine=engine, port=port), encoding="ascii")
        command = [program, "-p", folder, "-e", f"{folder}/log", "-c", str(file)]
        with _running(command, port, Path(folder) / "said") as server:
            yield server


@contextlib.contextmanager
def _running(command: Sequence[str], port: int, log: Path) -> Iterator[Server]:
    with log.open("wb") as said:
        process = subprocess.Popen(command, stderr=said, stdout=said, start_new_session=True)  # noqa: S603  # ours
    try:
        _wait_for(process, port, log)
        yield Server(process, port)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until it accepts connections."""
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((LOOPBACK, port), 1.0):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(encoding="utf-8", errors="replace").strip().rsplit("\n", 1)[-1]
            msg = f"{Path(process.args[0]).name} does not listen: {said}"  # type: ignore[index,arg-type]  # a list
            raise PeerLost(msg, remedy="try the command by hand")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((LOOPBACK, 0))
        port: int = found.getsockname()[1]
    return port
