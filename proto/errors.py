"""Every error that isles raises on purpose.

    IslesError
    |-- UsageError            the person at the keyboard can mend it: a flag, a file, a model
    |   |-- ConfigError       a setting is unknown, out of range, or contradicts another
    |   |-- ManifestError     this model cannot be split as asked
    |   `-- StoreLockedError  another broker owns the store folder
    |-- RemoteDataError       a peer sent something that cannot be right
    |   |-- MessageError      a header that is no valid message
    |   |-- PayloadError      a payload that no codec of ours wrote, or that was damaged on its way
    |   `-- ManifestMismatchError   a model that is not the run's model
    |-- RefusedError          a broker refused this process for good; the text says why
    |   |-- FencedError       a newer incarnation of this process exists
    |   `-- QuarantinedError  too much of what this learner sent was rejected
    |-- StoreError            the broker's disk did not keep its word, or its store is damaged
    |   `-- StoreFullError    the disk under it is full: nothing is lost, and the broker can start again once it is not
    |-- UnreachableError      nobody answered in the time that was given
    |-- NonFiniteError        this process computed NaN or infinity
    `-- RangeError            this process computed values that the chosen codec cannot represent

A message says whose fault it is, what happened, where, and what to do about it. Commands print it as one sentence and
exit with the class's `exit_code`.
"""

from __future__ import annotations


class IslesError(Exception):
    """The root of the tree; never raised itself."""

    exit_code = 1


class UsageError(IslesError, ValueError):
    """Something a person can mend before starting again."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, out of range, or contradicts another one."""


class ManifestError(UsageError):
    """This model cannot be split into fragments as asked."""


class StoreLockedError(UsageError):
    """Another broker process owns this store folder."""


class RemoteDataError(IslesError):
    """A peer sent something that cannot be right; nothing of it was used."""


class MessageError(RemoteDataError):
    """A header that is no valid message."""


class PayloadError(RemoteDataError):
    """A payload that no codec of ours wrote, or that was damaged on its way."""


class ManifestMismatchError(RemoteDataError):
    """A model that is not the run's model."""

    exit_code = 2


class RefusedError(IslesError):
    """A broker refused this process for good; starting it again unchanged would be refused again."""

    exit_code = 3


class FencedError(RefusedError):
    """A newer incarnation of this process exists; this one must end."""

    exit_code = 4


class QuarantinedError(RefusedError):
    """Too many contributions of this learner in a row were rejected: it may come later, or once it is pardoned."""

    exit_code = 9


def refusal_error(code: str) -> type[RefusedError]:
    """The exception that ends a process which a broker refused with this code."""
    return {"fenced": FencedError, "quarantined": QuarantinedError}.get(code, RefusedError)


class StoreError(IslesError):
    """The broker's disk did not keep its word, or its store cannot be read."""

    exit_code = 6


class StoreFullError(StoreError):
    """The disk under the store is full: nothing that was acknowledged is lost, and nothing else was acknowledged."""

    exit_code = 7


class UnreachableError(IslesError):
    """Nobody answered in the time that was given."""

    exit_code = 5


def unanswered(address: object, timeout_seconds: float) -> UnreachableError:
    """The exception of a process that no broker at `address` answered in the time that it was given."""
    return UnreachableError(
        f"no broker answered at {address} within {timeout_seconds:g} s: is it running there, and do its three ports "
        f"reach it from this machine? `isles doctor --broker {address}` examines the way"
    )


class NonFiniteError(IslesError, ArithmeticError):
    """This process computed NaN or infinity; the value was not sent."""


class RangeError(IslesError, ArithmeticError):
    """This process computed values too large for the chosen codec; nothing was sent."""


def shown(value: object) -> str:
    """A value that somebody gave, for a sentence: its beginning, if it is long."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # written in hexadecimal, numbers may be longer than Python writes out
        return "a number of thousands of digits"
