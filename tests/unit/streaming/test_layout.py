from __future__ import annotations

import pytest

from kvferry.core import DType, KeyScope, KVSpec, LayerSpec, TensorSpec
from kvferry.core.errors import CapacityError, ConnectionClosedError, ProtocolError, error_from_code
from kvferry.streaming.layout import StreamLayout, clean_error, describe_mismatch
from kvferry.testing.prompt_kv import kv_spec


def _spec(*tensors: TensorSpec, layout: str = "kvferry") -> KVSpec:
    layer = LayerSpec(tensors)
    return KVSpec(model="m", revision="r", layers=(layer, layer), block_tokens=4, layout=layout)


def test_sizes_of_full_and_tail_blocks() -> None:
    layout = StreamLayout(
        _spec(TensorSpec("k", (4, 5), DType.FLOAT16), TensorSpec("v", (4, 3), DType.INT8)), 2, 3
    )
    assert layout.blocks == 3
    assert layout.tensor_nbytes(0, 0) == (40, 12)
    assert layout.pad_nbytes(0, 0) == 12
    assert layout.payload_nbytes(0, 0) == 64
    assert layout.tensor_nbytes(1, 2) == (30, 9)
    assert layout.pad_nbytes(1, 2) == 0
    assert layout.payload_nbytes(1, 2) == 39
    assert layout.tail_slice(0) == slice(0, 39)
    assert layout.tail_slice(1) == slice(64, 103)
    assert layout.tail_buffer_nbytes == 128


def test_a_tensor_without_token_axis_goes_whole_in_the_tail() -> None:
    spec = _spec(TensorSpec("k", (4, 2), DType.INT8), TensorSpec("state", (6,), DType.FLOAT32))
    assert StreamLayout(spec, 1, 1).tensor_nbytes(0, 1) == (2, 24)


def test_an_opaque_layout_goes_whole_in_the_tail() -> None:
    spec = _spec(TensorSpec("pages", (4, 2), DType.INT8), layout="engine-x")
    assert StreamLayout(spec, 1, 1).tensor_nbytes(0, 1) == (8,)


def test_no_tail_has_no_buffer() -> None:
    layout = StreamLayout(kv_spec(), 3, 0)
    assert (layout.blocks, layout.tail_buffer_nbytes) == (3, 0)


def test_mismatch_names_the_fields_but_never_a_salt() -> None:
    text = describe_mismatch(
        kv_spec(4, head_dim=8),
        kv_spec(5, head_dim=16),
        KeyScope(adapter="a", salt=b"hunter2"),
        KeyScope(salt=b"other"),
    )
    assert "4 layers against 5" in text
    assert "layer 0 [k[16, 2, 8]:float16, v[16, 2, 8]:float16] against [k[16, 2, 16]" in text
    assert "adapter 'a' against None" in text
    assert "another salt" in text
    assert "hunter2" not in text


def test_a_kept_error_keeps_no_frames() -> None:
    buffer = bytearray(8)

    def fail(view: memoryview) -> None:
        try:
            raise OSError(5, "reset")
        except OSError as exc:
            raise ConnectionClosedError(f"gone with {len(view)}") from exc

    kept: Exception | None = None
    try:
        fail(memoryview(buffer))
    except ConnectionClosedError as exc:
        kept = clean_error(exc)
    assert isinstance(kept, ConnectionClosedError)
    assert str(kept) == "gone with 8"
    assert kept.__traceback__ is None
    assert kept.__cause__ is None
    buffer.append(0)  # raises BufferError while a view is alive


@pytest.mark.parametrize("error", [CapacityError("full"), error_from_code("spec_mismatch", "x")])
def test_a_kept_error_is_of_the_same_kind(error: Exception) -> None:
    kept = clean_error(error)
    assert type(kept) is type(error)
    assert kept is not error
    assert str(kept) == str(error)


def test_a_kept_error_keeps_whose_fault_it_is() -> None:
    kept = clean_error(ProtocolError("nonsense", remote=True))
    assert isinstance(kept, ProtocolError)
    assert kept.remote


def test_an_interrupt_is_kept_as_the_end_of_its_thread() -> None:
    assert "KeyboardInterrupt" in str(clean_error(KeyboardInterrupt()))
