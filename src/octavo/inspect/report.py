"""Owns the ladder report: one self-contained HTML page made from the JSON of a ladder run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from octavo.inspect.asm import Assembly, Note
from octavo.inspect.device_view import device_section
from octavo.inspect.figures import device_roofs
from octavo.inspect.figures_curves import (
    Bar,
    Point,
    Roof,
    bar_figure,
    occupancy_figure,
    quantization_figure,
    roofline_figure,
)
from octavo.inspect.figures_ring import ring_figure
from octavo.inspect.figures_tiles import schedule_figure, swizzle_figure
from octavo.inspect.page import figure, page, table, tile
from octavo.inspect.report_data import (
    CUBLAS,
    Group,
    LadderRun,
    known_rung,
    requested_intensity,
)
from octavo.kernels.matmul.occupancy import occupancy
from octavo.kernels.matmul.roofline import Roofline, peak_flops

# Terms a reader needs before the first chart, in the order in which they build on each other.
WORDS = (
    (
        "SM",
        "streaming multiprocessor: one of the 132 cores of an H200, with its own registers, "
        "shared memory and tensor cores",
    ),
    ("warp", "32 threads that run the same instruction together"),
    (
        "CTA",
        "a block of threads on one SM that can share memory; it computes one tile of the output",
    ),
    ("tile", "the rectangle of the output that one CTA computes"),
    ("shared memory", "up to 227 KB on each SM, filled and read by hand: far faster than DRAM"),
    ("FFMA", "one fp32 multiply-add; without tensor cores the unit of work"),
    ("wgmma", "the instruction by which 128 threads hand two tiles to the tensor core"),
    ("TMA", "the unit that copies whole tiles between DRAM and shared memory by itself"),
    ("cluster", "CTAs on neighbouring SMs that can share what one of them loads (multicast)"),
    ("roofline", "the most a kernel can reach: by arithmetic, or by bytes times bandwidth"),
    ("cuBLAS", "NVIDIA's own library, timed in the same run"),
)


def render_report(
    run: LadderRun,
    *,
    device: Mapping[str, Any] | None = None,
    assemblies: Mapping[str, tuple[Assembly, Sequence[Note]]] | None = None,
    asm_links: Mapping[str, str] | None = None,
) -> str:
    """The page. `device` is a checked device measurement, `assemblies` adds registers and remarks
    for each rung by name, `asm_links` the hrefs of their asm pages.
    """
    built = assemblies or {}
    parts = [
        _head(run),
        _words(),
        device_section(device) if device else "",
        _ilp_section(run),
        *[_ladder_section(run, dtype) for dtype in ("bf16", "fp32") if _groups(run, dtype)],
        _rung_table(run, asm_links or {}),
        _roofline_section(run, device),
        _why_sections(),
        _machine_section(built),
        _foot(run),
    ]
    return page(f"The matmul ladder on {run.environment.get('gpu', 'a GPU')}", "\n".join(parts))


def _groups(run: LadderRun, dtype: str) -> list[Group]:
    return [g for g in run.groups if g.dtype == dtype]


def _head(run: LadderRun) -> str:
    gpu = escape(str(run.environment.get("gpu", "an unnamed GPU")))
    tiles = []
    for group in run.groups:
        best = group.best
        if best:
            words = f"TFLOP/s, {group.name}: {best.rung}, {best.vs_cublas:.3f} x cuBLAS"
            tiles.append(tile(f"{best.tflops:.0f}", words))
    wrong = sorted({r.rung for g in run.groups for r in g.rungs if not r.ok})
    alarm = ""
    if wrong:
        names = escape(", ".join(wrong))
        alarm = (
            f'<p class="wrong">Not right in this run, so their speeds do not count: {names}.</p>'
        )
    return (
        f"<h1>The matmul ladder</h1>"
        f'<p class="lead">How a matrix multiplication gets from a textbook loop to the speed of the'
        f" machine, one idea a rung, measured on {gpu}.</p>"
        f"<nav><a href='#bf16'>bf16</a><a href='#fp32'>fp32</a><a href='#rungs'>Rung by rung</a>"
        f"<a href='#roofline'>Roofline</a><a href='#why'>Why</a><a href='#code'>Machine code</a>"
        f"</nav>"
        f'<div class="tiles">{"".join(tiles)}</div>{alarm}'
    )


def _words() -> str:
    items = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in WORDS)
    return f'<details open><summary>Words</summary><dl class="words">{items}</dl></details>'


def _ladder_section(run: LadderRun, dtype: str) -> str:
    groups = _groups(run, dtype)
    what = (
        "16-bit inputs, sums in fp32, on the tensor cores. Cool: short bursts on a rested GPU."
        " Sustained: under steady load, where the power limit lowers the clock."
        if dtype == "bf16"
        else "32-bit floats on the ordinary arithmetic units, tensor cores off."
    )
    charts = [_chart(run, group) for group in groups]
    rest = "".join(charts[1:])
    more = f"<details><summary>Other sizes and modes</summary>{rest}</details>" if rest else ""
    return f'<h2 id="{dtype}">The {dtype} ladder</h2><p>{what}</p>{charts[0]}{more}'


def _chart(run: LadderRun, group: Group) -> str:
    series = 0 if group.dtype == "fp32" else 2
    bars = []
    for row in group.rungs:
        note = f"{row.tflops:.1f} · {row.vs_cublas:.2f}x" if row.ok else "WRONG"
        bars.append(Bar(row.rung, row.tflops, note, series, row.spread_tflops()))
    marks = []
    if group.cublas:
        marks.append(("cuBLAS", group.cublas.tflops))
    steady = group.mode != "cool"  # bursts are too short for NVML's samples to tell their clock
    clock = group.clocks.get("sm_mhz_median") if steady else run.device.max_clock
    if clock:
        peak = peak_flops(run.device, group.dtype, float(clock)) / 1e12
        when = "held" if steady else "at most"
        marks.append((f"all units busy, {float(clock):.0f} MHz {when}", peak))
    spec = peak_flops(run.device, group.dtype) / 1e12
    marks.append((f"data sheet, {run.device.spec_clock} MHz", spec))
    svg = bar_figure(bars, marks, "TFLOP/s", f"Speed of the rungs, {group.name}")
    watts = group.clocks.get("watts_max") if steady else None
    load = f" Highest board power {float(watts):.0f} W." if watts else ""
    caption = (
        f"{escape(group.name)}. Bars: median; the thin line spans the fastest and slowest sample."
        f" At the right, TFLOP/s and the ratio to cuBLAS in the same run.{load}"
    )
    return figure(svg.inline(), caption)


def _rung_table(run: LadderRun, links: Mapping[str, str]) -> str:
    """Each rung once: at the largest size of its dtype, first mode."""
    rows: list[tuple[str, ...]] = []
    shown = []
    for dtype in ("fp32", "bf16"):
        groups = _groups(run, dtype)
        if not groups:
            continue
        group = max(groups, key=lambda g: g.size[0] * (g.mode == groups[0].mode))
        shown.append(group.name)
        before: float | None = None
        for row in group.rungs:
            rung = known_rung(row.rung)
            gain = f"{row.tflops / before:.2f}x" if before else ""
            before = row.tflops
            name = escape(row.rung)
            link = f'<a href="{escape(links[row.rung])}">{name}</a>' if row.rung in links else name
            idea = ""
            if rung:
                idea = f"{escape(rung.idea)}<br><small>Limit: {escape(rung.limiter)}</small>"
            rows.append(
                (
                    link,
                    idea,
                    f"{row.tflops:.1f}" if row.ok else '<span class="wrong">wrong</span>',
                    gain,
                    f"{row.vs_cublas:.3f}",
                )
            )
    head = ("rung", "idea", "TFLOP/s", "over the last", "x cuBLAS")
    which = f"<p>Speeds are those of {escape(' and '.join(shown))}.</p>"
    return f'<h2 id="rungs">Rung by rung</h2>{which}{table(head, rows, numeric=(2, 3, 4))}'


def _ilp_section(run: LadderRun) -> str:
    parts = []
    for entry in run.ilp:
        rates = entry.get("tflops", {})
        ratio = entry.get("ratio")
        if ratio is None or not rates:
            continue
        said = ", ".join(
            f"{escape(str(k).removeprefix('ilp_'))} {float(v):.1f} TFLOP/s"
            for k, v in rates.items()
        )
        parts.append(
            f"<h2>Before the ladder: why threads need independent work</h2><p>The same number of"
            f" multiply-adds, once as a chain in which each waits for the one before, once as"
            f" several chains side by side: {said}. Independent work is {float(ratio):.1f} times"
            f" as fast, because a multiply-add takes 4 clocks but a new one can start each clock."
            f"</p>"
        )
    return "".join(parts)


def _roofline_section(run: LadderRun, measured: Mapping[str, Any] | None) -> str:
    device = run.device
    roofs = device_roofs(device)
    if measured:
        rate = float(measured["bandwidth_gbs"]["l2_read"]) * 1e9
        slope = f"L2 by ordinary loads, {rate / 1e12:.1f} TB/s"
        roofs.append(Roof("", slope, Roofline(peak_flops(device, "bf16"), rate), 3))
    points = []
    for dtype, series in (("fp32", 0), ("bf16", 2)):
        groups = _groups(run, dtype)
        for row in groups[0].rungs if groups else []:
            rung = known_rung(row.rung)
            if rung and row.ok:
                label = f"{rung.number:02d}"
                at = requested_intensity(rung)
                points.append(Point(at, row.tflops * 1e12, label, series))
    svg = roofline_figure(roofs, points, "Roofline with every rung")
    caption = (
        f"Across: operations for each byte that the SMs ask for beyond their own shared memory."
        f" Up: speed. Larger tiles (and multicast) move a rung right, where the"
        f" sloped line allows more. The lower slope is DRAM ({device.dram_bytes_per_s / 1e12:.1f}"
        f" TB/s); the upper one is what all L1 caches together deliver (128 bytes a clock each)."
        f" Rungs between the two live on L2 and L1: most of what they ask for was fetched before."
    )
    lead = (
        "A kernel can be short of arithmetic or short of bytes. The roof shows which: below the"
        " slope bytes decide, below the flat part the arithmetic units do."
    )
    return f'<h2 id="roofline">Roofline</h2><p>{lead}</p>{figure(svg.inline(), caption)}'


def _why_sections() -> str:
    parts = ['<h2 id="why">Why the rungs are what they are</h2>']
    for title, lead, svg, caption in PICTURES:
        parts.append(f"<h3>{title}</h3><p>{lead}</p>{figure(svg().inline(), caption)}")
    return "".join(parts)


PICTURES = (
    (
        "Swizzled shared memory",
        "Shared memory has 32 banks of 4 bytes. The tensor core reads 8 rows of 16 bytes at once;"
        " if the rows of a tile are 128 bytes wide, all 8 pieces lie in the same 4 banks and have to"
        " wait for each other. TMA can store the tile so that they do not.",
        swizzle_figure,
        "Each square is 16 bytes, labelled row.chunk and coloured by chunk; one line is all 32"
        " banks (numbers at the top). Outlined: what one read wants, chunk 0 of rows 0 to 7."
        " A swizzle XORs the chunk number with bits of the row number.",
    ),
    (
        "Producer and consumer",
        "A load takes far longer than the arithmetic on what it brings. So some threads do nothing but"
        " ask for the next tiles, into a ring of stages, and others do nothing but multiply. Two"
        " barriers a stage keep them apart: full (the bytes are there) and empty (they were used).",
        ring_figure,
        "A load of 6 ticks and a multiplication of 2, in the model of the kernels' barriers. Each"
        " stage alternates between being filled and being read; with four of them a full one is"
        " always ready. The parity tells rounds apart, since a barrier has no other counter.",
    ),
    (
        "The order of tiles",
        "132 CTAs run at once and read rows of A and columns of B through L2. A wave that covers a"
        " compact patch of the output needs fewer of them, so more reads are served by L2.",
        schedule_figure,
        "32 x 32 tiles of 128x256, coloured by wave of 132; wave 1 is strong, the line is the order."
        " Bars at the edges: panels of A and B that wave 1 reads. Traffic is simulated for K = 8192"
        " and 60 MB of L2 with CTAs in lockstep: it ranks orders, it does not predict bytes.",
    ),
    (
        "Quantization",
        "Work comes in whole tiles and whole waves. One row too many costs a row of tiles, one tile"
        " too many costs a wave.",
        quantization_figure,
        "Top left: useful part of the edge tiles. Top right: how busy 132 SMs are. Below: the"
        " product for square problems, by tile size: large tiles are faster inside and lose more"
        " at the edges.",
    ),
    (
        "Occupancy",
        "Registers, shared memory and threads decide how many CTAs fit on one SM. The fp32 rungs"
        " need many warps to hide memory; the wgmma rungs run one CTA of 384 threads an SM and hide"
        " it by fetching ahead.",
        occupancy_figure,
        "Left: warps on an SM by registers a thread. Right: CTAs by shared memory each. Both fall"
        " in steps, because only whole CTAs fit.",
    ),
)


def _machine_section(built: Mapping[str, tuple[Assembly, Sequence[Note]]]) -> str:
    if not built:
        return ""
    rows = []
    details = []
    for name, (assembly, remarks) in built.items():
        rung = known_rung(name)
        found = assembly.resources
        smem = found.static_smem + (rung.dynamic_smem if rung else 0)
        threads = rung.threads if rung else 0
        fit = occupancy(threads, found.registers, smem) if threads else None
        rows.append(
            (
                escape(name),
                str(threads or ""),
                str(found.registers),
                f"{smem / 1024:.0f}",
                str(fit.ctas_per_sm) if fit else "",
                f"{fit.fraction:.0%}" if fit else "",
                escape(", ".join(fit.limiters)) if fit else "",
                str(len(assembly.sass.instructions)),
            )
        )
        items = "".join(f"<li><b>{escape(n.kind)}.</b> {escape(n.text)}</li>" for n in remarks)
        details.append(f"<details><summary>{escape(name)}</summary><ul>{items}</ul></details>")
    head = (
        "rung",
        "threads",
        "registers",
        "KB shared",
        "CTAs an SM",
        "occupancy",
        "limited by",
        "SASS",
    )
    return (
        '<h2 id="code">Machine code</h2><p>What the compiler made of each rung, read from its'
        " machine code without a GPU.</p>"
        + table(head, rows, numeric=(1, 2, 3, 4, 5, 7))
        + "".join(details)
    )


def _foot(run: LadderRun) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in run.environment.items() if v and k != "packages")
    return (
        f"<footer>Timed with L2 cold (inputs rotated), interleaved with {CUBLAS}, medians; random"
        f" inputs; each rung checked against an oracle in the same run. {escape(facts)}.</footer>"
    )
