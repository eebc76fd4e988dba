"""Runs rungs on small ragged shapes; what compute-sanitizer watches. Arguments: rung numbers."""

from __future__ import annotations

import sys

from tests.gpu.problems import make_problem

from octavo.bench import correctness
from octavo.kernels.launch import Kernel
from octavo.kernels.matmul.registry import rung

SHAPES = ((264, 520, 200), (64, 64, 64), (129, 77, 72))
LONG = (520, 520, 1416)
"""Walked by one cluster, all tiles: rings wrap, stages and staging are used again, stores deferred."""


def main() -> int:
    numbers = [int(number) for number in sys.argv[1:]]
    bad = sum(not is_right(number, shape) for number in numbers for shape in SHAPES)
    Kernel.resident_ctas = lambda _self, _device, shape: shape.cluster
    for number in numbers:
        bad += not is_right(number, LONG)
        print(f"rung {number} checked", flush=True)
    return bad


def is_right(number: int, shape: tuple[int, int, int]) -> bool:
    problem = make_problem(rung(number), *shape, seed=0)
    check = correctness.run_and_compare(rung(number), problem)
    if not check.ok:
        print(check)
    return check.ok


if __name__ == "__main__":
    sys.exit(main())
