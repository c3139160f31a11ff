"""A daemon with credentials over a pool of Mooncake: tenants store under names of their own."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.client import Client, ClientOptions
from kvferry.core.clock import deadline_in
from kvferry.daemon.credentials import CredentialFile, Limits, edited, new_credential
from kvferry.testing.blocks import block_bytes, save_blocks, small_spec
from kvferry.testing.mooncake_pool import MooncakePool
from kvferry.testing.processes import Command

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="mooncake is not installed"),
]
SPEC = small_spec("tenants-mooncake", pages=16)
CAPACITY = 4 << 20


def test_each_tenant_has_its_own_blocks_in_the_pool(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pool = stack.enter_context(MooncakePool())
        config, url = tmp_path / "kvferry.toml", f"unix://{tmp_path}/d.sock"
        config.write_text(
            f'[[store.tiers]]\nkind = "mooncake"\nmaster = "{pool.address}"\nwrite = "write_through"\n'
        )
        tokens = {}
        for tenant in ("a", "b"):
            credential, token = new_credential(tenant, ("read", "write"))
            with edited(tmp_path / "c.json") as box:
                tenants = {**box[0].tenants, tenant: Limits()}
                box[0] = CredentialFile(tenants=tenants, credentials=(*box[0].credentials, credential))
            tokens[tenant] = token.encode()
        words = ("--config", str(config), "--credentials", f"{tmp_path}/c.json", "--capacity", str(CAPACITY))
        daemon = stack.enter_context(
            Command(
                "serve",
                *words,
                "--socket",
                f"{tmp_path}/d.sock",
                "--set",
                "daemon.listen=none",
                "--http",
                "none",
            )
        )
        assert daemon.wait_ready()["tenants"] == "2"
        clients = {t: stack.enter_context(Client(url, ClientOptions(credential=tokens[t]))) for t in tokens}
        spaces = {t: client.namespace(SPEC) for t, client in clients.items()}
        own = {t: spaces[t].keys([ord(t)] * 4 * SPEC.block_tokens) for t in tokens}
        for t, ns in spaces.items():
            save_blocks(ns, own[t])
            for number in range(1 + CAPACITY // (8 * SPEC.block_nbytes)):  # both the same, and memory is full
                save_blocks(ns, ns.keys([number] * 4 * SPEC.block_tokens))
                assert clients[t].flush(deadline=deadline_in(20))
        for t, ns in spaces.items():
            other = own["b" if t == "a" else "a"]
            assert ns.lookup(own[t]).tiers == ("mooncake",) * 4
            assert ns.lookup(other).prefix == 0
            with ns.load(own[t], deadline=deadline_in(20)) as lease:
                for n, key in enumerate(own[t]):
                    assert lease.view(n) == block_bytes(key, SPEC.block_nbytes)
            assert clients[t].stats().per_tier["mooncake"]["present"] == 0, "it was taken for another's"
        assert daemon.terminate() == 0
        for secret in tokens.values():
            assert secret.decode()[18:] not in daemon.err
