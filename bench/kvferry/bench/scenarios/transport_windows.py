"""``transport.mooncake.write`` and ``.read``: a window of another process, beside Mooncake's bare engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from kvferry.bench.link.ends import LinkEnds
from kvferry.bench.link.mooncake import MooncakeTe
from kvferry.bench.link.windows import MooncakeWindows
from kvferry.bench.pairing import Progress, run_paired
from kvferry.bench.results import Param, Result, Sample, summarise
from kvferry.bench.scenarios.transport import TransportOptions
from kvferry.bench.scenarios.transport_link import link_params

__all__ = ["run_windows"]


def run_windows(
    scenario: str,
    options: TransportOptions,
    peers: LinkEnds,  # noqa: ARG001 - both ends are its own
    progress: Progress,
) -> Iterator[Result]:
    """Batches that are written or read; the windows stay open, so what is measured is the transfer."""
    operation = scenario.rpartition(".")[2]
    for nbytes in options.sizes:
        walk = max(options.walk_nbytes, nbytes)
        with contextlib.ExitStack() as stack:
            windows = MooncakeWindows(nbytes, walk)
            stack.callback(windows.close)
            bare = MooncakeTe(nbytes, walk)
            stack.callback(bare.close)
            for batch in options.batches:
                count = max(1, options.run_nbytes // (nbytes * batch))
                subjects: dict[str, Callable[[], Sample]] = {
                    "subject": partial(windows.run, operation, batch, count),
                    "mooncake_te": partial(bare.put if operation == "write" else bare.get, batch, count),
                }
                label = f"{scenario} nbytes={nbytes} batch={batch}"
                samples = run_paired(
                    subjects, runs=options.runs, warmup=options.warmup, progress=progress, label=label
                )
                params: dict[str, Param] = {
                    **link_params("mooncake", nbytes, batch, 1, "off", options),
                    "mooncake_te_failed": bare.failed,
                }
                values = {name: [s.gb_per_s for s in found] for name, found in samples.items()}
                yield summarise(
                    scenario, params, "GB/s", values, samples=samples["subject"], verified=windows.verify()
                )
