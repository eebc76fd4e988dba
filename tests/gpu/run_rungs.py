"""Runs rungs on small ragged shapes; what compute-sanitizer watches. Arguments: rung numbers."""

from __future__ import annotations

import sys

from tests.gpu.problems import make_problem

from octavo.bench import correctness
from octavo.kernels.launch import Kernel
from octavo.kernels.matmul.registry import rung

SHAPES = ((264, 520, 200), (64, 64, 64), (129, 77, 72), (520, 520, 1096))


def on_one_cluster() -> None:
    """From here on one cluster walks all tiles: rings wrap, and stages and staging are used again."""
    Kernel.resident_ctas = lambda _self, _device, shape: shape.cluster


def main() -> int:
    on_one_cluster()
    bad = 0
    for number in map(int, sys.argv[1:]):
        for shape in SHAPES:
            problem = make_problem(rung(number), *shape, seed=0)
            check = correctness.run_and_compare(rung(number), problem)
            if not check.ok:
                print(check)
                bad += 1
        print(f"rung {number} checked", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
