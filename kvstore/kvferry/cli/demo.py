"""``kvferry demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Optional

import typer

from kvferry.cli.options import Sets
from kvferry.cli.output import print_json

__all__ = ["demo"]

_Model = Annotated[
    str,
    typer.Option(
        metavar="smollm2|tiny|DIR",
        help="SmolLM2-135M-Instruct (93 MB, fetched once), a tiny random one, or a folder.",
    ),
]
_PromptFile = Annotated[
    Optional[Path],  # noqa: UP045  typer evaluates it
    typer.Option(metavar="FILE", help="A text to talk about instead of the Apache licence."),
]
_MaxTokens = Annotated[int, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")]
_Repeat = Annotated[
    int, typer.Option(min=1, max=1000, metavar="N", help="Repeats, on cold caches; figures are medians.")
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; everything else goes to standard error.")
]
_Threads = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, max=1024, help="Threads of each process (default: half of the cores)."),
]
_ChunkTokens = Annotated[int, typer.Option(min=1, max=65536, help="Tokens computed at once.")]
_BlockTokens = Annotated[int, typer.Option(min=1, max=4096, help="Tokens of one block.")]
_DType = Annotated[
    Literal["float32", "float64", "bfloat16", "float16"], typer.Option(help="What the model computes in.")
]
_Rate = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Limit of the link that carries KV, such as 100MB/s or 1Gbit."),
]
_KeepLogs = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="Keep the logs of the processes in this folder."),
]
_Temperature = Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")]
_Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random draws.")]


def demo(
    *,
    model: _Model = "smollm2",
    prompt_file: _PromptFile = None,
    max_tokens: _MaxTokens = 48,
    repeat: _Repeat = 1,
    as_json: _Json = False,
    threads: _Threads = None,
    chunk_tokens: _ChunkTokens = 512,
    block_tokens: _BlockTokens = 16,
    dtype: _DType = "float32",
    rate: _Rate = None,
    keep_logs: _KeepLogs = None,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    sets: Sets = None,
) -> None:
    """Hold a conversation over a long text, split between a prefill and a decode process, and in one process.

    Starts everything it needs on this machine, shows where the time to the first token went, and checks that
    both say the same: the exit code is 1 if they do not. --set is for both workers, as stream.codec=ebp;
    behind a lossy codec the texts may differ.
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
        seed=seed,
        temperature=temperature,
        settings=tuple(sets or ()),
    )
    result = run_demo(options, display)
    display.result(result)
    if as_json:
        print_json(result)
    if not result["identical"] and not result.get("lossy"):
        raise typer.Exit(1)
