"""Conformance suites of byte and array stages: :class:`ByteStageSuite`, :class:`ArrayStageSuite`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

import pytest

from kvferry.codecs.base import ArrayStage, ByteStage, UnfitValuesError
from kvferry.codecs.error import slice_errors
from kvferry.core.buffers import page_aligned
from kvferry.core.errors import CodecError, CorruptBlockError
from kvferry.core.spec import LayerSpec
from kvferry.testing.codecs import FILLS, LAYERS, LENGTHS, assert_guard, fill_of, guarded, mutations

__all__ = ["ArrayStageSuite", "ByteStageSuite"]


class ByteStageSuite(ABC):
    """What every byte stage must do. Inherit it in a test class and give :meth:`make_stage`."""

    @abstractmethod
    def make_stage(self) -> ByteStage:
        """A stage under test."""

    def _encoded(self, stage: ByteStage, data: bytes) -> bytes:
        dst, whole = guarded(stage.max_encoded_nbytes(len(data)))
        used = stage.encode_into(memoryview(data), dst)
        assert 0 <= used <= len(dst)
        assert_guard(whole, len(dst))
        return bytes(dst[:used])

    @pytest.mark.parametrize("fill", FILLS)
    @pytest.mark.parametrize("length", LENGTHS)
    def test_round_trip(self, length: int, fill: str) -> None:
        """The same bytes come back, into a buffer that may be longer."""
        stage, data = self.make_stage(), fill_of(fill, length)
        encoded = self._encoded(stage, data)
        for room in (length, length + 100):
            out, whole = guarded(room)
            assert stage.decode_into(memoryview(encoded), out) == length
            assert_guard(whole, room)
            assert bytes(out[:length]) == data

    def test_output_too_small_is_an_error(self) -> None:
        """One byte less than is needed, both ways; nothing behind it is touched."""
        stage, data = self.make_stage(), fill_of("random", 7240)
        encoded = self._encoded(stage, data)
        dst, whole = guarded(len(encoded) - 1)
        with pytest.raises(CodecError):
            stage.encode_into(memoryview(data), dst)
        assert_guard(whole, len(dst))
        out, whole = guarded(len(data) - 1)
        with pytest.raises(CorruptBlockError):
            stage.decode_into(memoryview(encoded), out)
        assert_guard(whole, len(out))

    def test_cut_bytes_are_an_error(self) -> None:
        """And so is one byte too many."""
        stage = self.make_stage()
        encoded = self._encoded(stage, fill_of("random", 999))
        out = page_aligned(2000)
        for wrong in (encoded[:-1], encoded[:5], encoded + b"\0"):
            with pytest.raises(CorruptBlockError):
                stage.decode_into(memoryview(wrong), out)

    def test_mutations_never_crash_or_write_outside(self) -> None:
        """Mutated bytes give an error or some bytes within the buffer."""
        stage = self.make_stage()
        encoded = self._encoded(stage, fill_of("random", 500) + bytes(500))
        for mutated in mutations(encoded, 1000):
            out, whole = guarded(1000)
            with contextlib.suppress(CorruptBlockError):
                assert stage.decode_into(memoryview(mutated), out) <= 1000
            assert_guard(whole, 1000)

    def test_config_rebuilds_an_equal_stage(self) -> None:
        """``from_config(config())`` writes the same bytes."""
        stage = self.make_stage()
        again = type(stage).from_config(stage.config())
        assert isinstance(again, ByteStage)
        data = fill_of("random", 500) + bytes(500)
        assert self._encoded(again, data) == self._encoded(stage, data)
        with pytest.raises(CodecError):
            type(stage).from_config({**stage.config(), "no_such_parameter": 1})


class ArrayStageSuite(ABC):
    """What every array stage must do; a stage that does not apply to a layer says so in ``unsupported``."""

    @abstractmethod
    def make_stage(self) -> ArrayStage:
        """A stage under test."""

    def _layers(self, stage: ArrayStage) -> dict[str, LayerSpec]:
        """Those that it applies to."""
        return {name: layer for name, layer in LAYERS.items() if not stage.unsupported(layer)}

    def test_applies_to_something(self) -> None:
        """Otherwise the other tests would show nothing."""
        stage = self.make_stage()
        assert any(layer.nbytes for layer in self._layers(stage).values())

    @pytest.mark.parametrize("count", [0, 1, 3])
    @pytest.mark.parametrize("fill", [*FILLS, "values"])
    @pytest.mark.parametrize("name", sorted(LAYERS))
    def test_round_trip(self, name: str, fill: str, count: int) -> None:
        """A lossless stage gives the same bytes back, a lossy one values within its bound, or refuses them.

        None touches what lies behind its buffers.
        """
        stage, layer = self.make_stage(), LAYERS[name]
        if stage.unsupported(layer):
            return
        inner, data = stage.encoded_layer(layer), fill_of(fill, layer.nbytes * count)
        dst, whole = guarded(inner.nbytes * count)
        try:
            stage.encode_into(memoryview(data), layer, dst)
        except UnfitValuesError:
            assert fill in ("random", "nan")
            assert not stage.lossless
            return
        finally:
            assert_guard(whole, len(dst))
        out, whole = guarded(len(data))
        stage.decode_into(dst, layer, out)
        assert_guard(whole, len(out))
        if stage.lossless:
            assert bytes(out) == data
        elif fill in ("zeros", "values"):
            for error in slice_errors(memoryview(data), out, layer):
                assert error.bounded <= stage.error_bound(error.tensor)

    def test_sizes_that_do_not_fit_are_an_error(self) -> None:
        """Other buffers than of whole slices are refused."""
        stage = self.make_stage()
        layer = next(layer for layer in self._layers(stage).values() if layer.nbytes)
        inner = stage.encoded_layer(layer).nbytes
        for src, dst in ((layer.nbytes - 1, inner), (layer.nbytes, inner - 1), (layer.nbytes, 2 * inner)):
            with pytest.raises(CodecError):
                stage.encode_into(memoryview(bytes(src)), layer, page_aligned(dst))
        for src, dst in ((inner - 1, layer.nbytes), (inner, layer.nbytes + 1)):
            with pytest.raises(CodecError):
                stage.decode_into(memoryview(bytes(src)), layer, page_aligned(dst))

    def test_config_rebuilds_an_equal_stage(self) -> None:
        """``from_config(config())`` writes the same bytes, and knows no other parameters."""
        stage = self.make_stage()
        again = type(stage).from_config(stage.config())
        assert isinstance(again, ArrayStage)
        for layer in self._layers(stage).values():
            inner, data = stage.encoded_layer(layer), memoryview(fill_of("values", layer.nbytes))
            assert again.encoded_layer(layer) == inner
            first, second = page_aligned(inner.nbytes), page_aligned(inner.nbytes)
            stage.encode_into(data, layer, first)
            again.encode_into(data, layer, second)
            assert first == second
        with pytest.raises(CodecError):
            type(stage).from_config({**stage.config(), "no_such_parameter": 1})
