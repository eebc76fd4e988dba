"""A fake runner with a KV memory that remembers what was written, and makers of requests.

Tokens are a function of (request_id, position), so a request's output must be the same whatever
the schedule. Each KV slot holds a signature of the whole prefix (and salt) up to its position; every
step first reads its prefix back, so a wrong hit, an early free or an aliased block fails at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.engine import CacheConfig, SchedulerConfig
from octavo.config.kv_cache import KVCacheLayout
from octavo.core.interfaces import KVConnectorScheduler
from octavo.core.request import EngineRequest
from octavo.core.scheduler import Scheduler
from octavo.core.scheduler_output import (
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from octavo.outputs import FinishReason, TokenLogprobs
from octavo.sampling_params import SamplingParams

VOCAB = 50
EOS = 49


def fake_token(request_id: str, position: int) -> int:
    """The token that stands at this position of this request, once sampled."""
    return ((hash_text(request_id) * 31 + position * 7919) * 2654435761 >> 16) % VOCAB


def hash_text(text: str) -> int:
    """A small hash that does not depend on PYTHONHASHSEED."""
    return sum((index + 1) * ord(char) for index, char in enumerate(text)) * 2654435761 % 1000003


def make_request(
    request_id: str,
    prompt: int | list[int] = 8,
    max_tokens: int = 4,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    eos: bool = False,
    **params: object,
) -> EngineRequest:
    """A request; `prompt` may be a length, then its tokens are its own."""
    if isinstance(prompt, int):
        prompt = [1000 + hash_text(request_id) % 997 + index for index in range(prompt)]
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        seed=0,
        eos_token_ids=(EOS,) if eos else (),
        max_tokens=max_tokens,
        priority=priority,
        cache_salt=cache_salt,
    )


def make_scheduler(
    num_usable_blocks: int = 64,
    *,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 128,
    caching: bool = True,
    windows: tuple[int | None, ...] = (None,),
    connector: KVConnectorScheduler | None = None,
    **config: object,
) -> Scheduler:
    """A scheduler over a small pool."""
    return Scheduler(
        SchedulerConfig(max_num_seqs, budget, max_model_len, **config),  # type: ignore[arg-type]
        CacheConfig(block_size, caching, 0.9, None, None, windows),
        num_usable_blocks + 1,
        connector=connector,
    )


def solo_output(request: EngineRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the request must produce, computed without any scheduler."""
    params, output = request.sampling_params, []
    num_prompt = len(request.prompt_token_ids)
    limit = min(request.max_tokens, max_model_len - num_prompt)
    while len(output) < limit:
        output.append(fake_token(request.request_id, num_prompt + len(output)))
        stops = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        if len(output) >= params.min_tokens and output[-1] in stops:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


@dataclass
class _Slot:
    request: EngineRequest
    tokens: list[int]
    num_computed: int
    tables: list[list[int]]
    """Of each KV group."""
    next_score: int
    incarnation: int

    @property
    def wants_scores(self) -> bool:
        return self.request.sampling_params.prompt_logprobs is not None


class FakeRunner:
    """Executes plans as the device would: exact positions, from its own token history."""

    def __init__(self, layout: KVCacheLayout, max_num_seqs: int, max_model_len: int) -> None:
        self.windows, self.block_size = layout.windows, layout.block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.slots: dict[str, _Slot] = {}
        self.kv: dict[int, tuple[int, int]] = {}
        """slot -> group and signature."""
        self.hidden: dict[int, int] = {}
        self.num_computed_tokens = 0
        self.num_entered = 0
        self.touched: dict[int, dict[int, set[int]]] = {}
        """step_id -> block_id -> incarnations that read or write it; until the step is settled."""

    def settled(self, step_id: int) -> None:
        """Its result was applied (or it failed)."""
        del self.touched[step_id]

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in plan.removed_request_ids:
            del self.slots[request_id]
        for new in plan.new_requests:
            self._enter(new)
        assert len(self.slots) <= self.max_num_seqs
        for request_id, block_ids in plan.new_block_ids.items():
            self._extend(self.slots[request_id].tables, block_ids)
        self.touched[plan.step_id] = {}
        output = ModelRunnerOutput(plan.step_id)
        written: set[int] = set()
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._run(request_id, num_tokens, plan, output, written)
        assert plan.sampling_requests == set(output.sampled_token_ids)
        return output

    def _enter(self, new: NewRequestData) -> None:
        assert new.request_id not in self.slots
        slot = _Slot(
            new.engine_request,
            list(new.token_ids),
            new.num_computed_tokens,
            [[] for _ in self.windows],
            new.score_start,
            self.num_entered,
        )
        self._extend(slot.tables, new.block_ids)
        self.num_entered += 1
        assert slot.num_computed < len(slot.tokens), "nothing left to compute"
        self.slots[new.request_id] = slot
        if slot.wants_scores:
            signatures = self._signatures(slot, [])
            owed = range(slot.next_score - 1, min(slot.num_computed, len(self._prompt(slot)) - 1))
            for position in owed:
                kept = self.hidden.get(self._kv_slot(slot, position))
                assert kept == signatures[position], f"no hidden state at {position}"

    @staticmethod
    def _extend(tables: list[list[int]], block_ids: list[int]) -> None:
        """As many ids for each group, group after group."""
        each, rest = divmod(len(block_ids), len(tables))
        assert rest == 0
        for group, table in enumerate(tables):
            table += block_ids[group * each : (group + 1) * each]

    def _first_seen(self, group: int, position: int) -> int:
        """The first key that a token at this position sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def _run(
        self,
        request_id: str,
        num_tokens: int,
        plan: SchedulerOutput,
        output: ModelRunnerOutput,
        written: set[int],
    ) -> None:
        slot = self.slots[request_id]
        drafts = plan.spec_token_ids.get(request_id, [])
        start, end = slot.num_computed, slot.num_computed + num_tokens
        assert num_tokens > 0
        assert end <= self.max_model_len
        signatures = self._signatures(slot, drafts)
        for group in range(len(self.windows)):
            for position in range(self._first_seen(group, start), start):
                kept = self.kv[self._kv_slot(slot, position, group)]
                assert kept == (group, signatures[position]), (
                    f"{request_id}: wrong K/V at {position}"
                )
            for position in range(start, end):
                kv_slot = self._kv_slot(slot, position, group)
                assert kv_slot not in written, "two requests write one slot in one step"
                written.add(kv_slot)
                self.kv[kv_slot] = group, signatures[position]
                self.hidden.pop(kv_slot, None)
                if group == 0 and slot.wants_scores and position < len(self._prompt(slot)):
                    self.hidden[kv_slot] = signatures[position]
        self._check_fence(slot, plan.step_id, start, end)
        self.num_computed_tokens += num_tokens
        if request_id in plan.sampling_requests:
            assert end - len(drafts) == len(slot.tokens), "samples before all tokens are run"
            sampled = self._verify(slot, drafts)
            slot.tokens += sampled
            end -= len(drafts) + 1 - len(sampled)
            output.sampled_token_ids[request_id] = sampled
            if slot.request.sampling_params.logprobs is not None:
                output.logprobs[request_id] = [TokenLogprobs([t], [-1.0], 1) for t in sampled]
        else:
            assert not drafts
            assert end <= len(slot.tokens)
        slot.num_computed = end
        self._score(slot, output)

    def _check_fence(self, slot: _Slot, step_id: int, start: int, end: int) -> None:
        """No block is written that an unsettled step uses for somebody else."""
        size, owner = self.block_size, slot.incarnation
        for group, table in enumerate(slot.tables):
            for block_id in table[start // size : -(-end // size)]:
                for earlier in self.touched.values():
                    assert earlier.get(block_id, {owner}) <= {owner}, (
                        f"block {block_id} came too early"
                    )
            for block_id in table[self._first_seen(group, start) // size : -(-end // size)]:
                self.touched[step_id].setdefault(block_id, set()).add(owner)

    def _verify(self, slot: _Slot, drafts: list[int]) -> list[int]:
        sampled: list[int] = []
        for index in range(len(drafts) + 1):
            sampled.append(fake_token(slot.request.request_id, len(slot.tokens) + index))
            if index < len(drafts) and drafts[index] != sampled[-1]:
                break
        return sampled

    def _score(self, slot: _Slot, output: ModelRunnerOutput) -> None:
        end = min(slot.num_computed + 1, len(self._prompt(slot)))
        if slot.wants_scores and slot.next_score < end:
            owed = self._prompt(slot)[slot.next_score : end]
            scores = [TokenLogprobs([token], [-1.0], 1) for token in owed]
            output.prompt_logprobs[slot.request.request_id] = scores
            slot.next_score = end

    def _signatures(self, slot: _Slot, drafts: list[int]) -> list[int]:
        state = hash_text(slot.request.cache_salt or "") + 1
        signatures = []
        for token in slot.tokens + drafts:
            state = (state * 1000003 + token + 1) % (2**61 - 1)
            signatures.append(state)
        return signatures

    def _kv_slot(self, slot: _Slot, position: int, group: int = 0) -> int:
        block_id = slot.tables[group][position // self.block_size]
        assert block_id != 0, "the null block in a block table"
        return block_id * self.block_size + position % self.block_size

    @staticmethod
    def _prompt(slot: _Slot) -> list[int]:
        return slot.request.prompt_token_ids
