import msgspec
import pytest

from kvferry.core.canonical import encode
from kvferry.core.errors import ConfigError
from kvferry.core.spec import DType, KeyScope, KVSpec, LayerSpec, Restore, TensorSpec, namespace_id


def layer(*shapes: tuple[int, ...], dtype: DType = DType.BFLOAT16) -> LayerSpec:
    return LayerSpec(tuple(TensorSpec(f"t{i}", shape, dtype) for i, shape in enumerate(shapes)))


def test_layer_slices_start_on_64_bytes_and_fill_the_block() -> None:
    spec = KVSpec(model="m", revision="", layers=(layer((3, 1), (5,)), layer((32,)), layer()), block_tokens=1)
    assert [la.data_nbytes for la in spec.layers] == [16, 64, 0]
    assert [spec.layer_slice(i) for i in range(3)] == [slice(0, 64), slice(64, 128), slice(128, 128)]
    assert spec.block_nbytes == 128
    assert [slot.offset for slot in spec.layers[0].slots()] == [0, 6]
    for outside in (-1, 3):
        with pytest.raises(IndexError, match=r"outside 0\.\.2"):
            spec.layer_slice(outside)


@pytest.mark.parametrize(("dtype", "nbytes"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("bool", 1)])
def test_bytes_of_a_tensor(dtype: str, nbytes: int) -> None:
    assert TensorSpec("k", (3, 5), DType(dtype)).nbytes == 15 * nbytes
    assert TensorSpec("scalar", (), DType(dtype)).nbytes == nbytes


def test_specs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a name"):
        TensorSpec("", (1,), DType.INT8)
    with pytest.raises(ConfigError, match="negative size"):
        TensorSpec("k", (1, -1), DType.INT8)
    with pytest.raises(ConfigError, match="different names"):
        LayerSpec((TensorSpec("k", (1,), DType.INT8), TensorSpec("k", (2,), DType.INT8)))
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        KVSpec(model="m", revision="", layers=(), block_tokens=0)
    with pytest.raises(ConfigError, match="name of its model"):
        KVSpec(model="", revision="", layers=(), block_tokens=1)
    for kind, window in (("all_blocks", 5), ("snapshot", 5), ("last_window", None), ("last_window", 0)):
        with pytest.raises(ConfigError, match="window_tokens"):
            Restore(kind, window)  # type: ignore[arg-type]
    for unknown in ("nonsense", "", "ALL_BLOCKS", None):
        with pytest.raises(ConfigError, match="none of all_blocks, last_window, snapshot"):
            Restore(unknown)  # type: ignore[arg-type]
    for decoder in (msgspec.json, msgspec.msgpack):
        data = decoder.encode({"kind": "nonsense", "window_tokens": None})
        with pytest.raises(msgspec.ValidationError, match="nonsense"):
            decoder.decode(data, type=Restore)
    for axis in ("tp", "pp", "cp"):
        for rank, size in ((1, 1), (-1, 2), (0, 0)):
            with pytest.raises(ConfigError, match=f"{axis}_rank {rank}"):
                KVSpec(
                    model="m",
                    revision="",
                    layers=(),
                    block_tokens=1,
                    **{f"{axis}_rank": rank, f"{axis}_size": size},  # type: ignore[arg-type]
                )


def test_a_description_shows_what_peers_may_differ_in() -> None:
    spec = KVSpec(
        model="m", revision="", layers=(layer((16, 2)),) * 3, block_tokens=16, tp_rank=1, tp_size=2, cp_size=2
    )
    text = spec.describe()
    for part in ("m@(no revision)", "layers=3", "t0[16, 2]:bfloat16", "16 tokens", "tp 1/2", "cp 0/2"):
        assert part in text
    assert spec.fingerprint().hex()[:12] in text
    assert (
        "cp" not in KVSpec(model="m", revision="r", layers=(), block_tokens=1).describe().split("layout")[1]
    )


def test_a_fingerprint_is_the_same_for_equal_specs_only() -> None:
    one, same = (KVSpec(model="m", revision="r", layers=(layer((4,)),), block_tokens=4) for _ in range(2))
    assert one == same
    assert one.fingerprint() == same.fingerprint()
    assert len(namespace_id(one, KeyScope())) == 32


def test_the_canonical_encoding_keeps_types_and_borders() -> None:
    values = [None, "", b"", [], False, 0, True, 1, "1", b"1", [1], [[1]], ["1", ""], ["", "1"], -1]
    encodings = [encode(v) for v in values]
    assert len(set(encodings)) == len(values)
    assert encode((1, 2)) == encode([1, 2])
    with pytest.raises(TypeError, match="float"):
        encode(1.5)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        encode(1 << 63)
