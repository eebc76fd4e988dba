"""Owns how a device measurement (`bench.device.measure_device`) is shown: as text and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from octavo.inspect.page import figure, table
from octavo.inspect.svg import SERIES, Axis, Scale, Svg, draw_axes
from octavo.kernels.matmul.roofline import DEVICES, Device, peak_flops

# What a level is called, its latency key, its bandwidth key, and what it is for.
LEVELS = (
    ("registers", "", "", "operands of every instruction, one clock away"),
    ("shared memory", "smem", "smem_read", "tiles that the threads of a CTA share"),
    ("L1 cache", "l1", "", "the same memory, filled by ordinary loads"),
    ("distributed shared memory", "dsmem", "", "shared memory of another CTA of the cluster"),
    ("L2 cache", "l2", "l2_read", "shared by all SMs; where waves of tiles meet"),
    ("DRAM", "dram", "read", "where A, B and the result live"),
)


def device_of(name: str) -> Device:
    """The data sheet for a GPU's name; H200 for one we do not know."""
    lower = name.lower()
    if "h100" in lower:
        return DEVICES["h100-pcie"] if "pcie" in lower else DEVICES["h100"]
    return DEVICES["h200"]


def level_rows(document: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Level, size on the whole GPU, latency in cycles, bandwidth in TB/s, purpose."""
    sizes = document["sizes"]
    sms = int(sizes["sms"])
    capacity = {
        "registers": sms * int(sizes["registers_per_sm"]) * 4,
        "shared memory": sms * int(sizes["smem_bytes_per_sm"]),
        "L2 cache": int(sizes["l2_bytes"]),
        "DRAM": int(sizes["memory_bytes"]),
    }
    rows = []
    for level, wait, rate, purpose in LEVELS:
        size = _bytes(capacity[level]) if level in capacity else ""
        cycles = f"{float(document['latency_cycles'][wait]):.0f}" if wait else ""
        speed = f"{float(document['bandwidth_gbs'][rate]) / 1e3:.2f}" if rate else ""
        rows.append((level, size, cycles, speed, purpose))
    return rows


def _bytes(count: int) -> str:
    for unit, size in (("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def power_lines(document: Mapping[str, Any]) -> list[str]:
    """One sentence for random and one for zero inputs: speed, clock held, ceiling at that clock."""
    device = device_of(str(document["environment"].get("gpu", "")))
    lines = []
    for label, row in document["tensor_core"].items():
        name = "all-zero" if label == "zeros" else label
        said = f"{name} inputs: {float(row['tflops']):.0f} TFLOP/s"
        clock = row.get("sm_mhz_median")
        if clock:
            peak = peak_flops(device, "bf16", float(clock)) / 1e12
            share = float(row["tflops"]) / peak
            said += f" at {float(clock):.0f} MHz, {share:.0%} of the {peak:.0f} possible there"
        if row.get("watts_max"):
            said += f", up to {float(row['watts_max']):.0f} W"
        lines.append(said)
    spec = peak_flops(device, "bf16") / 1e12
    lines.append(f"the data sheet's {spec:.0f} TFLOP/s are those of {device.spec_clock} MHz")
    return lines


def device_text(document: Mapping[str, Any]) -> str:
    """The terminal view. Raises KeyError for a document of another form."""
    environment = document["environment"]
    lines = [f"{environment.get('gpu', '')}, driver {environment.get('driver', '')}", ""]
    lines.append(f"{'level':26s} {'size':>10s} {'cycles':>7s} {'TB/s':>7s}  what for")
    for level, size, cycles, speed, purpose in level_rows(document):
        lines.append(f"{level:26s} {size:>10s} {cycles:>7s} {speed:>7s}  {purpose}")
    lines += ["", "global loads, one word in `stride`: useful and moved GB/s"]
    for stride, row in document["strided_read"].items():
        lines.append(f"  stride {stride!s:>3s} {row['useful']:8.0f} {row['moved']:8.0f}")
    lines += ["", "shared loads: cycles of a warp's load by lanes that meet in one bank"]
    for ways, cycles in document["smem_cycles_per_load"].items():
        lines.append(f"  {ways!s:>10s} {float(cycles):7.1f}")
    lines += ["", "tensor cores under load", *[f"  {line}" for line in power_lines(document)]]
    return "\n".join(lines) + "\n"


def device_section(document: Mapping[str, Any]) -> str:
    """The report's section on the machine itself."""
    head = ("level", "size, whole GPU", "latency, cycles", "read, TB/s", "what for")
    rows = [tuple(map(escape, row)) for row in level_rows(document)]
    power = "; ".join(power_lines(document))
    return (
        '<h2 id="device">The machine, measured</h2><p>Each level of memory is larger and slower than'
        " the one above. The ladder is the story of moving work up this table.</p>"
        + table(head, rows, numeric=(1, 2, 3))
        + figure(access_figure(document).inline(), ACCESS_CAPTION)
        + f"<p>{escape(power[0].upper() + power[1:])}. Zeros switch fewer wires, so the same work"
        " draws less power and the chip may clock higher: nothing here is timed on zeros.</p>"
    )


ACCESS_CAPTION = (
    "Left: DRAM reads when a warp's lanes read every nth word. Memory moves 32-byte sectors, so from"
    " a stride of 8 on only one word in eight that moves is wanted. Right: a warp's load from shared"
    " memory takes a turn for each lane that wants another word of the same bank."
)


def access_figure(document: Mapping[str, Any]) -> Svg:
    """Useful bandwidth by stride, and shared-memory cycles by bank conflict."""
    svg = Svg(1000, 330, "What access patterns cost")
    reads = {int(k): float(v["useful"]) for k, v in document["strided_read"].items()}
    banks = {
        int(k): float(v) for k, v in document["smem_cycles_per_load"].items() if k != "broadcast"
    }
    _panel(svg, 60, "Strided reads of DRAM", "useful GB/s", "stride, words of 4 bytes", reads)
    _panel(svg, 570, "Bank conflicts", "cycles a load", "lanes that meet in a bank", banks)
    return svg


def _panel(
    svg: Svg, left: float, name: str, up: str, across: str, data: Mapping[int, float]
) -> None:
    most = max(data.values())
    x = Scale(min(data), max(data), left, left + 400, log=True)
    y = Scale(0, most * 1.08, 270, 70)
    svg.text(left - 40, 24, name, size=15, bold=True)
    levels = [(most * part, f"{most * part:.0f}") for part in (0, 0.25, 0.5, 0.75, 1)]
    draw_axes(svg, Axis(x, [(k, str(k)) for k in data], across), Axis(y, levels, up))
    svg.line([(x(k), y(v)) for k, v in data.items()], SERIES[0], width=2)
    for key, value in data.items():
        svg.circle(x(key), y(value), 4, SERIES[0], tip=f"{key}: {value:.1f}")
