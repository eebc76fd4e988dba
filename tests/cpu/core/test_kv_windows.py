"""Groups of layers with windows: what has passed is given back, and hits need a window only."""

from __future__ import annotations

import pytest

from octavo.config.kv_cache import KVCacheLayout
from octavo.core.block_pool import NULL_BLOCK_ID
from octavo.core.kv_cache_manager import NO_HITS, KVCacheManager
from octavo.core.request import Request
from tests.cpu.core.fakes import make_request, make_scheduler
from tests.cpu.core.loop import BOTH, looped, run_all

SIZE = 4


def manager(*windows: int | None, num_usable: int = 100, ahead: int = 64) -> KVCacheManager:
    return KVCacheManager(num_usable + 1, KVCacheLayout(SIZE, windows, ahead), True)


def computed(kv: KVCacheManager, name: str, tokens: list[int]) -> Request:
    """A request that ran all its tokens, a block a step."""
    request = Request(make_request(name, tokens))
    hits, start = kv.get_computed_blocks(request)
    for end in range(start + SIZE, len(tokens) + SIZE, SIZE):
        assert kv.allocate_slots(request, min(end, len(tokens)), hits) is not None
        kv.cache_blocks(request, min(end, len(tokens)))
        kv.check_integrity()
        hits = NO_HITS
    return request


@pytest.mark.parametrize("window", [1, 2, 5, 8, 13])
def test_a_table_keeps_what_the_next_token_sees_and_no_more(window: int) -> None:
    kv = manager(window)
    request = Request(make_request("a", 60))
    for end in range(1, 60):
        assert kv.allocate_slots(request, end) is not None
        kv.cache_blocks(request, end)
        first_seen = max(0, end - window + 1)
        table = kv.get_block_ids(request)
        assert [block == NULL_BLOCK_ID for block in table] == [
            (index + 1) * SIZE <= first_seen for index in range(len(table))
        ]
    assert kv.num_free_blocks >= 100 - (window // SIZE + 2)


def test_without_prefix_caching_windows_give_back_as_well() -> None:
    kv = KVCacheManager(11, KVCacheLayout(SIZE, (6,)), False)
    request = Request(make_request("a", 400))
    for end in range(SIZE, 400, SIZE):
        assert kv.allocate_slots(request, end) is not None
        kv.cache_blocks(request, end)
    assert kv.num_free_blocks >= 10 - 3
    kv.release(kv.free(request))
    assert kv.num_free_blocks == 10


def test_a_hit_needs_the_blocks_of_the_last_window_only() -> None:
    """The start of the text is evicted; its end is hit, and the passed part is not held."""
    kv, tokens = manager(8, num_usable=10), list(range(40))
    first = computed(kv, "a", tokens)
    kv.release(kv.free(first))
    kv.release(kv.free(computed(kv, "other", [99] * 24)))  # reuses the blocks passed the longest
    again = Request(make_request("b", [*tokens, 1, 2]))
    hits, num_tokens = kv.get_computed_blocks(again)
    assert num_tokens == 40
    assert [block == NULL_BLOCK_ID for block in hits.get_block_ids()] == [True] * 8 + [False] * 2
    assert kv.get_computed_blocks(Request(make_request("c", tokens[:13])))[1] == 0
    other = [*tokens[:20], 7, *tokens[21:], 1, 2]
    assert kv.get_computed_blocks(Request(make_request("d", other)))[1] == 0, "same last window"


def test_the_hit_is_the_longest_on_which_all_groups_agree() -> None:
    kv, tokens = manager(None, 8, num_usable=30), list(range(40))
    request = computed(kv, "a", tokens)
    full, window = kv._tables["a"].groups
    kv.release(kv.free(request))
    longer = Request(make_request("b", [*tokens, 1]))
    assert kv.get_computed_blocks(longer)[1] == 40
    kv.pool._forget(window[-1])
    assert kv.get_computed_blocks(longer)[1] == 36
    kv.pool._forget(full[6])
    assert kv.get_computed_blocks(longer)[1] == 24
    passed = [prefix for prefix in kv.pool._prefixes.values() if prefix.blocks[1] is not None]
    for prefix in passed:
        if prefix.token_ids[0] in (12, 16):
            kv.pool._forget(prefix.blocks[1])  # type: ignore[arg-type]
    assert kv.get_computed_blocks(longer)[1] == 12, "24 needs the blocks from 17 on"


def test_scores_of_a_prompt_hit_nothing_where_the_first_group_has_a_window() -> None:
    kv, tokens = manager(8), list(range(40))
    computed(kv, "a", tokens)
    scored = make_request("b", tokens, prompt_logprobs=0)
    assert kv.get_computed_blocks(Request(scored))[1] == 0


@BOTH
@pytest.mark.parametrize("windows", [(16,), (16, 16)])
def test_a_long_text_runs_in_a_pool_of_its_window(depth: int, windows: tuple[int, ...]) -> None:
    """512 tokens, prompt and output, where the pool holds about 40."""
    layout = KVCacheLayout(SIZE, windows, 2 * 8)
    peak = layout.peak_blocks(10**6)
    assert peak == 9 * len(windows)
    loop = looped(
        make_request("a", 200, 312), depth=depth, num_usable_blocks=peak, windows=windows, budget=8,
        max_model_len=512,
    )  # fmt: skip
    most = 0
    while loop.scheduler.has_work():
        loop.step()
        a = loop.scheduler.state.requests.get("a")
        if a is not None and len(a.output_token_ids) > 8:
            most = max(most, peak - loop.scheduler.state.kv.num_free_blocks)
    assert most <= (16 // SIZE + 2) * len(windows)
    loop.drain()
    loop.check_outputs()
    assert loop.scheduler.stats().num_preemptions == 0


@BOTH
def test_windows_let_more_requests_run_at_once(depth: int) -> None:
    """Eight texts of 128 tokens: 256 blocks without a window, 8 x 11 with one."""
    requests = [make_request(f"r{number}", 64, 64) for number in range(8)]
    scheduler = make_scheduler(88, windows=(16,), budget=12)
    run_all(scheduler, requests, depth)
    assert scheduler.stats().num_preemptions == 0
