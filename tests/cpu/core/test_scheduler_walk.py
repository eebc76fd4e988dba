"""Random walks over the scheduler: nothing leaks, something always progresses, tokens never change."""

from __future__ import annotations

import random

import pytest

from octavo.core.block_hash import hash_block
from octavo.core.scheduler import Scheduler
from octavo.outputs import FinishReason
from tests.cpu.core.fakes import fake_token, make_request, make_scheduler
from tests.cpu.core.loop import Loop

MAX_MODEL_LEN = 48


def weak_hash(bits: int):  # type: ignore[no-untyped-def]
    """sha256 cut to a few bits: collisions everywhere, the content comparison must hold."""
    mask = (1 << bits) - 1

    def function(parent, token_ids, extra_keys):  # type: ignore[no-untyped-def]
        return bytes([hash_block(parent, token_ids, extra_keys)[0] & mask])

    return function


class Walk:
    """One random life of an engine."""

    def __init__(self, seed: int, depth: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        windows = random.Random(seed).choice([(None,), (None,), (6,), (None, 9), (None, 5, 5)])
        self.scheduler: Scheduler = make_scheduler(
            pick([12, 14, 20, 40]) * len(windows),
            windows=windows,
            block_size=4,
            max_num_seqs=pick([2, 4, 8]),
            budget=pick([8, 13, 32]),
            max_model_len=MAX_MODEL_LEN,
            caching=pick([True, True, False]),
            policy=pick(["fcfs", "priority"]),
            long_prefill_token_threshold=pick([0, 0, 5]),
            max_bypass=pick([0, 1, 4, 32]),
        )
        bits = pick([None, None, 8, 0])
        if bits is not None:
            self.scheduler.state.kv._hash_function = weak_hash(bits)
        self.loop = Loop(self.scheduler, depth)
        self.loop.keep_plans = False
        self.prefixes = [[self.random.randrange(50) for _ in range(24)] for _ in range(3)]
        self.num_added = 0

    def prompt(self) -> list[int]:
        """Prompts share prefixes and sometimes continue an earlier conversation."""
        done = [r for r in self.loop.received.values() if r.last is not None]
        if done and self.random.random() < 0.2:
            received = self.random.choice(done)
            history = received.request.prompt_token_ids + received.token_ids
            if len(history) < MAX_MODEL_LEN - 8:
                return [*history, *self.random.choices(range(50), k=self.random.randint(0, 4))]
        prefix = self.random.choice(self.prefixes)[: self.random.randint(0, 24)]
        return [*prefix, *self.random.choices(range(50), k=self.random.randint(1, 12))]

    def add(self) -> None:
        rng = self.random
        self.num_added += 1
        max_tokens = rng.choice([0, 1, 2, 5, 12, 24, 40])
        scores = max_tokens == 0 or rng.random() < 0.2
        params: dict[str, object] = {}
        if scores and rng.random() < 0.8:
            params["prompt_logprobs"] = 0
        if rng.random() < 0.3:
            params["stop_token_ids"] = rng.sample(range(50), 5)
        if rng.random() < 0.3:
            params["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.3:
            params["logprobs"] = 1
        self.loop.add(
            make_request(
                f"r{self.num_added}",
                self.prompt(),
                max_tokens,
                priority=rng.randint(0, 2),
                cache_salt=rng.choice([None, None, "a"]),
                eos=rng.random() < 0.5,
                **params,
            )
        )

    def set_drafts(self) -> None:
        """Guesses with a correct beginning of random length."""
        drafts = {}
        for request in self.scheduler.state.running:
            start = request.num_tokens + request.num_inflight_samples
            length, good = self.random.randint(0, 3), self.random.randint(0, 3)
            drafts[request.request_id] = [
                fake_token(request.request_id, start + i) if i < good else 7 for i in range(length)
            ]
        self.scheduler.set_drafts(drafts)

    def disturb(self) -> None:
        """Now and then: aborts (live, unknown, repeated), errors of one request or one step."""
        loop, rng = self.loop, self.random
        live = list(self.scheduler.state.requests)
        if live and rng.random() < 0.02:
            name = rng.choice(live)
            loop.abort(name, name, "unknown")
        if loop.in_flight and rng.random() < 0.004:
            loop.fail()
        if loop.in_flight and rng.random() < 0.008:
            plan, output = loop.in_flight[-1]
            if plan.num_scheduled_tokens:
                output.errors[rng.choice(list(plan.num_scheduled_tokens))] = "scripted"

    def run(self, num_steps: int) -> None:
        load, speculates = self.random.uniform(0.2, 1.0), self.random.random() < 0.5
        for _ in range(num_steps):
            if self.random.random() < load and len(self.scheduler.state.waiting) < 12:
                self.add()
            if speculates and self.random.random() < 0.7:
                self.set_drafts()
            self.disturb()
            self.loop.step()
        self.loop.drain()
        self.loop.check_outputs()


def walk(seed: int, num_steps: int) -> Walk:
    result = Walk(seed, depth=1 + seed % 2)
    result.run(num_steps)
    return result


@pytest.mark.parametrize("seed", range(40))
def test_random_walk_leaks_nothing_and_always_progresses(seed: int) -> None:
    """S02, S09, S10, S17, S19 over many configurations, short."""
    walk(seed, 100)


@pytest.mark.parametrize("seed", range(100, 104))
def test_long_random_walk(seed: int) -> None:
    """S02: 4 x 2,000 steps."""
    walk(seed, 2_000)


def test_walks_reach_what_they_are_for() -> None:
    """The walk is worth nothing if it never preempts, hits, verifies or aborts."""
    walks = [walk(seed, 150) for seed in range(200, 212)]
    stats = [w.scheduler.stats() for w in walks]
    reasons = [r.last.finish_reason for w in walks for r in w.loop.received.values() if r.last]
    assert sum(s.num_preemptions for s in stats) > 20
    assert sum(s.prefix_cache_hits for s in stats) > 500
    assert set(reasons) == set(FinishReason)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(300, 308))
def test_random_walk_of_20000_steps(seed: int) -> None:
    """S02 at full length: 8 configurations x 20,000 steps."""
    walk(seed, 20_000)
