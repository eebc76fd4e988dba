"""Token ids to text while they arrive, and the search for stop strings in that text.

The result depends only on the tokens, not on how they are grouped into updates. Work per token
does not grow with the length of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.engine.tokenizer import Tokenizer
from octavo.sampling_params import SamplingParams


class StopStrings:
    """Finds the stop string that is completed first; of those, the longest.

    An Aho-Corasick automaton: its state is the longest end of the text that begins a stop string,
    which is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]
        """By state: characters of text to hold back."""
        self.match: list[str | None] = [None]
        """By state: the stop string that ends here, if any."""
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(None)
                state = self._next[state][char]
            self.match[state] = stop
        self._fail = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:  # breadth first: shorter prefixes are linked before longer ones
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                # A state's own stop string is longer than any that only ends in it.
                self.match[child] = self.match[child] or self.match[self._fail[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character; 0 is the start."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def open_state(self, state: int) -> int:
        """The longest prefix in `state` that a stop string still continues."""
        while state and not self._next[state]:
            state = self._fail[state]
        return state


class IncrementalDetokenizer:
    """The text of one completion.

    Text that may turn out to be a stop string and bytes that are not yet a whole character are
    held back. A character belongs to the token that brings its last byte. A stop string counts if
    that token comes after the first `min_tokens`; it ends the text, and later tokens are ignored.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self.stop_string: str | None = None
        """The stop string that was found."""
        self.num_tokens = 0
        """Tokens that count: up to and including the one that completed the stop string."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stops = StopStrings(params.stop) if params.stop else None
        self._state = 0
        self._held = ""
        self._released: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._prompt_tail(prompt_token_ids))

    @property
    def text(self) -> str:
        """All text released so far."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    def update(
        self, new_token_ids: Sequence[int], *, stop_token: bool = False, finished: bool = False
    ) -> str:
        """Add tokens; returns the text they release.

        stop_token: the last one is EOS or a stop token, which stays out of the text unless
        include_stop_str_in_output is set. finished: nothing follows, so release what is held.
        """
        parts: list[str] = []
        silent = len(new_token_ids) - 1 if stop_token and not self._keep_stop else -1
        for i, token_id in enumerate(new_token_ids):
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            if i != silent and token_id not in self._skipped:
                chars = self._decoder.decode(self._tokenizer.token_bytes(token_id))
                parts.append(self._release(chars))
        if finished and self.stop_string is None:
            parts.append(self._release(self._decoder.decode(b"", final=True)))
            parts.append(self._held)
            self._held = ""
        delta = "".join(parts)
        if delta:
            self._released.append(delta)
        return delta

    def _release(self, chars: str) -> str:
        """Pass new characters through the stop search; returns what may be shown."""
        if self._stops is None or not chars:
            return chars
        inert = self.num_tokens <= self._min_tokens
        text = self._held + chars
        for end in range(len(self._held) + 1, len(text) + 1):
            self._state = self._stops.step(self._state, text[end - 1])
            match = self._stops.match[self._state]
            if match is None:
                continue
            if not inert:
                self.stop_string, self._held = match, ""
                return text[: end if self._keep_stop else end - len(match)]
            self._state = self._stops.open_state(self._state)
        cut = len(text) - self._stops.depth[self._state]
        self._held = text[cut:]
        return text[:cut]

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt: they may begin the first character of the output."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 3:
                break
        return tail[-3:]
