"""The codec of a tier: what is configured, what blocks become, and what is given back."""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from kvferry.codecs import ByteStage, CodecConfig, decode_frame, decode_row, registry
from kvferry.core.clock import deadline_in
from kvferry.core.errors import ConfigError, TierError
from kvferry.core.spec import DType, KVSpec, LayerSpec, TensorSpec
from kvferry.store import encoding
from kvferry.store.encoding import OFF, BlockCodec, EncodedBlock, TierCodec, most_encoded_nbytes
from kvferry.store.tier import ReadOutcome
from kvferry.testing.codecs import fill_of, kv_layer, mutations

KV = kv_layer(16, 2, 64)
STATE = LayerSpec((TensorSpec("state", (33,), DType.FLOAT32),))
ODD = LayerSpec((TensorSpec("k", (7, 1, 33), DType.FLOAT16), TensorSpec("flag", (3,), DType.BOOL)))
EMPTY = kv_layer(0, 8, 128)
LOSSLESS = ("ebp", "ebp(bits=4)", "split", "dedup(inner=split)", "zstd", "lz4", "shuffle|zstd", "split|lz4")
LOSSY = ("int8", "int4", "fp8", "int8(k=channel)|zstd")


def spec_of(*layers: LayerSpec, layout: str = "kvferry") -> KVSpec:
    return KVSpec(model="m", revision="r", layers=layers, block_tokens=16, layout=layout)


MIXED = spec_of(KV, STATE, ODD, EMPTY, KV)
PLAIN = spec_of(*(KV,) * 3)


def block(spec: KVSpec, fill: str = "values") -> memoryview:
    return memoryview(fill_of(fill, spec.block_nbytes))


def encoded(codec: TierCodec, spec: KVSpec, data: memoryview) -> EncodedBlock:
    found = codec.encode(data, spec)
    assert found is not None
    return found


def decoded(codec: TierCodec, spec: KVSpec, data: memoryview) -> tuple[ReadOutcome, bytes, bool]:
    into = memoryview(bytearray(spec.block_nbytes))
    found = codec.decode(data, spec, into, deadline=deadline_in(20))
    assert bool(found.reason) == (found.outcome is not ReadOutcome.HIT)
    return found.outcome, bytes(into), found.lossy


@pytest.mark.parametrize("text", LOSSLESS)
@pytest.mark.parametrize("fill", ["values", "zeros", "nan", "random"])
def test_lossless_codecs_give_back_what_was_saved(text: str, fill: str) -> None:
    for spec in (MIXED, PLAIN, spec_of(KV)):
        data = block(spec, fill)
        found = encoded(TierCodec(text), spec, data)
        assert found.encoding == (text, False, 0.0)
        assert len(found.sizes) == len(spec.layers)
        assert len(found.data) <= most_encoded_nbytes(spec)
        assert decoded(TierCodec(OFF), spec, found.data) == (ReadOutcome.HIT, bytes(data), False)


@pytest.mark.parametrize("text", LOSSY)
def test_lossy_codecs_say_so_and_are_read_where_that_is_allowed(text: str) -> None:
    data = block(MIXED)
    codec = TierCodec(text, allow_lossy=True)
    found = encoded(codec, MIXED, data)
    assert found.encoding.lossy
    assert found.encoding.codec == text
    assert 0 < found.encoding.bound < 1
    outcome, values, lossy = decoded(codec, MIXED, found.data)
    assert (outcome, lossy) == (ReadOutcome.HIT, True)
    assert values != bytes(data)
    state = MIXED.layer_slice(1)
    assert values[state] == bytes(data[state])  # a layer that the codec does not know is as it was


@pytest.mark.parametrize("reader", [TierCodec(OFF), TierCodec("ebp"), TierCodec("auto")])
def test_a_lossless_reader_gets_nothing_lossy(reader: TierCodec) -> None:
    found = encoded(TierCodec("int8", allow_lossy=True), PLAIN, block(PLAIN))
    before = reader.counters().get("codec_refused_lossy", 0)
    outcome, _, lossy = decoded(reader, PLAIN, found.data)
    assert (outcome, lossy) == (ReadOutcome.MISS, True)
    assert reader.counters()["codec_refused_lossy"] == before + 1


def test_a_flag_that_lies_does_not_help() -> None:
    """The stages say by themselves that they lose something."""
    found = bytearray(encoded(TierCodec("int8", allow_lossy=True), PLAIN, block(PLAIN)).data)
    found[4] &= ~1
    assert decoded(TierCodec(OFF), PLAIN, memoryview(found))[0] is ReadOutcome.MISS


def test_slices_outside_the_bound_stay_as_they_are_and_are_counted() -> None:
    codec = TierCodec("int8(bound=0.0001)", allow_lossy=True, check="always")
    data = block(PLAIN)
    found = encoded(codec, PLAIN, data)
    assert not found.encoding.lossy  # nothing was lost after all
    assert codec.counters()["codec_out_of_bound"] == len(PLAIN.layers)
    assert decoded(TierCodec(OFF), PLAIN, found.data) == (ReadOutcome.HIT, bytes(data), False)


def test_what_has_lost_something_elsewhere_says_so_here() -> None:
    for codec in (TierCodec(OFF, allow_lossy=True), TierCodec("ebp", allow_lossy=True)):
        data = block(PLAIN, "random")
        found = codec.encode(data, PLAIN, lossy=True, most=10)
        assert found is not None
        assert found.encoding.lossy
        assert decoded(codec, PLAIN, found.data)[:2] == (ReadOutcome.HIT, bytes(data))


def test_an_opaque_layout_takes_byte_codecs_only(caplog: pytest.LogCaptureFixture) -> None:
    opaque = spec_of(KV, layout="engine/pages-v3")
    codec = TierCodec("ebp")
    with caplog.at_level(logging.WARNING):
        assert codec.encode(block(opaque), opaque) is None
        assert codec.encode(block(opaque), opaque) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "engine/pages-v3" in line
    assert "engine/pages-v3" in codec.status()["codec of m"]
    assert codec.counters()["codec_kept_blocks"] == 2
    data = block(opaque, "zeros")
    found = encoded(TierCodec("zstd"), opaque, data)
    assert decoded(TierCodec(OFF), opaque, found.data)[1] == bytes(data)


@pytest.mark.parametrize("spec", [spec_of(), spec_of(STATE)])
def test_blocks_that_no_codec_knows_are_kept(spec: KVSpec) -> None:
    assert TierCodec("ebp").encode(block(spec), spec) is None


def test_what_would_not_pay_is_kept() -> None:
    codec = TierCodec("ebp")
    data = block(PLAIN, "random")
    assert codec.encode(data, PLAIN, most=len(data)) is None
    assert codec.counters()["codec_kept_blocks"] == 1
    assert codec.encode(block(PLAIN), PLAIN, most=len(data)) is not None


def test_damage_is_corrupt_or_a_miss_never_anything_else() -> None:
    """The checksum finds it first; this is what is behind that. Whatever comes out, nothing is raised."""
    small = spec_of(kv_layer(4, 1, 16), EMPTY, STATE)
    for text in ("ebp", "split", "int8", "zstd"):
        found = encoded(TierCodec(text, allow_lossy=True), small, block(small))
        reader = TierCodec(OFF, allow_lossy=True)
        seen = {decoded(reader, small, memoryview(m))[0] for m in mutations(bytes(found.data), 250)}
        assert ReadOutcome.CORRUPT in seen
        assert ReadOutcome.FAILED not in seen
        assert decoded(reader, small, memoryview(bytes(found.data) + bytes(64)))[0] is ReadOutcome.CORRUPT
        assert decoded(reader, small, memoryview(b""))[0] is ReadOutcome.CORRUPT


def test_a_codec_that_is_not_installed_is_a_miss() -> None:
    found = bytearray(encoded(TierCodec("zstd"), PLAIN, block(PLAIN)).data)
    at = found.index(b"zstd")
    found[at : at + 4] = b"zzzz"
    reader = TierCodec(OFF)
    assert decoded(reader, PLAIN, memoryview(found))[0] is ReadOutcome.MISS
    assert reader.counters()["codec_undecodable"] == 1


class Faulty(ByteStage):
    """A stage of others, with one thing wrong."""

    codec_id = "faulty"

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong

    def config(self) -> CodecConfig:
        return {"wrong": self.wrong} if self.wrong else {}

    @classmethod
    def from_config(cls, config: CodecConfig) -> Faulty:
        return cls(str(config.get("wrong", "")))

    def max_encoded_nbytes(self, nbytes: int) -> int:
        if self.wrong == "size":
            raise ValueError("a bug of others")
        return -1 if self.wrong == "negative size" else nbytes

    def encode_into(self, src: memoryview, dst: memoryview) -> int:
        if self.wrong == "encode":
            raise ValueError("a bug of others")
        if self.wrong == "writes its input":
            src[:] = bytes(len(src))
        half = len(src) // 2
        dst[:half] = src[:half]
        return ENCODED.get(self.wrong, half)  # type: ignore[return-value]

    def decode_into(self, src: memoryview, dst: memoryview) -> int:
        return self.decode(src, dst)

    def decode(self, src: memoryview, dst: memoryview) -> int:
        if self.wrong == "decode":
            raise ValueError("a bug of others")
        if self.wrong == "leaves":
            sys.exit(3)
        dst[: len(src)] = dst[len(src) : 2 * len(src)] = src
        if self.wrong == "loses":
            dst[0] ^= 1
        return 2 * len(src) if self.wrong != "decodes too much" else 1 << 40


ENCODED: Final[dict[str, object]] = {"too much": 1 << 40, "too little": -5, "nothing": None, "yes": True}
TWICE: Final = spec_of(*(LayerSpec((TensorSpec("k", (16, 64), DType.BFLOAT16),)),) * 3)


@pytest.fixture
def faulty() -> Iterator[None]:
    registry.register("faulty", Faulty)
    yield
    registry.unregister("faulty")


@pytest.mark.parametrize(
    "wrong", ["size", "negative size", "encode", "writes its input", "decode", "leaves", "loses", *ENCODED]
)
def test_a_codec_that_cannot_encode_costs_the_ratio_and_not_the_block(
    faulty: None, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    saved = bytes(range(256)) * (TWICE.layers[0].nbytes // 512) * 6
    data = memoryview(bytearray(saved))
    codec = TierCodec(f"faulty(wrong={wrong})", allow_lossy=True)
    for _ in range(3):
        assert codec.encode(data, TWICE) is None
    assert data == saved
    assert codec.counters()["codec_kept_blocks"] == 3
    assert codec.counters()["codec_failed"] == (0 if "size" in wrong else 3)
    assert len(caplog.records) == 1
    again = codec.encode(data, TWICE, lossy=True)  # which is to say so, and is encoded as it is
    assert again is not None
    assert decoded(codec, TWICE, again.data) == (ReadOutcome.HIT, bytes(data), False)
    assert again.encoding.lossy


@pytest.mark.parametrize("wrong", ["decode", "decodes too much", "leaves"])
def test_a_codec_that_cannot_decode_costs_a_miss(
    faulty: None, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    half = bytes(range(256)) * (TWICE.layers[0].nbytes // 512)
    data = memoryview(half * 6)
    codec = TierCodec("faulty")
    frames = bytes(encoded(codec, TWICE, data).data)
    assert decoded(codec, TWICE, memoryview(frames)) == (ReadOutcome.HIT, bytes(data), False)
    worse = Faulty(wrong)
    monkeypatch.setattr(Faulty, "decode_into", lambda _, src, dst: worse.decode(src, dst))
    for count in (1, 2):
        assert decoded(codec, TWICE, memoryview(frames))[0] is ReadOutcome.MISS
        assert codec.counters()["codec_undecodable"] == count


def test_deadlines_are_kept_between_slices() -> None:
    codec = TierCodec("ebp")
    with pytest.raises(TierError, match="deadline"):
        codec.encode(block(PLAIN), PLAIN, deadline=deadline_in(-1))
    found = encoded(codec, PLAIN, block(PLAIN))
    into = memoryview(bytearray(PLAIN.block_nbytes))
    assert codec.decode(found.data, PLAIN, into, deadline=deadline_in(-1)).outcome is ReadOutcome.FAILED


# ---- configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"codec": "int8"}, "allow_lossy=true"),
        ({"codec": "int8", "allow_lossy": "no"}, "allow_lossy=true"),
        ({"codec": "epb"}, "did you mean ebp"),
        ({"codec": "zstd|ebp"}, "array stages come first"),
        ({"codec": 3}, "must be text"),
        ({"codec": ""}, "must be text"),
        ({"allow_lossy": "maybe"}, "true or false"),
        ({"codec": "ebp", "codec_check": "never"}, "one of sample, always"),
    ],
)
def test_wrong_options_are_told(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match="tier x") as caught:
        TierCodec.from_options("tier x", options)
    assert told in str(caught.value)


def test_options_are_taken_and_the_others_left() -> None:
    given = {"codec": "int8", "allow_lossy": "true", "codec_check": "always", "capacity": "1GiB"}
    codec, rest = TierCodec.from_options("tier x", given)
    assert rest == {"capacity": "1GiB"}
    assert (codec.text, codec.accepts_lossy, codec.check) == ("int8", True, "always")
    described = {o.name: (o.value, o.given, o.text) for o in codec.describe({"codec": "int8"})}
    assert described == {
        "codec": ("int8", True, "int8"),
        "allow_lossy": (True, False, "true"),
        "codec_check": ("always", False, "always"),
    }
    assert TierCodec.from_options("tier x", {})[0].text == OFF
    assert TierCodec("raw").text == OFF
    assert not TierCodec("raw").is_on


@pytest.mark.parametrize(
    ("codec", "lines"),
    [
        (TierCodec("int8", allow_lossy=True), ["lossy: tier disk: int8 encodes"]),
        (TierCodec("auto", allow_lossy=True), ["lossy: tier disk: int8 may be chosen for"]),
        (TierCodec("ebp", allow_lossy=True), ["lossy: tier disk: what was stored"]),
        (TierCodec("ebp"), []),
        (TierCodec("auto"), []),
    ],
)
def test_loss_is_announced_by_one_line(
    codec: TierCodec, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        codec.announce("disk")
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == len(lines)
    assert all(told.startswith(line) for told, line in zip(found, lines, strict=True))
    assert ("lossy" in codec.status()["codec"].replace("lossless", "")) == codec.accepts_lossy


# ---- auto -------------------------------------------------------------------------------------------


class Costs:
    """The clock of a codec: it moves by what encoding and decoding cost here, in seconds a byte of KV."""

    ENCODE: Final = {"ebp(bits=4)": 1e-9, "ebp": 4e-9, "split": 2e-9, "int8": 1e-9}
    DECODE: Final = 1e-9

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._encode, self._frame, self._row = BlockCodec.encode, decode_frame, decode_row
        costs = self

        def encode(codec: BlockCodec, data: memoryview, name: str, deadline: float) -> EncodedBlock:
            costs.now += len(data) * costs.ENCODE[name]
            return costs._encode(codec, data, name, deadline)

        monkeypatch.setattr(BlockCodec, "encode", encode)
        monkeypatch.setattr(encoding, "decode_frame", self._decode_frame)
        monkeypatch.setattr(encoding, "decode_row", self._decode_row)

    def __call__(self) -> float:
        return self.now

    def _decode_frame(self, frame: memoryview, layer: LayerSpec, into: memoryview) -> object:
        self.now += layer.nbytes * self.DECODE
        return self._frame(frame, layer, into)

    def _decode_row(
        self, row: memoryview, layers: Sequence[LayerSpec], slots: list[memoryview], *, lossless_only: bool
    ) -> object:
        self.now += sum(layer.nbytes for layer in layers) * self.DECODE
        return self._row(row, layers, slots, lossless_only=lossless_only)

    def stored(self, codec: TierCodec, rate: float, blocks: int) -> list[str]:
        """Write and read blocks over a medium of so many bytes a second; what each was encoded by."""
        data, names = block(PLAIN), list[str]()
        into = memoryview(bytearray(PLAIN.block_nbytes))
        for _ in range(blocks):
            self.now += 0.1
            found = codec.encode(data, PLAIN)
            for way in ("write", "read"):
                for _ in range(4):  # parts of a window
                    codec.carried(way, int(rate / 100), 0.01)
            if found is not None:
                assert codec.decode(found.data, PLAIN, into, deadline=math.inf).outcome is ReadOutcome.HIT
            names.append("raw" if found is None else found.encoding.codec)
        return names


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Costs:
    return Costs(monkeypatch)


def test_auto_encodes_for_a_slow_medium_and_not_for_a_fast_one(costs: Costs) -> None:
    slow, fast = TierCodec("auto", clock=costs), TierCodec("auto", clock=costs)
    chosen = costs.stored(slow, 1e6, 60)
    assert set(chosen[-20:]) <= {"ebp(bits=4)", "ebp", "split"}
    assert max(Counter(chosen[-20:]).values()) > 15  # but for a trial now and then
    assert costs.stored(fast, 1e13, 60)[-20:].count("raw") > 15
    assert "link" in slow.status()["codec"]
    counted = slow.counters()
    names = {name: n for name, n in counted.items() if name.startswith("codec_auto_")}
    assert names == {f"codec_auto_{name}": n for name, n in Counter(chosen).items()}
    assert counted["codec_switches"] >= 1
    assert costs.stored(slow, 1e13, 60)[-20:].count("raw") > 15  # it became faster


def test_auto_weighs_what_codecs_take(costs: Costs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that encodes for nothing is taken, whatever others do to the size; none where decoding is slow."""
    monkeypatch.setattr(Costs, "ENCODE", dict.fromkeys(Costs.ENCODE, 1e-6) | {"ebp": 1e-11})
    monkeypatch.setattr(Costs, "DECODE", 1e-11)
    chosen = costs.stored(TierCodec("auto", clock=costs), 1e9, 60)
    assert chosen[-20:].count("ebp") > 15
    monkeypatch.setattr(Costs, "DECODE", 1e-6)
    assert costs.stored(TierCodec("auto", clock=costs), 1e9, 60)[-20:].count("raw") > 15


def test_auto_takes_a_lossy_codec_only_where_that_is_allowed(costs: Costs) -> None:
    codec = TierCodec("auto", allow_lossy=True, clock=costs)
    assert costs.stored(codec, 1e6, 60)[-20:].count("int8") > 15
    with pytest.raises(ConfigError, match="int8 is lossy"):
        TierCodec("auto", candidates=("int8",))
