"""`slime-tis port`: launch scripts of slime as command lines of train.py."""
