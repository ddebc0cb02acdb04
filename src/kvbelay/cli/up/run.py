"""From the options to the end of the last process."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from kvbelay.cli.begun import in_one_go
from kvbelay.cli.up import engines, show
from kvbelay.cli.up.ports import HOST, free_ports, require_free
from kvbelay.cli.up.process import Process, Server, end_all, words
from kvbelay.cli.up.warden import Warden
from kvbelay.errors import ConfigError, DeadlineExceeded, PeerLost

ROUTE = (sys.executable, "-m", "kvbelay", "route")
LOOK_S = 0.2
"""How often we look whether all of them live."""
PATIENCE_S = {"reference": 4.0, "vllm": 8.0}
"""How long the router waits for the answer to a probe: all servers share one machine, and vLLM's are busy at times."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    *,
    model: str | None,
    engine: str | None,
    prefill: int,
    decode: int,
    port: int,
    logs: Path | None,
    within: float,
    arguments: Sequence[str],
) -> None:
    """Serve until a signal comes. Raises `KvbelayError` for what keeps it from serving, and what a signal's handler
    raises before it serves.
    """
    choice = engines.choose(engine, model)
    if arguments and choice.engine != "vllm":
        raise ConfigError("the reference engine takes none", field="arguments after --", remedy="leave them out")
    if port:
        require_free(port)
    click.echo(f"Engine: {choice.engine} ({choice.why}). Model: {choice.model}.")
    with contextlib.ExitStack() as stack:
        folder = _folder(logs)
        click.echo(f"Logs: {folder}")
        counts = {"prefill": prefill, "decode": decode}
        names = {role: [f"{role}-{number + 1}" for number in range(count)] for role, count in counts.items()}
        if choice.engine == "vllm":
            servers = engines.vllm(choice, names, arguments)
        else:
            weights = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbelay-up-")))
            _load(choice.model, weights)
            servers = engines.reference(choice, names, weights)
        with in_one_go():
            ensemble = Ensemble(folder, within)
            stack.callback(ensemble.end)
        ensemble.start(servers)
        router = _router(servers, names, port or free_ports(1)[0], folder, PATIENCE_S[choice.engine])
        ensemble.start([router])
        with contextlib.suppress(SystemExit):  # a signal: this is how it ends
            show.invitation(router.url, choice.model)
            ensemble.watch(router)
    click.echo(f"\nEverything that was started has been ended. Logs: {folder}")


class Ensemble:
    """The processes that run."""

    def __init__(self, folder: Path, within_s: float) -> None:
        self._folder = folder
        self._within_s = within_s
        self._warden = Warden()
        self._processes: list[Process] = []

    def start(self, servers: Sequence[Server]) -> None:
        """Start them, and wait until all of them serve. Raises `PeerLost` for one that ends, `DeadlineExceeded` for one
        that does not come.
        """
        begun = []
        for server in servers:
            with in_one_go():
                begun.append(Process(server, self._folder / f"{server.name}.log", self._warden))
                self._processes.append(begun[-1])
        missing = [*begun]
        with show.status() as say:
            for process in show.wait(begun, self._within_s, say):
                missing.remove(process)
                show.started(process)
        for process in missing:
            if how := process.ended():
                raise PeerLost(how)
        for process in missing[:1]:
            msg = f"{process.server.name} does not serve after {self._within_s:.0f} s{words(process.log)}"
            raise DeadlineExceeded(msg)

    def watch(self, router: Server) -> None:
        """Tell of servers that end. Raises `PeerLost` when the router does: without it there is nothing to ask."""
        while True:
            for process in [*self._processes]:
                how = process.ended()
                if how is None:
                    continue
                if process.server is router:
                    raise PeerLost(how)
                self._processes.remove(process)
                click.echo(f"\n{how}\n  The others go on.")
            time.sleep(LOOK_S)

    def end(self) -> None:
        """All of them. Signals do not interrupt it."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        end_all(self._processes)
        self._warden.close()


def _router(
    servers: Sequence[Server], names: Mapping[str, Sequence[str]], port: int, folder: Path, patience_s: float
) -> Server:
    """The router with its configuration, by which it knows the servers' names."""
    configuration: dict[str, Any] = {"health": {"timeout_s": patience_s}}
    for role, of_role in names.items():
        configuration[role] = [{"name": s.name, "url": s.url} for s in servers if s.name in of_role]
    path = folder / "router.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(configuration)))
    command = [*ROUTE, "--config", str(path), "--host", HOST, "--port", str(port)]
    return Server("router", port, command, {"PYTHONSAFEPATH": "1"}, "/ready")


def _load(model: str, weights: Path) -> None:
    """Have the weights made that all servers map, and find out now what is wrong with the model."""
    from kvbelay.reference import load_model  # noqa: PLC0415  # an extra

    if model != "tiny":
        click.echo("Loading the model ...")
    load_model(model, weights)


def _folder(logs: Path | None) -> Path:
    if logs is None:
        return Path(tempfile.mkdtemp(prefix="kvbelay-logs-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        msg = f"cannot be made: {exc.strerror or exc}"
        raise ConfigError(msg, source=str(logs), field="--logs", remedy="name a folder that is yours") from exc
    return logs.resolve()
