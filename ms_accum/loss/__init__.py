"""What is the loss of a micro-batch, and what does it count for?

Provides: the `Objective` of a run, with the weight and the loss of its micro-batches; a Cell for loss and gradients.
Imports `network` and `ranks`.
"""
