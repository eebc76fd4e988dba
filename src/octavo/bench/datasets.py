"""Request lists for benchmarks: random token ids of given lengths, the same for every engine.

Also the check that a run produced what was asked for: a figure of anything else is no measurement.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from octavo.errors import OctavoError
from octavo.outputs import RequestOutput


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of the given lengths; ids avoid the ends of the vocabulary, where control tokens are.

    A vocabulary too small for that margin is used whole.
    """
    generator = random.Random(seed)
    low, high = (100, vocab_size - 1000) if vocab_size > 2000 else (0, vocab_size)
    return [[generator.randrange(low, high) for _ in range(length)] for length in lengths]


def check_produced(
    outputs: Sequence[RequestOutput], output_lens: Sequence[int], max_model_len: int
) -> int:
    """Tokens that a run produced: exactly those asked for, one length an output.

    Raises OctavoError otherwise, with both numbers and why: the errors of failed requests, or
    prompts that left too little room in max_model_len.
    """
    got = [len(out.outputs[0].token_ids) for out in outputs]
    if got == list(output_lens):
        return sum(got)
    if failed := [error for out in outputs if (error := out.outputs[0].error)]:
        reasons = "; ".join(dict.fromkeys(failed[:3]))
        why = f"{len(failed)} of {len(outputs)} requests failed: {reasons}"
    else:
        each = zip(outputs, got, output_lens, strict=True)
        out, number, length = next(row for row in each if row[1] != row[2])
        prompt = len(out.prompt_token_ids)
        why = f"a prompt of {prompt} tokens and an output of {length}"
        if prompt + length > max_model_len:
            why += f" do not fit into max_model_len={max_model_len}"
        else:
            why += f" ended after {number} ({out.outputs[0].finish_reason})"
    raise OctavoError(f"{sum(got)} of {sum(output_lens)} output tokens were produced: {why}")
