"""The guard's children: how each is made, named, asked and, if it cannot start, left out."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvbelay import errors
from kvbelay.core.boundary import Where, call, fail, text_of, type_name
from kvbelay.core.model import Failure
from kvbelay.vllm import host
from kvbelay.vllm.lines import Lines
from kvbelay.vllm.options import KEY, ChildOptions, Role, child_options, name_children
from kvbelay.vllm.series import Series

log = host.logger(__name__)

T = TypeVar("T")
TRUSTED = 2 / 3
"""The part of a lease on which a consumer may rely; by so much NIXL's heartbeats extend it, and the rest is theirs."""
SLOW_S = 1e-3
"""From here on a call of a hook counts as time that the child spends in the engine's step."""


class Guarded:
    """One child. ``connector`` is None where it could not start, and ``cause`` says why."""

    def __init__(self, name: str, options: ChildOptions, series: Series, lease_s: float | None = None) -> None:
        self.name = name
        self.options = options
        self.pulls = options.role is Role.PD
        """It pulls from another engine what the request's parameters name; else it is a cache."""
        self.beats = False
        """The other side keeps its offers alive for as long as it wants them."""
        self.pushed = False
        """The other engine writes into this one's blocks."""
        self.needed: tuple[str, ...] = ()
        """The parameters without which it cannot pull."""
        self.hosts = None if options.hosts is None else frozenset(options.hosts)
        self.trusted_s = math.inf if lease_s is None else lease_s * TRUSTED
        """How long after an offer another engine may still come for it, and how long a load of it may take."""
        self.connector: Any = None
        self.cause: Failure | None = None
        self.spent_s = 0.0
        """Seconds inside its slow hooks since `take_spent`."""
        self._series = series
        self._lines = Lines(log)

    def start(self, make: Callable[[], Any]) -> None:
        """Make the connector; what it raises makes the child unavailable."""
        made = call(make, Where(self.name, "__init__"))
        if isinstance(made, Failure):
            self.stop(made)
        else:
            self.connector = made

    def stop(self, cause: Failure) -> None:
        """From now on it is not asked any more. Raises what stops the engine if the child is required."""
        if self.cause is not None:
            return
        self.connector, self.cause = None, cause
        what = f"child {self.name!r} is unavailable: {cause.operation}: {cause.detail}"
        remedy = "mend it, or remove the child; its siblings serve meanwhile"
        if self.options.required:
            raise errors.ChildUnavailable(what, remedy="mend it, or set required to false")
        log.error("kvbelay: %s; %s", what, remedy)

    def ask(self, hook: str, *args: object, request: str = "", **kwargs: Any) -> object:
        """What the child's hook returns, or a `Failure`, which is logged and counted."""
        began = time.perf_counter()
        answer = call(lambda: getattr(self.connector, hook)(*args, **kwargs), Where(self.name, hook, request))
        seconds = time.perf_counter() - began
        if seconds > SLOW_S:
            self.took(hook, seconds)
        if isinstance(answer, Failure):
            self.note(answer)
        return answer

    def checked(self, hook: str, answer: object, right: Callable[[Any], bool], request: str = "") -> object:
        """The answer, or a `Failure` if its shape is wrong."""
        if isinstance(answer, Failure):
            return answer
        fits = call(lambda: right(answer), Where(self.name, hook, request))
        if fits is True:
            return answer
        error = errors.UnknownShape(f"{hook} answered {text_of(answer)} ({type_name(answer)})")
        failure = fail(error, Where(self.name, hook, request))
        self.note(failure)
        return failure

    def note(self, failure: Failure) -> None:
        """Count a failure, and log it."""
        kind = (failure.operation, failure.kind)
        self._series.count("failures", self.name, *kind)
        request = f" for request {failure.request}" if failure.request else ""
        after = f" (while handling it: {failure.handling})" if failure.handling else ""
        text = "kvbelay: %s.%s failed%s: %s%s"
        self._lines.warn(kind, text, failure.child, failure.operation, request, failure.detail, after)

    def took(self, hook: str, seconds: float) -> None:
        """A call of a hook was slow."""
        self.spent_s += seconds
        self._series.observe("slow_hook_seconds", self.name, hook, value=seconds)

    def take_spent(self) -> float:
        """Seconds spent in slow hooks since this was asked last."""
        spent, self.spent_s = self.spent_s, 0.0
        return spent


def configured(vllm_config: Any, series: Series | None = None) -> list[tuple[Guarded, Mapping[str, Any]]]:
    """The children that the configuration names, not started, each with its own configuration."""
    series = series or Series()
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    configs = extra.get("connectors")
    if not isinstance(configs, list) or not configs or not all(isinstance(config, Mapping) for config in configs):
        msg = "these are no children"
        field = "kv_connector_extra_config.connectors"
        raise errors.ConfigError(msg, source="--kv-transfer-config", field=field, remedy="list at least one connector")
    options = [child_options(index, config) for index, config in enumerate(configs)]
    names = name_children([str(config.get("kv_connector")) for config in configs], options)
    children: list[tuple[Guarded, Mapping[str, Any]]] = []
    for name, option, config in zip(names, options, configs, strict=True):
        if option.role is None:
            role = Role.PD if config.get("kv_connector") in host.PULLING else Role.CACHE
            option = msgspec.structs.replace(option, role=role)  # noqa: PLW2901  # with what is known of its class
        lease_s = host.lease_s(config) if option.lease_s is None else option.lease_s
        if lease_s is not None and option.load_s is not None and option.load_s > lease_s * TRUSTED:
            msg = f"load_s of {name!r} is longer than {lease_s * TRUSTED:.3g} s, two thirds of its lease_s"
            field = f"connectors[{len(children)}].{KEY}.load_s"
            remedy = "shorten load_s, or lengthen the lease on both sides"
            raise errors.ConfigError(msg, source="--kv-transfer-config", field=field, remedy=remedy)
        child = Guarded(name, option, series, lease_s)
        child.beats = config.get("kv_connector") in host.LEASES
        child.pushed = config.get("kv_connector") in host.PUSHED
        child.needed = host.NEEDED.get(config.get("kv_connector", ""), ())
        children.append((child, config))
    return children


def child_config(vllm_config: Any, config: Mapping[str, Any]) -> Any:
    """The engine's configuration as one child sees it: its own transfer configuration, without the guard's options."""
    extra = {key: value for key, value in (config.get("kv_connector_extra_config") or {}).items() if key != KEY}
    own = {"engine_id": vllm_config.kv_transfer_config.engine_id, **config, "kv_connector_extra_config": extra}
    child = copy.copy(vllm_config)
    child.kv_transfer_config = KVTransferConfig(**own)
    return child


def child_class(vllm_config: Any) -> Any:
    """The class of a child, from its own configuration."""
    return KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)


def start_children(vllm_config: Any, role: Any, kv_cache_config: Any, series: Series) -> list[Guarded]:
    """Make all children. One that raises is left out, with its cause."""
    children = []
    for child, config in configured(vllm_config, series):

        def make(config: Mapping[str, Any] = config) -> Any:
            own = child_config(vllm_config, config)
            return child_class(own)(own, role, kv_cache_config)

        child.start(make)
        children.append(child)
    return children
