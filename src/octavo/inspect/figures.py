"""Owns the list of pictures that need no measurement: those of docs/figures and of the report."""

from __future__ import annotations

from octavo.inspect.figures_curves import (
    Roof,
    occupancy_figure,
    quantization_figure,
    roofline_figure,
)
from octavo.inspect.figures_ring import ring_figure
from octavo.inspect.figures_tiles import schedule_figure, swizzle_figure
from octavo.inspect.svg import Svg
from octavo.kernels.matmul.roofline import H200, Device, Roofline, device_roofline, peak_flops


def pictures() -> dict[str, Svg]:
    """Pictures by file name, without ending."""
    return {
        "swizzle": swizzle_figure(),
        "ring": ring_figure(),
        "schedules": schedule_figure(),
        "quantization": quantization_figure(),
        "occupancy": occupancy_figure(),
        "roofline": roofline_figure(device_roofs(H200), [], "Roofline of an H200"),
    }


def device_roofs(device: Device) -> list[Roof]:
    """DRAM with both arithmetic peaks, and the L1 caches together: 128 bytes a clock each."""
    l1 = device.num_sms * 128 * device.spec_clock * 1e6
    dram = f"DRAM, {device.dram_bytes_per_s / 1e12:.1f} TB/s"
    near = f"all L1 caches, {l1 / 1e12:.0f} TB/s"
    return [
        Roof("", near, Roofline(peak_flops(device, "bf16"), l1), 5),
        Roof("bf16 peak", dram, device_roofline(device, "bf16"), 2),
        Roof("fp32 peak", "", device_roofline(device, "fp32"), 0),
    ]
