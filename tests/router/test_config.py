"""The configuration: what is taken, and what is said of what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbelay.cli.route.run import configured
from kvbelay.errors import ConfigError
from kvbelay.router.config import Fallback

GOOD = """
[[prefill]]
url = "http://10.0.0.1:8000/"
[[decode]]
name = "d-1"
url = "http://[::1]:8000"
weight = 2.0
[routing]
fallback = "always"
attempts = 7
[limits]
concurrency = 10
"""


def test_a_file(tmp_path: Path) -> None:
    """A file is read; who has no name gets host and port; the command line may change the fallback."""
    file = tmp_path / "router.toml"
    file.write_text(GOOD)
    config = configured((), (), file, None)
    assert [(peer.name, peer.url, peer.weight) for peer in (*config.prefill, *config.decode)] == [
        ("10.0.0.1:8000", "http://10.0.0.1:8000", 1.0),
        ("d-1", "http://[::1]:8000", 2.0),
    ]
    assert (config.routing.fallback, config.routing.attempts, config.limits.concurrency) == (Fallback.ALWAYS, 7, 10)
    assert configured((), (), file, "never").routing.fallback is Fallback.NEVER
    (tmp_path / "router.json").write_text('{"decode": [{"url": "http://x"}]}')
    assert configured((), (), tmp_path / "router.json", None).decode[0].name == "x:80"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "decode: there is no decode instance"),
        ("decode = 5", "router.toml: decode: Expected `array`"),
        ("[[decode]]\nurl = 'http://x'\nwait = 3", "unknown field `wait`"),
        ("[[decode]]\nurl = 'http://x'\nweight = 0", "decode[0].weight"),
        ("[[decode]]\nurl = 'x:80'", "decode[0].url"),
        ("[[decode]]\nurl = 'http://x:port'", "decode[0].url"),
        ("[[decode]]\nurl = 'http://user:secret@x'", "decode[0].url"),
        ("[[decode]]\nurl = 'http://x'\nname = 'a b'", "decode[0].name"),
        ("[[decode]]\nurl = 'http://x'\n[[decode]]\nurl = 'http://x/'", "is the name of two decode instances"),
        ("[[decode]]\nurl = 'http://x'\n[times]\nidle_s = 0", "times.idle_s"),
        ("[[decode]]\nurl = 'http://x'\n[routing]\nfallback = 'perhaps'", "routing.fallback"),
        ("[[decode", "is no valid TOML"),
    ],
)
def test_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    """What cannot be used is refused with a sentence that names file and field."""
    file = tmp_path / "router.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        configured((), (), file, None)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_named_twice(tmp_path: Path) -> None:
    """Instances stand in the file or on the command line, not in both."""
    file = tmp_path / "router.toml"
    file.write_text(GOOD)
    with pytest.raises(ConfigError, match="the command line names decode instances too"):
        configured((), ("http://x",), file, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        configured((), (), tmp_path / "none.toml", None)
