"""`octavo kernels`: the matmul kernel lab. This module owns its arguments, `list`, `bench`, `device`.

What needs no measurement (asm, roofline, occupancy, report) is in `kernels_inspect`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from octavo.cli import kernels_inspect
from octavo.errors import KernelError
from octavo.inspect import device_view
from octavo.kernels.matmul.registry import RUNGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the rungs: tile, threads, stages, idea")
    listing.add_argument("--long", action="store_true", help="with idea and limiter in full")
    listing.set_defaults(action_run=run_list)
    device = actions.add_parser("device", help="measure this GPU's memories (needs a GPU)")
    device.add_argument("--out", type=Path, help="write the result as JSON, for `report --device`")
    device.set_defaults(action_run=run_device)
    bench = actions.add_parser("bench", help="check and time rungs beside cuBLAS (needs a GPU)")
    bench.add_argument("rungs", nargs="*", help="rung numbers or names, default all")
    bench.add_argument("--sizes", type=int, nargs="+", default=[4096, 8192], help="M = N = K, bf16")
    bench.add_argument("--fp32-sizes", type=int, nargs="*", default=[4096], help="M = N = K, fp32")
    bench.add_argument("--modes", nargs="+", choices=["cool", "sustained"], help="default both")
    bench.add_argument("--rounds", type=int, default=7, help="samples of each rung")
    bench.add_argument("--out", type=Path, help="write the result as JSON, for `report`")
    bench.set_defaults(action_run=run_bench)
    kernels_inspect.add_actions(actions)


def run(args: argparse.Namespace) -> int:
    return int(args.action_run(args))


def run_list(args: argparse.Namespace) -> int:
    print(
        f"{'rung':26s} {'dtype':5s} {'tile':12s} {'threads':>7s} {'stages':>6s} {'cluster':>7s}  title"
    )
    for one in RUNGS:
        tile = f"{one.block_m}x{one.block_n}x{one.block_k}" if one.kind == "matmul" else "-"
        print(
            f"{one.name:26s} {one.dtype:5s} {tile:12s} {one.threads:7d} {one.stages:6d}"
            f" {one.cluster:7d}  {one.title}"
        )
        if args.long:
            print(f"{'':4s}Idea: {one.idea}\n{'':4s}Limiter: {one.limiter}\n")
    return 0


def require_gpu(what: str) -> None:
    """Raises KernelError, in one line, where no CUDA GPU can be used."""
    import torch

    if not torch.cuda.is_available():
        raise KernelError(f"`octavo kernels {what}` needs a CUDA GPU, and this machine shows none")


def run_bench(args: argparse.Namespace) -> int:
    require_gpu("bench")
    from octavo.bench import ladder

    chosen = [kernels_inspect.find_rung(name) for name in args.rungs] or list(RUNGS)
    document = ladder.run_ladder(
        args.sizes,
        chosen,
        modes=args.modes or ("cool", "sustained"),
        rounds=args.rounds,
        fp32_sizes=args.fp32_sizes,
        progress=print,
    )
    if args.out:
        ladder.write(document, args.out)
        print(f"wrote {args.out}")
    return 0 if all(row["ok"] for row in document["results"]) else 1


def run_device(args: argparse.Namespace) -> int:
    require_gpu("device")
    from octavo.bench import device, ladder

    document = device.measure_device()
    print(device_view.device_text(document), end="")
    if args.out:
        ladder.write(document, args.out)
        print(f"wrote {args.out}")
    return 0
