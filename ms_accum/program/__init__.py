"""How does a program communicate with a person?

Provides: flags and their errors, the settings of a run, the output before, during and after it, signals, exit codes.
Imports `ranks`, `numerics`, `window`, `saving`.
"""
