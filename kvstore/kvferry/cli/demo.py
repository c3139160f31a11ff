"""``kvferry demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

__all__ = ["demo"]


def demo(
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="smollm2|tiny|DIR",
            help="SmolLM2-135M-Instruct (93 MB, fetched once), a tiny random one, or a folder.",
        ),
    ] = "smollm2",
    prompt_file: Annotated[
        Optional[Path],  # noqa: UP045  typer evaluates it
        typer.Option(metavar="FILE", help="A text to talk about instead of the Apache licence."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")] = 48,
    repeat: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Repeats, on cold caches; figures are medians.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; everything else goes to standard error.")
    ] = False,
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=1024, help="Threads of each process (default: half of the cores)."),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, max=65536, help="Tokens computed at once.")] = 512,
    block_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of one block.")] = 16,
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"], typer.Option(help="What the model computes in.")
    ] = "float32",
    rate: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Limit of the link that carries KV, such as 100MB/s or 1Gbit."),
    ] = None,
    keep_logs: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Keep the logs of the processes in this folder."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Of the random draws (default: 0)."),
    ] = None,
) -> None:
    """Hold a conversation over a long text, split between a prefill and a decode process, and in one process.

    Starts everything it needs on this machine, shows where the time to the first token went, and checks that
    both say the same: the exit code is 1 if they do not.
    """
    from kvferry.engine.demo.display import Display
    from kvferry.engine.demo.run import DemoOptions, default_threads, run_demo

    display = Display(quiet_stdout=as_json)
    options = DemoOptions(
        model=model,
        prompt_file=prompt_file,
        max_tokens=max_tokens,
        repeat=repeat,
        threads=threads or default_threads(),
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        dtype=dtype,
        rate=rate,
        keep_logs=keep_logs,
        seed=0 if seed is None else seed,
        temperature=temperature,
    )
    result = run_demo(options, display)
    display.result(result)
    if as_json:
        from kvferry.cli.output import print_json

        print_json(result)
    if not result["identical"]:
        raise typer.Exit(1)
