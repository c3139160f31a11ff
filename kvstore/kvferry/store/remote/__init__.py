"""Tiers over remote stores of values; see :mod:`kvferry.store.remote.tier` for what is the same for all."""
