"""``kvferry inspect``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kvferry.cli.options import Json
from kvferry.core.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.store.disk.inspection import (
        Finding,
        Inspection,
        KeySummary,
        NamespaceSummary,
        Verification,
    )

__all__ = ["inspect"]

Text = Optional[str]  # noqa: UP045  typer evaluates it
Pair = Optional[tuple[str, str]]  # noqa: UP045
EXIT_CORRUPT = 1
_HEADER = (
    "tenant", "model", "group", "rank", "adapter", "namespace", "blocks", "size",
    "a block", "codec", "ratio", "oldest", "newest",
)  # fmt: skip


def inspect(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory of a disk tier.")],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every block and compare its checksum and identity.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Verify, put corrupt blocks into quarantine, remove left-overs."),
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="List every block with its key, the last used first.")
    ] = False,
    export: Annotated[
        Pair,
        typer.Option(
            "--export",
            metavar="KEY FILE",
            help="Copy a block, decoded, to the safetensors file FILE; its key, or the start of it.",
        ),
    ] = None,
    tenant: Annotated[Text, typer.Option(help="Whose block to export, if several have one.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a directory of a disk tier holds, by model; verify it, mend it, or take one block out.

    Looking, --verify and --export disturb no store that uses the directory; --repair needs it for itself.
    The exit code is 1 if corrupt blocks were found.
    """
    from kvferry.cli.output import print_json
    from kvferry.store.disk import inspection

    asked = {"--verify": verify, "--repair": repair, "--keys": keys}
    _check_together([name for name, given in asked.items() if given], export, tenant)
    if export is not None:
        _export(directory, *export, tenant, as_json=as_json)
        return
    checked: Verification | None = None
    if repair or verify:
        checked = _with_progress(directory, inspection.repair if repair else inspection.verify)
    found = inspection.inspect(directory)
    if as_json:
        more: dict[str, object] = {"verification": _checked_as_json(checked)} if checked else {}
        if keys:
            more["keys"] = [_key_as_json(block) for block in inspection.list_keys(directory)]
        print_json({**_as_json(found), **more})
    else:
        _print(found, checked)
        if keys:
            _print_keys(inspection.list_keys(directory))
    if checked is not None and checked.corrupt:
        raise typer.Exit(EXIT_CORRUPT)


def _check_together(besides: list[str], export: Pair, tenant: str | None) -> None:
    if export is not None and besides:
        raise ConfigError(
            f"--export takes one block out and does nothing else; leave out {', '.join(besides)}"
        )
    if tenant is not None and export is None:
        raise ConfigError("--tenant names whose block --export takes; without --export leave it out")


def _export(directory: str, key: str, target: str, tenant: str | None, *, as_json: bool) -> None:
    from kvferry.cli.output import print_json, say
    from kvferry.store.disk.inspection import export_block

    header = export_block(directory, key, target, tenant=tenant)
    how = header.encoding
    if as_json:
        decoded = {} if how is None else {"codec": how.codec, "lossy": how.lossy, "bound": how.bound}
        print_json({"exported": key, "file": target, "spec": header.spec.describe(), **decoded})
    else:
        said = "" if how is None else f", decoded from {how.codec} ({'lossy' if how.lossy else 'lossless'})"
        say(f"{target}: {header.spec.describe()}{said}")


def _with_progress(
    directory: str, work: Callable[[str, Callable[[int, int], None]], Verification]
) -> Verification:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=None)
        return work(directory, lambda done, total: bar.update(task, completed=done, total=total))


def _as_json(found: Inspection) -> dict[str, object]:
    return {
        "directory": found.directory,
        "used_by": found.used_by,
        "nbytes": found.nbytes,
        "blocks": sum(n.blocks for n in found.namespaces),
        "namespaces": [_namespace_as_json(n) for n in found.namespaces],
        "quarantined": [{"name": name, "nbytes": nbytes} for name, nbytes in found.quarantined],
        "temporaries": found.temporaries,
        "foreign": {"count": found.foreign_count, "names": list(found.foreign)},
        "errors": list(found.errors),
    }


def _namespace_as_json(summary: NamespaceSummary) -> dict[str, object]:
    from kvferry.store.disk.header import spec_to_json

    header = summary.header
    return {
        "tenant": summary.tenant,
        "namespace": summary.namespace_id.hex(),
        "model": None if header is None else header.spec.model,
        "adapter": None if header is None else header.adapter,
        "blocks": summary.blocks,
        "nbytes": summary.nbytes,
        "ratio": round(summary.ratio, 3),
        "codecs": dict(summary.codecs),
        "lossy": summary.lossy,
        "oldest_s": round(summary.oldest_s, 3),
        "newest_s": round(summary.newest_s, 3),
        "spec": None if header is None else spec_to_json(header.spec),
    }


def _key_as_json(block: KeySummary) -> dict[str, object]:
    return {
        "key": block.key.hex(),
        "tenant": block.tenant,
        "namespace": block.namespace_id.hex(),
        "nbytes": block.nbytes,
        "used_s": round(block.used_s, 3),
    }


def _print_keys(blocks: list[KeySummary]) -> None:
    from kvferry.cli.output import print_table
    from kvferry.core.units import format_nbytes

    rows = [
        (b.key.hex(), b.tenant, b.namespace_id.hex()[:12], format_nbytes(b.nbytes), _age(b.used_s))
        for b in blocks
    ]
    print_table(("key", "tenant", "namespace", "size", "used"), rows)


def _checked_as_json(checked: Verification) -> dict[str, object]:
    def listed(findings: list[Finding]) -> list[dict[str, str]]:
        return [
            {"tenant": f.tenant, "namespace": f.namespace_id.hex(), "key": f.key.hex(), "reason": f.reason}
            for f in findings
        ]

    return {
        "blocks": checked.blocks,
        "nbytes": checked.nbytes,
        "corrupt": listed(checked.corrupt),
        "unreadable": listed(checked.unreadable),
        "put_away": checked.put_away,
        "codecs": dict(checked.codecs),
        "lossy": checked.lossy,
    }


def _print(found: Inspection, checked: Verification | None) -> None:
    from kvferry.cli.output import print_table, say
    from kvferry.core.units import format_nbytes

    blocks = sum(n.blocks for n in found.namespaces)
    used = "" if found.used_by is None else f", used by process {found.used_by}"
    say(f"{found.directory}: {blocks} blocks, {format_nbytes(found.nbytes)} on disk{used}")
    if found.namespaces:
        print_table(_HEADER, [_row(summary) for summary in found.namespaces])
    if found.quarantined:
        nbytes = format_nbytes(sum(n for _, n in found.quarantined))
        say(f"in quarantine: {len(found.quarantined)} files, {nbytes}")
    if found.temporaries:
        say(f"temporary files: {found.temporaries} (being written, or left by a crash)")
    if found.foreign_count:
        say(f"not the tier's: {found.foreign_count}, as {', '.join(found.foreign[:3])}")
    for error in found.errors:
        say(f"not read: {error}")
    if checked is not None:
        _print_checked(checked)


def _print_checked(checked: Verification) -> None:
    from kvferry.cli.output import say
    from kvferry.core.units import format_nbytes

    sound = checked.blocks - len(checked.corrupt) - len(checked.unreadable)
    say(f"verified: {sound} of {checked.blocks} blocks are sound, {format_nbytes(checked.nbytes)} read")
    if checked.codecs:
        codecs = ", ".join(f"{name}: {count}" for name, count in checked.codecs.most_common())
        say(f"codecs: {codecs}; {checked.lossy} blocks are lossy")
    for word, findings in (("corrupt", checked.corrupt), ("unreadable", checked.unreadable)):
        for finding in findings[:20]:
            say(f"{word}: {finding.key.hex()} of tenant {finding.tenant}: {finding.reason}")
        if len(findings) > 20:
            say(f"{word}: and {len(findings) - 20} more; --json lists all")
    if checked.put_away:
        say(f"put into quarantine: {checked.put_away}")


def _row(summary: NamespaceSummary) -> tuple[object, ...]:
    from kvferry.core.units import format_nbytes

    header = summary.header
    known = ("?", "?", "?", "", "?")
    if header is not None:
        spec = header.spec
        revision = f"@{spec.revision[:12]}" if spec.revision else ""
        rank = f"tp {spec.tp_rank}/{spec.tp_size} pp {spec.pp_rank}/{spec.pp_size}"
        block = f"{spec.block_tokens} tokens, {format_nbytes(spec.block_nbytes)}"
        known = (spec.model + revision, spec.group, rank, header.adapter or "", block)
    size, ages = format_nbytes(summary.nbytes), (_age(summary.oldest_s), _age(summary.newest_s))
    name = summary.namespace_id.hex()[:12]
    ratio = f"{summary.ratio:.2f}" if summary.ratio else "?"
    return (summary.tenant, *known[:4], name, summary.blocks, size, known[4], _codecs(summary), ratio, *ages)


def _codecs(summary: NamespaceSummary) -> str:
    """As seen in some headers: the most frequent first."""
    names = sorted(summary.codecs, key=lambda name: -summary.codecs[name])
    return f"{', '.join(names) or '?'}{' (lossy)' if summary.lossy else ''}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
