"""What `train.py` and `eval.py` share: flags, exit codes, signals, the folder of a run, tasks, metrics, the plot."""
