"""Who may work on the engine: one caller at a time, and Ctrl-C only where it can do no harm.

Owns the engine's lock. Knows nothing of what is done under it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` looks handlers up in an enum, 10 us a turn
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from octavo.errors import EngineDeadError, OctavoError

Result = TypeVar("Result")


class InterruptGate:
    """While it is shut, Ctrl-C waits: it is let through by `open()`, or when the gate is removed.

    Whatever SIGINT's handler is, it is called once however often the key was pressed. Does nothing
    outside the main thread, where no signal is handled, and if the signal has no Python handler.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, Any], Any] | None = None
        self._pressed: tuple[int, FrameType | None] | None = None
        self._open = False
        self.is_shut = False
        """What another signal's handler raises may leave us installed: not shut, we let all through."""

    def install(self) -> None:
        """Stand before SIGINT's handler, and shut."""
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(signal.SIGINT)
            left = getattr(handler, "__self__", None)
            if isinstance(left, InterruptGate) and not left.is_shut:
                handler = left._handler
            if callable(handler):
                self._handler = handler
                _signal.signal(signal.SIGINT, self._note)
                self.is_shut = True

    def remove(self) -> None:
        """Leave the place to the handler, and let through what came."""
        if self._handler is not None:
            _signal.signal(signal.SIGINT, self._handler)
            self.let_through()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Here Ctrl-C takes effect at once, the first time."""
        self._open = True
        try:
            self.let_through()
            yield
        finally:
            self._open = False

    def let_through(self) -> None:
        """Call the handler, with what the signal came with, if Ctrl-C was pressed."""
        if self._pressed is not None and self._handler is not None:
            pressed, self._pressed, self._open = self._pressed, None, False
            self._handler(*pressed)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pressed = number, frame
        if self._open or not self.is_shut:
            self.let_through()


class Turns:
    """A lock that says what is wrong instead of waiting for ever."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._pid = os.getpid()

    def run(self, work: Callable[[InterruptGate], Result]) -> Result:
        """Wait for a turn and do the work; Ctrl-C waits for its end, except where the gate is opened.

        Raises EngineDeadError in a forked child, and OctavoError for a call from within a turn of
        the same thread, as a signal handler may make it: it would break into its own step.
        """
        if os.getpid() != self._pid:  # the worker, and the lock's owner, stayed in the parent
            raise EngineDeadError("the worker did not survive fork(); make an engine here")
        me = threading.get_ident()
        if self._owner == me:
            raise OctavoError(
                "the engine is at work in this thread: a signal handler or callback cannot use it "
                "before the call that it interrupts has returned"
            )
        gate = InterruptGate()
        # Another signal's handler may raise anywhere, but never between the lock and the `with` of it,
        # which are C; nor amid a `finally` of our own before its first call.
        with self._lock:
            try:
                gate.install()
                self._owner = me
                return work(gate)
            finally:
                gate.is_shut = False
                self._owner = None
                gate.remove()
