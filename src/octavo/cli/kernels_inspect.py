"""The parts of `octavo kernels` that need no GPU: asm, roofline, occupancy and report."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import KernelError
from octavo.inspect import figures, figures_tiles, report, report_data
from octavo.inspect.asm import Assembly, Note, assemble
from octavo.inspect.asm_html import render_html
from octavo.inspect.asm_text import note_lines, render_text
from octavo.inspect.drawing import SERIES, svg
from octavo.inspect.notes import notes
from octavo.kernels.matmul import occupancy as occupancy_model
from octavo.kernels.matmul import quantization, roofline
from octavo.kernels.matmul.registry import RUNGS, Rung, rung


def add_actions(actions: Any) -> None:
    """Add this module's actions to the subparsers of `octavo kernels`."""
    asm = actions.add_parser("asm", help="source, PTX and SASS side by side, with remarks")
    asm.add_argument("name", help="a rung (number or name) or a .cu file")
    asm.add_argument("--kernel", help="which entry function, when there are several")
    asm.add_argument("--notes", action="store_true", help="only the remarks")
    asm.add_argument("--all", action="store_true", help="every SASS instruction, nothing folded")
    asm.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of text")
    asm.set_defaults(action_run=run_asm)
    roof = actions.add_parser("roofline", help="what bounds a GEMM, and how fast it can be")
    for size in "mnk":
        roof.add_argument(size, type=positive)
    roof.add_argument("--dtype", choices=list(roofline.FLOPS_PER_CLOCK), default="bf16")
    roof.add_argument("--device", choices=list(roofline.DEVICES), default="h200")
    roof.add_argument("--clock", type=positive, metavar="MHZ", help="default: the data sheet's")
    roof.add_argument("--tile", type=positive, nargs=2, default=[128, 256], metavar=("BM", "BN"))
    roof.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")
    roof.set_defaults(action_run=run_roofline)
    fit = actions.add_parser("occupancy", help="how many CTAs fit on an SM, and what limits them")
    fit.add_argument("name", nargs="?", help="a rung; or give --threads and --registers")
    fit.add_argument("--threads", type=positive)
    fit.add_argument("--registers", type=positive, help="a thread")
    fit.add_argument("--smem", type=int, default=0, help="bytes a CTA")
    fit.set_defaults(action_run=run_occupancy)
    page = actions.add_parser("report", help="one HTML page from the JSON of `bench`")
    page.add_argument("json", type=Path, nargs="?", help="written by `octavo kernels bench --out`")
    page.add_argument("--device", type=Path, metavar="JSON", help="written by `device --out`")
    page.add_argument("--out", type=Path, default=Path("ladder.html"))
    page.add_argument("--code", action="store_true", help="compile all rungs: registers, remarks")
    page.add_argument("--asm", nargs="+", metavar="RUNG", help="and write asm pages of these")
    page.add_argument("--figures", type=Path, metavar="DIR", help="write the docs' SVG pictures")
    page.set_defaults(action_run=run_report)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def find_rung(name: str) -> Rung:
    """A rung by number ("2", "02") or name. Raises KernelError for any other."""
    try:
        return rung(int(name) if name.isdecimal() else name)
    except KeyError as error:
        raise KernelError(f"no rung {name!r}; `octavo kernels list` shows them") from error


def _assemble(name: str, kernel: str | None = None) -> tuple[Assembly, str, str]:
    """A rung or a file, with a title and a line about it."""
    if name.endswith(".cu"):
        path = Path(name)
        try:
            return assemble(path.read_text(), path.name, kernel), path.name, ""
        except OSError as error:
            raise KernelError(f"cannot read {name}: {error.strerror}") from error
    found = find_rung(name)
    built = assemble(found.source, found.path.name, kernel or found.entry)
    return built, f"{found.number:02d} {found.title}", found.idea


def run_asm(args: argparse.Namespace) -> int:
    assembly, title, idea = _assemble(args.name, args.kernel)
    remarks = notes(assembly)
    if args.html:
        _write(args.html, render_html(assembly, remarks, title=title, intro=idea))
    elif args.notes:
        print("\n".join(note_lines(remarks)))
    else:
        print(render_text(assembly, remarks, most=0 if args.all else 6), end="")
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"wrote {path} ({len(text) // 1024} KB)")


def run_roofline(args: argparse.Namespace) -> int:
    device = roofline.DEVICES[args.device]
    clock = args.clock or device.spec_clock
    roof = roofline.device_roofline(device, args.dtype, clock)
    m, n, k = args.m, args.n, args.k
    width = roofline.ELEMENT_BYTES[args.dtype]
    out = 2 if width < 4 else 4
    flops = roofline.gemm_flops(m, n, k)
    traffic = roofline.gemm_bytes(m, n, k, element_bytes=width, out_bytes=out)
    intensity = flops / traffic
    block_m, block_n = args.tile
    tiles = quantization.tile_quantization(m, n, block_m, block_n)
    waves = quantization.wave_quantization(tiles.tiles, device.num_sms)
    seconds = roof.seconds(flops, traffic)
    print(f"{m} x {n} x {k} {args.dtype} on {device.name} at {clock} MHz")
    print(f"  work        {flops / 1e9:.2f} GFLOP, {traffic / 1e6:.2f} MB at least")
    print(f"  intensity   {intensity:.1f} FLOP/byte; the ridge is at {roof.ridge_point:.1f}")
    print(
        f"  peak        {roof.flops_per_s / 1e12:.0f} TFLOP/s, {roof.bytes_per_s / 1e12:.2f} TB/s"
    )
    print(f"  bound by    {roof.limiter(intensity)}")
    print(f"  at best     {roof.attainable(intensity) / 1e12:.1f} TFLOP/s, {seconds * 1e6:.2f} us")
    print(
        f"  {block_m}x{block_n} tiles  {tiles.tiles} tiles, {tiles.efficiency:.0%} of them useful;"
        f" {waves.waves} waves on {device.num_sms} SMs, {waves.efficiency:.0%} busy"
    )
    if args.svg:
        slope = f"DRAM, {roof.bytes_per_s / 1e12:.1f} TB/s"
        ceiling = f"{args.dtype} peak", slope, roof, SERIES[2]
        point = intensity, roof.attainable(intensity) / 1e12, f"{m} x {n} x {k}", SERIES[1]
        picture = figures.roofline_figure([ceiling], [point], f"{m} x {n} x {k}")
        _write(args.svg, svg(picture))
    return 0


def run_occupancy(args: argparse.Namespace) -> int:
    if args.name:
        found = find_rung(args.name)
        assembly, _, _ = _assemble(args.name)
        threads, registers = found.threads, assembly.resources.registers
        smem = assembly.resources.static_smem + found.dynamic_smem
    elif args.threads and args.registers:
        threads, registers, smem = args.threads, args.registers, args.smem
    else:
        raise KernelError("give a rung, or --threads and --registers")
    try:
        fit = occupancy_model.occupancy(threads, registers, smem)
    except ValueError as error:
        raise KernelError(str(error)) from error
    print(f"{threads} threads x {registers} registers, {smem} bytes of shared memory a CTA")
    for resource, count in fit.limits.items():
        mark = "  <- the limit" if resource in fit.limiters else ""
        print(f"  {resource:14s} allows {count} CTAs an SM{mark}")
    print(
        f"  {fit.ctas_per_sm} CTAs, {fit.warps_per_sm} warps of"
        f" {occupancy_model.MAX_WARPS}: {fit.fraction:.0%} occupancy"
    )
    return 0


def run_report(args: argparse.Namespace) -> int:
    if args.json is None and args.figures is None:
        raise KernelError("give the JSON of `octavo kernels bench --out FILE`, or --figures DIR")
    if args.figures:
        for name, picture in figures_tiles.pictures().items():
            _write(args.figures / f"{name}.svg", svg(picture))
    if args.json is None:
        return 0
    run = report_data.load_run(args.json)
    assemblies: dict[str, tuple[Assembly, list[Note]]] = {}
    links = {}
    pages = {find_rung(name).name for name in args.asm or ()}
    for found in _chosen_rungs(run, pages, args.code):
        assembly = assemble(found.source, found.path.name, found.entry)
        remarks = notes(assembly)
        if args.code:
            assemblies[found.name] = (assembly, remarks)
        if found.name in pages:
            title = f"{found.number:02d} {found.title}"
            html = render_html(assembly, remarks, title=title, intro=found.idea)
            _write(args.out.parent / "asm" / f"{found.name}.html", html)
            links[found.name] = f"asm/{found.name}.html"
    device = report_data.load_device(args.device) if args.device else None
    html = report.render_report(run, device=device, assemblies=assemblies, asm_links=links)
    _write(args.out, html)
    return 0


def _chosen_rungs(run: report_data.LadderRun, pages: set[str], code: bool) -> Iterator[Rung]:
    """The rungs to compile: those with a page, and with `code` all that were measured."""
    measured = {row.rung for group in run.groups for row in group.rungs} if code else set()
    yield from (one for one in RUNGS if one.name in pages | measured)
