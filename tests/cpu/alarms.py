"""Signals whose handlers raise at random moments, as Ctrl-C and the usual timeout idiom do."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable


class Alarm(RuntimeError):
    """What the handler raises: an error that locks raise, too."""


def interrupt_often(
    body: Callable[[], object], check: Callable[[], object], longest: float, seconds: float = 1.5
) -> int:
    """Runs `body` over and over, each time cut short within `longest` seconds by an Alarm.

    After each of them, while the Alarm and its frames live, `check` has to return in another thread.
    Returns how many there were.
    """
    armed = False

    def ring(*_: object) -> None:
        if armed:
            raise Alarm

    draw = random.Random(0)
    before = signal.signal(signal.SIGALRM, ring)
    end, count = time.monotonic() + seconds, 0
    kept: Alarm | None = None
    try:
        while time.monotonic() < end:
            count += 1
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, longest))
                while time.monotonic() < end + 10:
                    body()
                raise AssertionError("an alarm was swallowed")
            except Alarm as alarm:
                armed, kept = False, alarm
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            other = threading.Thread(target=check, daemon=True)
            other.start()
            other.join(10)
            assert not other.is_alive(), f"stuck for ever after {count} alarms: {kept!r}"
    finally:
        armed = False
        signal.signal(signal.SIGALRM, before)
    return count
