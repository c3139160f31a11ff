"""Conformance suites and fakes, shipped so that third parties can use them."""
