"""An embedding model on one device: loads it, and makes texts into vectors. Keeps no state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.config.encoder import EncoderConfig
from octavo.config.engine import EngineConfig
from octavo.models.bert import pool
from octavo.outputs import EmbeddingOutput
from octavo.weights.loader import load_encoder
from octavo.worker.device import initialise_math


class EncoderWorker:
    """Constructing it loads the weights; then `embed` per step, from the same thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._dtype = config.model.dtype
        if config.device == "cpu":
            initialise_math()
        self._model = load_encoder(
            config.model, torch.device(config.device), config.seed, config.linear_backend
        )

    @torch.inference_mode()
    def embed(
        self, texts: Sequence[Sequence[int]], pooling: EncoderConfig
    ) -> list[EmbeddingOutput]:
        """Token ids of each text, none empty -> its vector, or why it has none."""
        hidden = self._model(texts)
        pooled = [pool(one, pooling.pooling_type, pooling.normalize) for one in hidden]
        vectors = torch.stack(pooled).cpu()
        error = f"the embedding is not finite in {self._dtype}"
        are_finite = vectors.isfinite().all(1).tolist()
        return [
            EmbeddingOutput(vector) if is_finite else EmbeddingOutput([], error)
            for vector, is_finite in zip(vectors.tolist(), are_finite, strict=True)
        ]
