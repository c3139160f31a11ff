"""Arguments that cannot be meant are refused before any kernel gets an address; messages stay short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.codecs import CodecPipeline, decode_frame, decode_many, decode_row
from kvferry.codecs.frame import aligned, header_nbytes, stage_bytes
from kvferry.core.errors import CodecError, CorruptBlockError, KVFerryError
from kvferry.testing.codecs import kv_layer

LAYER = kv_layer(64, 1, 64)
SIZE = LAYER.nbytes
PIPELINE = CodecPipeline.parse("ebp")
NEEDED = PIPELINE.max_encoded_nbytes(LAYER)
ROOM = aligned(NEEDED)


def room(nbytes: int = ROOM) -> memoryview:
    return memoryview(bytearray(nbytes))


def frame() -> memoryview:
    out = room()
    return out[: PIPELINE.encode_into(room(SIZE), LAYER, out)]


NOT_BYTES: list[Any] = [bytes(ROOM), bytearray(ROOM), None, room(2 * ROOM)[::2], room(2 * ROOM).cast("H")]


@pytest.mark.parametrize("wrong", NOT_BYTES, ids=["bytes", "bytearray", "None", "strided", "words"])
def test_only_flat_memory_is_taken(wrong: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: PIPELINE.encode_into(wrong, LAYER, room()),
        lambda: PIPELINE.encode_into(room(SIZE), LAYER, wrong),
        lambda: PIPELINE.encode_row([room(SIZE)], [LAYER], wrong),
        lambda: PIPELINE.decode_into(wrong, LAYER, room(SIZE)),
        lambda: PIPELINE.decode_into(frame(), LAYER, wrong),
        lambda: decode_frame(wrong, LAYER, room(SIZE)),
        lambda: decode_frame(frame(), LAYER, wrong),
        lambda: decode_many([frame()], LAYER, [wrong]),
        lambda: decode_row(frame(), [LAYER], [wrong]),
    ]
    for call in calls:
        with pytest.raises(CodecError, match=r"must be (a memoryview|one) of"):
            call()


def test_the_remedy_works() -> None:
    """Memory with gaps cannot be cast."""
    for wrong, remedy in (
        (room(2 * ROOM)[::2], "; copy it first"),
        (room(ROOM).cast("H"), r"; .cast\('B'\)"),
    ):
        with pytest.raises(CodecError, match=remedy):
            PIPELINE.encode_into(wrong, LAYER, room())


def test_other_arguments_that_are_none() -> None:
    with pytest.raises(CodecError, match="the layer is NoneType"):
        PIPELINE.encode_into(room(SIZE), None, room())  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="a codec is int"):
        CodecPipeline.parse(5)  # type: ignore[arg-type]
    for stages in (None, "ebp", [object()]):
        with pytest.raises(CodecError, match="must be a sequence of stages"):
            CodecPipeline(stages)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="1 inputs for 0 outputs"):
        PIPELINE.encode_many([room(SIZE)], LAYER, [])
    with pytest.raises(CodecError, match="1 inputs for 0 layers"):
        PIPELINE.encode_row([room(SIZE)], [], room())
    with pytest.raises(CodecError, match="1 layers for 0 outputs"):
        decode_row(frame(), [LAYER], [])


@pytest.mark.parametrize("start", [0, 64, NEEDED - 1, -64, 1 - SIZE])
def test_input_and_output_have_no_byte_in_common(start: int) -> None:
    memory = room(3 * ROOM)
    src, dst = memory[ROOM : ROOM + SIZE], memory[ROOM - start : 2 * ROOM - start]
    before = bytes(memory)
    for call in (
        lambda: PIPELINE.encode_into(src, LAYER, dst),
        lambda: PIPELINE.encode_row([src], [LAYER], dst),
        lambda: decode_frame(dst, LAYER, src),
        lambda: PIPELINE.decode_into(dst, LAYER, src),
    ):
        with pytest.raises(CodecError, match="input and output overlap"):
            call()
    assert bytes(memory) == before


def test_views_of_different_objects_over_the_same_memory_overlap() -> None:
    whole = np.zeros(2 * ROOM, np.uint8)  # each of its slices is an object of its own
    with pytest.raises(CodecError, match="input and output overlap"):
        PIPELINE.encode_into(whole[:SIZE].data, LAYER, whole[64 : 64 + ROOM].data)
    with pytest.raises(CodecError, match="input and output overlap"):
        decode_frame(whole[:ROOM].data, LAYER, whole[64 : 64 + SIZE].data)


def test_outputs_of_one_call_overlap_nothing() -> None:
    memory, srcs = room(3 * ROOM), [room(SIZE), room(SIZE)]
    with pytest.raises(CodecError, match="two outputs overlap"):
        PIPELINE.encode_many(srcs, LAYER, [memory[:ROOM], memory[64 : 64 + ROOM]])
    with pytest.raises(CodecError, match="input and output overlap"):  # of the other slice
        PIPELINE.encode_many([srcs[0], memory[:SIZE]], LAYER, [memory[64 : 64 + ROOM], memory[2 * ROOM :]])
    frames = [frame(), frame()]
    with pytest.raises(CodecError, match="two outputs overlap"):
        decode_many(frames, LAYER, [memory[:SIZE], memory[SIZE - 1 : 2 * SIZE - 1]])
    PIPELINE.encode_many([srcs[0], srcs[0]], LAYER, [memory[:ROOM], memory[ROOM:]])  # inputs may
    decode_many([frames[0], frames[0]], LAYER, [memory[:SIZE], memory[SIZE : 2 * SIZE]])


def test_neighbours_are_no_overlap() -> None:
    memory = room(2 * ROOM)
    made = PIPELINE.encode_into(memory[:SIZE], LAYER, memory[SIZE : SIZE + ROOM])
    decode_frame(memory[SIZE : SIZE + made], LAYER, memory[:SIZE])


@pytest.mark.parametrize("at", [5, 10, 15, header_nbytes(stage_bytes((("ebp", {}),))) - 1])
@pytest.mark.parametrize("verb", ["frame", "many", "row"])
def test_bytes_that_are_zeros_in_this_format_are_compared(at: int, verb: str) -> None:
    made, out = frame(), room(SIZE)
    decode_frame(made, LAYER, out)  # the kernels know how such a frame looks
    made[at] = 1
    verbs: dict[str, Callable[[], object]] = {
        "frame": lambda: decode_frame(made, LAYER, out),
        "many": lambda: decode_many([made], LAYER, [out]),
        "row": lambda: decode_row(made, [LAYER], [out]),
    }
    with pytest.raises(CorruptBlockError, match="zeros in this format"):
        verbs[verb]()


@pytest.mark.parametrize(
    "text",
    ["{}", "{}|zstd", "ebp({}=1)", "ebp(bits={})", "ebp({})", "(" * 9, "dedup(inner={})", "int8(k={})"],
)
@pytest.mark.parametrize("sign", ["x", "9", "(", "é", "="])
def test_messages_about_long_texts_are_short(text: str, sign: str) -> None:
    with pytest.raises(KVFerryError) as found:
        CodecPipeline.parse(text.format(sign * 100_000))
    assert len(str(found.value)) < 600
