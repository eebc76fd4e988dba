"""A kernel that kills the GPU's context ends the engine with a clear error, and does not hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.gpu.engines import model_folder

SCRIPT = """
import sys
from pathlib import Path
import torch
from octavo.errors import DeviceLostError, EngineDeadError
from tests.gpu.engines import engine, sampling, token_prompts

from octavo import LLM
llm = LLM(sys.argv[1], device="cuda", skip_tokenizer_init=True, max_model_len=512,
          num_gpu_blocks_override=200)
prompts = token_prompts([20] * 4, 1)
assert len(llm.generate(prompts, sampling(0), use_tqdm=False)) == 4
runner = llm.engine.core._executor._worker._runner
forward = runner._forward
def broken(batch):
    torch.zeros(4, device="cuda")[torch.tensor([1000], device="cuda")]  # asserts on the device
    return forward(batch)
runner._forward = broken
try:
    llm.generate(prompts, sampling(0), use_tqdm=False)
    sys.exit("no error")
except DeviceLostError as error:
    print(error)
try:
    llm.generate(prompts, sampling(0), use_tqdm=False)
    sys.exit("not dead")
except EngineDeadError:
    pass
llm.shutdown()
print("ended")
"""


def test_a_lost_gpu_ends_the_engine(tmp_path: Path) -> None:
    model = model_folder(tmp_path, "llama")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip().endswith("ended"), done.stderr[-3000:]
    assert "the GPU runs no more" in done.stdout
