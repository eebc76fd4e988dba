"""What clock and power the GPU holds while something runs, sampled from NVML beside it.

A tensor-core kernel at full rate is limited by power, so a rate without its clock says little.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
from typing import Any

_CLOCK_SM = 1  # nvmlClockType_t
_INTERVAL_S = 0.01


class ClockSampler:
    """Context manager: samples SM clock (MHz) and board power (W) of the first GPU."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.mhz: list[int] = []
        self.watts: list[float] = []

    def __enter__(self) -> ClockSampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        nvml, handle, value = load_nvml(), ctypes.c_void_p(), ctypes.c_uint()
        if nvml is None or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
            return
        while not self._stop.wait(_INTERVAL_S):
            if not nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM, ctypes.byref(value)):
                self.mhz.append(value.value)
            if not nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(value)):
                self.watts.append(value.value / 1000)

    def summary(self) -> dict[str, float | int | None]:
        """Median, lowest and highest clock, highest power; None where NVML told nothing."""
        return {
            "samples": len(self.mhz),
            "sm_mhz_median": statistics.median(self.mhz) if self.mhz else None,
            "sm_mhz_min": min(self.mhz, default=None),
            "sm_mhz_max": max(self.mhz, default=None),
            "watts_max": max(self.watts, default=None),
        }


def load_nvml() -> Any:
    """NVIDIA's management library, ready for calls; None where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if nvml.nvmlInit_v2() else nvml
