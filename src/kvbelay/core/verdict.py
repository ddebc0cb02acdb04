"""What a foreign result means: landed, missed or failed, and why.

Two branches only: a batch landed entire and verified, or it failed. A result that says nothing is a failure. A result
of a shape we do not know is read through the names that backends use for the same thing, each attribute once, and
refused by name where that is not safe.
"""

from __future__ import annotations

from enum import Enum

from kvbelay import errors
from kvbelay.core.boundary import ABSENT, Broken, Where, fail, is_a, peek, text_of, type_name
from kvbelay.core.model import BatchResult, Failure, Miss

GOOD = frozenset({"ok", "done", "success", "succeeded", "complete", "completed", "landed", "finished"})
BAD = frozenset({"failed", "fail", "failure", "error", "err", "aborted", "cancelled", "timeout", "timed_out"})
WORDS = ("state", "status")
FLAGS = ("ok", "all_ok", "success")
BLOCKS = ("failed_blocks", "failed_ids", "failed_block_ids")
CAUSES = ("error", "exception", "message")


def read(result: object, where: Where) -> BatchResult | Miss | Failure:
    """Bring what a ``get`` returned into our own words."""
    if result is Miss.MISS:
        return Miss.MISS
    if result is None:
        return fail(errors.SaidNothing("the call came back without a result"), where)
    if type(result) is BatchResult:
        return _check_fields(result, where)
    return _read_foreign(result, where)


def check(
    result: BatchResult, where: Where, *, nbytes: int, promised: bytes | None, landed: bytes | None
) -> Failure | None:
    """None if the whole batch landed as it left; else why not.

    ``nbytes`` is the batch's size, ``promised`` the ticket's digest, ``landed`` the destination's.
    """
    source = promised if promised is not None else result.source_digest
    if result.failed_blocks:
        count = len(result.failed_blocks)
        return fail(errors.TransferFailed(f"{count} of the batch's blocks failed"), where)
    if result.nbytes != nbytes:
        return fail(errors.ShortTransfer(f"{result.nbytes} of {nbytes} bytes landed"), where)
    if source is None or landed is None:
        return fail(errors.SaidNothing("there is no digest to verify the batch against"), where)
    if result.source_digest is not None and result.source_digest != source:
        return fail(errors.CorruptData("what was sent is not what the ticket promised"), where)
    if landed != source:
        return fail(errors.CorruptData("the bytes that landed are not the bytes that left"), where)
    return None


def _check_fields(result: BatchResult, where: Where) -> BatchResult | Failure:
    """The struct does not enforce its types when it is made: a connector may have put anything there."""
    for name, value, types in (
        ("nbytes", result.nbytes, (int,)),
        ("source_digest", result.source_digest, (bytes, type(None))),
        ("landed_digest", result.landed_digest, (bytes, type(None))),
        ("failed_blocks", result.failed_blocks, (tuple, list)),
    ):
        if not _exactly(value, *types):
            error = errors.UnknownShape(f"BatchResult.{name} is a {type_name(value)!r}")
            return fail(error, where)
    return result


def _read_foreign(result: object, where: Where) -> BatchResult | Failure:
    """A result of another's making: every attribute is read once, and all that are there must agree."""
    name = type_name(result)
    seen: dict[str, object] = {}
    for attribute in (*WORDS, *FLAGS, *BLOCKS, *CAUSES, "nbytes"):
        value = peek(result, attribute)
        if is_a(value, Broken):
            error = errors.UnknownShape(f"a result of type {name!r} cannot be read")
            return fail(error, where, handling=f"reading {attribute!r} raised {value.text}")
        if value is not ABSENT:
            seen[attribute] = value
    says = [_word(seen[key]) for key in (*WORDS, *FLAGS) if key in seen]
    blocks = [seen[key] for key in BLOCKS if seen.get(key) is not None]
    lists = [value for value in blocks if _exactly(value, tuple, list, set, frozenset)]
    if False in says or any(lists):
        cause = next((text_of(seen[key]) for key in CAUSES if seen.get(key) is not None), "")
        state = next((text_of(seen[key]) for key in (*WORDS, *FLAGS) if key in seen), "failed blocks")
        return fail(errors.TransferFailed(f"a result of type {name!r} reports {state} {cause}".rstrip()), where)
    if not says:
        error = errors.UnknownShape(f"a result of type {name!r} has none of {', '.join((*WORDS, *FLAGS))}")
        return fail(error, where)
    if None in says or len(lists) < len(blocks):
        error = errors.UnknownShape(f"a result of type {name!r} says {text_of(seen)}: a state or a list we do not know")
        return fail(error, where)
    nbytes = seen.get("nbytes")
    if type(nbytes) is not int:
        return fail(errors.SaidNothing(f"a result of type {name!r} does not say how many bytes landed"), where)
    return BatchResult(nbytes=nbytes, source_digest=None, landed_digest=None)


def _exactly(value: object, *types: type) -> bool:
    """Whether the value's type is one of these: no comparison that a foreign metaclass could answer."""
    return any(type(value) is known for known in types)


def _word(value: object) -> bool | None:
    """What a state means: True, False, or None for a word that we do not know."""
    if is_a(value, Enum):
        value = peek(value, "value")
    if type(value) is bool:
        return value
    if type(value) is not str:
        return None
    word = value.lower()
    return True if word in GOOD else False if word in BAD else None
