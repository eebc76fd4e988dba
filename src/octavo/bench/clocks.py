"""What clock and power the GPU holds while something runs, sampled from NVML beside it.

A tensor-core kernel at full rate is limited by power, so a rate without its clock says little.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from typing import Any

_CLOCK_SM = 1  # nvmlClockType_t


class ClockSampler:
    """Context manager: samples SM clock (MHz) and board power (W) every `interval` seconds."""

    def __init__(self, device: int = 0, interval: float = 0.01) -> None:
        self._device, self._interval = device, interval
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.mhz: list[int] = []
        self.watts: list[float] = []

    def __enter__(self) -> ClockSampler:
        nvml = load_nvml()
        if nvml is not None:
            self._thread = threading.Thread(target=self._sample, args=(nvml,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self, nvml: Any) -> None:
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(self._device, ctypes.byref(handle)):
            return
        value = ctypes.c_uint()
        while not self._stop.is_set():
            if not nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM, ctypes.byref(value)):
                self.mhz.append(value.value)
            if not nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(value)):
                self.watts.append(value.value / 1000)
            time.sleep(self._interval)

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
