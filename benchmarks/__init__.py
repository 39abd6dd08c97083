"""Measurements of ms_accum beside its peers: `python -m benchmarks speed|memory|data|start|accuracy|cost`."""
