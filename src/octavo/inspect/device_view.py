"""Owns how a device measurement (`bench.device.measure_device`) is shown as text and in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.inspect.page import render, words
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


def device_of(environment: Mapping[str, Any]) -> Device:
    """The data sheet for a document's GPU; H200 for one we do not know."""
    name = str(environment.get("gpu", "")).lower()
    if "h100" in name:
        return DEVICES["h100-pcie"] if "pcie" in name else DEVICES["h100"]
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
        megabytes = capacity.get(level, 0) / 2**20
        size = f"{megabytes:.1f} MB" if megabytes < 1024 else f"{megabytes / 1024:.1f} GB"
        cycles = f"{float(document['latency_cycles'][wait]):.0f}" if wait else ""
        speed = f"{float(document['bandwidth_gbs'][rate]) / 1e3:.2f}" if rate else ""
        rows.append((level, size if level in capacity else "", cycles, speed, purpose))
    return rows


def power_lines(document: Mapping[str, Any]) -> list[str]:
    """One sentence for random and one for zero inputs: speed, clock held, ceiling at that clock."""
    device = device_of(document["environment"])
    lines = []
    for label, row in document["tensor_core"].items():
        clock = row.get("sm_mhz_median")
        facts = {"tflops": float(row["tflops"]), "clock": clock, "watts": row.get("watts_max")}
        peak = peak_flops(device, "bf16", clock and float(clock)) / 1e12
        lines.append(words("power", inputs=label, **facts, peak=peak))
    spec = peak_flops(device, "bf16") / 1e12
    lines.append(f"the data sheet's {spec:.0f} TFLOP/s are those of {device.spec_clock} MHz")
    return lines


def device_text(document: Mapping[str, Any]) -> str:
    """The terminal view. Raises KeyError for a document of another form."""
    environment = document["environment"]
    return render(
        "device.txt",
        gpu=environment.get("gpu", ""),
        driver=environment.get("driver", ""),
        levels=[("level", "size", "cycles", "TB/s", "what for"), *level_rows(document)],
        strided=document["strided_read"],
        banks=document["smem_cycles_per_load"],
        power=power_lines(document),
    )
