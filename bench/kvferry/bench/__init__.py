"""Benchmarks that print the ceiling of the same run beside every figure."""
