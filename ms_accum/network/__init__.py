"""Networks, their parameters, gradients and optimizers, in one process.

Provides: functions on gradients inside graphs (`tree`), accumulators, reading and comparing Parameters (`parameters`),
training flags (`training_mode`), MindSpore's optimizers with their learning rates and settings (`optimizers`), and the
random number generators. Imports no other room.
"""
