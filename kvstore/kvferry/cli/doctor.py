"""``kvferry doctor``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from kvferry.cli.options import ConfigFile, Json, Sets
from kvferry.cli.output import plain, print_json, print_table, say
from kvferry.core.errors import KVFerryError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvferry.core.config import Config
    from kvferry.core.diagnosis import Finding, Probe

__all__ = ["doctor"]

EXIT_LACKING = 1


def doctor(*, config: ConfigFile = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show what this machine can do and why not, each finding with its remedy.

    The exit code is 0 if everything works that the configuration asks for, else 1. Takes about two seconds,
    never more than half a minute, needs no root, and changes nothing.
    """
    from kvferry.core.config_sources import load_config
    from kvferry.core.diagnosis import collect

    loaded = load_config(config, assignments=sets or ()).config
    found = collect(_probes(loaded), asked=("addresses", "tiers", "codecs"))
    lacking = any(one.level == "fail" for one in found)
    if as_json:
        print_json({"ok": not lacking, "findings": [asdict(one) for one in found]})
    else:
        _print(found)
    if lacking:
        raise typer.Exit(EXIT_LACKING)


def _probes(config: Config) -> list[tuple[str, str, Probe]]:
    from kvferry.core.diagnosis_host import host_probes
    from kvferry.device.diagnosis import configured_device_probe, device_probes
    from kvferry.store.diagnosis import tier_probes
    from kvferry.streaming.diagnosis import codec_probe
    from kvferry.transports.diagnosis import address_probe, transport_probes

    store = config.store
    listens = [
        ("prefill.listen", config.prefill.listen),
        ("decode.listen", config.decode.listen),
        ("decode.kv_listen", config.decode.kv_listen),
        ("gateway.listen", config.gateway.listen),
        *(("daemon.listen", url) for url in config.daemon.listen or ()),
        ("daemon.http", config.daemon.http),
    ]
    dials = [("gateway.prefill", url) for url in config.gateway.prefill]
    dials += [("gateway.decode", url) for url in config.gateway.decode]
    host = host_probes(
        dram_nbytes=store.dram_capacity,
        hugepages=store.hugepages,
        numa_node=store.numa_node,
        other_nbytes=0 if config.kv.num_blocks else config.kv.memory,
    )
    return [
        *transport_probes(),
        *device_probes(),
        *host,
        *tier_probes(store.tiers),
        *(configured_device_probe(option, name) for option, name in _devices(config)),
        codec_probe(config.stream.codec, allow_lossy=config.stream.allow_lossy),
        *(_listen_probe(option, url, config) for option, url in listens if url is not None),
        *(address_probe(option, url, listens=False) for option, url in dials),
    ]


def _devices(config: Config) -> list[tuple[str, str]]:
    """The devices that are asked for, each with what asks for it."""
    found = [(f"store.tiers: {tier.name or tier.kind}.device", tier.options.get("device"))
             for tier in config.store.tiers if tier.kind == "device"]  # fmt: skip
    if config.model.device != "cpu":
        found.append(("model.device", config.model.device))
    return [(option, name) for option, name in found if isinstance(name, str)]


def _listen_probe(option: str, url: str, config: Config) -> tuple[str, str, Probe]:
    """A probe of an address to listen on, which the process that has it must accept too."""
    from kvferry.core.diagnosis import Finding
    from kvferry.core.process import require_loopback
    from kvferry.transports import require_scheme
    from kvferry.transports.diagnosis import address_probe

    area, name, probe = address_probe(option, url, listens=True)

    def look() -> Iterable[Finding]:
        try:
            if not url.startswith(("http://", "https://")):
                require_scheme(url, option)
            tokens = config.daemon.credentials != "none" if option == "daemon.listen" else None
            require_loopback(url, option, trusted_network=config.wire.trusted_network, credentials=tokens)
        except KVFerryError as error:
            remedy = f"do what it says, or change {option}"
            return [Finding(area, name, str(error), "fail", "the configuration asks for it", remedy)]
        return probe()

    return area, name, look


def _print(found: list[Finding]) -> None:
    areas = dict.fromkeys(one.area for one in found)
    for area in areas:
        say(f"{area}:")
        rows = [(one.name, one.level, one.value) for one in found if one.area == area]
        print_table(("what", "state", "found"), rows)
        say("")
    troubled = [one for one in found if one.level != "ok"]
    for one in sorted(troubled, key=lambda one: one.level != "fail"):
        say(f"{one.level} {one.area}, {one.name}: {one.why}")
        say(f"  remedy: {plain(one.remedy)}")
    fails = sum(one.level == "fail" for one in found)
    say(
        "Everything that the configuration asks for works here."
        if not fails
        else f"{fails} of what the configuration asks for does not work here."
    )
