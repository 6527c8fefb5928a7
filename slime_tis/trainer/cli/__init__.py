"""The command line of train.py: its options, checks before the start, advice on slime's flags."""
