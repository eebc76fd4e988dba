"""A child process that loads damaged checkpoints: `python -m tests.cpu.weights.fuzz FOLDER FIRST LAST`.

Each case must end in a named error, or in the weights that the undamaged files hold. A case that
takes five seconds of processor time, or more memory than such small files justify, ends the
process; so does any other exception. The seed is printed before its case, so that the last line
names the culprit.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.config import machine
from octavo.config.engine import EngineArgs
from octavo.config.model import ARCHITECTURES
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.tokenizer import load_tokenizer
from octavo.errors import ConfigError, ModelLoadError
from octavo.weights.checkpoint import load_model_config
from tests.cpu.paged import PagedModel, settings

CPU_SECONDS = 5.0
MEMORY = 2**28  # that the loader believes to be free
HEADROOM = 2**30  # of address space: MEMORY, and the stacks and arenas of threads
INDEX = "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
EXTREMES = [
    0,
    1,
    2,
    7,
    127,
    255,
    2**15,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**64 - 1,
]
DEEP: Any = []
for _ in range(90):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None,
    True,
    False,
    "",
    "llama",
    "1",
    [],
    [1],
    [None],
    {},
    {"type": "foo"},
    DEEP,
]
VALUES += [-1, -1.0, 0.5, 1e-45, 1e39, float("nan"), float("inf"), 10**400, 4, 16, 32, *EXTREMES]
VALUES += [[name] for name in ARCHITECTURES] + ["float16", "bfloat16", "int8", "gelu"]
VALUES += [["full_attention"] * 2, ["sliding_attention", "full_attention"], ["x"] * 10**5]
VALUES += [{"rope_type": kind, "factor": 2.0} for kind in ("linear", "dynamic", "yarn", "llama3")]
KEYS = [*settings(), "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"]
KEYS += ["attention_bias", "mlp_bias", "quantization_config", "num_local_experts", "torch_dtype"]
KEYS += ["use_sliding_window", "partial_rotary_factor", "num_experts_per_tok", "lm_head_bias"]


def damage_bytes(content: bytes, spots: range, chooser: random.Random) -> bytes:
    """One change: a byte, a bit, a number, or a piece that goes or is replaced."""
    changed, at = bytearray(content), chooser.choice(spots)
    match chooser.randrange(5):
        case 0:
            changed[at] = chooser.randrange(256)
        case 1:
            changed[at] ^= 1 << chooser.randrange(8)
        case 2:
            changed[at : at + 8] = struct.pack("<Q", chooser.choice(EXTREMES))
        case 3:
            changed[at : at + 4] = struct.pack("<I", chooser.choice(EXTREMES) % 2**32)
        case _:
            width = chooser.randint(1, 16)
            changed[at : at + width] = chooser.choice([b"", chooser.randbytes(width)])
    return bytes(changed)


def damage_gguf(content: bytes, chooser: random.Random) -> bytes:
    """One to four changes to the header, half of them off the long vocabulary."""
    end = content.index(b"rope_freqs.weight") + 40
    words = content.index(b"tokenizer.ggml.tokens"), content.index(b"tokenizer.ggml.token_type")
    for _ in range(chooser.randint(1, 4)):
        spots = [range(4, words[0]), range(words[1], end), range(4, end)]
        content = damage_bytes(content, chooser.choice(spots), chooser)
    return content


def damage_config(content: bytes, chooser: random.Random) -> bytes:
    """Another value for one to three keys, or damaged text."""
    if chooser.random() < 0.2:
        return damage_bytes(content, range(len(content)), chooser)
    config = json.loads(content)
    for _ in range(chooser.randint(1, 3)):
        config[chooser.choice(KEYS)] = chooser.choice(VALUES)
    if chooser.random() < 0.3:
        config.pop(chooser.choice(list(config)))
    return json.dumps(config).encode()


def damage_index(content: bytes, chooser: random.Random) -> bytes:
    """An entry that goes, comes, moves or is no file name, or damaged text."""
    if chooser.random() < 0.3:
        return damage_bytes(content, range(len(content)), chooser)
    index = json.loads(content)
    places = index["weight_map"]
    name = chooser.choice(list(places))
    match chooser.randrange(5):
        case 0:
            del places[name]
        case 1:
            places[f"{name}.more"] = chooser.choice(SHARDS)
        case 2:
            places[name] = chooser.choice([*SHARDS, *VALUES, "../x", "config.json", "."])
        case 3:
            index["weight_map"] = chooser.choice(VALUES)
        case _:
            index["metadata"] = chooser.choice(VALUES)  # read by nobody
    return json.dumps(index).encode()


def damage_shard(content: bytes, chooser: random.Random) -> bytes:
    """A change in the header, or a cut."""
    if chooser.random() < 0.2:
        return content[: chooser.randrange(len(content))]
    size = int.from_bytes(content[:8], "little")
    return damage_bytes(content, range(8 + size), chooser)


def load(path: Path) -> dict[str, torch.Tensor]:
    """The parameters of the model, after one step; a GGUF file's tokenizer and template as well."""
    if path.suffix == ".gguf":
        tokenizer = load_tokenizer(path)
        tokenizer.decode(tokenizer.encode("hello <|end|> 12"))
        ChatTemplate.load(None, tokenizer)
    model = PagedModel(load_model_config(EngineArgs(str(path))), num_blocks=2)
    return dict(model.model.named_parameters())


def check(path: Path, expected: dict[str, torch.Tensor]) -> bool:
    """False if the checkpoint is refused, by name and in few words."""
    try:
        loaded = load(path)
    except (ConfigError, ModelLoadError) as error:
        if len(str(error)) > 2000:
            raise AssertionError("an error text that nobody reads") from error
        return False
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), f"{name} is not what it was"
    return True


def main(folder: Path, first: int, last: int) -> None:
    targets: list[tuple[Path, Path, Callable[[bytes, random.Random], bytes]]] = [
        (folder / "hf" / "config.json", folder / "hf", damage_config),
        (folder / "hf" / INDEX, folder / "hf", damage_index),
        (folder / "hf" / SHARDS[0], folder / "hf", damage_shard),
        *((path, path, damage_gguf) for path in sorted(folder.glob("*.gguf"))),
    ]
    machine.available_memory = lambda: MEMORY
    expected = {path: load(path) for _, path, _ in targets}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    counts = {"loaded": 0, "refused": 0}
    for seed in range(first, last):
        damaged, path, damage = targets[seed % len(targets)]
        print(seed, damage.__name__, flush=True)
        content = damaged.read_bytes()
        damaged.write_bytes(damage(content, random.Random(seed)))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        counts["loaded" if check(path, expected[path]) else "refused"] += 1
        signal.setitimer(signal.ITIMER_PROF, 0)
        damaged.write_bytes(content)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
