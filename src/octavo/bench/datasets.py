"""Request lists for benchmarks: random token ids of given lengths, the same for every engine."""

from __future__ import annotations

import random


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of the given lengths; ids avoid the ends of the vocabulary, where control tokens are.

    A vocabulary too small for that margin is used whole.
    """
    generator = random.Random(seed)
    low, high = (100, vocab_size - 1000) if vocab_size > 2000 else (0, vocab_size)
    return [[generator.randrange(low, high) for _ in range(length)] for length in lengths]
