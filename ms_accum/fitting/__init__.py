"""What fits into memory, and what is fast?

Provides: the memory report, the search for the largest micro-batch, the scaling of learning rates, advice when memory
runs out, settings of MindSpore's CPU runtime. Imports `network` and `ranks`.
"""
