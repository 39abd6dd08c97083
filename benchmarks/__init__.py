"""Measurements of ms_accum compared with its peers: `python -m benchmarks --help` lists them."""
