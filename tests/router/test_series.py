"""What clients and instances send makes no series of the router's: every label has few values, all of them its own."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvbelay import errors
from kvbelay.router.config import Health
from kvbelay.router.outcome import Result

from .fakes import LONG, Fake, Rig, resets, rig, run, says

PATIENT = Health(interval_s=3600, timeout_s=60, open_after=1000)
KINDS = {name for name, thing in vars(errors).items() if isinstance(thing, type)} | {"NotReached"}
VALUES = {
    "endpoint": {"/v1/completions", "/v1/chat/completions", "/v1/models"},
    "result": {result.value for result in Result} | {"taken", "refused"},
    "role": {"prefill", "decode"},
    "peer": {"p1", "d1"},
    "kind": KINDS,
}
FEW = 10
"""Most values of the labels that are not listed."""


async def shown(up: Rig) -> tuple[str, dict[str, set[str]]]:
    """What is scraped, and the values of each label but that of buckets."""
    async with up.client.get(up.url + "/metrics") as response:
        text = await response.text()
    values: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label in sample.labels.keys() - {"le"}:
                values.setdefault(label, set()).add(sample.labels[label])
    return text, values


async def hostile(up: Rig, number: int) -> None:
    """One client's requests, all of whose names are its own."""
    name = f"made up {number}"
    for body in (
        {"prompt": LONG, "model": name, "user": name, name: name},
        {"prompt": name},
        {"prompt": LONG, "n": number + 2},
        {"prompt": LONG, "kv_transfer_params": {"remote_engine_id": name, "kvbelay": {"endpoint": name}}},
        {"messages": [{"role": name, "content": LONG}]},
        name.encode(),
    ):
        path = "/v1/chat/completions" if "messages" in str(body) else "/v1/completions"
        await up.post(body, f"{path}?{number}={number}", **{"X-Request-Id": name, f"X-Odd-{number}": name})
    for method, path in (("GET", f"/v1/{number}"), ("POST", f"/{number}"), (f"ODD{number}", "/v1/completions")):
        async with up.client.request(method, up.url + path) as response:
            await response.read()


def test_cardinality() -> None:
    """Whatever requests hold, and however instances answer, labels have the values that the router gives them."""

    async def main() -> None:
        answers = [says(500, "no"), resets, says(418, "tea"), says(200, {"kv_transfer_params": {"made up": 1}})]
        prefill, decode = Fake("p1", answers * 60), Fake("d1", answers * 60)
        async with rig([prefill], [decode], health=PATIENT) as up:
            for number in range(24):
                await hostile(up, number)
            text, values = await shown(up)
        assert "made up" not in text
        assert values.keys() == {*VALUES, "why"}
        for label, found in values.items():
            assert found <= VALUES[label] if label in VALUES else len(found) <= FEW, (label, found)

    run(main())
