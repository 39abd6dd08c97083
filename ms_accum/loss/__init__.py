"""The loss of a micro-batch, what it counts for, and its gradients.

Read `objective` first. `known_losses` has the facts about MindSpore's losses, `first_micro_batch` and `additivity`
check the first micro-batches, and `window_loss` averages the losses of a window. Imports `network`, `ranks` and
`layers`.
"""
