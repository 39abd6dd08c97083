"""What keeps the numbers right beyond the plain mean of gradients?

Provides: collaborators that are given to the driver, the Cells, `AccumulatedTrainStep` and `Accumulator`; who does not
give one gets a graph without it. Imports `network`, `ranks`, `layers` and `loss`.
"""
