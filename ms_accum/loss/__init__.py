"""The loss of a micro-batch, what it counts for, and its gradients.

Read `objective` first. `known_losses` has the facts about MindSpore's losses and joins a loss to its network,
`columns` and `additivity` check micro-batches. Imports `network`, `ranks` and `layers`.
"""
