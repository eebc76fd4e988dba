"""LLM.embed on a tiny encoder: what the folder says, what the caller says, and every refusal."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.cli import main
from octavo.config.engine import EngineArgs
from octavo.errors import ConfigError, EngineDeadError, InvalidRequestError, ModelLoadError
from octavo.weights.checkpoint import load_model_config
from octavo.worker.encoder_worker import EncoderWorker
from tests.cpu.tiny.encoders import write_encoder

TEXTS = ["the old ship", "seas", "a ship a wind the sea", "wind", "ship " * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def vectors(llm: LLM, prompts: Any, **options: Any) -> list[list[float]]:
    outputs = llm.embed(prompts, use_tqdm=False, **options)
    assert all(output.outputs.error is None for output in outputs)
    return [output.outputs.embedding for output in outputs]


def test_outputs_are_in_order_with_their_tokens(folder: Path) -> None:
    with LLM(folder) as llm:
        outputs = llm.embed([*TEXTS, [1, 6, 2], {"prompt_token_ids": [1, 7, 2]}], use_tqdm=False)
        assert [len(output.prompt_token_ids) for output in outputs] == [5, 4, 8, 3, 42, 3, 3]
        assert outputs[1].prompt_token_ids == [1, 4, 5, 2]
        assert all(output.finished for output in outputs)
        assert len({output.request_id for output in outputs}) == 7
        assert outputs[3].outputs.embedding == outputs[6].outputs.embedding
        assert [output.outputs for output in llm.embed("wind")] == [outputs[3].outputs]
        assert llm.embed([], use_tqdm=False) == []
        assert vectors(llm, {"prompt": "wind", "cache_salt": None}) == vectors(llm, "wind")
        assert llm.get_tokenizer().decode([4, 5]) == "seas"


def test_no_bit_depends_on_how_texts_are_put_into_steps(folder: Path) -> None:
    with LLM(folder) as llm:
        alone = [vectors(llm, text)[0] for text in TEXTS]
        assert vectors(llm, TEXTS * 30) == alone * 30
    for limits in ({"max_num_batched_tokens": 64, "max_num_seqs": 64}, {"max_num_seqs": 2}):
        with LLM(folder, **limits) as llm:
            assert vectors(llm, TEXTS[::-1]) == alone[::-1]
            with ThreadPoolExecutor(4) as pool:  # callers that share the engine
                found = list(pool.map(lambda texts: vectors(llm, texts), [TEXTS] * 8))
            assert found == [alone] * 8


def test_pooling_is_as_the_folder_says_unless_the_caller_does(tmp_path: Path) -> None:
    def lengths(found: list[list[float]]) -> torch.Tensor:
        return torch.tensor(found).norm(dim=1)

    with LLM(write_encoder(tmp_path)) as llm:
        mean, ones = vectors(llm, TEXTS), torch.ones(len(TEXTS))
        torch.testing.assert_close(lengths(mean), ones)
        raw = vectors(llm, TEXTS, normalize=False)
        assert (lengths(raw) - 1).abs().min() > 0.1
        torch.testing.assert_close(torch.tensor(raw) / lengths(raw)[:, None], torch.tensor(mean))
        cls = vectors(llm, TEXTS, pooling_type="cls", normalize=False)
        assert cls != raw
    cls_flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    for pooling in (cls_flags, {"pooling_mode": "cls"}):
        with LLM(write_encoder(tmp_path, steps=("Transformer", "Pooling"), pooling=pooling)) as llm:
            assert vectors(llm, TEXTS) == cls
            assert vectors(llm, TEXTS, pooling_type="mean", normalize=True) == mean
    (tmp_path / "modules.json").unlink()
    with LLM(tmp_path) as llm:
        assert vectors(llm, TEXTS) == vectors(llm, TEXTS, pooling_type="cls", normalize=True)


def test_texts_that_are_too_long_are_refused_or_cut(folder: Path) -> None:
    long = "ship " * 63
    with LLM(folder) as llm:
        with pytest.raises(InvalidRequestError, match=r"prompt: 65 tokens .* max_model_len=64"):
            llm.embed(["wind", long])
        for limit, length in ((-1, 64), (64, 64), (10, 10), (3, 3)):
            [output] = llm.embed(long, truncate_prompt_tokens=limit, use_tqdm=False)
            assert output.prompt_token_ids == [1, *[6] * (length - 2), 2]
            assert output.outputs.embedding == vectors(llm, [output.prompt_token_ids])[0]
        [output] = llm.embed([list(range(9))], truncate_prompt_tokens=4, use_tqdm=False)
        assert output.prompt_token_ids == [0, 1, 2, 3]
        for bad in (0, 2, -2, 65, True, 3.0, "4"):
            with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
                llm.embed("wind", truncate_prompt_tokens=bad)


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("", {}, "prompt: is empty"),
        (" \n", {}, "prompt: is empty"),
        ([[]], {}, "prompt_token_ids: must not be empty"),
        ([[1, 96, 2]], {}, "prompt_token_ids: token id 96"),
        ([[1, True]], {}, "prompt_token_ids: token id True"),
        ("\ud800", {}, "prompt: is not valid Unicode"),
        (7, {}, "prompts: must be text"),
        ([7.5], {}, "prompt: must be text"),
        ({"prompt": "a", "image": 1}, {}, "image: "),
        ("a", {"pooling_type": "max"}, r"pooling_type: 'max' is none of \('mean', 'cls'\)"),
        ("a", {"pooling_type": ["cls"]}, "pooling_type: "),
        ("a", {"normalize": "no"}, "normalize: "),
        ("a", {"normalize": 1}, "normalize: "),
        ("a", {"truncate_prompt_tokens": -1.0}, "truncate_prompt_tokens: "),
        ({"prompt": "a", "cache_salt": "x"}, {}, "cache_salt: "),
        ({"prompt": "  ", "prompt_token_ids": None}, {}, "prompt: is empty"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    folder: Path, prompt: Any, options: dict[str, Any], error: str
) -> None:
    with LLM(folder) as llm:
        before = vectors(llm, "wind")
        with pytest.raises(InvalidRequestError, match=error):
            llm.embed(prompt, use_tqdm=False, **options)
        assert vectors(llm, "wind") == before


def test_an_engine_does_what_its_model_is_for(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(folder) as llm:
        for call in (llm.generate, llm.chat):
            with pytest.raises(InvalidRequestError, match="is an embedding model"):
                call([{"role": "user", "content": "wind"}])
        with pytest.raises(InvalidRequestError, match="is an embedding model"):
            llm.reset_prefix_cache()
    with LLM(tiny_model, load_format="dummy", skip_tokenizer_init=True) as llm:
        with pytest.raises(InvalidRequestError, match=r"model: .* has no LLM\.embed"):
            llm.embed([[1, 2]])
    assert main(["generate", str(folder), "wind"]) == 2
    assert "is an embedding model" in capsys.readouterr().err


def test_without_a_tokenizer_token_ids_are_taken(folder: Path) -> None:
    with LLM(folder, skip_tokenizer_init=True) as llm:
        [output] = llm.embed([[6, 7, 8]], truncate_prompt_tokens=1, use_tqdm=False)
        assert output.prompt_token_ids == [6]
        with pytest.raises(InvalidRequestError, match="text needs a tokenizer"):
            llm.embed("wind")


def test_a_text_without_a_finite_vector_fails_alone(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][7] = 1e38  # its variance overflows
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path) as llm:
        good, bad = (llm.embed(text, use_tqdm=False)[0].outputs for text in ("ship", "wind"))
        assert bad.embedding == []
        assert bad.error is not None
        assert "not finite in float32" in bad.error
        together = llm.embed(["wind", "ship", "wind"], use_tqdm=False)
        assert [output.outputs for output in together] == [bad, good, bad]


def test_a_step_that_fails_is_the_error_of_its_texts_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = EncoderWorker.embed

    def embed(worker: EncoderWorker, texts: Any, pooling: Any) -> Any:
        if texts[0] == [6]:
            raise MemoryError("no room")
        return run(worker, texts, pooling)

    monkeypatch.setattr(EncoderWorker, "embed", embed)
    with LLM(folder, max_num_seqs=1) as llm:
        good, bad, last = (o.outputs for o in llm.embed([[7, 8], [6], [7, 8]], use_tqdm=False))
    assert (bad.embedding, bad.error) == ([], "MemoryError: no room")
    assert good.error is None
    assert good == last


def test_shutdown_amid_a_call_ends_it_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, run = LLM(folder, max_num_seqs=1), EncoderWorker.embed
    begun, go_on = threading.Event(), threading.Event()

    def embed(worker: EncoderWorker, texts: Any, pooling: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return run(worker, texts, pooling)

    monkeypatch.setattr(EncoderWorker, "embed", embed)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(llm.embed, [[6]] * 3, use_tqdm=False)
        assert begun.wait(60)
        end = pool.submit(llm.shutdown)
        while not llm._engine._thread._closed:
            time.sleep(0.01)
        go_on.set()
        end.result(60)
        with pytest.raises(EngineDeadError, match="shut down"):
            call.result(60)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    write_encoder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "encoder.layer.1.attention.self.key.bias"
    tensors[name][63] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"not finite in float32: {name}"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type="),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"num_attention_heads": 3}, "num_attention_heads: 3 does not divide 64"),
        ({"vocab_size": 95}, r"embeddings\.word_embeddings\.weight has shape"),
        ({"num_hidden_layers": 3}, r"missing tensors: encoder\.layer\.2"),
        ({"num_hidden_layers": 1}, r"unexpected tensors: encoder\.layer\.1"),
        ({"max_position_embeddings": None}, "max_position_embeddings: missing"),
        ({"architectures": ["RobertaModel"], "pad_token_id": 79}, "80 leaves none beyond 80"),
        ({"settings": {"do_lower_case": True}}, "do_lower_case=True"),
        ({"settings": {"max_seq_length": -1}}, "sentence_bert_config.json: max_seq_length"),
        ({"steps": ("Transformer", "Pooling", "Dense")}, "modules.json: .*Dense.*is not supported"),
        ({"steps": ()}, r"modules.json: \[\] is not supported"),
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pooling by 'pooling_mode_max_tokens'"),
        ({"pooling": {"pooling_mode_cls_token": False}}, r"pooling by \[\]"),
        ({"pooling": {"pooling_mode": {"a": 1}}}, "pooling by {'a': 1}"),
        ({"pooling": {"pooling_mode_mean_tokens": 1}}, "pooling_mode_mean_tokens: 1"),
    ],
)
def test_folders_that_we_do_not_run_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    write_encoder(tmp_path, **changes)
    with pytest.raises((ModelLoadError, ConfigError), match=error):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("modules.json", {}), ("modules.json", [1]), ("sentence_bert_config.json", [])],
)
def test_damaged_json_is_refused_by_name(tmp_path: Path, name: str, content: Any) -> None:
    write_encoder(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=name):
        LLM(tmp_path)


def test_a_pooling_folder_outside_the_model_is_refused(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    steps = [{"type": "Transformer"}, {"type": "Pooling", "path": "../1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(ModelLoadError, match=r"bad folder name '\.\./1_Pooling'"):
        LLM(tmp_path)


def test_a_model_that_fits_to_the_byte_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder has no output layer, which would pack a copy of the embeddings, and no rotary table."""
    weight_bytes = load_model_config(EngineArgs(str(folder))).weight_bytes()
    monkeypatch.setattr("octavo.config.machine.available_memory", lambda: weight_bytes)
    with LLM(folder) as llm:
        assert len(vectors(llm, TEXTS)) == len(TEXTS)
    monkeypatch.setattr("octavo.config.machine.available_memory", lambda: weight_bytes - 1)
    with pytest.raises(ModelLoadError, match=f"takes {weight_bytes} bytes"):
        LLM(folder)


def test_a_step_must_hold_the_longest_text(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="max_num_batched_tokens=63 is less than max_model_len=64"
    ):
        LLM(folder, max_num_batched_tokens=63, max_num_seqs=4)
    with pytest.raises(ConfigError, match="max_model_len=65 is more"):
        LLM(folder, max_model_len=65)
    with LLM(folder, max_model_len=8, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        assert len(vectors(llm, TEXTS[:4])) == 4


def test_after_shutdown_and_in_a_forked_child_nothing_hangs(folder: Path) -> None:
    llm = LLM(folder)

    def in_child(sender: Any) -> None:
        try:
            llm.embed("wind", use_tqdm=False)
        except EngineDeadError as error:
            sender.send(str(error))
        llm.shutdown()

    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(sender,))
    child.start()
    assert receiver.poll(60)
    assert "stayed in the process" in receiver.recv()
    child.join(60)
    assert child.exitcode == 0
    assert len(vectors(llm, "wind")) == 1
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError):
        llm.embed("wind")


def test_info_shows_pooling_and_no_kv_cache(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["pooling"] == "mean, normalized"
    assert rows["context"] == "64 tokens"
    assert not {"kv_bytes_per_token", "kv_pool"} & rows.keys()
    assert main(["explain", str(folder), "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    limits = ["max_model_len", "max_num_seqs", "max_num_batched_tokens"]
    assert names == ["device", "dtype", "linear_backend", *limits]
    assert main(["explain", str(folder), "--step"]) == 2
    assert "is an embedding model" in capsys.readouterr().err
