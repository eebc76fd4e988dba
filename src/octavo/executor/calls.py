"""Calls that run one after the other: in the caller's thread, or on a thread of their own.

Not concurrent.futures: its locks are taken by Python code, and what a signal handler raises amid that
(Ctrl-C, an alarm) leaves them taken for ever. Here threads meet in SimpleQueues only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

Result = TypeVar("Result")
_LOOK_UP = 0.05  # seconds


class Call(Generic[Result]):
    """A call, and its outcome once it has run."""

    def __init__(self, fn: Callable[..., Result], args: tuple[Any, ...]) -> None:
        self._work: tuple[Callable[..., Result], tuple[Any, ...]] | None = (fn, args)
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._result: Result | None = None
        self.error: BaseException | None = None
        """What the call raised."""

    def run(self) -> None:
        """Make the call. Raises nothing."""
        assert self._work is not None, "a call runs once"
        fn, args = self._work
        try:
            self._result = fn(*args)
        except BaseException as error:
            self.error = error
        bell, self._work = self._bell, None
        del self  # the error's traceback holds this frame: it must not hold the error in turn
        bell.put(None)

    def wait(self) -> None:
        """Return once it has run. May be called again after an interrupt."""
        while self._work is not None:
            # A signal that came just before this wait is seen after it.
            with suppress(Empty):
                self._bell.get(timeout=_LOOK_UP)

    def result(self) -> Result:
        """Wait; then what the call returned, or what it raised."""
        self.wait()
        if self.error is not None:
            raise self.error
        return cast(Result, self._result)


class CallersThread:
    """Runs a call where it is submitted."""

    def submit(self, fn: Callable[..., Result], /, *args: Any) -> Call[Result]:
        """The call, over. Only an Exception is its outcome: an interrupt passes."""
        call = Call(fn, args)
        try:
            call.run()
            if call.error is not None and not isinstance(call.error, Exception):
                raise call.error
            return call
        finally:
            del call  # see run

    def close(self, wait: bool = True) -> None:
        """Nothing runs that would have to end."""


class OwnThread:
    """Runs calls on a thread that lives until `close`, the end of this object, or of the process."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._closed = False
        thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._calls, thread)

    def submit(self, fn: Callable[..., Result], /, *args: Any) -> Call[Result]:
        """Queue a call. Raises RuntimeError after `close`."""
        call = Call(fn, args)
        self._calls.put(call)
        # Looked at last: what was queued before the mark of the end runs, what came later is told.
        if self._closed:
            raise RuntimeError("the thread was closed")
        return call

    def close(self, wait: bool = True) -> None:
        """End the thread after what is queued. May be called twice."""
        self._closed = True
        if wait:
            self._end()
        else:
            self._calls.put(None)


def _serve(calls: SimpleQueue[Call[Any] | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # and what it brought, before the next one comes


def _end(calls: SimpleQueue[Call[Any] | None], thread: threading.Thread) -> None:
    calls.put(None)
    if thread is not threading.current_thread():  # where the garbage collector may call this
        thread.join()
