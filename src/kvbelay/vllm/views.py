"""A request as one child sees it, where two children's ``kv_transfer_params`` could not share one dict.

The other side's guard sends each child's own parameters by name under ``kvbelay``. What stands there comes from a
client: it is used only where it has the right shape, and a child whose parameters no engine can have sent sees none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.leases import UNTIL
from kvbelay.vllm.options import KEY
from kvbelay.vllm.params import refusal

CHILDREN = "children"


class View:
    """The host's request, with the ``kv_transfer_params`` of one child. Everything else is the request's own."""

    def __init__(self, request: Any, params: dict[str, Any] | None) -> None:
        self.kv_transfer_params = params
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def merged(
    params: dict[str, dict[str, Any]], until: dict[str, float], link: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The children's ``kv_transfer_params`` in one: flat, as routers expect it, unless two children use a key.

    A key that two children use keeps the first one's value, and every child's own stand by name under ``kvbelay``.
    There it also says until when the children's offers are good, and where the engine's guard is reached (``link``).
    """
    if not params:
        return None
    flat: dict[str, Any] = {}
    clash = False
    for own in params.values():
        for key, value in own.items():
            clash |= key in flat
            flat.setdefault(key, value)
    ours: dict[str, Any] = {**link, UNTIL: until} if until else {**link}
    if clash:
        ours[CHILDREN] = params
    if ours:
        flat[KEY] = ours
    return flat


def view_for(child: Guarded, request: Any, views: dict[str, Any]) -> Any:
    """The request as this child sees it; ``views`` keeps what was made, since children write into their parameters."""
    params = request.kv_transfer_params
    if params is None:
        return request
    if child.name not in views:
        views[child.name] = _view(child, request, params)
    return views[child.name]


def _view(child: Guarded, request: Any, params: Any) -> Any:
    ours = params.get(KEY) if type(params) is dict else None
    named = ours.get(CHILDREN) if type(ours) is dict else None
    own = named.get(child.name) if type(named) is dict else None
    given = own if type(own) is dict else params
    why = "it is no mapping" if type(given) is not dict else ""
    if child.pulls and not why:
        why = refusal(given, needed=child.needed, hosts=child.hosts)
    if why:
        child.note(fail(errors.InvalidBatch(why), Where(child.name, "kv_transfer_params", request.request_id)))
        return View(request, None)
    return View(request, given) if given is own else request
