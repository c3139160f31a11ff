"""``kvferry prefill``, ``kvferry decode``, ``kvferry gateway``: the processes of the reference engine."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from kvferry.cli.options import ConfigFile, Flags, Sets, load_and_log

__all__ = ["decode", "gateway", "prefill"]

# ruff: noqa: UP045  typer evaluates the annotations, also on Python 3.10

Model = Annotated[
    Optional[str],
    typer.Option("--model", metavar="DIR|smollm2|tiny", help="Folder of the checkpoint. [model.path]"),
]
ModelName = Annotated[
    Optional[str],
    typer.Option("--model-name", metavar="NAME", help="Its name; the folder's if not given. [model.name]"),
]
MaxModelLen = Annotated[
    Optional[int],
    typer.Option("--max-model-len", help="Longest prompt and answer, in tokens. [model.max_model_len]"),
]
Threads = Annotated[Optional[int], typer.Option("--threads", help="Threads of the model. [model.threads]")]


def prefill(
    *,
    model: Model = None,
    name: ModelName = None,
    listen: Annotated[
        Optional[str],
        typer.Option("--listen", metavar="URL", help="Where it takes requests. [prefill.listen]"),
    ] = None,
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Run a prefill worker: it computes the KV of prompts and streams it to decode workers.

    Prints one line `ready role=prefill listen=URL …` when it takes requests. SIGTERM ends it in good
    order, a second one at once.
    """
    flags = {**_model_flags(model, name, max_model_len, threads), "prefill.listen": ("--listen", listen)}
    loaded = load_and_log(config, sets, flags)
    from kvferry.engine.workers.main import run_prefill

    run_prefill(loaded)


def decode(
    *,
    model: Model = None,
    name: ModelName = None,
    listen: Annotated[
        Optional[str],
        typer.Option("--listen", metavar="URL", help="Where it takes requests. [decode.listen]"),
    ] = None,
    kv_listen: Annotated[
        Optional[str],
        typer.Option("--kv-listen", metavar="URL", help="Where it takes KV. [decode.kv_listen]"),
    ] = None,
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Run a decode worker: it takes KV from prefill workers and generates from it.

    Prints one line `ready role=decode listen=URL kv=URL …` when it takes requests. SIGTERM ends it in
    good order, a second one at once.
    """
    flags = {
        **_model_flags(model, name, max_model_len, threads),
        "decode.listen": ("--listen", listen),
        "decode.kv_listen": ("--kv-listen", kv_listen),
    }
    loaded = load_and_log(config, sets, flags)
    from kvferry.engine.workers.main import run_decode

    run_decode(loaded)


def gateway(
    *,
    listen: Annotated[
        Optional[str],
        typer.Option("--listen", metavar="URL", help="Where it takes requests. [gateway.listen]"),
    ] = None,
    prefill_workers: Annotated[
        Optional[list[str]],
        typer.Option("--prefill", metavar="URL", help="A prefill worker; may be repeated. [gateway.prefill]"),
    ] = None,
    decode_workers: Annotated[
        Optional[list[str]],
        typer.Option("--decode", metavar="URL", help="A decode worker; may be repeated. [gateway.decode]"),
    ] = None,
    model: Annotated[
        Optional[str],
        typer.Option(
            "--model",
            metavar="DIR|smollm2|tiny",
            help="Folder of the same model, for its tokenizer; without, only token ids go.",
        ),
    ] = None,
    config: ConfigFile = None,
    sets: Sets = None,
) -> None:
    """Run the gateway: the OpenAI API (`/v1/completions`) over prefill and decode workers.

    Prints one line `ready role=gateway listen=URL …` when it takes requests; `/ready` is 200 once a
    matching pair of workers is up.
    """
    flags = {
        "gateway.listen": ("--listen", listen),
        "gateway.prefill": ("--prefill", prefill_workers or None),
        "gateway.decode": ("--decode", decode_workers or None),
        "model.path": ("--model", model),
    }
    loaded = load_and_log(config, sets, flags)
    from kvferry.engine.gateway.server import serve
    from kvferry.engine.process import StopSignal

    serve(loaded, StopSignal())


def _model_flags(
    model: str | None, name: str | None, max_model_len: int | None, threads: int | None
) -> Flags:
    return {
        "model.path": ("--model", model),
        "model.name": ("--model-name", name),
        "model.max_model_len": ("--max-model-len", max_model_len),
        "model.threads": ("--threads", threads),
    }
