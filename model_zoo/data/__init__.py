"""Data sets of images, and their downloads.

Exports `create_dataset`, which batches the files of a folder or the digits of scikit-learn, and the functions that
download such a folder. It may import MindSpore, NumPy and `model_zoo._check`, but no network and never `ms_accum`;
scikit-learn is imported where it is used, and the package `download` in a process of its own.
"""
