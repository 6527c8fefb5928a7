"""The command line: flags from the fields of the configs, YAML, presets, checks before the start, and the tools."""
