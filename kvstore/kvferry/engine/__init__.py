"""The prefill/decode reference engine: correct and readable first."""
