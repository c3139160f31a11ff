"""The application forks while another thread makes the first call of a codec."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORKED = """
import importlib.abc, os, signal, sys, threading
from kvferry.codecs import CodecPipeline
from kvferry.core import registry
from kvferry.core.spec import DType, LayerSpec, TensorSpec

layer = LayerSpec((TensorSpec("k", (16, 1, 32), DType.BFLOAT16),))
inside, forking = threading.Event(), threading.Event()
os.register_at_fork(before=forking.set)  # before what was registered earlier

def held() -> None:
    inside.set()
    assert forking.wait(20)

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[1].split():
            held()

def slow_scan(found=registry.entry_points, **group):
    held()
    return found(**group)

def call() -> None:
    pipeline = CodecPipeline.parse("ebp")
    encoded = memoryview(bytearray(pipeline.max_encoded_nbytes(layer, 1)))
    pipeline.encode_into(memoryview(bytes(layer.nbytes)), layer, encoded)

if sys.argv[1] == "entry points":
    registry.entry_points = slow_scan
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=call)
thread.start()
assert inside.wait(20)
child = os.fork()
if not child:
    signal.alarm(20)
    forking.set()
    call()
    os._exit(0)
thread.join(20)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


IN_USE = """
import os, signal
from kvferry.codecs import CodecPipeline

pipeline = CodecPipeline.parse("raw")
pipeline.checks._lock.acquire()  # as another thread might
child = os.fork()
if not child:
    signal.alarm(20)
    os._exit(pipeline.counts["calls"])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_child_of_a_fork_goes_on_with_a_pipeline() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_USE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["entry points", "kvferry.codecs.native.kernels kvferry.codecs.fallback"])
def test_a_child_of_a_fork_amid_the_first_call_does_not_hang(where: str) -> None:
    command = [sys.executable, "-c", FORKED, where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
