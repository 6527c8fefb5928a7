"""What a launcher says through environment variables, and the messages where it says something impossible."""

import pytest

from slime_tis.trainer.megatron.environment import LAUNCH, Environment, read_environment

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_without_a_launcher_there_is_one_process() -> None:
    assert read_environment({}) == Environment(rank=0, local_rank=0, world_size=1, launched=False)
    assert read_environment(TORCHRUN) == Environment(rank=3, local_rank=1, world_size=4, launched=True)


WRONG = {
    "no ranks": (
        {"WORLD_SIZE": "0"},
        "the environment variable WORLD_SIZE is '0' but must be a whole number from 1 on",
    ),
    "negative": (
        {"WORLD_SIZE": "-1"},
        "the environment variable WORLD_SIZE is '-1' but must be a whole number from 1 on",
    ),
    "a word": (
        {"WORLD_SIZE": "abc"},
        "the environment variable WORLD_SIZE is 'abc' but must be a whole number from 1 on",
    ),
    "a fraction": ({"WORLD_SIZE": "1.5"}, "the environment variable WORLD_SIZE is '1.5' but must be a whole number"),
    "empty": ({"WORLD_SIZE": ""}, "the environment variable WORLD_SIZE is '' but must be a whole number from 1 on"),
    "huge": ({"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE is '{'9' * 80}' but must be"),
    "other digits": ({"RANK": "٣"}, "the environment variable RANK is '٣' but must be a whole number from 0 on"),
    "rank": ({"RANK": "abc"}, "the environment variable RANK is 'abc' but must be a whole number from 0 on"),
    "alone": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is unset"),
    "beyond": (TORCHRUN | {"RANK": "4"}, "RANK is 4 but WORLD_SIZE is 4, so ranks end at 3"),
    "no size": ({"RANK": "1"}, "RANK is 1 but WORLD_SIZE is 1, so ranks end at 0"),
    "no address": ({"RANK": "0"}, "RANK is 0 but MASTER_ADDR is unset"),
    "no port": ({"RANK": "0", "MASTER_ADDR": "node0"}, "RANK is 0 but MASTER_PORT is unset"),
    "port": (TORCHRUN | {"MASTER_PORT": "http"}, "the environment variable MASTER_PORT is 'http' but must be"),
    "port 0": (TORCHRUN | {"MASTER_PORT": "0"}, "the environment variable MASTER_PORT is '0' but must be"),
    "port beyond": (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT is 65536 but a port is at most 65535"),
    "local": (TORCHRUN | {"LOCAL_RANK": "x"}, "the environment variable LOCAL_RANK is 'x' but must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_impossible_values_are_named(case: str) -> None:
    environ, words = WRONG[case]
    with pytest.raises(ValueError) as raised:
        read_environment(environ)
    assert words in str(raised.value)
    assert str(raised.value).endswith(f"; {LAUNCH}.")
