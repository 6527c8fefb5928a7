"""`correct` and the policy loss use the token pass that the caller selects."""

from argparse import Namespace

import pytest
import torch

from slime_tis import RolloutCorrectionConfig, correct
from slime_tis.correction import torch_token_pass
from slime_tis.correction.layout import PackedChunk
from slime_tis.correction.token_pass import TokenPass
from slime_tis.errors import CustomFunctionError
from slime_tis.policy.config import PolicyConfig
from slime_tis.policy.custom_loss import ObjectiveFunctions


def test_correct_calls_the_selected_token_pass() -> None:
    def double_weights(config: RolloutCorrectionConfig, packed: PackedChunk) -> TokenPass:
        result = torch_token_pass(config, packed)
        result.weight_RK.mul_(2)
        return result

    zeros, ones = torch.zeros(1, 2), torch.ones(1, 2)
    config = RolloutCorrectionConfig(use_tis=True)
    assert correct(config, zeros, zeros, ones, token_pass=double_weights).weights.tolist() == [[2.0, 2.0]]


def test_an_option_selects_the_token_pass() -> None:
    path = "slime_tis.correction.token_pass.torch_token_pass"
    assert ObjectiveFunctions.load(PolicyConfig(token_pass_path=path), Namespace()).token_pass is torch_token_pass
    with pytest.raises(CustomFunctionError, match="absent"):
        ObjectiveFunctions.load(PolicyConfig(token_pass_path="absent.token_pass"), Namespace())
