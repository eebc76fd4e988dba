"""Calls that run one after the other: in the caller's thread, or on a thread of their own.

Not concurrent.futures: its locks are taken by Python code, and what a signal handler raises amid that
(Ctrl-C, an alarm) leaves them taken for ever. Here threads meet in SimpleQueues only.
"""

from __future__ import annotations

import atexit
import os
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
        self._calls: SimpleQueue[Call[Any]] = SimpleQueue()
        self._last, self._closed = Call(int, ()), False
        threading.Thread(None, _serve, name, (self._calls, self._last), daemon=True).start()
        _serving[self._last] = self._calls
        # The collector runs in any thread, and an interrupted load may last: nobody waits there.
        weakref.finalize(self, self._calls.put, self._last)

    def submit(self, fn: Callable[..., Result], /, *args: Any) -> Call[Result]:
        """Queue a call. Raises RuntimeError after `close`; a call that came amid it may yet run."""
        call = Call(fn, args)
        self._calls.put(call)
        # Looked at last: what was queued before the mark of the end runs, what came later is told.
        if self._closed:
            raise RuntimeError("the thread was closed")
        return call

    def close(self, wait: bool = True) -> None:
        """End the thread after what is queued. May be called again, also after an interrupt."""
        self._closed = True
        self._calls.put(self._last)
        if wait:  # not by joining: Python 3.11 takes a thread for ended whose join is interrupted
            self._last.wait()


_serving: dict[Call[Any], SimpleQueue[Call[Any]]] = {}
"""The last call of each thread that lives, and its queue."""
os.register_at_fork(after_in_child=_serving.clear)


def _serve(calls: SimpleQueue[Call[Any]], last: Call[Any]) -> None:
    while (call := calls.get()) is not last:
        call.run()
        del call  # and what it brought, before the next one comes
    _serving.pop(last, None)
    last.run()


@atexit.register
def _end_all() -> None:
    """A thread that is amid C++ code when the interpreter goes aborts the process."""
    for last, calls in list(_serving.items()):
        calls.put(last)
        last.wait()
