"""Fails unless each package named has enough branch coverage: ``check_coverage.py PERCENT PACKAGE ...``.

``coverage report --fail-under`` mixes lines with branches, and a large package hides a small one. This counts
the branches of each package by itself, and lists the files that bring one under the bar. Reads the combined
``.coverage``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def measured() -> dict[str, tuple[int, int, list[int]]]:
    """File name to branches covered, branches, and lines that never ran."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        subprocess.run([sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(path)], check=True)
        files = json.loads(path.read_text())["files"]
    found: dict[str, tuple[int, int, list[int]]] = {
        name: (f["summary"]["covered_branches"], f["summary"]["num_branches"], f["missing_lines"])
        for name, f in files.items()
    }
    return found


def ranges(lines: list[int]) -> str:
    """``1-3, 7`` for 1, 2, 3, 7; at most a dozen of them."""
    found: list[list[int]] = []
    for line in lines:
        if found and line <= found[-1][1] + 1:
            found[-1][1] = line
        else:
            found.append([line, line])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in found[:12]]
    return ", ".join(texts) + (", ..." if len(found) > 12 else "") or "none"


def check(package: str, bar: float) -> bool:
    """Print the figure of one package; whether it reaches the bar."""
    folder = "/" + package.replace(".", "/") + "/"
    files = {name: found for name, found in measured().items() if folder in name}
    covered = sum(found[0] for found in files.values())
    branches = sum(found[1] for found in files.values())
    percent = 100.0 * covered / branches if branches else 0.0
    enough = percent >= bar
    verdict = "at least" if enough else "UNDER"
    print(f"coverage: {package}: {percent:.1f} % of {branches} branches ({verdict} {bar:g} %)")
    if not enough:
        for name, (part, whole, missing) in sorted(files.items()):
            if part < whole:
                print(f"  {name}: {part} of {whole} branches, lines that never ran: {ranges(missing)}")
    return enough


def main(bar: str, *packages: str) -> int:
    """0 if every package reaches the bar, else 1."""
    results = [check(package, float(bar)) for package in packages]  # all are printed
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
