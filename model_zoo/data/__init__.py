"""Data sets of images and of text, and their downloads.

It may import MindSpore, NumPy and `model_zoo._check`, but no network and never `ms_accum`;
scikit-learn is imported where it is used, and the package `download` in a process of its own.
"""
