"""`octavo kernels`: the matmul kernel lab. Only `bench` and `device` measure, and need a GPU."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from octavo.cli.options import check_writable, integer
from octavo.errors import KernelError
from octavo.files import read_text
from octavo.inspect import figures, report, report_data
from octavo.inspect.asm import Assembly, Note, assemble
from octavo.inspect.asm_views import note_lines, render_html, render_text
from octavo.inspect.notes import notes
from octavo.inspect.page import SERIES, render, svg
from octavo.kernels.matmul import quantization, roofline
from octavo.kernels.matmul.occupancy import MAX_WARPS, occupancy
from octavo.kernels.matmul.registry import RUNGS, rung


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the rungs: tile, threads, stages, idea")
    listing.add_argument("--long", action="store_true", help="with idea and limiter in full")
    device = actions.add_parser("device", help="measure this GPU's memories (needs a GPU)")
    device.add_argument("--out", type=Path, help="write the result as JSON, for `report --device`")
    bench = actions.add_parser("bench", help="check and time rungs beside cuBLAS (needs a GPU)")
    bench.add_argument("rungs", nargs="*", help="rung numbers or names, default all")
    sizes = partial(bench.add_argument, type=integer, metavar="N")
    sizes("--sizes", nargs="+", default=[4096, 8192], help="M = N = K, bf16")
    sizes("--fp32-sizes", nargs="*", default=[4096], help="M = N = K, fp32")
    modes = ["cool", "sustained"]
    bench.add_argument("--modes", nargs="+", choices=modes, default=modes, help="default both")
    bench.add_argument("--rounds", type=integer, default=7, help="samples of each rung")
    bench.add_argument("--out", type=Path, help="write the result as JSON, for `report`")
    asm = actions.add_parser("asm", help="source, PTX and SASS side by side, with remarks")
    asm.add_argument("name", help="a rung (number or name) or a .cu file")
    asm.add_argument("--kernel", help="which entry function, when there are several")
    asm.add_argument("--notes", action="store_true", help="only the remarks")
    asm.add_argument("--all", action="store_true", help="every SASS instruction, nothing folded")
    asm.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of text")
    roof = actions.add_parser("roofline", help="what bounds a GEMM, and how fast it can be")
    for size in "mnk":
        roof.add_argument(size, type=integer)
    roof.add_argument("--dtype", choices=list(roofline.FLOPS_PER_CLOCK), default="bf16")
    roof.add_argument("--device", choices=list(roofline.DEVICES), default="h200")
    roof.add_argument("--clock", type=integer, metavar="MHZ", help="default: the data sheet's")
    roof.add_argument("--tile", type=integer, nargs=2, default=[128, 256], metavar=("BM", "BN"))
    roof.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")
    fit = actions.add_parser("occupancy", help="how many CTAs fit on an SM, and what limits them")
    fit.add_argument("name", nargs="?", help="a rung; or give --threads and --registers")
    fit.add_argument("--threads", type=integer)
    fit.add_argument("--registers", type=integer, help="a thread")
    fit.add_argument("--smem", type=partial(integer, least=0), help="bytes a CTA")
    page = actions.add_parser("report", help="one HTML page from the JSON of `bench`")
    page.add_argument("json", type=Path, nargs="?", help="written by `octavo kernels bench --out`")
    page.add_argument("--device", type=Path, metavar="JSON", help="written by `device --out`")
    page.add_argument("--out", type=Path, default=Path("ladder.html"))
    page.add_argument("--code", action="store_true", help="compile all rungs: registers, remarks")
    page.add_argument("--asm", nargs="+", metavar="RUNG", help="and write asm pages of these")
    page.add_argument("--figures", type=Path, metavar="DIR", help="write the docs' SVG pictures")


def run(args: argparse.Namespace) -> int:
    actions = {"list": run_list, "device": run_device, "bench": run_bench, "asm": run_asm}
    actions |= {"roofline": run_roofline, "occupancy": run_occupancy, "report": run_report}
    if args.action in ("device", "bench") and args.out:
        check_writable("--out", args.out)
    return actions[args.action](args)


def run_list(args: argparse.Namespace) -> int:
    print(render("list.txt", rungs=RUNGS, long=args.long), end="")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    from octavo.bench.ladder import run_ladder

    chosen = [rung(name) for name in args.rungs] or RUNGS
    settings = {name: getattr(args, name) for name in ("modes", "rounds", "fp32_sizes")}
    document = run_ladder(args.sizes, chosen, **settings)
    if args.out:
        _write(args.out, json.dumps(document, indent=1) + "\n")
    return 0 if all(row["ok"] for row in document["results"]) else 1


def run_device(args: argparse.Namespace) -> int:
    from octavo.bench.device import measure_device

    document = measure_device()
    print(report_data.device_text(document), end="")
    if args.out:
        _write(args.out, json.dumps(document, indent=1) + "\n")
    return 0


def _assemble(name: str, kernel: str | None = None) -> tuple[Assembly, dict[str, str]]:
    """A rung or a file, with the title and the introduction of its page."""
    if name.endswith(".cu"):
        path = Path(name)
        return assemble(read_text("name", path), path.name, kernel), {"title": path.name}
    found = rung(name)
    built = assemble(found.source, found.path.name, kernel or found.entry)
    return built, {"title": f"{found.number:02d} {found.title}", "intro": found.header["Idea"]}


def run_asm(args: argparse.Namespace) -> int:
    assembly, about = _assemble(args.name, args.kernel)
    remarks = notes(assembly)
    if args.html:
        _write(args.html, render_html(assembly, remarks, **about))
    elif args.notes:
        print("\n".join(note_lines(remarks)))
    else:
        print(render_text(assembly, remarks, most=0 if args.all else 6), end="")
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())  # encoded first: no empty file is left if that fails
    print(f"wrote {path} ({len(text) // 1024} KB)")


def run_roofline(args: argparse.Namespace) -> int:
    device, size = roofline.DEVICES[args.device], (args.m, args.n, args.k)
    name, clock = "{} x {} x {}".format(*size), args.clock or device.spec_clock
    roof = roofline.device_roofline(device, args.dtype, clock)
    width = roofline.ELEMENT_BYTES[args.dtype]
    flops = roofline.gemm_flops(*size)
    traffic = roofline.gemm_bytes(*size, element_bytes=width, out_bytes=2 if width < 4 else 4)
    intensity = flops / traffic
    tiles = quantization.tile_quantization(args.m, args.n, *args.tile)
    waves = quantization.wave_quantization(tiles.pieces, device.num_sms)
    found = {"flops": flops, "traffic": traffic, "intensity": intensity, "name": name}
    found |= {"asked": args, "device": device, "clock": clock}
    print(render("roofline.txt", **found, roof=roof, tiles=tiles, waves=waves))
    if args.svg:
        slope = f"DRAM, {roof.bytes_per_s / 1e12:.1f} TB/s"
        ceiling = f"{args.dtype} peak", slope, roof, SERIES[2]
        point = intensity, roof.attainable(intensity) / 1e12, name, SERIES[1]
        picture = figures.roofline_figure([ceiling], [point], name)
        _write(args.svg, svg(picture))
    return 0


def run_occupancy(args: argparse.Namespace) -> int:
    threads, registers, smem = args.threads, args.registers, args.smem or 0
    if args.name:
        if any(number is not None for number in (threads, registers, args.smem)):
            raise KernelError("a rung has its own --threads, --registers and --smem")
        found, resources = rung(args.name), _assemble(args.name)[0].resources
        threads, registers = found.threads, resources.registers
        smem = resources.static_smem + found.dynamic_smem
    elif not (threads and registers):
        raise KernelError("give a rung, or --threads and --registers")
    fit = occupancy(threads, registers, smem)
    kernel = {"threads": threads, "registers": registers, "smem": smem}
    print(render("occupancy.txt", **kernel, fit=fit, most=MAX_WARPS))
    return 0


def run_report(args: argparse.Namespace) -> int:
    if args.json is None and args.figures is None:
        raise KernelError("give the JSON of `octavo kernels bench --out FILE`, or --figures DIR")
    if args.figures:
        for name, picture in figures.pictures().items():
            _write(args.figures / f"{name}.svg", svg(picture))
    if args.json is None:
        return 0
    run = report_data.load_run(args.json)
    device = report_data.load_device(args.device) if args.device else None
    pages = {rung(name).name for name in args.asm or ()}
    measured = {row.rung for group in run.groups for row in group.rungs} if args.code else set()
    assemblies: dict[str, tuple[Assembly, list[Note]]] = {}
    links = {}
    for name in (one.name for one in RUNGS if one.name in pages | measured):
        assembly, about = _assemble(name)
        remarks = notes(assembly)
        if args.code:
            assemblies[name] = assembly, remarks
        if name in pages:
            links[name] = f"asm/{name}.html"
            page = render_html(assembly, remarks, **about)
            _write(args.out.parent / links[name], page)
    html = report.render_report(run, device=device, assemblies=assemblies, asm_links=links)
    _write(args.out, html)
    return 0
