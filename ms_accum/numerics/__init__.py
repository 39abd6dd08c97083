"""What keeps the numbers right beyond the plain mean of gradients?

Provides: collaborators for the driver, the Cells, `AccumulatedTrainStep` and `Accumulator`, such as a loss scale; a
collaborator that is not given is not in the graph. Imports `network`, `ranks`, `layers` and `loss`.
"""
