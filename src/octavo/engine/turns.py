"""Who may work on the engine: one caller at a time, and Ctrl-C only where it can do no harm.

Owns the engine's lock. Knows nothing of what is done under it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from octavo.errors import EngineDeadError, OctavoError

_LOOK_UP = 0.05  # seconds between looks at Ctrl-C while another thread has its turn


class InterruptGate:
    """While it is entered, Ctrl-C waits: it is let through by `open()`, or when the gate is left.

    Whatever SIGINT's handler is, it is called once however often the key was pressed. Does nothing
    outside the main thread, where no signal is handled, and if the signal has no Python handler.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, Any], Any] | None = None
        self._pressed: tuple[int, FrameType | None] | None = None
        self._open = False
        # What another signal's handler raises may leave us installed outside: then Ctrl-C passes.
        self._entered = False

    def __enter__(self) -> InterruptGate:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
                self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            self._entered = False
            signal.signal(signal.SIGINT, self._handler)
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
        if self._open or not self._entered:
            self.let_through()


class Turns:
    """A lock that says what is wrong instead of waiting for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """True in a child process: the worker, and the lock's owner, stayed in the parent."""
        return os.getpid() != self._pid

    @contextmanager
    def take(self) -> Iterator[InterruptGate]:
        """Wait for a turn and hold it; Ctrl-C waits for its end, except where the gate is opened.

        Raises EngineDeadError in a forked child, and OctavoError for a call from within a turn of
        the same thread, as a signal handler may make it: it would wait for itself.
        """
        if self.forked:
            raise EngineDeadError("the worker did not survive fork(); make an engine here")
        me = threading.get_ident()
        if self._owner == me:
            raise OctavoError(
                "the engine is at work in this thread: a signal handler or callback cannot use it "
                "before the call that it interrupts has returned"
            )
        with InterruptGate() as gate:
            while not self._lock.acquire(timeout=_LOOK_UP):
                gate.let_through()
            self._owner = me
            try:
                yield gate
            finally:
                self._owner = None
                self._lock.release()
