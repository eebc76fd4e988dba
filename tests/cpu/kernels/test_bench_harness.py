"""The harness must notice each kind of wrong result, and its bookkeeping must be right. No GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from tests.gpu.problems import make_problem
from tests.gpu.ragged import ragged_shapes

from octavo.bench import correctness, provenance, timer
from octavo.bench.clocks import ClockSampler
from octavo.bench.correctness import Problem
from octavo.kernels.matmul.registry import Rung, rung

SHAPE = (37, 48, 64)


def solved(which: Rung) -> Problem:
    """A right answer on the CPU, in guarded buffers."""
    m, n, k = SHAPE
    problem = make_problem(which, m, n, k, seed=3, device="cpu")
    problem.poison()
    exact, _ = correctness.oracle(which, problem)
    problem.out.copy_(exact.to(problem.out.dtype))
    return problem


@pytest.fixture(params=[8, 12], ids=["fp32", "bf16"])
def which(request: pytest.FixtureRequest) -> Rung:
    return rung(request.param)


def judge(which: Rung, problem: Problem) -> correctness.Check:
    return correctness.compare(which, problem)


def test_right_result_passes(which: Rung) -> None:
    check = judge(which, solved(which))
    assert check.ok
    assert check.worst <= 1.0


def test_one_wrong_element_fails(which: Rung) -> None:
    problem = solved(which)
    problem.out[5, 7] *= 10
    check = judge(which, problem)
    assert not check.ok
    assert check.worst > 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_element_fails(which: Rung, value: float) -> None:
    problem = solved(which)
    problem.out[36, 47] = value
    assert not judge(which, problem).ok


def test_unwritten_element_fails(which: Rung) -> None:
    problem = solved(which)
    right = problem.out.clone()
    problem.poison()
    problem.out[:, 1:] = right[:, 1:]
    assert not judge(which, problem).ok


def test_write_past_the_edge_fails(which: Rung) -> None:
    problem = solved(which)
    last = problem.out.storage_offset() + 36 * problem.out.stride(0) + 47
    problem.out_buffer[last + 1] = 0.0
    check = judge(which, problem)
    assert not check.guards_intact
    assert not check.ok


def test_small_error_everywhere_fails(which: Rung) -> None:
    problem = solved(which)
    problem.out *= 1.01
    assert not judge(which, problem).ok


def test_inputs_sit_in_nan_and_bf16_rows_have_guards() -> None:
    problem = make_problem(rung(12), *SHAPE, seed=0, device="cpu")
    assert problem.a.stride(0) > problem.a.shape[1]
    beside = torch.as_strided(
        problem.a, (37,), (problem.a.stride(0),), problem.a.storage_offset() + 64
    )
    assert bool(beside.isnan().all())


def test_ragged_shapes_cover_what_the_issue_lists() -> None:
    for number in (2, 9, 20):
        shapes = list(ragged_shapes(rung(number)))
        assert {m for m, _, _ in shapes} >= set(range(1, 131))
        assert {n for _, n, _ in shapes} >= {8, 16, 64, 72}
        assert {k for _, _, k in shapes} >= {8, 16, 64, 72}
        assert all(k % 8 == 0 and k > 0 for _, _, k in shapes)
        assert sum(max(m, n) > 512 and k > 1024 for m, n, k in shapes) >= 2
        tile = rung(number)
        assert (tile.block_m, tile.block_n, max(tile.block_k, 8)) in shapes


def test_rotation_always_passes_twice_the_l2() -> None:
    for size in (1, 10_000, 2**20, 100 * 2**20, 2**30):
        count = timer.rotation_count(size)
        assert count >= 2
        assert (count - 1) * size >= timer.COLD_BYTES  # of the sets between two uses of one


def test_tree_hash_is_the_one_of_git(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "deep").mkdir(parents=True)
    (tmp_path / "pkg" / "a.py").write_text("x = 1\n")
    (tmp_path / "pkg" / "a").mkdir()
    (tmp_path / "pkg" / "a" / "b.cu").write_text("int b;\n")
    script = tmp_path / "pkg" / "deep" / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    (tmp_path / "pkg" / "__pycache__").mkdir()
    (tmp_path / "pkg" / "__pycache__" / "a.pyc").write_bytes(b"1")
    (tmp_path / "pkg" / "empty").mkdir()
    expected = provenance.git_tree_hash(tmp_path / "pkg")

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    git("add", "pkg")
    tree = git("write-tree")
    assert git("rev-parse", f"{tree}:pkg") == expected
    (tmp_path / "pkg" / "a.py").write_text("x = 2\n")
    assert provenance.git_tree_hash(tmp_path / "pkg") != expected


def test_a_clock_summary_is_of_what_was_sampled() -> None:
    clocks = ClockSampler()
    keys = ("samples", "sm_mhz_median", "sm_mhz_min", "sm_mhz_max", "watts_max")
    assert clocks.summary() == dict(zip(keys, (0, None, None, None, None), strict=True))
    clocks.mhz, clocks.watts = [1980, 1400, 1500], [650.0, 699.5, 300.0]
    assert clocks.summary() == dict(zip(keys, (3, 1500, 1400, 1980, 699.5), strict=True))
