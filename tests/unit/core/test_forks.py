from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, threading
from kvferry.core import forks

class Owner:
    lock = threading.Lock()

def outcome(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

owner = Owner()
forks.renewed_in_child(owner, "lock")
owner.lock.acquire()
child = os.fork()
if not child:
    os._exit(0 if owner.lock.acquire(timeout=0) else 1)
assert outcome(child) == 0
assert owner.lock.locked()

with forks.loading(), forks.loading():  # of this thread: nothing to wait for
    child = os.fork()
if not child:
    grandchild = os.fork()
    os._exit(outcome(grandchild) if grandchild else 0)
assert outcome(child) == 0

forks._WAIT_S = 0.05  # a load that does not end
inside, end = threading.Event(), threading.Event()

def load():
    with forks.loading():
        inside.set()
        end.wait(20)

thread = threading.Thread(target=load)
thread.start()
assert inside.wait(20)
child = os.fork()
if not child:
    forks._WAIT_S = 20
    with forks.loading():
        grandchild = os.fork()  # that thread is not here
    os._exit(outcome(grandchild) if grandchild else 0)
assert outcome(child) == 0
end.set()
thread.join(20)
"""


def test_locks_are_renewed_and_loads_waited_for_but_not_for_ever() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
