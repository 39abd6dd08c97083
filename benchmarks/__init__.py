"""Measurements of ms_accum beside its peers: `python -m benchmarks --help` lists them."""
