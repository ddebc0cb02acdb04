"""Connectors by name: built-in ones, third parties', and one clear error for whatever is wrong with a configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbelay.connectors import registry
from kvbelay.connectors.faulty import Fault, Faulty
from kvbelay.connectors.memory import MemoryConnector
from kvbelay.connectors.port import PORT_VERSION
from kvbelay.connectors.registry import known, load_object, open_backend, open_child, prepare, prepare_object
from kvbelay.core.model import Fingerprint
from kvbelay.errors import Closed, ConfigError, MissingExtra, PeerLost
from kvbelay.runtime.deadline import Until

OURS = Fingerprint("tiny", "1", ())
PLACE = {"source": "belay.toml", "field": "children.near"}

ACME = """
import msgspec
from kvbelay.errors import ConfigError, PeerLost

class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sizes: tuple[int, ...] = ()

class Config(msgspec.Struct, frozen=True):
    address: str
    retries: int = 3
    inner: Inner = Inner()

class Connector:
    def __init__(self, config, child):
        self.config, self.child = config, child
    def lookup(self, ids, within): return []
    def put(self, batch, within): return None
    def get(self, batch, ticket, within): return None
    def release(self, ticket, within): pass
    def probe(self, within): pass
    def close(self): pass

class Backend:
    Config = Config
    digest_in_pass = False
    def open(self, config, *, child, fingerprint):
        if config.address == "nowhere":
            raise ConfigError("no such place", field="address", remedy="look at a map")
        if config.address == "down":
            raise PeerLost("it is down")
        if config.address == "lean":
            import a_library_that_is_not_there
        if config.address == "odd":
            return object()
        return Connector(config, child)

BACKEND = Backend()

class Around(msgspec.Struct):
    connector: str
    config: dict = msgspec.field(default_factory=dict)

class Ring:
    Config = Around
    digest_in_pass = True
    wrapped = []
    def wrap(self, inner, config, *, child):
        self.wrapped.append(inner)
        raise ConfigError("too tight", field="size", remedy="loosen it")

RING = Ring()

class Loop:
    Config = Config
    digest_in_pass = True
    def wrap(self, inner, config, *, child): return inner
LOOP = Loop()

class Half:
    Config = dict
    open = None
HALF = Half()

class Hostile:
    def __getattribute__(self, name):
        raise RuntimeError("do not look at me")
HOSTILE = Hostile()
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution on the path that registers entry points of the group."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(package: str = "acme", module: str = ACME, **points: str) -> None:
        (tmp_path / f"{package}.py").write_text(module, encoding="utf-8")
        monkeypatch.delitem(sys.modules, package, raising=False)
        information = tmp_path / f"{package}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}\n" for name, value in points.items()]
        (information / "entry_points.txt").write_text(f"[kvbelay.connectors]\n{''.join(lines)}")

    return installed


def refused(connector: str, config: Any = None, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """The error that opening ends in; it names the file, and is the only one."""
    with pytest.raises(ConfigError) as caught:
        open_child("near", connector, {"address": "here"} if config is None else config, OURS, **PLACE)
    assert type(caught.value) is kind
    assert caught.value.source == "belay.toml"
    assert str(caught.value).startswith("belay.toml: children.near")
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_built_in(name: str) -> None:
    """Every built-in connector loads, and is a backend."""
    backend = open_backend(name)
    assert backend.Config.__struct_config__.forbid_unknown_fields
    assert name in known()


def test_opens_a_child() -> None:
    """A child opens from a mapping, under its name."""
    opened = open_child("near", "memory", {"store": "registry"}, OURS)
    assert isinstance(opened, MemoryConnector)
    opened.close()


def test_loads_nothing_before_it_is_asked_for() -> None:
    """Importing the registry loads no backend."""
    names = [value.partition(":")[0] for value in registry.BUILT_IN.values()]
    text = Path(registry.__file__).read_text(encoding="utf-8")
    assert not [name for name in names if f"import {name}" in text or f"from {name}" in text]


def test_prepare_starts_nothing(tmp_path: Path) -> None:
    """A configuration is judged without opening anything."""
    prepared = prepare("store", "file", {"path": str(tmp_path / "new"), "capacity_nbytes": 10_000}, **PLACE)
    assert (prepared.child, prepared.config.capacity_nbytes) == ("store", 10_000)
    assert list(tmp_path.iterdir()) == []
    prepared.open(OURS).close()
    assert (tmp_path / "new").is_dir()


def test_third_party(install: Install) -> None:
    """A connector of another package opens by the name of its entry point, and is listed."""
    install(acme="acme:BACKEND")
    opened = open_child("near", "acme", {"address": "here", "inner": {"sizes": [1]}}, OURS)
    assert (opened.child, opened.config.address, opened.config.inner.sizes) == ("near", "here", (1,))
    assert "acme" in known()


def test_unknown_connector(install: Install) -> None:
    """The error names all connectors that there are, and the one that was meant."""
    install(acme="acme:BACKEND")
    error = refused("memroy")
    assert error.field == "children.near"
    assert "did you mean 'memory'?" in error.remedy
    assert "acme, faulty, file, memory, stream" in error.remedy
    assert "did you mean" not in refused("redis").remedy


def test_unknown_key(tmp_path: Path) -> None:
    """The error names the key by its path, and the field that was meant."""
    error = refused("file", {"path": str(tmp_path), "capacity_nbyte": 5})
    assert error.field == "children.near.capacity_nbyte"
    assert "did you mean 'capacity_nbytes'?" in error.remedy
    assert "path, capacity_nbytes, fsync" in error.remedy


def test_unknown_key_of_a_lenient_struct(install: Install) -> None:
    """A backend whose struct would swallow unknown keys does not get any."""
    install(acme="acme:BACKEND")
    assert refused("acme", {"address": "here", "colour": 1}).field == "children.near.colour"


@pytest.mark.parametrize(
    ("config", "field", "text"),
    [
        ({"path": "x", "capacity_nbytes": "5"}, ".capacity_nbytes", "Expected `int`, got `str`"),
        ({"path": "x", "capacity_nbytes": 5, "fsync": 1}, ".fsync", "Expected `bool`, got `int`"),
        ({"path": "x", "capacity_nbytes": 0}, ".capacity_nbytes", "Expected `int` >= 1"),
        ({"path": "", "capacity_nbytes": 5}, ".path", "length >= 1"),
        ({"path": "x"}, "", "missing required field `capacity_nbytes`"),
        ("/var/cache", "", "Expected `object`, got `str`"),
        (5, "", "Expected `object`, got `int`"),
    ],
)
def test_wrong_values(config: object, field: str, text: str) -> None:
    """A wrong type, a value out of range or a missing field is named by its path; nothing is converted."""
    error = refused("file", config)
    assert error.field == f"children.near{field}"
    assert text in error.what
    assert "path, capacity_nbytes, fsync" in error.remedy


@pytest.mark.parametrize(
    ("inner", "field"), [({"sizes": [1, "2"]}, ".inner.sizes[1]"), ({"size": 1}, ".inner"), ([1], ".inner")]
)
def test_nested_values(install: Install, inner: object, field: str) -> None:
    """The path of a nested field is told in full."""
    install(acme="acme:BACKEND")
    assert refused("acme", {"address": "here", "inner": inner}).field == f"children.near{field}"


def test_error_of_the_backend_itself(install: Install, tmp_path: Path) -> None:
    """A ConfigError of open() is completed with the file and the path of the child."""
    install(acme="acme:BACKEND")
    error = refused("acme", {"address": "nowhere"})
    assert (error.what, error.field, error.remedy) == ("no such place", "children.near.address", "look at a map")
    (tmp_path / "taken").write_text("")
    assert refused("file", {"path": str(tmp_path / "taken"), "capacity_nbytes": 5}).field == "children.near.path"


def test_missing_library(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not installed is a MissingExtra that says what to install; the cause stays chained."""
    install(acme="acme:BACKEND", lean="a_module_that_is_not_there:BACKEND")
    for connector, config in (("acme", {"address": "lean"}), ("lean", {})):
        error = refused(connector, config, MissingExtra)
        assert "that_is_not_there" in error.what
        assert isinstance(error.__cause__, ImportError)
    monkeypatch.setitem(registry.BUILT_IN, "nixl", "kvbelay.connectors.not_there:BACKEND")
    assert "pip install 'kvbelay[nixl]'" in refused("nixl", {}, MissingExtra).remedy


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("raise RuntimeError('half installed')", "half installed"),
        ("def broken(:", "SyntaxError"),
        ("BACKENDS = 1", "BACKEND"),
        ("raise BaseException('rude')", "rude"),
    ],
)
def test_package_that_does_not_load(install: Install, module: str, text: str) -> None:
    """Whatever a foreign module raises when it is imported becomes one error that says so and names its package."""
    install("rotten", module, rotten="rotten:BACKEND")
    error = refused("rotten")
    assert text in error.what
    assert "of rotten does not load" in error.what


@pytest.mark.parametrize(
    ("value", "lacking"),
    [
        ("acme:HALF", ["Config", "digest_in_pass", "open()"]),
        ("acme:HOSTILE", ["Config", "digest_in_pass", "open()"]),
        ("acme:Backend", ["open()"]),
        ("acme", ["digest_in_pass", "open()"]),
    ],
)
def test_object_that_is_no_backend(install: Install, value: str, lacking: list[str]) -> None:
    """An entry point that names something else is refused, naming what it lacks; so is a class."""
    install(other=value)
    error = refused("other")
    for part in ("Config", "digest_in_pass", "open()"):
        assert (part in error.what.partition("lacks")[2]) == (part in lacking)


@pytest.mark.parametrize("version", ["0", "2", "'1'", "True", "None", "1.0"])
def test_port_version_that_is_not_ours(install: Install, version: str) -> None:
    """A backend that was written for another version of the port, or whose version is none, is refused by name."""
    install("newer", f"{ACME}\nBackend.port_version = {version}", newer="newer:BACKEND")
    error = refused("newer")
    assert error.what == f"connector 'newer' of newer was written for port version {version}, this is {PORT_VERSION}"
    assert f"for port version {PORT_VERSION}" in error.remedy


def test_port_version_that_is_ours(install: Install) -> None:
    """A backend that says the version that this is opens, as does one that says none."""
    install("ours", f"{ACME}\nBackend.port_version = {PORT_VERSION}", ours="ours:BACKEND")
    assert open_child("near", "ours", {"address": "here"}, OURS).child == "near"


def test_backend_that_nobody_registered(install: Install) -> None:
    """What module:attribute names is loaded, checked and configured as an entry point would be."""
    install()
    backend = load_object("acme:BACKEND", source="TARGET")
    assert prepare_object("near", "acme:BACKEND", backend, {"address": "here"}).open(OURS).child == "near"
    for reference, text in (("acme:NOTHING", "NOTHING"), ("acme:", "acme:"), ("no_such_module:X", "no_such_module")):
        with pytest.raises(ConfigError, match=text) as caught:
            load_object(reference, source="TARGET")
        assert str(caught.value).startswith("TARGET: ")
    with pytest.raises(ConfigError, match="acme:HALF of acme is no backend"):
        prepare_object("near", "acme:HALF", load_object("acme:HALF"), {})


def test_connector_without_methods(install: Install) -> None:
    """What open() returned must have the methods of the port."""
    install(acme="acme:BACKEND")
    assert "lacks lookup, put, get, release, probe, close" in refused("acme", {"address": "odd"}).what


def test_backend_that_cannot_start(install: Install) -> None:
    """A backend that is down is no mistake of the configuration: its own error comes through."""
    install(acme="acme:BACKEND")
    with pytest.raises(PeerLost):
        open_child("near", "acme", {"address": "down"}, OURS, **PLACE)


def test_claimed_names(install: Install) -> None:
    """A name that two packages claim, or that is ours, opens neither of them, and the error names both."""
    install("acme", memory="acme:BACKEND", twice="acme:BACKEND")
    install("other", ACME, twice="other:BACKEND")
    error = refused("memory", {})
    assert "claimed by acme, kvbelay" in error.what
    assert "claimed by" in (what := refused("twice").what)
    assert "acme" in what
    assert "other" in what


def test_faulty_wraps_any_connector() -> None:
    """The connector inside a faulty one opens from the same configuration, under the same name."""
    config = {
        "connector": "memory",
        "config": {"store": "inside"},
        "plan": {"seed": 3, "strikes": [{"fault": "late write", "nth": 1}]},
    }
    opened = open_child("near", "faulty", config, OURS, **PLACE)
    assert isinstance(opened, Faulty)
    assert isinstance(opened.inner, MemoryConnector)
    opened.close()
    assert prepare("near", "faulty", config).config.plan.strikes[0].fault is Fault.LATE_WRITE


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"connector": "memroy"}, "children.near.connector"),
        ({"connector": "file", "config": {"path": "x", "capacity": 1}}, "children.near.config.capacity"),
        ({"connector": "faulty", "config": {"connector": "memroy"}}, "children.near.config.connector"),
        ({"connector": "memory", "plan": {"strikes": [{"fault": "plague"}]}}, "children.near.plan.strikes[0].fault"),
        ({"connector": "memory", "plan": {"strikes": [{"fault": "lie"}]}}, "children.near.plan.strikes[0]"),
    ],
)
def test_paths_inside_a_wrapper(config: dict[str, object], field: str) -> None:
    """An error inside a wrapper is named by its full path, before anything is opened."""
    with pytest.raises(ConfigError) as caught:
        prepare("near", "faulty", config, **PLACE)
    assert (caught.value.source, caught.value.field) == ("belay.toml", field)


def test_unknown_kind_is_named_where_it_stands() -> None:
    """Where the fields stand in ``config``, the kind stands beside them in ``connector``."""
    with pytest.raises(ConfigError) as caught:
        prepare("near", "memroy", {}, source="belay.toml", field="children[0].config")
    assert caught.value.field == "children[0].connector"


def test_inner_is_closed_if_its_wrapper_fails(install: Install) -> None:
    """A wrapper that does not start leaves nothing open."""
    install(ring="acme:RING", loop="acme:LOOP")
    error = refused("ring", {"connector": "memory", "config": {"store": "ring"}})
    assert error.field == "children.near.size"
    (inner,) = open_backend("ring").wrapped
    with pytest.raises(Closed):
        inner.probe(Until(5.0))
    assert "Config.connector and Config.config" in refused("loop").what
