"""Signals, finalisers, threads and forks that reach the engine amid a step."""

from __future__ import annotations

import _signal
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from octavo import LLM
from octavo.engine.turns import InterruptGate, Turns
from octavo.errors import EngineDeadError, OctavoError
from octavo.outputs import RequestOutputKind
from tests.cpu.alarms import interrupt_often
from tests.cpu.tiny.helpers import PARAMS, PROMPTS, params, run, tiny, tokens


@pytest.fixture(autouse=True)
def _interruptible() -> Generator[None, None, None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, previous) is signal.default_int_handler


def nothing(_: InterruptGate) -> None:
    """A turn that does no work."""


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def before(call: int, action: Callable[[], object], function: Callable[..., Any]) -> Any:
    """The function, with something else happening just before its n-th call."""
    calls: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            action()
        return function(*args, **kwargs)

    return watched


def part_of_a_step(llm: LLM, name: str) -> tuple[object, str]:
    """The object and the method that does this part."""
    core = llm.engine.core
    owners = {
        "execute": core._executor,
        "launch": core._executor._worker,
        "process": llm.engine._outputs,
    }
    return owners.get(name, core.scheduler), name


def watch(
    patch: pytest.MonkeyPatch, llm: LLM, name: str, call: int, action: Callable[[], object]
) -> None:
    owner, method = part_of_a_step(llm, name)
    patch.setattr(owner, method, before(call, action, getattr(owner, method)))


class Client:
    """Keeps a half-read stream in a cycle: only the garbage collector can close it."""

    def __init__(self, llm: LLM) -> None:
        self.me = self
        self.stream = llm.stream([[5, 6, 7 + i] for i in range(10)], params(max_tokens=60))
        next(self.stream)


@pytest.mark.parametrize("part", ["schedule", "launch", "update", "process"])
def test_garbage_is_collected_amid_a_step(
    part: str, overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the caller's thread, where the step is half planned or applied, and in the worker's, for
    which the caller waits."""
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        gc.collect()
        gc.disable()
        try:
            Client(llm)
            watch(monkeypatch, llm, part, 2, gc.collect)
            found: list[Any] = []
            thread = threading.Thread(
                target=lambda: found.extend(tokens(run(llm, PROMPTS, PARAMS))), daemon=True
            )
            thread.start()
            thread.join(60)
            if thread.is_alive():
                os._exit(1)  # a deadlock: nothing could be ended in order
        finally:
            gc.enable()
        assert found == expected
        llm.engine.step()
        assert not llm.engine._outputs.num_requests


def test_what_was_left_is_ended_by_the_next_call(tiny_model: Path) -> None:
    """Whatever that call is; has_work says that there is something to end."""
    with tiny(tiny_model) as llm:
        for call in (
            llm.reset_prefix_cache,
            llm.engine.step,
            llm.engine.drain,
            lambda: llm.engine.add_request("r", [1], PARAMS),
        ):
            stream = llm.stream([[5, 6, 7]], params(max_tokens=300))
            next(stream)
            stream.close()
            assert llm.engine.has_work()
            call()
            assert llm.engine._outputs.num_requests == llm.engine._outputs.has_request("r")


@pytest.mark.parametrize("part", ["schedule", "execute", "update", "process"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_ctrl_c_amid_a_step_takes_nothing_from_others(
    part: str, call: int, overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted call ends; a stream beside it misses no token and the engine serves on."""
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        [expected] = tokens(run(llm, [[5, 6, 7]], params(max_tokens=12)))
        stream = llm.stream([[5, 6, 7]], params(max_tokens=12))
        found = list(next(stream).outputs[0].token_ids)
        with monkeypatch.context() as patch:
            watch(patch, llm, part, call, press)
            with pytest.raises(KeyboardInterrupt):
                run(llm, PROMPTS, PARAMS)
        for output in stream:
            found += output.outputs[0].token_ids
        assert found == expected
        assert llm.engine._outputs.num_requests == 0


def test_ctrl_c_does_not_wait_for_the_device(
    overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        go_on, interrupted = threading.Event(), list[bool]()

        def hang() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.append(go_on.wait(20))

        with monkeypatch.context() as patch:
            watch(patch, llm, "launch", 2, hang)
            with pytest.raises(KeyboardInterrupt):
                run(llm, PROMPTS, PARAMS)
            go_on.set()
        assert tokens(run(llm, PROMPTS, PARAMS)) == expected
        assert interrupted == [True]


def test_ctrl_c_does_not_wait_for_another_thread() -> None:
    turns, taken, done = Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        turns.run(lambda gate: (taken.set(), done.wait(60)))

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(60)
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        turns.run(nothing)
    done.set()
    thread.join()
    turns.run(nothing)


def test_a_handler_of_the_callers_own_is_called_once_and_kept() -> None:
    """With the frame that the signal interrupted, whenever it is let through."""
    calls: list[tuple[int, str]] = []

    def handler(number: int, frame: FrameType) -> None:
        calls.append((number, frame.f_code.co_name))

    previous = signal.signal(signal.SIGINT, handler)
    try:

        def work(gate: InterruptGate) -> None:
            press()
            press()
            assert calls == []
            with gate.open():
                assert calls == [(signal.SIGINT, "press")]
                press()
            press()

        Turns().run(work)
        assert calls == [(signal.SIGINT, "press")] * 2
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        inside = Turns().run(lambda gate: (press(), signal.getsignal(signal.SIGINT)))
        assert inside == (None, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("part", ["schedule", "update", "process"])
def test_a_signal_handler_cannot_use_the_engine_amid_a_step(
    part: str, overlap: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told so, and the step goes on."""
    errors: list[OctavoError] = []
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))

        def handler(number: int, frame: object) -> None:
            for nested in (lambda: run(llm, [[4, 4]], PARAMS), llm.shutdown, llm.engine.step):
                with pytest.raises(OctavoError, match="at work in this thread") as caught:
                    nested()
                errors.append(caught.value)

        previous = signal.signal(signal.SIGUSR1, handler)
        try:
            with monkeypatch.context() as patch:
                watch(patch, llm, part, 2, lambda: signal.raise_signal(signal.SIGUSR1))
                assert tokens(run(llm, PROMPTS, PARAMS)) == expected
        finally:
            signal.signal(signal.SIGUSR1, previous)
        assert len(errors) == 3


def in_child(action: Callable[[], None]) -> None:
    """Fork; the action must end there, without an error."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    for _ in range(600):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("driving", [False, True])
def test_a_forked_child_is_told_so(driving: bool, tiny_model: Path) -> None:
    """The worker thread, and whoever holds the turn, stay in the parent: nobody may wait for them."""
    with tiny(tiny_model) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        stream = llm.stream([[5, 6, 7]], params(max_tokens=12))
        next(stream)
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            llm.engine._turns.run(lambda gate: (taken.set(), done.wait(60)))

        thread = threading.Thread(target=hold)
        if driving:
            thread.start()
            taken.wait(60)

        def child() -> None:
            for call in (
                lambda: run(llm, [[1, 2]], PARAMS),
                lambda: next(stream),
                llm.reset_prefix_cache,
                llm.engine.step,
                llm.engine.drain,
                lambda: llm.engine.abort(["req-0"]),
                lambda: llm.engine.add_request("r", [1], PARAMS),
            ):
                with pytest.raises(EngineDeadError, match="fork"):
                    call()
            stream.close()
            llm.shutdown()
            llm.shutdown()

        in_child(child)
        done.set()
        if driving:
            thread.join()
        list(stream)
        assert tokens(run(llm, PROMPTS, PARAMS)) == expected


def test_what_a_signal_handler_raises_is_not_the_steps_error(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual timeout idiom: the call ends with it, the engine and the next call do not."""

    def too_late(number: int, frame: object) -> None:
        raise TimeoutError("too late")

    with tiny(tiny_model) as llm:
        expected = tokens(run(llm, PROMPTS, PARAMS))
        worker = llm.engine.core._executor._worker
        launch = worker.launch

        def slow(plan: Any) -> Any:
            time.sleep(0.4)
            return launch(plan)

        before = signal.signal(signal.SIGALRM, too_late)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(worker, "launch", slow)
                signal.setitimer(signal.ITIMER_REAL, 0.2)
                with pytest.raises(TimeoutError, match="too late"):
                    run(llm, PROMPTS, PARAMS)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert tokens(run(llm, PROMPTS, PARAMS)) == expected


def test_the_lock_outlives_handlers_that_raise_anywhere() -> None:
    turns = Turns()

    def turn() -> None:
        turns.run(nothing)

    assert interrupt_often(turn, turn, longest=1e-4) > 100
    assert turns._owner is None
    with pytest.raises(KeyboardInterrupt):
        press()
    turn()  # finds the handler behind a gate that an alarm has left installed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_any_function_of_a_step_loses_no_output(overlap: bool, tiny_model: Path) -> None:
    """At the n-th function that it enters, for every n: later steps bring what this one did not."""
    with tiny(tiny_model, async_scheduling=overlap) as llm:
        engine = llm.engine
        [expected] = tokens(run(llm, [[5, 6, 7]], params(max_tokens=4)))
        for entry in count(1):
            delta = RequestOutputKind.DELTA
            engine.add_request(f"r{entry}", [5, 6, 7], params(max_tokens=4), output_kind=delta)
            seen = engine.step()
            entered = 0

            def enter(frame: FrameType, event: str, _: object, nth: int = entry) -> None:
                nonlocal entered
                entered += event == "call"
                if entered == nth:
                    sys.setprofile(None)
                    press()

            try:
                sys.setprofile(enter)
                seen += engine.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            while engine.has_work():
                seen += engine.step()
            found = [token for output in seen for token in output.outputs[0].token_ids]
            assert found == expected, f"interrupted at entry {entry}"
            if entered < entry:
                break
        assert entry > 50


def test_a_late_abort_still_brings_the_last_output(tiny_model: Path) -> None:
    with tiny(tiny_model) as llm:
        engine = llm.engine
        engine.add_request("a", [3, 4, 5], PARAMS)
        engine.step()
        engine.abort_soon(["a"])
        seen = [output for _ in range(20) if engine.has_work() for output in engine.step()]
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]


@pytest.mark.parametrize("call", [1, 2])
def test_ctrl_c_works_where_another_handlers_error_has_left_the_gate_installed(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installing one runs the handlers of pending signals first, and one may raise (an alarm)."""
    install = _signal.signal

    def alarmed(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == call and call == 2:
            raise TimeoutError
        install(*args)
        if len(calls) == call:
            raise TimeoutError

    calls: list[Any] = []
    monkeypatch.setattr(_signal, "signal", alarmed)
    with pytest.raises(TimeoutError):
        Turns().run(nothing)
    monkeypatch.undo()
    is_back = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert is_back == (call == 1), "only removing it was cut short"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            press()
    Turns().run(nothing)
