"""The errors that BootSeer raises.

Foreign exceptions are mapped to these once, at the adapter that meets them; only `cli.main`
turns them into an exit code. A message is one line: what, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class BootseerError(Exception):
    """Root of all own errors. `exit_code` is what the command line ends with."""

    exit_code = 1


class TransientError(BootseerError):
    """The same request may succeed later. `retry_after_s` is what the other side asked for, or None."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PermanentError(BootseerError):
    """Trying again gives the same result."""


class NotFoundError(PermanentError):
    """There is no object of this name."""


class TooShortError(PermanentError):
    """An object ends before the bytes that were asked for."""


class AlreadyExistsError(PermanentError):
    """The name is taken (EEXIST)."""


class NotEmptyError(PermanentError):
    """The folder is not empty (ENOTEMPTY)."""


class IsFolderError(PermanentError):
    """A folder where a file is needed (EISDIR)."""


class NotFolderError(NotFoundError):
    """A file where a folder is needed (ENOTDIR): nothing can lie below it."""


class NoSpaceError(PermanentError):
    """No space left, or a quota is exceeded (ENOSPC)."""


class NoSpaceNowError(TransientError):
    """No space left, but writes in flight may give some back (ENOSPC)."""


class AccessError(PermanentError):
    """The other side refuses: the login is missing or wrong, or does not have the right."""


class CorruptError(PermanentError):
    """Bytes are not what their digest or their format says. Never handed on as data."""


class SignatureError(PermanentError):
    """A signature is required, and no trusted key has signed these bytes under this name."""


class UsageError(BootseerError):
    """The request is invalid; `hint` says what to type instead."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "", exit_code: int = 2) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code


def limit_of(error: BaseException) -> str:
    """The end of a message about an error of the system: which limits refused a process or thread; else empty."""
    is_refused = isinstance(error, BlockingIOError) or "start new thread" in str(error)
    return "; see the limits of processes and memory (ulimit -u, pids.max)" if is_refused else ""


def as_message(error: BaseException) -> dict[str, str]:
    """An error as a message to another process."""
    text = str(error) if isinstance(error, BootseerError) else f"{type(error).__name__}: {error}{limit_of(error)}"
    return {"error": text, "kind": type(error).__name__, "hint": getattr(error, "hint", "")}


def from_message(message: Mapping[str, str]) -> BootseerError:
    """The error that another process has sent; `PermanentError` for an unknown kind."""
    found = globals().get(message["kind"])
    kind = found if isinstance(found, type) and issubclass(found, BootseerError) else PermanentError
    error: BootseerError = kind(message["error"])
    if isinstance(error, UsageError):
        error.hint = message["hint"]
    return error


@contextmanager
def os_errors_as(kind: Callable[..., BootseerError], what: object, then: str = "", **more: str) -> Iterator[None]:
    """Raise an `OSError` of the block as an error of this kind, with the message "`what`: reason`then`"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}{then}", **more) from error


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Raise an `ImportError` of the block as a `UsageError`: `what` needs a library that `extra` installs."""
    try:
        yield
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        why = f"needs {error.name or error}, which is not installed" if is_missing else f"is not possible: {error}"
        raise UsageError(f"{what} {why}", hint=f"pip install 'bootseer[{extra}]'") from error


class Interrupted(BaseException):
    """A signal asked this process to end. No `Exception`: nothing that handles errors may swallow it."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(name)
        self.exit_code = 128 + number
