"""An answer's text, while its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from kvbelay.reference import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no whole character, at the end of a text perhaps not yet."""


class Text:
    """Gives out each piece of the text as soon as no later token can change it.

    The pieces together are the text of all tokens, cut before the first of ``stops``.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._keep = max(map(len, stops), default=1) - 1
        self._tokens: list[int] = []
        self._given = 0
        self.stopped = False
        """Whether one of ``stops`` has come: no more is to be said."""

    def add(self, token: int) -> str:
        """What can be said after this token."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens).rstrip(UNFINISHED)
        return self._give(text, len(text) - self._keep)

    def end(self) -> str:
        """What is left when no more tokens come."""
        if self.stopped:
            return ""
        text = self._tokenizer.decode(self._tokens)
        return self._give(text, len(text))

    def _give(self, text: str, safe: int) -> str:
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self.stopped = True
            safe = min(found)
        piece = text[self._given : safe]
        self._given += len(piece)
        return piece
