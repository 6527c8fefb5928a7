"""`slime-tis parity`: finds the first operation in which two executions of a model differ."""
