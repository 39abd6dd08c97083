"""The loss of a micro-batch, what it counts for, and its gradients.

Read `objective` first. `known_losses` has the facts about MindSpore's losses and joins a loss to its network,
`first_micro_batch` and `additivity` check the first micro-batches. Imports `network`, `ranks` and `layers`.
"""
