"""The benchmarks, one module a group; found through :mod:`kvferry.bench.registry`."""
