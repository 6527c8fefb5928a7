"""`slime-tis port`: launch scripts of other trainers as command lines of train.py."""
