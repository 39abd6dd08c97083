"""What is a window, how is it run, and what happens at its end?

Provides: where windows end (`ends`), the order of the steps at the boundary, the open window, the record of a finished
window, the callbacks that get it, and reading batches from a dataset. Imports `network`, `ranks`, `loss` and
`numerics`.
"""
