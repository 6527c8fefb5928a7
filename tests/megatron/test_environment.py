"""The environment variables of a launcher, and the messages about impossible values."""

import pytest

from slime_tis.trainer.megatron.environment import LAUNCH, Environment, read_environment

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_without_a_launcher_there_is_one_process():
    assert read_environment({}) == Environment(rank=0, local_rank=0, world_size=1, launched=False)
    assert read_environment(TORCHRUN) == Environment(rank=3, local_rank=1, world_size=4, launched=True)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'", id="no ranks"),
        pytest.param({"WORLD_SIZE": "1.5"}, "WORLD_SIZE is '1.5'", id="a fraction"),
        pytest.param({"WORLD_SIZE": ""}, "WORLD_SIZE is ''", id="empty"),
        pytest.param({"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE is '{'9' * 80}' ", id="huge"),
        pytest.param({"RANK": "٣"}, "RANK is '٣'", id="other digits"),
        pytest.param({"WORLD_SIZE": "2"}, "RANK is unset", id="size without rank"),
        pytest.param(TORCHRUN | {"RANK": "4"}, "from 0 to 3", id="rank beyond the size"),
        pytest.param({"RANK": "0"}, "MASTER_ADDR is unset", id="no address"),
        pytest.param({"RANK": "0", "MASTER_ADDR": "node0"}, "MASTER_PORT is unset", id="no port"),
        pytest.param(TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT is '65536'", id="port beyond the range"),
    ],
)
def test_impossible_values_are_named(environ, message):
    with pytest.raises(ValueError) as raised:
        read_environment(environ)
    assert message in str(raised.value) and str(raised.value).endswith(LAUNCH + ".")
