"""GPU tests run on an H200 machine by hand (`pytest tests/gpu`); elsewhere they are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    if not hopper:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
