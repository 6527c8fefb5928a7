"""`slime-tis port`: launch scripts of slime and vime as command lines of train.py."""
