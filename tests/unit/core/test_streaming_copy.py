"""Copies past the caches: in C where the library is there, in numpy everywhere."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from kvferry.core import streaming_copy
from kvferry.core.buffers import ByteArray, as_bytes_view, page_aligned
from kvferry.core.errors import ConfigError
from kvferry.core.native import Native, load, native
from kvferry.core.streaming_copy import stream_into

BIG = 256 << 10  # from here on the kernel is taken


@pytest.fixture(autouse=True, params=["native", "numpy"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(streaming_copy, "_kernel", lambda: None)
    elif streaming_copy._kernel() is None:
        pytest.skip(f"no native copy: {native().reason or 'the library is older'}")
    return str(request.param)


def random_bytes(nbytes: int) -> ByteArray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, BIG - 1, BIG, BIG + 1, BIG + 63, (1 << 20) + 4096])
@pytest.mark.parametrize("offset", [0, 1, 63, 64, 4096])
def test_all_bytes_and_no_others(nbytes: int, offset: int) -> None:
    target = np.frombuffer(page_aligned(offset + nbytes + 4096), np.uint8)
    target[:] = 0xAB
    source = random_bytes(nbytes + 3)[3:]  # not aligned
    stream_into(target, offset, as_bytes_view(source))
    assert np.array_equal(target[offset : offset + nbytes], source)
    assert (target[:offset] == 0xAB).all()
    assert (target[offset + nbytes :] == 0xAB).all()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, BIG + 1), (1, BIG), (-1, 8), (BIG + 1, 0)])
def test_what_does_not_fit_is_refused(offset: int, nbytes: int) -> None:
    target = np.zeros(BIG, np.uint8)
    with pytest.raises(ValueError, match=f"{nbytes} bytes do not fit into {BIG}"):
        stream_into(target, offset, memoryview(b"\x01" * nbytes))
    assert not target.any()


@pytest.mark.parametrize("nbytes", [8, BIG])
def test_a_read_only_destination_is_refused(nbytes: int) -> None:
    target = np.frombuffer(bytes(BIG), np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        stream_into(target, 0, memoryview(bytes(nbytes)))


@pytest.mark.parametrize("shift", [-64, -1, 1, 64])
def test_bytes_that_overlap(shift: int) -> None:
    target = random_bytes(BIG + 128)
    expected = target[64 : 64 + BIG].copy()
    stream_into(target, 64 + shift, as_bytes_view(target[64 : 64 + BIG]))
    assert np.array_equal(target[64 + shift : 64 + shift + BIG], expected)


def test_others_run_meanwhile() -> None:
    """The GIL is released: a copy in another thread does not stop this one."""
    target = np.zeros(64 << 20, np.uint8)
    source = as_bytes_view(random_bytes(64 << 20))
    done = threading.Event()
    turns, most = 0, 0

    def copy() -> None:
        nonlocal most
        for _ in range(100):  # until the other thread had a core during one of them
            before = turns
            stream_into(target, 0, source)
            most = max(most, turns - before)
            if most > 3:  # around a call that keeps all to itself there may be one or two
                break
        done.set()

    thread = threading.Thread(target=copy, name="kvferry-test")
    thread.start()
    while not done.wait(0.0001):
        turns += 1
    thread.join()
    assert most > 3


def test_an_older_library_has_no_copy(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    if kernel == "numpy":
        pytest.skip("the function under test is replaced")
    monkeypatch.setattr(streaming_copy, "native", lambda: Native(ctypes.CDLL(None)))
    assert streaming_copy._kernel.__wrapped__() is None
    monkeypatch.setattr(streaming_copy, "native", lambda: load("off"))
    assert streaming_copy._kernel.__wrapped__() is None


def test_a_library_that_cannot_be_used_is_refused() -> None:
    assert load("off").library is None
    assert "KVFERRY_NATIVE=off" in load("off").reason
    with pytest.raises(ConfigError, match=r"/nowhere\.so cannot be used"):
        load("/nowhere.so")
