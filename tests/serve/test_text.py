"""The pieces of a text are the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbelay.reference.tokenizer import ByteTokenizer
from kvbelay.serve.text import Text

STOPS = st.lists(st.text(alphabet="ab€\N{REPLACEMENT CHARACTER}", min_size=1, max_size=4), max_size=3)
BYTES = st.lists(st.sampled_from([*b"ab", *"€".encode(), 0xFF, 0xE2]), max_size=40)


@given(BYTES, STOPS)
def test_pieces_are_the_text(tokens: list[int], stops: list[str]) -> None:
    """Whatever the bytes, the pieces together are what all tokens together say, cut before the first stop."""
    text = Text(ByteTokenizer(), stops)
    pieces = []
    for token in tokens:
        pieces.append(text.add(token))
        if text.stopped:
            break
    pieces.append(text.end())
    whole = ByteTokenizer().decode(tokens)
    cuts = [place for place in map(whole.find, stops) if place >= 0]
    if text.stopped or not cuts:
        assert "".join(pieces) == whole[: min(cuts, default=len(whole))]


def test_a_character_in_pieces() -> None:
    """Nothing is said of a character until it is whole."""
    text = Text(ByteTokenizer(), ())
    assert [text.add(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]


def test_what_may_be_a_stop_is_kept_back() -> None:
    """No more is said than stands before the longest stop that may have begun; at the end all of it is."""
    text = Text(ByteTokenizer(), ["bcd"])
    assert [text.add(byte) for byte in b"abc"] == ["", "", "a"]
    assert (text.end(), text.stopped) == ("bc", False)
    text = Text(ByteTokenizer(), ["bcd"])
    assert "".join(text.add(byte) for byte in b"abcde") == "a"
    assert (text.end(), text.stopped) == ("", True)
