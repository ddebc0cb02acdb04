"""Bad input: one clear sentence on standard error, exit code 2, no traceback, nothing started, nothing left."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import pytest

from kvbelay.cli.demo import stage
from kvbelay.cli.main import main

Run = Callable[..., "Ended"]


class Ended(NamedTuple):
    """How a call ended."""

    code: int
    said: str
    errors: str


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the call may leave something."""
    with tempfile.TemporaryDirectory(prefix="kb") as name:
        yield Path(name)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals: None,  # noqa: ARG001  # puts the handlers back
    tmp_path: Path,
) -> Iterator[Run]:
    """Calls ``kvbelay``; no worker may be started."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(stage, "MODULES", {})

    def call(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["kvbelay", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Ended(int(caught.value.code or 0), *capsys.readouterr())

    yield call
    assert not list(temporary.iterdir())


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """The one sentence with which ``kvbelay demo --model tiny`` refuses these options."""

    def call(*arguments: str | Path) -> str:
        ended = run("demo", "--model", "tiny", *arguments)
        assert ended.code == 2
        assert "Traceback" not in ended.errors
        (sentence,) = re.findall(r"(?m)^Error: (.*)$", ended.errors)
        assert ended.errors.endswith(f"Error: {sentence}\n")
        return sentence

    return call


@pytest.fixture
def other_architecture(place: Path) -> Path:
    writer = gguf.GGUFWriter(path := place / "other.gguf", "gpt2")
    writer.add_block_count(2)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def test_model_that_is_not_there(refused: Callable[..., str]) -> None:
    """The path, and what may be named instead."""
    assert refused("--model", "/not/there.gguf") == (
        '/not/there.gguf: the model cannot be read (No such file or directory); name a GGUF file, "smollm2" or "tiny"'
    )


def test_model_of_another_architecture(refused: Callable[..., str], other_architecture: Path) -> None:
    """The file, the architecture that it has, and the one that it should have."""
    sentence = refused("--model", other_architecture)
    assert sentence.startswith(f"{other_architecture}: general.architecture: ")
    assert "gpt2" in sentence
    assert "llama" in sentence


@pytest.mark.parametrize("nbytes", [0, 3, 20, 70])
def test_model_that_is_truncated(refused: Callable[..., str], other_architecture: Path, nbytes: int) -> None:
    """Wherever the file was cut off, the sentence names it."""
    other_architecture.write_bytes(other_architecture.read_bytes()[:nbytes])
    assert refused("--model", other_architecture).startswith(f"{other_architecture}: ")


def test_model_that_is_a_directory(refused: Callable[..., str], place: Path) -> None:
    """A directory is no file."""
    assert refused("--model", place).startswith(f"{place}: the model cannot be read (Is a directory)")


def test_port_in_use(refused: Callable[..., str]) -> None:
    """The address, that it is in use, and the option that chose it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        sentence = refused("--near", address)
    assert sentence.startswith("--near: ")
    assert f"{address} is in use; choose another address" in sentence


def test_socket_in_use(refused: Callable[..., str], place: Path) -> None:
    """Of a socket that somebody serves, or a file that is no socket, likewise; neither is touched."""
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(place / "near.sock"))
        taken.listen()
        assert "is in use by a process that runs" in refused("--near", f"unix://{place}/near.sock")
    (place / "file").write_text("precious", encoding="utf-8")
    assert "is in use: a file that is no socket" in refused("--near", f"unix://{place}/file")
    assert (place / "file").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize(
    ("near", "words"),
    [
        ("tcp://192.0.2.1:7777", "is not on this host's loopback"),
        ("tcp://localhost:7777", "no name is looked up"),
        ("tcp://127.0.0.1:0", "names no port"),
        ("tcp://127.0.0.1:70000", "is not an address"),
        ("http://127.0.0.1:7777", "is not an address"),
        ("unix://near.sock", "is not an address"),
        ("unix:///" + "long/" * 30, "has at most 107 bytes"),
        ("unix:///not/there/near.sock", "No such file or directory"),
        ("", "is not an address"),
    ],
)
def test_address_that_cannot_be_served(refused: Callable[..., str], near: str, words: str) -> None:
    """What is wrong with it, and how one is written."""
    sentence = refused("--near", near)
    assert sentence.startswith("--near: ")
    assert words in sentence


def test_store_with_a_file_in_the_way(refused: Callable[..., str], place: Path) -> None:
    """A file where the directory, or one above it, should be is named with the option."""
    (place / "file").write_text("precious", encoding="utf-8")
    for path in (place / "file", place / "file" / "below"):
        sentence = refused("--store", path)
        assert sentence.startswith("--store: ")
        assert f"the directory '{path}' cannot be used" in sentence
    assert (place / "file").read_text(encoding="utf-8") == "precious"


def test_store_that_cannot_be_written(refused: Callable[..., str]) -> None:
    """A file system that takes no files, even from root."""
    assert "the directory '/proc/kvbelay' cannot be used" in refused("--store", "/proc/kvbelay")


def test_prompt_longer_than_the_cache(refused: Callable[..., str], place: Path) -> None:
    """Which prompt, how long it is, and how much there is room for."""
    (place / "prompts").write_text("short\n" + "x" * 5000 + "\n", encoding="utf-8")
    assert refused("--prompts", place / "prompts") == (
        "prompt r01 does not fit: 5001 tokens, and up to 16 of the answer; the cache holds 4096; shorten the prompt"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "there is no prompt"), (b" \n\n\t\n", "there is no prompt"), (b"caf\xe9\n", "name a text file in UTF-8")],
)
def test_prompts_that_are_none(refused: Callable[..., str], place: Path, content: bytes, words: str) -> None:
    """A file without a prompt, or not in UTF-8, is named, and what it should be."""
    (place / "prompts").write_bytes(content)
    sentence = refused("--prompts", place / "prompts")
    assert sentence.startswith(f"{place / 'prompts'}: ")
    assert words in sentence


def test_prompts_that_cannot_be_read(refused: Callable[..., str], place: Path) -> None:
    """A file that is not there, and a directory."""
    for path, words in ((place / "none", "No such file"), (place, "Is a directory")):
        sentence = refused("--prompts", path)
        assert sentence.startswith(f"{path}: the prompts cannot be read")
        assert words in sentence


def test_record_that_cannot_be_written(refused: Callable[..., str], place: Path) -> None:
    """It is found out before anything starts, and no empty file is left where something else was wrong."""
    assert refused("--json", place / "none" / "record").startswith(f"{place / 'none' / 'record'}: cannot be written")
    assert "Is a directory" in refused("--json", place)
    refused("--json", place / "record", "--store", "/proc/kvbelay")
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--requests", "0", "0 is not in the range 1<=x<=10000"),
        ("--requests", "many", "'many' is not a valid integer"),
        ("--faults", "some", "'some' is not one of 'none', 'default', 'storm'"),
        ("--seed", "-1", "-1 is not in the range"),
        ("--seed", str(2**70), "is not in the range"),
        ("--speed", "9", "No such option"),
    ],
)
def test_options(refused: Callable[..., str], option: str, value: str, words: str) -> None:
    """The option, the value, and what is possible."""
    sentence = refused(option, value)
    assert option in sentence
    assert words in sentence


def test_no_temporary_directory(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no temporary directory can be made, the sentence is the operating system's."""
    monkeypatch.setattr(tempfile, "tempdir", "/not/there")
    ended = run("demo", "--model", "tiny")
    assert ended.code == 2
    assert re.fullmatch(r"Error: .*No such file or directory.*/not/there.*\n", ended.errors)


def test_kvbelay_alone(run: Run) -> None:
    """Without a subcommand it lists them, each with what it does."""
    ended = run()
    assert re.search(r"(?m)^  demo +Move a model's KV cache between two processes", ended.said + ended.errors)


def test_unknown_subcommand(run: Run) -> None:
    """It is named."""
    ended = run("domo")
    assert ended.code == 2
    assert "Error: No such command 'domo'." in ended.errors


def test_version(run: Run) -> None:
    """The package's name and version."""
    assert run("--version").code == 0
    assert re.fullmatch(r"kvbelay, version \d+\.\d+\.\d+\n", run("--version").said)


def test_help_has_examples(run: Run) -> None:
    """Each option is explained, and there are commands to copy, each of which can be parsed."""
    ended = run("demo", "--help")
    assert ended.code == 0
    examples = re.findall(r"(?m)^    kvbelay demo(.*?)(?:  .*)?$", ended.said)
    assert len(examples) >= 3
    for options in examples:
        assert run("demo", *options.split(), "--help").code == 0
    assert all(len(line) <= 80 for line in ended.said.splitlines())


KVBELAY = (sys.executable, "-m", "kvbelay")
SMALL = ("demo", "--model", "tiny", "--faults", "none", "--requests", "1")
WITHOUT = "import sys; sys.modules[{module!r}] = None; from kvbelay.cli.main import main; main()"


def without(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT.format(module=module), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["rich", "numpy"])
def test_extra_that_is_not_installed(module: str) -> None:
    """The demo names what is missing and the extra to install; help needs no extra."""
    ended = without(module, "demo", "--model", "tiny")
    assert ended.returncode == 2
    assert re.fullmatch(rf"Error: .* needs {module}; install the extra: pip install 'kvbelay\[demo\]'\n", ended.stderr)
    assert "Move a model's KV cache" in without(module, "--help").stdout
    assert "Examples:" in without(module, "demo", "--help").stdout


@pytest.mark.parametrize("redirection", [">&-", "> /dev/full", "<&-"])
def test_standard_streams_that_are_missing_or_full(place: Path, redirection: str) -> None:
    """Closed standard input or output changes nothing; output that nobody takes is one sentence. No traceback."""
    ended = subprocess.run(
        ["/bin/sh", "-c", f'"$0" "$@" {redirection}', *KVBELAY, *SMALL],
        env={**os.environ, "TMPDIR": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not list(place.iterdir())
    if redirection == "> /dev/full":
        assert (ended.returncode, ended.stderr) == (2, "Error: [Errno 28] No space left on device\n")
    else:
        assert (ended.returncode, ended.stderr) == (0, "")


def test_output_that_cannot_be_encoded() -> None:
    """Where the terminal cannot show what a model says, it shows something else."""
    ended = subprocess.run(
        [*KVBELAY, *SMALL],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.isascii()
