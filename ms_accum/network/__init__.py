"""What can be done to a network, its parameters and their gradients, in one process?

Provides: operations on gradients inside graphs (`tree`), accumulators, reading and comparing Parameters, inspecting
and restoring a network, learning rates, random number generators. Imports no other room.
"""
