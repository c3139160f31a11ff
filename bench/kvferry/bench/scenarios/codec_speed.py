"""``codec.<id>.ratio``, ``.encode`` and ``.decode``: pipelines against a cold memcpy, on one core or more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kvferry.bench.ceilings import COLD_NBYTES, ColdWalk, MemcpyCold
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.bench.scenarios.codec import CodecOptions, short_name
from kvferry.bench.scenarios.codec_kv import ModelKV
from kvferry.bench.side_by_side import SideBySide
from kvferry.codecs import CodecPipeline, decode_frame, decode_many
from kvferry.core.errors import CorruptBlockError

__all__ = ["run_speed"]

_RUN_NBYTES = (
    96 << 20
)  # some 10 ms a thread and more, so that the start of threads and a lost turn count little
_CALL = 16  # slices, as a tier and a link hand over some at once


class _Walk:
    """Slices of real KV, encoded and decoded piece by piece through memory that no cache holds.

    Args:
        pipeline: What encodes.
        kv: Slices and their layer.
        options: What is walked through.
        threads: That encode side by side, each its own pieces.
    """

    def __init__(self, pipeline: CodecPipeline, kv: ModelKV, options: CodecOptions, threads: int) -> None:
        self._pipeline, self._layer, self._threads = pipeline, kv.layer, SideBySide(threads)
        slices = np.concatenate([text.slices.reshape(-1, kv.layer.nbytes) for text in kv.texts])
        run_nbytes = min(_RUN_NBYTES, options.walk_nbytes * 3 // 8)
        self.pieces = max(threads, run_nbytes // kv.layer.nbytes)
        self._count = max(2 * self.pieces, -(-options.walk_nbytes // kv.layer.nbytes))
        room = -(-pipeline.max_encoded_nbytes(kv.layer) // 64) * 64
        walked = self._count * kv.layer.nbytes
        self._src = _cut(ColdWalk(kv.layer.nbytes, walked), self._count)
        self._encoded = _cut(ColdWalk(room, self._count * room), self._count)
        self._dst = ColdWalk(kv.layer.nbytes, walked, fill=0)
        self._sizes = [0] * self._count
        self._next = 0
        for number, piece in enumerate(self._src):
            piece[:] = slices[number % len(slices)].data
        self._encode(range(self._count))

    @property
    def ratio(self) -> float:
        """Bytes before encoding over bytes afterwards."""
        return self._count * self._layer.nbytes / sum(self._sizes)

    def _encode(self, numbers: range) -> None:
        for at in range(0, len(numbers), _CALL):
            places = [n % self._count for n in numbers[at : at + _CALL]]
            sizes = self._pipeline.encode_many(
                [self._src[p] for p in places], self._layer, [self._encoded[p] for p in places]
            )
            for place, size in zip(places, sizes, strict=True):
                self._sizes[place] = size

    def encode(self) -> Sample:
        """One run, over the pieces that were encoded longest ago."""
        seconds = self._timed(self._encode, self._next)
        self._next += self.pieces
        return Sample(seconds, self.pieces * self._layer.nbytes)

    def decode(self) -> Sample:
        """One run, over pieces that were encoded half a walk ago, so that no cache has them."""
        start = self._next + self._count // 2
        targets = {n: self._dst.take() for n in range(start, start + self.pieces)}

        def one(numbers: range) -> None:
            for at in range(0, len(numbers), _CALL):
                some = numbers[at : at + _CALL]
                places = [n % self._count for n in some]
                frames = [self._encoded[p][: self._sizes[p]] for p in places]
                decode_many(frames, self._layer, [targets[n] for n in some])

        seconds = self._timed(one, start)
        self._verify(targets)
        return Sample(seconds, self.pieces * self._layer.nbytes)

    def _timed(self, one: Callable[[range], None], start: int) -> float:
        count = self._threads.threads
        return self._threads.run(one, [range(start + t, start + self.pieces, count) for t in range(count)])

    def _verify(self, decoded: Mapping[int, memoryview]) -> None:
        """A lossless pipeline gives the bytes back; a lossy one what a second decoding gives."""
        for n, got in decoded.items():
            place = n % self._count
            expected = self._src[place]
            if not self._pipeline.lossless:
                expected = memoryview(bytearray(len(got)))
                decode_frame(self._encoded[place][: self._sizes[place]], self._layer, expected)
            if not np.array_equal(np.frombuffer(got, np.uint8), np.frombuffer(expected, np.uint8)):
                raise CorruptBlockError(f"codec {self._pipeline.text!r} gave other bytes back")

    def close(self) -> None:
        """End its threads."""
        self._threads.close()


def run_speed(kv: ModelKV, options: CodecOptions, progress: Progress) -> Iterator[Result]:
    """Every pipeline in turn: its ratio, then both directions."""
    for text in options.pipelines:
        # the bound is checked by sampling as in use, so what that costs is in the figure
        pipeline = CodecPipeline.parse(text)
        walks = {f"threads{n}": _Walk(pipeline, kv, options, n) for n in sorted({1, options.threads})}
        own = walks[f"threads{options.threads}"]
        try:
            yield from _measure(text, kv, options, walks, own, progress)
        finally:
            for walk in walks.values():
                walk.close()


def _measure(
    text: str,
    kv: ModelKV,
    options: CodecOptions,
    walks: dict[str, _Walk],
    own: _Walk,
    progress: Progress,
) -> Iterator[Result]:
    rounds = _rounds(text, kv, options, walks, own.pieces, progress)
    params: dict[str, Param] = {
        "codec": text,
        "model": options.model,
        "slice_tokens": options.slice_tokens,
        "threads": options.threads,
        "kernels": options.kernels,
    }
    name = short_name(text)
    yield summarise(f"codec.{name}.ratio", params, "x smaller", {"subject": [own.ratio]})
    speeds = {key: [s.gb_per_s for s in samples] for key, samples in rounds.items()}
    params["cold"] = options.walk_nbytes >= COLD_NBYTES
    if options.threads > 1:
        # what memory allows: threads that move as many bytes as these scale no further
        memory = {"subject": speeds["memcpy_threads"], "memcpy_cold": speeds["memcpy_cold"]}
        yield summarise(f"codec.{name}.memcpy_threads", params, "GB/s", memory)
    for direction in ("encode", "decode"):
        values = {"subject": speeds[f"{direction}_threads{options.threads}"]}
        values["memcpy_cold"] = speeds["memcpy_cold"]
        if options.threads > 1:
            values["one_thread"] = speeds[f"{direction}_threads1"]
            values["memcpy_threads"] = speeds["memcpy_threads"]
        yield summarise(
            f"codec.{name}.{direction}",
            params,
            "GB/s",
            values,
            samples=rounds[f"{direction}_threads{options.threads}"],
            verified=True,
        )


def _rounds(
    text: str,
    kv: ModelKV,
    options: CodecOptions,
    walks: dict[str, _Walk],
    pieces: int,
    progress: Progress,
) -> dict[str, list[Sample]]:
    """All walks beside what memory itself does, with one thread and with so many."""
    copies = {"memcpy_cold": 1, **({"memcpy_threads": options.threads} if options.threads > 1 else {})}
    baselines = {
        name: MemcpyCold(kv.layer.nbytes, pieces, walk_nbytes=options.walk_nbytes, threads=threads)
        for name, threads in copies.items()
    }
    subjects: dict[str, Callable[[], Sample]] = dict(baselines)
    for name, walk in walks.items():
        subjects[f"encode_{name}"] = walk.encode
        subjects[f"decode_{name}"] = walk.decode
    try:
        return run_paired(subjects, runs=options.runs, progress=progress, label=text)
    finally:
        for baseline in baselines.values():
            baseline.close()


def _cut(walk: ColdWalk, count: int) -> list[memoryview]:
    return [walk.take() for _ in range(count)]
