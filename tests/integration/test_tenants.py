"""Tenants of a daemon that is a process of its own: what one can find of another's, over TLS, and by time."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import trustme

from kvferry.client import Client, ClientNamespace, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.core.errors import AuthError, KVFerryError
from kvferry.core.keys import BlockKey
from kvferry.daemon.credentials import CredentialFile, Limits, Right, edited, new_credential
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec, wait_until
from kvferry.testing.processes import Command

SPEC = small_spec("tenants", pages=16)
PATTERN = os.urandom(64)

# Another tenant's process: attaches, uses what it may, and looks through every byte that it can map. What it
# looks for it knows only with every bit turned over, so that it does not find its own words.
SCANNER = """
import json, os, sys
from kvferry.client import Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.daemon.credentials import CredentialFile, Limits, Right, edited, new_credential
from kvferry.testing.blocks import save_blocks, small_spec

url, token, turned = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
over = bytes(range(255, -1, -1))
with Client(url, ClientOptions(token_file=token)) as client:
    ns = client.namespace(small_spec("tenants", pages=16))
    keys = ns.keys(range(64))
    found = ns.lookup(keys).prefix
    save_blocks(ns, keys)
    with ns.load(keys, deadline=deadline_in(20)) as lease:
        views = [lease.view(index) for index in range(len(lease))]
        regions = [line.split() for line in open("/proc/self/maps")]
        marks = shared = 0
        with open("/proc/self/mem", "rb", 0) as memory:
            for fields in regions:
                start, end = (int(part, 16) for part in fields[0].split("-"))
                if "r" not in fields[1] or fields[-1] in ("[vvar]", "[vvar_vclock]", "[vsyscall]"):
                    continue
                for at in range(start, end, 16 << 20):
                    try:
                        memory.seek(at)
                        data = memory.read(min((16 << 20) + 4096, end - at))
                    except OSError:
                        continue
                    marks += data.translate(over).count(turned)
                    shared += len(data) if "memfd" in fields[-1] or "(deleted)" in fields[-1] else 0
print(json.dumps({"prefix": found, "shared_nbytes": shared, "marks": marks}))
"""


# One process looks into another of its user. Root may look into all, so both run without its powers.
WITHOUT_POWERS = """
import ctypes, os, sys
PR_CAPBSET_DROP, libc = 24, ctypes.CDLL(None)
for capability in range(64):
    libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
LOOKER = """
import os, subprocess, sys
folder = sys.argv[1]
serve = [sys.executable, "-m", "kvferry.cli", "serve", "--disk", "none", "--http", "none"]
for mode, more in ("open", []), ("hidden", ["--credentials", folder + "/c.json"]):
    own = [*serve, "--set", "daemon.listen=none", "--socket", folder + "/" + mode + ".sock", *more]
    with subprocess.Popen(own, stdout=subprocess.PIPE) as daemon:
        assert b"ready" in daemon.stdout.readline()
        reached = []
        for name in ("mem", "maps", "fd/0", "environ"):
            try:
                os.close(os.open(f"/proc/{daemon.pid}/{name}", os.O_RDONLY | os.O_NONBLOCK))
                reached.append(name)
            except OSError:
                pass
        print(mode, *reached)
        daemon.terminate()
"""


class Site(NamedTuple):
    """A folder with the credentials of tenants ``a`` and ``b``, and what a daemon is told of it."""

    folder: Path
    words: tuple[str, ...]

    def serve(self, *more: str) -> Command:
        own = ["serve", "--socket", f"{self.folder}/d.sock", "--http", "none", "--capacity", "64MiB"]
        if "--listen" not in more:
            own += ["--set", "daemon.listen=none"]
        return Command(*own, *self.words, *more)

    def token(self, tenant: str) -> str:
        return f"{self.folder}/{tenant}.token"

    def client(self, tenant: str, url: str | None = None) -> Client:
        return Client(url or f"unix://{self.folder}/d.sock", ClientOptions(token_file=self.token(tenant)))


def add(folder: Path, tenant: str, name: str, *rights: Right) -> str:
    """A token in a file of that name; the id of its credential."""
    credential, token = new_credential(tenant, rights or ("read", "write"))
    with edited(folder / "c.json") as box:
        tenants = {**box[0].tenants, tenant: Limits()}
        box[0] = CredentialFile(tenants=tenants, credentials=(*box[0].credentials, credential))
    path = folder / f"{name}.token"
    path.write_text(token)
    path.chmod(0o600)
    return credential.id


def remove(folder: Path, credential_id: str) -> None:
    with edited(folder / "c.json") as box:
        left = tuple(one for one in box[0].credentials if one.id != credential_id)
        box[0] = CredentialFile(tenants=box[0].tenants, credentials=left)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    for tenant in ("a", "b"):
        add(folder, tenant, tenant)
    disk = ("--disk", f"{folder}/disk", "--disk-capacity", "64MiB")
    return Site(folder, ("--credentials", f"{folder}/c.json", *disk))


@pytest.fixture(scope="module")
def daemon(site: Site) -> Iterator[Command]:
    with site.serve() as command:
        ready = command.wait_ready()
        assert ready["tenants"] == "2"
        yield command
        assert command.terminate() == 0
        for tenant in ("a", "b"):
            assert Path(site.token(tenant)).read_text().strip()[18:] not in command.err + command.out


def scanned_by_both(site: Site) -> tuple[dict[str, int], dict[str, int]]:
    """What a process of A, who has saved a pattern, finds of it in all that it can map, and one of B."""
    with site.client("a") as client:
        ns = client.namespace(SPEC)
        keys = ns.keys(range(64))
        unit = PATTERN * (SPEC.block_nbytes // len(PATTERN) + 1)
        blocks = [(key, unit[: SPEC.block_nbytes]) for key in keys]
        assert ns.save(blocks, parent=None, deadline=deadline_in(20)) == len(keys)
        script = [sys.executable, "-c", SCANNER, f"unix://{site.folder}/d.sock"]

        def scan(tenant: str) -> dict[str, int]:
            turned = bytes(255 - value for value in PATTERN).hex()
            words = [*script, site.token(tenant), turned]
            done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120)
            found: dict[str, int] = json.loads(done.stdout)
            assert found["shared_nbytes"] >= SPEC.block_nbytes * len(keys)
            return found

        own, other = scan("a"), scan("b")
        assert own["prefix"] == len(keys)
        return own, other


def test_a_process_of_b_finds_nothing_of_a_in_what_it_can_map(site: Site, daemon: Command) -> None:
    own, other = scanned_by_both(site)
    assert own["marks"] > 0, "the scan finds what there is"
    assert other["prefix"] == 0
    assert other["marks"] == 0
    assert daemon.process.poll() is None


def test_nor_in_copy_mode(tmp_path: Path) -> None:
    """Clients map the memory for reading, and give the daemon memory of theirs to copy from."""
    for tenant in ("a", "b"):
        add(tmp_path, tenant, tenant)
    own = Site(tmp_path, ("--credentials", f"{tmp_path}/c.json", "--disk", "none"))
    with own.serve("--set", "daemon.arena=copy") as command:
        command.wait_ready()
        mine, other = scanned_by_both(own)
    assert mine["marks"] > 0
    assert (other["prefix"], other["marks"]) == (0, 0)


def test_a_daemon_with_credentials_is_opaque_to_other_processes_of_its_user(site: Site) -> None:
    words = [sys.executable, "-c", WITHOUT_POWERS, LOOKER, str(site.folder)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["open mem maps fd/0 environ", "hidden"]


def test_a_wrong_token_and_none_are_refused_by_the_process(site: Site, daemon: Command) -> None:
    url = f"unix://{site.folder}/d.sock"
    for shown in (None, b"kvf1_000000000000_" + b"A" * 43):
        with pytest.raises(AuthError):
            Client(url, ClientOptions(credential=shown))
    assert daemon.process.poll() is None


def test_sighup_reads_tokens_again(site: Site, daemon: Command) -> None:
    made = add(site.folder, "b", "late", "read")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "credentials were read again" in daemon.err)
    with site.client("late") as client:
        assert client.stats().capacity_nbytes == 32 << 20
        remove(site.folder, made)
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "not valid" in client.away)


# ---- TLS ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pem")
    for name in ("ca", "other"):
        ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        ca.cert_pem.write_to_path(str(folder / f"{name}.pem"))
        for who in ("server", "client"):
            host = "127.0.0.1" if who == "server" else f"{who}@example.org"
            ca.issue_cert(host).private_key_and_cert_chain_pem.write_to_path(
                str(folder / f"{name}-{who}.pem")
            )
    return folder


def refusal(site: Site, url: str) -> str:
    """Why a client of tenant ``a`` does not get in."""
    try:
        with site.client("a", url) as client:
            return client.away
    except KVFerryError as error:
        return str(error)


def test_a_daemon_beyond_loopback_speaks_tls_and_wants_certificate_and_token(site: Site, pem: Path) -> None:
    listen = f"tls://0.0.0.0:0?cert={pem}/ca-server.pem&client_ca={pem}/ca.pem"
    own = Site(site.folder, site.words[:2])
    with own.serve("--listen", listen, "--socket", "none", "--disk", "none") as command:
        port = command.wait_ready()["listen"].split("?")[0].rpartition(":")[2]
        base = f"tls://127.0.0.1:{port}?ca={pem}"
        mine = f"&cert={pem}/ca-client.pem"
        with site.client("a", f"{base}/ca.pem{mine}") as client:
            ns = client.namespace(SPEC)
            keys = ns.keys(range(1000, 1016))
            save_blocks(ns, keys)
            with ns.load(keys, deadline=deadline_in(20)) as lease:
                assert bytes(lease.view(1)) == block_bytes(keys[1], SPEC.block_nbytes)
        with pytest.raises(AuthError, match="not valid"):
            Client(f"{base}/ca.pem{mine}", ClientOptions(credential=b"kvf1_000000000000_" + b"A" * 43))
        assert "not trusted" in refusal(site, f"{base}/other.pem{mine}")
        assert "certificate" in refusal(site, f"{base}/ca.pem")
        assert "certificate" in refusal(site, f"{base}/ca.pem&cert={pem}/other-client.pem")
        assert command.terminate() == 0


# ---- time --------------------------------------------------------------------------------------------------


def auc(one: Sequence[float], other: Sequence[float]) -> float:
    """Share of pairs in which one of ``one`` is larger; 0.5 if nobody can tell them apart."""
    ranked = sorted([(value, 0) for value in other] + [(value, 1) for value in one])
    total, at = 0.0, 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        total += sum(kind for _, kind in ranked[at:end]) * (at + end + 1) / 2
        at = end
    return (total - len(one) * (len(one) + 1) / 2) / (len(one) * len(other))


def probe(ns: ClientNamespace, keys: Sequence[BlockKey]) -> float:
    started = time.perf_counter()
    found = ns.lookup(keys)
    lease = ns.load(keys, deadline=deadline_in(20))
    took = time.perf_counter() - started
    assert found.prefix == 0
    assert not len(lease)
    lease.release()
    return took


def probes(site: Site, count: int) -> tuple[list[float], list[float]]:
    """Times of B for prompts that A has cached, and for those that nobody has; in random order."""
    blocks = 8
    with site.client("a") as owner, site.client("b") as prober:
        his, ns = owner.namespace(SPEC), prober.namespace(SPEC)
        prompts = [[number * 7 + 1] * blocks * SPEC.block_tokens for number in range(2 * count)]
        chains = [ns.keys(prompt) for prompt in prompts]
        cached = chains[:10]
        for chain in cached:
            save_blocks(his, chain)
        unseen = chains[10:]
        jobs = [(True, cached[number % 10]) for number in range(count)]
        jobs += [(False, unseen[number % 10]) for number in range(count)]
        random.Random(7).shuffle(jobs)
        for _, chain in jobs[:40]:
            probe(ns, chain)
        times: tuple[list[float], list[float]] = ([], [])
        before = prober.stats()
        gc.disable()
        try:
            for was_cached, chain in jobs:
                times[not was_cached].append(probe(ns, chain))
        finally:
            gc.enable()
        after = prober.stats()
        assert (after.lookups - before.lookups, after.hit_blocks) == (2 * count, before.hit_blocks)
        assert all(his.lookup(chain).prefix == blocks for chain in cached)
        return times


def growth(client: Client, run: Callable[[], object]) -> dict[str, object]:
    """What counters gained while it ran."""
    before = client.stats()
    run()
    after = client.stats()
    grown: dict[str, object] = {
        name: getattr(after, name) - getattr(before, name)
        for name in ("lookups", "lookup_blocks", "hit_blocks")
    }
    for tier, counts in after.per_tier.items():
        for name, value in counts.items():
            grown[f"{tier} {name}"] = value - before.per_tier.get(tier, {}).get(name, 0.0)
    return grown


def test_a_probe_of_what_another_has_cached_counts_as_one_of_nothing(site: Site, daemon: Command) -> None:
    """C134. Times are judged in soak alone: here every counter, of the disk tier too, has to grow alike."""
    with site.client("a") as owner, site.client("b") as prober:
        his, ns = owner.namespace(SPEC), prober.namespace(SPEC)
        cached, unseen = (ns.keys([number] * 8 * SPEC.block_tokens) for number in (701, 702))
        save_blocks(his, cached)
        for client in (owner, prober):  # what earlier tests saved too: its writes would be counted
            assert client.flush(deadline=deadline_in(20))
        of_cached = growth(prober, lambda: [probe(ns, cached) for _ in range(5)])
        assert of_cached == growth(prober, lambda: [probe(ns, unseen) for _ in range(5)])
        assert of_cached["lookups"] == 5
        assert his.lookup(cached).prefix == 8
    assert daemon.process.poll() is None


@pytest.mark.soak
def test_2000_probes_tell_nothing(site: Site, daemon: Command) -> None:
    """C134, and show 5 of the daemon: the area under the curve of the times is 0.45 to 0.55."""
    found = auc(*probes(site, 2000))
    print(f"AUC of 2,000 interleaved probes each: {found:.3f}")
    assert daemon.process.poll() is None
    assert 0.45 <= found <= 0.55


def test_the_area_is_what_it_should_be() -> None:
    assert auc([2, 3], [0, 1]) == 1
    assert auc([0, 1], [2, 3]) == 0
    assert auc([1, 1], [1, 1]) == 0.5
    assert auc([1, 3], [0, 2]) == 0.75


def test_in_copy_mode_the_kernel_refuses_writes(site: Site, tmp_path: Path) -> None:
    with Site(tmp_path, site.words[:2]).serve("--disk", "none", "--set", "daemon.arena=copy") as command:
        command.wait_ready()
        with Client(f"unix://{tmp_path}/d.sock", ClientOptions(token_file=site.token("a"))) as client:
            ns = client.namespace(SPEC)
            keys = ns.keys(range(64))
            save_blocks(ns, keys)
            with ns.load(keys, deadline=deadline_in(20)) as lease:
                address = np.frombuffer(lease.view(0), np.uint8).ctypes.data
                libc = ctypes.CDLL(None, use_errno=True)
                both = mmap.PROT_READ | mmap.PROT_WRITE
                assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), both) == -1
                assert ctypes.get_errno() == errno.EACCES
