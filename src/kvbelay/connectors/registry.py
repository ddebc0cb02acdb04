"""Which connectors there are, and how one is opened from a configuration.

The built-in ones are named here and loaded when asked for; anybody else's register an object that is a
`kvbelay.connectors.port.Backend` under the entry point group ``kvbelay.connectors``. Whatever is wrong with a
configuration ends in one `ConfigError` that names the file, the field and the remedy.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import msgspec

from kvbelay.connectors.port import PORT_VERSION, Backend, Connector, Unfenced, Wrapping
from kvbelay.connectors.staged import Staged
from kvbelay.core import boundary
from kvbelay.core.boundary import Where
from kvbelay.core.model import Failure, Fingerprint
from kvbelay.errors import ConfigError, MissingExtra

GROUP = "kvbelay.connectors"
BUILT_IN = {
    "memory": "kvbelay.connectors.memory:BACKEND",
    "stream": "kvbelay.connectors.stream:BACKEND",
    "file": "kvbelay.connectors.file:BACKEND",
    "faulty": "kvbelay.connectors.faulty:BACKEND",
}
"""Name to ``module:attribute``. An optional one's extra bears its name."""

WRAPPED = 16
"""Most connectors that may stand around one another."""
METHODS = ("lookup", "put", "get", "release", "probe", "close")

_AT = re.compile(r"(?s)(?P<what>.*) - at `(?:key in )?\$(?P<path>.*)`")


class Place(NamedTuple):
    """Where in the configuration a child stands: the file, or what stands for it, and the path in it."""

    source: str = ""
    field: str = ""

    def error(self, what: str, *, key: str = "", remedy: str) -> ConfigError:
        """About the child as a whole, or about the field of it at the path ``key``."""
        return ConfigError(what, source=self.source, field=self.at(key), remedy=remedy)

    def at(self, key: str) -> str:
        """The path of a field of the child."""
        return f"{self.field}{'' if not self.field or not key or key.startswith('[') else '.'}{key}"


class Prepared(NamedTuple):
    """A child whose configuration was decoded and found good; nothing of it runs yet."""

    child: str
    connector: str
    backend: Backend
    config: Any
    place: Place
    inner: Prepared | None = None
    """What a `Wrapping` backend stands around."""

    def open(self, fingerprint: Fingerprint) -> Connector:
        """Open it.

        Raises `ConfigError` where the configuration turns out to be unusable, `MissingExtra` where the backend's own
        library is absent, and whatever else the backend raises when it cannot start.
        """
        with contextlib.ExitStack() as undo:
            inner = self.inner.open(fingerprint) if self.inner is not None else None
            if inner is not None:
                undo.callback(inner.close)
            opened = self._start(inner, fingerprint)
            lacking = [name for name in METHODS if not callable(boundary.peek(opened, name))]
            if lacking:
                msg = f"connector {self.connector!r} opened {boundary.text_of(opened)}, which lacks {_listed(lacking)}"
                raise self.place.error(msg, remedy=f"install a release of {self.connector!r} that fits this kvbelay")
            undo.pop_all()
        return opened

    def _start(self, inner: Connector | None, fingerprint: Fingerprint) -> Connector:
        backend = self.backend
        try:
            if inner is not None and isinstance(backend, Wrapping):
                return backend.wrap(inner, self.config, child=self.child)
            return backend.open(self.config, child=self.child, fingerprint=fingerprint)
        except ImportError as exc:
            raise _missing(self.connector, exc, self.place) from exc
        except ConfigError as exc:
            exc.source, exc.field = self.place.source, self.place.at(exc.field)
            raise


def open_child(
    child: str,
    connector: str,
    config: Mapping[str, object],
    fingerprint: Fingerprint,
    *,
    source: str = "",
    field: str = "",
) -> Connector:
    """`prepare` and open at once."""
    return prepare(child, connector, config, source=source, field=field).open(fingerprint)


def prepare(child: str, connector: str, config: Mapping[str, object], *, source: str = "", field: str = "") -> Prepared:
    """Find the connector and decode its configuration, strictly; starts nothing.

    Parameters
    ----------
    child
        The name that the configuration gives it.
    connector
        The kind: a key of `BUILT_IN`, or the name of an entry point.
    config
        The connector's own fields.
    source, field
        For errors: the file, and the path of ``config`` in it. A last part that is ``config`` means that the kind
        stands beside it, as ``connector``.

    Raises
    ------
    ConfigError
        For an unknown connector, an unknown or missing field, a wrong type, a package that cannot be loaded or that is
        no `Backend`; `MissingExtra` where a library is absent.
    """
    place = Place(source, field)
    return _prepared(child, connector, _named(connector, place), config, place)


def prepare_object(
    child: str, name: str, thing: object, config: Mapping[str, object], *, source: str = "", field: str = ""
) -> Prepared:
    """`prepare` with an object that should be a `Backend`, and that no package need have registered."""
    place = Place(source, field)
    return _prepared(child, name, _checked(EntryPoint(name, name, GROUP), thing, place), config, place)


def load_object(reference: str, *, source: str = "", field: str = "") -> Any:
    """What ``module:attribute`` names. Raises `ConfigError` for whatever is raised meanwhile, as `prepare` does."""
    return _loaded(EntryPoint(reference, reference, GROUP), Place(source, field))


def open_backend(name: str) -> Backend:
    """The backend of this name. Raises as `prepare` does.

    A package that registers the name of a built-in connector, or of another package's, makes the name unusable: which
    of the two is meant is for the operator to say.
    """
    return _backend(name, Place())


def fenced(connector: Connector, *, child: str, arena_nbytes: int) -> Connector:
    """The connector itself, or, where it is `Unfenced`, a wrapper with an arena of that size that keeps its promise."""
    if not isinstance(connector, Unfenced):
        return connector
    return Staged(connector, arena_nbytes=arena_nbytes, child=child)


def known() -> tuple[str, ...]:
    """Names that can be asked for, in alphabetical order."""
    return tuple(sorted({*BUILT_IN, *entry_points(group=GROUP).names}))


def _named(connector: str, place: Place) -> Backend:
    """The backend that stands under ``connector``, beside the ``config`` at that place."""
    head, dot, last = place.field.rpartition(".")
    return _backend(connector, Place(place.source, f"{head}{dot}connector" if last == "config" else place.field))


def _prepared(
    child: str, connector: str, backend: Backend, config: Mapping[str, object], place: Place, *, depth: int = 1
) -> Prepared:
    if depth > WRAPPED:
        msg = f"more than {WRAPPED} connectors stand around one another"
        raise place.error(msg, remedy="wrap fewer")
    decoded: Any = _decoded(connector, config, backend, place)
    inner = None
    if isinstance(backend, Wrapping):
        within = Place(place.source, place.at("config"))
        found = _named(decoded.connector, within)
        inner = _prepared(child, decoded.connector, found, decoded.config, within, depth=depth + 1)
    return Prepared(child, connector, backend, decoded, place, inner)


def _backend(name: str, place: Place) -> Backend:
    points = list(entry_points(group=GROUP, name=name))
    if name in BUILT_IN:
        points.append(EntryPoint(name, BUILT_IN[name], GROUP))
    if not points:
        msg = f"there is no connector {name!r}"
        raise place.error(msg, remedy=_instead(name, known(), "connectors"))
    if len(points) > 1:
        msg = f"the name {name!r} is claimed by {_listed(_origin(point) for point in points)}"
        raise place.error(msg, remedy="uninstall the package that is not meant")
    return _checked(points[0], _loaded(points[0], place), place)


def _loaded(point: EntryPoint, place: Place) -> object:
    def load() -> object:
        try:
            return point.load()
        except ImportError as exc:
            return exc

    loaded = boundary.call(load, Where(place.field, "load"))
    if boundary.is_a(loaded, ImportError):
        raise _missing(point.name, loaded, place) from loaded
    if type(loaded) is Failure:
        msg = f"connector {point.name!r} of {_origin(point)} does not load: {loaded.detail}"
        raise place.error(msg, remedy="install a release of it that works")
    return loaded


def _checked(point: EntryPoint, loaded: Any, place: Place) -> Backend:
    written_for = boundary.peek(loaded, "port_version")
    silent = boundary.is_a(written_for, boundary.Absent) or boundary.is_a(written_for, boundary.Broken)
    if not silent and (type(written_for) is not int or written_for != PORT_VERSION):
        said = boundary.text_of(written_for)
        msg = (
            f"connector {point.name!r} of {_origin(point)} was written for port version {said}, this is {PORT_VERSION}"
        )
        raise place.error(msg, remedy=f"install a release of it for port version {PORT_VERSION}, or another kvbelay")
    config: Any = boundary.peek(loaded, "Config")
    struct = boundary.is_a(config, type) and issubclass(config, msgspec.Struct)
    wraps = callable(boundary.peek(loaded, "wrap"))
    needs = {
        "Config (a type of msgspec.Struct)": struct,
        "digest_in_pass (a bool)": type(boundary.peek(loaded, "digest_in_pass")) is bool,
        "open()": (wraps or callable(boundary.peek(loaded, "open"))) and not boundary.is_a(loaded, type),
    }
    if wraps and struct:
        needs["Config.connector and Config.config"] = {"connector", "config"} <= {*config.__struct_fields__}
    lacking = [what for what, there in needs.items() if not there]
    if lacking:
        msg = f"{point.value} of {_origin(point)} is no backend: it lacks {_listed(lacking)}"
        raise place.error(msg, remedy="name an instance of a class like kvbelay.connectors.port.Backend")
    backend: Backend = loaded
    return backend


def _decoded(name: str, config: object, backend: Backend, place: Place) -> msgspec.Struct:
    fields = backend.Config.__struct_encode_fields__
    for key in config if isinstance(config, Mapping) else ():
        if key not in fields:
            msg = f"connector {name!r} has no field {key!r}"
            raise place.error(msg, key=str(key), remedy=_instead(str(key), fields, "fields"))
    try:
        return msgspec.convert(config, backend.Config)
    except msgspec.ValidationError as exc:
        found = _AT.fullmatch(str(exc))
        what, key = (found["what"], found["path"].lstrip(".")) if found else (str(exc), "")
        remedy = f"the fields of connector {name!r} are {_listed(fields)}"
        raise place.error(what, key=key, remedy=remedy) from exc


def _missing(name: str, exc: ImportError, place: Place) -> MissingExtra:
    msg = f"connector {name!r} needs something that cannot be imported: {exc}"
    remedy = f"run: pip install 'kvbelay[{name}]'"
    if name not in BUILT_IN:
        remedy = f"install what the package that provides {name!r} asks for"
    return MissingExtra(msg, source=place.source, field=place.field, remedy=remedy)


def _origin(point: EntryPoint) -> str:
    """The package that registers it, or the module of an object that nobody registered."""
    if point.dist is not None:
        return point.dist.name
    return "kvbelay" if point.name in BUILT_IN else point.value.partition(":")[0]


def _instead(name: str, names: Iterable[str], what: str) -> str:
    names = tuple(names)
    close = difflib.get_close_matches(name, names, 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}The {what} are {_listed(names)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
