"""KVCacheManager: tables, hits in full computed blocks, hidden states for prompt scores."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.config.kv_cache import KVCacheLayout
from octavo.core.block_hash import hash_block
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request
from tests.cpu.core.fakes import make_request


def request(name: str, tokens: list[int], **params: object) -> Request:
    return Request(make_request(name, tokens, **params))  # type: ignore[arg-type]


def manager(num_usable: int = 16, caching: bool = True, **kw) -> KVCacheManager:  # type: ignore[no-untyped-def]
    return KVCacheManager(num_usable + 1, KVCacheLayout(4), caching, **kw)


def run(kv: KVCacheManager, r: Request) -> int:
    """Admit and compute it whole; returns the tokens that were hit."""
    hits, num_hit = kv.get_computed_blocks(r)
    assert kv.allocate_slots(r, r.num_tokens, hits) is not None
    kv.cache_blocks(r, r.num_tokens)
    return num_hit


def end(kv: KVCacheManager, r: Request) -> None:
    kv.release(kv.free(r))


def test_table_grows_by_the_blocks_that_are_missing() -> None:
    kv, r = manager(), request("a", list(range(10)))
    assert kv.allocate_slots(r, 3) == [1]
    assert kv.allocate_slots(r, 4) == []
    assert kv.allocate_slots(r, 13) == [2, 3, 4]
    assert kv.get_block_ids(r) == [1, 2, 3, 4]
    assert kv.num_free_blocks == 12


def test_failed_allocation_changes_nothing() -> None:
    kv, r = manager(2), request("a", list(range(10)))
    assert kv.allocate_slots(r, 9) is None
    assert not kv.holds(r)
    assert kv.num_free_blocks == 2


def test_freeing_what_holds_nothing_is_a_no_op() -> None:
    """S08: aborted before it was ever scheduled."""
    kv = manager()
    assert kv.free(request("a", [1])) == []


def test_last_token_is_always_recomputed() -> None:
    """S14: the prompt is a multiple of the block size and every block is cached."""
    kv = manager()
    a = request("a", list(range(8)))
    assert run(kv, a) == 0
    end(kv, a)
    assert run(kv, request("b", list(range(8)))) == 4
    assert run(kv, request("c", list(range(9)))) == 8


def test_hits_end_where_prompts_diverge_even_inside_a_block() -> None:
    """S22: only whole equal blocks count."""
    kv = manager()
    run(kv, request("a", list(range(12))))
    assert run(kv, request("b", [*range(6), 99, *range(7, 14)])) == 4
    assert run(kv, request("c", [99, *range(1, 12)])) == 0
    assert run(kv, request("d", list(range(19)))) == 12


def test_start_of_a_prefix_survives_longest() -> None:
    """Tail blocks are freed first, so eviction eats a prefix from its end."""
    kv = manager(8)
    a = request("a", list(range(17)))
    run(kv, a)
    end(kv, a)
    filler = request("f", [7] * 20)
    assert kv.allocate_slots(filler, 20) is not None  # 4 unused blocks and one of a's
    assert kv.get_computed_blocks(request("b", list(range(17))))[1] == 12


def test_planned_blocks_cannot_be_hit_before_they_are_computed() -> None:
    """S17."""
    kv = manager()
    a, b = request("a", list(range(12))), request("b", list(range(12)))
    kv.allocate_slots(a, 12)
    assert kv.get_computed_blocks(b)[1] == 0
    kv.cache_blocks(a, 7)
    assert kv.get_computed_blocks(b)[1] == 4


def test_blocks_beyond_known_tokens_are_not_cached() -> None:
    """Drafts and tokens still on the device are computed but not known."""
    kv, a = manager(), request("a", list(range(6)))
    kv.allocate_slots(a, 12)
    kv.cache_blocks(a, 12)
    assert kv.pool.num_cached_blocks == 1


def test_output_tokens_are_cached_for_the_next_turn() -> None:
    kv, a = manager(), request("a", list(range(6)))
    a.output_token_ids = [60, 61, 62]
    kv.allocate_slots(a, 9)
    kv.cache_blocks(a, 8)
    assert kv.get_computed_blocks(request("b", [*range(6), 60, 61, 62, 7]))[1] == 8


def test_shared_blocks_are_one_block_with_two_holders() -> None:
    kv = manager()
    a, b = request("a", list(range(9))), request("b", list(range(9)))
    run(kv, a)
    run(kv, b)
    assert kv.get_block_ids(a)[:2] == kv.get_block_ids(b)[:2]
    assert kv.num_freeable_blocks(a) == 1
    assert kv.num_free_blocks == 12
    end(kv, a)
    assert kv.num_free_blocks == 13
    kv.check_integrity()


def test_fits_counts_free_hits_as_taken_and_keeps_the_reserve() -> None:
    kv = manager(4)
    a = request("a", list(range(9)))
    run(kv, a)
    end(kv, a)
    b = request("b", list(range(9)))
    hits, _ = kv.get_computed_blocks(b)
    assert len(hits) == 2
    assert kv.fits(b, 9, hits, 1)
    assert not kv.fits(b, 9, hits, 2)
    assert kv.allocate_slots(b, 20, hits) is None
    assert kv.num_free_blocks == 4, "a failed allocation has touched no hit"


def test_salt_separates_equal_prompts() -> None:
    kv = manager(32)
    run(kv, request("a", list(range(9))))
    assert run(kv, request("b", list(range(9)), cache_salt="s")) == 0
    assert run(kv, request("c", list(range(9)), cache_salt="t")) == 0
    assert run(kv, request("d", list(range(9)), cache_salt="s")) == 8
    assert run(kv, request("e", list(range(9)))) == 8


@pytest.mark.parametrize("bits", [0, 1, 8])
def test_weak_hash_never_lends_foreign_blocks(bits: int) -> None:
    """S19: a constant, a 1-bit and an 8-bit hash; hits may be lost, never wrong."""
    mask = (1 << bits) - 1
    kv = manager(32, hash_function=lambda *a: bytes([hash_block(*a)[0] & mask]))
    run(kv, request("a", [1, 1, 1, 1, 2, 2, 2, 2, 3]))
    run(kv, request("b", [9, 9, 9, 9, 2, 2, 2, 2, 3]))
    for name, tokens in [("c", [5, 5, 5, 5, 2, 2, 2, 2, 3]), ("d", [2, 2, 2, 2, 2, 2, 2, 2, 3])]:
        assert kv.get_computed_blocks(request(name, tokens))[1] == 0
    kv.check_integrity()


def test_orphans_of_an_evicted_parent_are_replaced() -> None:
    """A parent comes back under a new prefix id; its old child gives way and hits work again."""
    kv = manager(8)
    a, b = request("a", list(range(9))), request("b", list(range(9)))
    kv.allocate_slots(a, 9)
    kv.allocate_slots(b, 9)
    kv.cache_blocks(a, 4)  # a's block 0 is mapped, b's equal one is not
    kv.cache_blocks(b, 9)  # b's block 1 is mapped
    end(kv, a)
    filler = request("f", [7] * 20)
    assert kv.allocate_slots(filler, 20) is not None  # evicts a's block 0
    end(kv, filler)
    c = request("c", list(range(9)))
    assert kv.get_computed_blocks(c)[1] == 0
    run(kv, c)
    assert kv.get_computed_blocks(request("d", list(range(9))))[1] == 8
    kv.check_integrity()


def test_without_caching_nothing_is_found_or_kept() -> None:
    kv = manager(caching=False)
    run(kv, request("a", list(range(9))))
    assert run(kv, request("b", list(range(9)))) == 0
    assert kv.pool.num_cached_blocks == 0


def test_prompt_scores_hit_only_blocks_with_hidden_states() -> None:
    """L03: a cached position can be scored only if its hidden state was kept."""
    kv = manager(32)
    run(kv, request("plain", list(range(13))))
    assert run(kv, request("scored", list(range(13)), prompt_logprobs=0)) == 0
    assert run(kv, request("again", list(range(13)), prompt_logprobs=0)) == 12
    assert run(kv, request("plain2", list(range(13)))) == 12


def test_hidden_states_are_claimed_for_prompt_blocks_only() -> None:
    kv = manager(32)
    a = request("a", list(range(6)), prompt_logprobs=0)
    a.output_token_ids = [60, 61, 62]
    run(kv, a)
    longer = [*range(6), 60, 61, 62]
    assert kv.get_computed_blocks(request("b", longer, prompt_logprobs=0))[1] == 4
    assert kv.get_computed_blocks(request("c", longer))[1] == 8


def test_delivered_scores_need_no_hidden_states_after_a_preemption() -> None:
    kv = manager(32)
    run(kv, request("plain", list(range(13))))
    r = request("scored", list(range(13)), prompt_logprobs=0)
    r.num_prompt_scores = 12
    assert kv.get_computed_blocks(r)[1] == 12


def test_cold_prompt_hashes_one_block_only() -> None:
    """Lookup stops at the first miss; hashes are kept with the request."""
    calls = []

    def counting(*args):  # type: ignore[no-untyped-def]
        calls.append(args)
        return hash_block(*args)

    kv, r = manager(64, hash_function=counting), request("a", list(range(200)))
    for _ in range(3):
        kv.get_computed_blocks(r)
    assert len(calls) == 1
    kv.allocate_slots(r, 200)
    kv.cache_blocks(r, 200)
    assert len(calls) == 50


class KVCacheMachine(RuleBasedStateMachine):
    """Requests over few distinct prompts come, compute, grow and go, in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(
            11, KVCacheLayout(2), True, lambda *a: bytes([hash_block(*a)[0] & 3])
        )
        self.live: dict[str, Request] = {}
        self.computed: dict[str, int] = {}
        self.written: dict[int, tuple[int, ...]] = {}
        self.count = 0

    def write(self, r: Request, start: int, end: int) -> None:
        """The device's memory: each block remembers the exact prefix it was computed for."""
        tokens, table = r.all_token_ids, self.kv.get_block_ids(r)
        for position in range(start, end):
            self.written[table[position // 2]] = tuple(tokens[: position + 1])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), data=st.data())
    def admit(self, tokens: list[int], data: st.DataObject) -> None:
        self.count += 1
        r = request(f"r{self.count}", tokens)
        hits, num_hit = self.kv.get_computed_blocks(r)
        assert num_hit < len(tokens)
        for index, block_id in enumerate(hits.get_block_ids()):
            assert self.written[block_id] == tuple(tokens[: 2 * index + 2])
        num_tokens = data.draw(st.integers(num_hit + 1, len(tokens)))
        free = self.kv.num_free_blocks
        fits = self.kv.fits(r, num_tokens, hits, 0)
        ids = self.kv.allocate_slots(r, num_tokens, hits)
        assert (ids is not None) == fits
        if ids is None:
            assert self.kv.num_free_blocks == free
            return
        self.live[r.request_id] = r
        self.computed[r.request_id] = num_hit

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1), cached=st.booleans())
    def compute(self, data: st.DataObject, token: int, cached: bool) -> None:
        r = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        start = self.computed[r.request_id]
        if start == r.num_tokens:
            r.output_token_ids.append(token)
        stop = data.draw(st.integers(start + 1, r.num_tokens))
        if self.kv.allocate_slots(r, stop) is None:
            return
        self.write(r, start, stop)
        self.computed[r.request_id] = stop
        if cached:
            self.kv.cache_blocks(r, stop)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.kv.release(self.kv.free(self.live.pop(name)))

    @invariant()
    def sound(self) -> None:
        self.kv.check_integrity()
        if not self.live:
            assert self.kv.num_free_blocks == 10


KVCacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestKVCacheMachine = KVCacheMachine.TestCase
