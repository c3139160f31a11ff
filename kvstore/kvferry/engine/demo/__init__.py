"""The demonstration: one conversation on a real model, split in processes and in one, compared.

Nothing is imported here; ``kvferry.cli.demo`` and the child processes load what they use.
"""
