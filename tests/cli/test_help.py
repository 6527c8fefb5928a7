"""The text of --help."""

import pytest

from slime_tis.main import main
from slime_tis.trainer.cli.arguments import build_parser
from slime_tis.trainer.cli.command_line import help_notes
from slime_tis.trainer.cli.run_options import COMMAND_LINE, OPTIONS, TITLES


def test_help_is_grouped_and_every_option_has_a_text_and_a_default():
    text = build_parser().format_help()
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["options", *TITLES]
    unwrapped = "".join(text.split())
    for option in OPTIONS.values():
        assert option.help.endswith(".")
        assert "".join(f"{option.help}({'; '.join(help_notes(COMMAND_LINE, option))})".split()) in unwrapped


@pytest.mark.parametrize("argv", [["--help"], ["DUMP", "--help"], ["DUMP", "--use-tis", "-h"]], ids=" ".join)
def test_help_of_what_if_is_its_own_wherever_the_flag_stands(argv, capsys):
    with pytest.raises(SystemExit) as end:
        main(["what-if", *argv])
    assert end.value.code == 0
    assert "slime-tis what-if [-h]" in capsys.readouterr().out
