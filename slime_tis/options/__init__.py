"""Options: from a dataclass field to a checked value.

One option, `lr: Annotated[float, Limits(ge=0, le=1)] = option(1e-6, group="optimizer")`, goes
through these modules in this order:

1.  `fields`: the field declares its type, limits, default, group and needs; the docstring under it
    is its help. `field_types` and `field_docs` read them. Standard library only, because
    `slime_tis.correction` declares its fields here.
2.  `values`: `declare_options` makes the field an `Option` with one name for every source;
    `read_given` turns the text of any source into a `Given`, a value with its label for messages.
3.  `flags`: the words of a command line as flags with their values.
4.  `command_line`: `CommandLine` adds aliases and --no- forms, writes --help, and merges the
    sources: command line over YAML over preset over default. It refuses options without effect.
5.  `yaml_file`: the values of --custom-config-path, and verl's blocks.

A program lists its dataclasses in one `CommandLine`, as `trainer/cli/train_options.py` does for
train.py. `build` makes each dataclass from its values; the dataclass calls `check_fields`, so
that configs made in Python pass the same checks.
"""
