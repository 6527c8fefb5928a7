"""The demo: a tiny model that sorts digits, and the commands that train and diagnose it."""
