"""The KV of texts, as a model computes it, in layer slices as codecs take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvferry.bench.pairing import Progress
from kvferry.bench.scenarios.codec import CodecOptions
from kvferry.bench.scenarios.codec_texts import texts
from kvferry.core.buffers import ByteArray
from kvferry.core.errors import ConfigError
from kvferry.core.spec import DType, LayerSpec, TensorSpec
from kvferry.engine.paged_kv import PagedKV, Sequence
from kvferry.engine.tokenizer import load_tokenizer
from kvferry.engine.weights import load_model

__all__ = ["ModelKV", "TextKV"]

_CHUNK = 512


@dataclass(frozen=True, slots=True)
class TextKV:
    """One text after its prefill.

    Attributes:
        name: Of the text.
        sequence: Its pages, whose values are those of bfloat16.
        next_tokens: What follows it.
        slices: Its KV, ``[layers, slices, bytes of a slice]``.
    """

    name: str
    sequence: Sequence
    next_tokens: torch.Tensor
    slices: ByteArray


class ModelKV:
    """A model and the KV of some texts.

    The model computes in float32, so that what a codec does stands out from the noise of bfloat16 sums; K and
    V are rounded to bfloat16, as engines keep them.

    Args:
        path: Folder of the model.
        options: Texts and sizes.
        progress: Called for each text.

    Raises:
        ConfigError: If a text is too short or cannot be read, or the model takes no text that long.
    """

    def __init__(self, path: Path, options: CodecOptions, progress: Progress) -> None:
        self.model = load_model(path, "float32")
        self.slice_tokens = options.slice_tokens
        self.kept_tokens = min(options.kept_tokens, options.slice_tokens)
        self._predicted = options.predicted
        config = self.model.config
        shape = (options.slice_tokens, config.num_kv_heads, config.head_dim)
        self.layer = LayerSpec(tuple(TensorSpec(name, shape, DType.BFLOAT16) for name in ("k", "v")))
        self._slices = options.tokens // options.slice_tokens
        self._tokens = self._slices * options.slice_tokens
        tokenizer = load_tokenizer(path)
        self.texts = []
        needed, most = self._tokens + self._predicted, self.model.max_model_len
        if needed > most:
            raise ConfigError(
                f"the model takes texts of {most} tokens, {needed} are needed, of which {self._predicted} "
                "are predicted; lower --tokens or --predicted"
            )
        chosen = texts(options.texts, options.own_texts)
        for number, (name, text) in enumerate(chosen.items()):
            progress(f"prefill of {name}", number, len(chosen))
            tokens = tokenizer.encode(text[: 16 * (self._tokens + self._predicted)], add_special_tokens=False)
            self.texts.append(self._prefill(name, tokens))

    def _prefill(self, name: str, tokens: list[int]) -> TextKV:
        needed = self._tokens + self._predicted
        if len(tokens) < needed:
            raise ConfigError(
                f"text {name} has {len(tokens)} tokens, {needed} are needed, of which {self._predicted} "
                "are predicted; lower --tokens or --predicted"
            )
        kv = PagedKV(self.model.config, num_blocks=-(-needed // 16), dtype=torch.float32)
        sequence = Sequence.allocate(kv, needed)
        ids = torch.tensor(tokens[:needed], dtype=torch.int64)
        for first in range(0, self._tokens, _CHUNK):
            chunk = ids[first : min(first + _CHUNK, self._tokens)]
            self.model.forward(chunk, sequence, want_logits=False)
        # the last token of the text predicts the first one behind it
        sequence.length -= 1
        return TextKV(name, sequence, ids[self._tokens - 1 :], self._round(sequence))

    def _round(self, sequence: Sequence) -> ByteArray:
        """Round the KV of ``sequence`` to bfloat16 in place; its slices."""
        found = []
        for layer in range(self.model.config.num_layers):
            k, v = (x[0].transpose(0, 1) for x in sequence.kv.gather(layer, sequence, self._tokens))
            rounded = [x.to(torch.bfloat16).contiguous() for x in (k, v)]
            sequence.kv.write_rows(layer, sequence, 0, rounded[0].float(), rounded[1].float())
            halves = [x.view(torch.int16).numpy().view(np.uint8).reshape(self._slices, -1) for x in rounded]
            found.append(np.concatenate(halves, axis=1))
        slices = np.zeros((len(found), self._slices, self.layer.nbytes), np.uint8)
        slices[:, :, : self.layer.data_nbytes] = np.stack(found)
        return slices

    def keep_first(self, before: ByteArray, slices: ByteArray) -> None:
        """Take the first tokens of a text from ``before``, as links leave them behind a lossy pipeline."""
        half = self.layer.data_nbytes // 2
        nbytes = half // self.slice_tokens * self.kept_tokens
        for start in (0, half):
            slices[:, 0, start : start + nbytes] = before[:, 0, start : start + nbytes]

    def put(self, text: TextKV, slices: ByteArray) -> None:
        """Replace the KV of ``text`` in its pages by that of ``slices``."""
        kv, config = text.sequence.kv, self.model.config
        half = self.layer.data_nbytes // 2
        for layer in range(config.num_layers):
            parts = []
            for start in (0, half):
                raw = np.ascontiguousarray(slices[layer, :, start : start + half]).view(np.int16)
                values = torch.from_numpy(raw).view(torch.bfloat16).float()
                parts.append(values.reshape(self._tokens, config.num_kv_heads, config.head_dim))
            kv.write_rows(layer, text.sequence, 0, parts[0], parts[1])

    def predict(self, text: TextKV) -> torch.Tensor:
        """Log-probabilities of the tokens behind ``text``, ``[predicted, vocabulary]``, from its pages."""
        text.sequence.length = self._tokens - 1
        logits = self.model.forward(text.next_tokens[:-1], text.sequence, every_token=True)
        assert logits is not None
        text.sequence.length = self._tokens - 1
        return torch.log_softmax(logits.double(), dim=-1)
