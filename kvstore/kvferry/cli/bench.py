"""``kvferry bench``."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kvferry.cli.options import ConfigFile, Json, Sets, load_and_log

if TYPE_CHECKING:
    from rich.console import Console

    from kvferry.bench.registry import Options
    from kvferry.bench.results import Result

__all__ = ["app"]

_WIDTH = 120

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")

Runs = Annotated[int, typer.Option(min=1, help="Rounds that count; 9 or more for figures to quote.")]
Text = Optional[str]  # noqa: UP045  typer evaluates it
Number = Optional[int]  # noqa: UP045

Scenario = Annotated[
    Text, typer.Option(metavar="NAME", help="Only this one, as store.load.dram; see kvferry bench list.")
]
Walk = Annotated[
    Text,
    typer.Option(
        metavar="SIZE", help="Memory that both ends walk through; less is not cold. [default: 256MiB]"
    ),
]
Schemes = Annotated[Text, typer.Option(metavar="SCHEME,…", help="Transports. [default: all installed]")]
PartSizes = Annotated[
    Text, typer.Option(metavar="SIZE,…", help="Sizes of a part. [default: 64KiB,256KiB,1MiB,4MiB,16MiB]")
]
Batches = Annotated[
    Text, typer.Option(metavar="N,…", help="Parts of a message, acknowledged once. [default: 1,32]")
]
Lanes = Annotated[Text, typer.Option(metavar="N,…", help="Sockets of a tcp connection. [default: 1,2]")]
Checksums = Annotated[
    Text, typer.Option(metavar="off|xxh3,…", help="Checksums of payloads. [default: off,xxh3]")
]
Alternatives = Annotated[
    Text,
    typer.Option(
        "--with",
        metavar="mooncake|ucxx|redis|none,…",
        help="Others to measure beside. [default: those installed]",
    ),
]
EndPlaces = Annotated[
    Text,
    typer.Option(
        "--ends",
        metavar="apart|anywhere",
        help="Each end on a CPU of its own, or where the scheduler has them. [default: apart]",
    ),
]
Connect = Annotated[
    Text,
    typer.Option(
        metavar="HOST[:PORT]|URL",
        help="Measure against kvferry bench server on another machine; a host means tcp, port 8470.",
    ),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare every byte of every round at who received it, in its time.")
]
Rates = Annotated[Text, typer.Option(metavar="RATE;…", help="Links of adaptive. [default: 50MB/s;…;4GB/s]")]
KeptTokens = Annotated[
    Number,
    typer.Option(min=0, help="First tokens that lossy ones leave alone; 4: as on links. [default: 0]"),
]
Predicted = Annotated[
    Number,
    typer.Option(min=1, help="Tokens that are predicted; 64 are few for the likeliest token. [default: 64]"),
]
TierCodec = Annotated[
    Text,
    typer.Option(
        "--codec",
        metavar="TEXT",
        help="Codec of the disk tier, such as ebp; blocks then hold normal values. [default: off]",
    ),
]
DaemonUrl = Annotated[
    Text,
    typer.Option(
        metavar="unix:auto|tcp:auto|URL",
        help="Measure a cache daemon: auto starts one, else one that runs there.",
    ),
]


@app.callback()
def _bench() -> None:
    """Measure what a link, a tier or a deployment delivers, with the ceiling of the same run beside it."""


@app.command("list")
def list_benchmarks() -> None:
    """List the benchmarks."""
    from kvferry.bench.registry import GROUPS
    from kvferry.cli.output import print_table

    rows = [(group.name, ", ".join(group.scenarios), group.summary) for group in GROUPS.values()]
    print_table(("group", "scenarios", "what"), rows)


@app.command("stream")
def stream(
    *,
    model: Annotated[
        Text,
        typer.Option(
            metavar="tiny|smollm2|DIR",
            help="Measure the overlap of a real prefill with a link as slow as its compute.",
        ),
    ] = None,
    tokens: Annotated[Number, typer.Option(min=16, help="Tokens of the prompt. [default: 1536]")] = None,
    layers: Annotated[Number, typer.Option(min=1, help="Layers, without a model. [default: 30]")] = None,
    threads: Annotated[Number, typer.Option(min=1, help="Threads of the model. [default: 1]")] = None,
    transport: Annotated[
        Text, typer.Option(metavar="tcp|unix", help="Over what, without a model. [default: tcp]")
    ] = None,
    runs: Runs = 9,
    as_json: Json = False,
) -> None:
    """KV streamed layer by layer to another process: throughput, or with --model the overlap.

    Without a model: GB/s against a bare socket and a cold memcpy; over unix it is written straight into the
    memory of the other process. With one: the seconds until the receiver
    holds all KV of a prompt, over a link whose rate makes the transfer as long as the compute, against the
    longer of both, and against sending only after the last layer.
    """
    from kvferry.bench.registry import Options

    params = {
        "model": model, "tokens": tokens, "layers": layers, "threads": threads, "transport": transport,
    }  # fmt: skip
    _run("stream", Options(runs=runs, params=params), as_json=as_json)


@app.command("store")
def store(
    *,
    scenario: Scenario = None,
    sizes: Annotated[
        Text,
        typer.Option(
            metavar="SIZE,…", help="Sizes of a block. [default: 64KiB,256KiB,1MiB,4MiB,16MiB,32MiB]"
        ),
    ] = None,
    directory: Annotated[
        Text,
        typer.Option(
            "--dir",
            metavar="DIR",
            help="Disk to measure: a folder is made in DIR, and removed. [default: beside the cache folder]",
        ),
    ] = None,
    entries: Annotated[
        Number,
        typer.Option(min=512, help="Blocks of store.lookup and store.restart. [default: 1000000 and 100000]"),
    ] = None,
    sync: Annotated[
        Text, typer.Option(metavar="none|data|full", help="What the disk tier syncs. [default: none]")
    ] = None,
    direct: Annotated[
        Text, typer.Option(metavar="auto|on|off", help="O_DIRECT of the disk tier. [default: auto]")
    ] = None,
    tier_codec: TierCodec = None,
    url: DaemonUrl = None,
    checksum: Annotated[
        Text, typer.Option(metavar="xxh3|off", help="Of frames to and from a daemon. [default: xxh3]")
    ] = None,
    walk: Walk = None,
    runs: Runs = 9,
    as_json: Json = False,
) -> None:
    """Blocks saved, found, loaded and evicted in memory, written and read on disk, found after a restart.

    Copies stand beside a cold memcpy, files beside the same files without the store. Memory of an entry is
    measured in a process of its own. With --url, saves and loads through a daemon, over shared memory or a
    connection, beside a cold memcpy and the transport alone. At full scale store.lookup takes 5 GiB,
    store.restart 1 GiB of disk.
    """
    from kvferry.bench.registry import Options

    params = {
        "scenario": scenario, "sizes": sizes, "dir": directory, "entries": entries,
        "sync": sync, "direct": direct, "codec": tier_codec, "walk": walk, "url": url, "checksum": checksum,
    }  # fmt: skip
    _run("store", Options(runs=runs, params=params), as_json=as_json)


@app.command("transport")
def transport(
    *,
    scenario: Scenario = None,
    scheme: Schemes = None,
    sizes: PartSizes = None,
    batch: Batches = None,
    lanes: Lanes = None,
    checksum: Checksums = None,
    alternatives: Alternatives = None,
    ends: EndPlaces = None,
    verify: Verify = False,
    connect: Connect = None,
    rate: Annotated[
        Text, typer.Option(metavar="RATE", help="Limit of transport.tcp.rate. [default: 100MB/s]")
    ] = None,
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0.1, help="How long each of its runs takes. [default: 5]"),
    ] = None,
    requests: Annotated[Number, typer.Option(min=1, help="Requests of a round. [default: 500]")] = None,
    block: Annotated[
        Text, typer.Option(metavar="SIZE", help="Block of transport.unix.arena. [default: 256MiB]")
    ] = None,
    walk: Walk = None,
    runs: Runs = 9,
    as_json: Json = False,
) -> None:
    """Messages between two processes over each transport: throughput both ways, round trips, and limits.

    Each figure is end to end, with an acknowledgement, and stands beside a bare socket of the same kind in
    the same rounds, and beside Mooncake's TransferEngine, bare UCXX and Redis where they are installed. The
    other end is a process of this machine, or kvferry bench server on another one.
    """
    from kvferry.bench.registry import Options

    params = {
        "scenario": scenario, "scheme": scheme, "sizes": sizes, "batch": batch, "lanes": lanes,
        "checksum": checksum, "with": alternatives, "ends": ends, "connect": connect, "rate": rate,
        "seconds": seconds, "requests": requests, "block": block, "walk": walk, "verify": verify,
    }  # fmt: skip
    _run("transport", Options(runs=runs, params=params), as_json=as_json)


@app.command("server")
def server(
    *,
    listen: Annotated[
        str, typer.Option(metavar="URL", help="Where, and what is measured: tcp, tls, unix or ucx.")
    ] = "tcp://127.0.0.1:8470",
    walk: Walk = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """The other end of bench transport --connect, until it is stopped; with a bare TCP socket beside it.

    Beyond loopback it needs --set wire.trusted_network=true, since whoever reaches it can use it.
    """
    from kvferry.bench.link.serve import serve_link

    serve_link(listen, walk, load_and_log(config, sets))


@app.command("device")
def device(
    *,
    kind: Annotated[
        str,
        typer.Option("--device", metavar="cpu|sim|cuda|musa", help="With a number, as musa:1, or without."),
    ] = "cpu",
    scenario: Scenario = None,
    sizes: Annotated[
        Text, typer.Option(metavar="SIZE,…", help="Sizes of one copy. [default: 1MiB,16MiB]")
    ] = None,
    layers: Annotated[Number, typer.Option(min=1, help="Layers of device.save_layers. [default: 32]")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Run the suites on the device too, and say whether it is as it should be: 5 minutes.",
        ),
    ] = False,
    walk: Walk = None,
    runs: Runs = 9,
    as_json: Json = False,
) -> None:
    """Copies from and to a device, its pages gathered and scattered, layers saved behind compute.

    Copies stand beside bare copies of pinned memory and a cold memcpy; pages of 16 tokens (64 KiB a layer)
    beside a cold memcpy; saves beside compute and copies alone, with what of the shorter was hidden. cpu is
    the host's memory, sim a simulated device that sleeps. Takes about a GiB of both memories.
    """
    from kvferry.bench.registry import Options

    params = {"device": kind, "scenario": scenario, "sizes": sizes, "layers": layers, "walk": walk}
    options = Options(runs=runs, params=params)
    if check:
        _check_device(options, as_json=as_json)
    else:
        _run("device", options, as_json=as_json)


@app.command("codec")
def codec(
    *,
    model: Annotated[str, typer.Option(metavar="tiny|smollm2|DIR", help="Whose KV to encode.")] = "smollm2",
    text: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="FILE", help="A text of yours; repeat it. [default: texts of every machine]"),
    ] = None,
    texts: Annotated[
        Number, typer.Option(min=1, max=6, help="How many of those, without --text. [default: 3]")
    ] = None,
    codecs: Annotated[
        Text, typer.Option(metavar="TEXT;…", help="Pipelines. [default: ebp;ebp(bits=4);split;int8;int4;fp8]")
    ] = None,
    tokens: Annotated[Number, typer.Option(min=1, help="Tokens of each text. [default: 2048]")] = None,
    slice_tokens: Annotated[
        Number, typer.Option(min=1, help="Tokens of a layer slice. [default: 256]")
    ] = None,
    threads: Annotated[Number, typer.Option(min=1, help="Threads that encode. [default: 1]")] = None,
    kernels: Annotated[
        Text, typer.Option(metavar="native|numpy", help="[default: native where it was built]")
    ] = None,
    only: Annotated[
        Text,
        typer.Option(
            metavar="speed|quality|adaptive",
            help="Only one of both, or what a link of some rate chooses by itself beside each fixed codec.",
        ),
    ] = None,
    rates: Rates = None,
    layers: Annotated[Number, typer.Option(min=1, help="Layers of adaptive. [default: 64]")] = None,
    kept_tokens: KeptTokens = None,
    predicted: Predicted = None,
    walk: Walk = None,
    runs: Runs = 9,
    as_json: Json = False,
) -> None:
    """Codecs on the KV of your model and texts: how much smaller, how fast, and what the answers lose.

    Speeds are bytes before encoding a second, beside a cold memcpy of the same run. Quality: the KV of a text
    is encoded and decoded, then its next tokens are predicted with it and with the KV as it was: KL
    divergence, agreement of the likeliest token, perplexity; and the error of K and V themselves. A pipeline
    is written as 'int8(k=channel)' or 'shuffle|zstd(level=3)'.
    """
    from kvferry.bench.registry import Options

    params = {
        "model": model, "text": "\0".join(text) if text else None, "texts": texts, "codecs": codecs,
        "tokens": tokens, "slice_tokens": slice_tokens, "threads": threads, "kernels": kernels, "only": only,
        "walk": walk, "rates": rates, "layers": layers, "kept_tokens": kept_tokens,
        "predicted": predicted,
    }  # fmt: skip
    _run("codec", Options(runs=runs, params=params), as_json=as_json)


def _check_device(options: Options, *, as_json: bool) -> None:
    """Exit with 1 if something is not as it should be."""
    from kvferry.bench.device_check import Verdict, check
    from kvferry.bench.report import print_report
    from kvferry.bench.results import Result
    from kvferry.cli.output import print_table
    from kvferry.cli.progress import progress_lines

    found: list[Result | Verdict] = []
    with progress_lines("kvferry bench device --check: starting") as progress:
        for one in check(options, progress):
            found.append(one)
            if as_json:
                typer.echo(one.to_json())
    verdicts = [one for one in found if isinstance(one, Verdict)]
    if not as_json:
        print_report([one for one in found if isinstance(one, Result)], _console())
        words = {True: "yes", False: "NO", None: "-"}
        rows = [
            (one.check, f"{one.value:.3g}", f"{one.bar:g}", words[one.ok], one.detail) for one in verdicts
        ]
        print_table(("check", "value", "bar", "as it should be", "what"), rows)
    if any(one.ok is False for one in verdicts):
        raise typer.Exit(1)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)  # nobody's terminal: nothing is cut


def _run(group: str, options: Options, *, as_json: bool) -> None:
    """Run a group with progress on standard error; results go to standard output."""
    from kvferry.bench.registry import GROUPS, run_group
    from kvferry.bench.report import print_report
    from kvferry.cli.progress import progress_lines

    # SIGTERM ends it as an exit, so that child processes and folders go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: list[Result] = []
    with progress_lines(f"kvferry bench {group}: starting, {options.runs} runs of each") as progress:
        for result in run_group(group, options, progress):
            results.append(result)
            if as_json:
                typer.echo(result.to_json())
    if not as_json:
        print_report(results, _console(), GROUPS[group].comparison)
