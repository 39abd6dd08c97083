"""Does accumulating equal the large batch? Measured for many libraries: `python -m benchmarks conformance`."""
