"""Benchmarks that print the ceiling of the same run beside every figure."""

from kvferry.bench.pairing import run_paired
from kvferry.bench.registry import GROUPS, Options, run_group
from kvferry.bench.results import Result, Sample, summarise

__all__ = ["GROUPS", "Options", "Result", "Sample", "run_group", "run_paired", "summarise"]
