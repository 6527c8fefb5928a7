"""Builds the weight transport that --sglang-weight-sync names."""

import pkgutil
from collections.abc import Sequence

from slime_tis.trainer.engines.engine import EngineHost
from slime_tis.trainer.engines.sglang.weights.protocol import WeightSync
from slime_tis.trainer.options.sglang import WEIGHT_TRANSPORTS, SGLangConfig


def build_weight_sync(config: SGLangConfig, host: EngineHost, urls: Sequence[str]) -> WeightSync:
    """Returns the transport; raises ValueError if these servers cannot use it."""
    sync: WeightSync = pkgutil.resolve_name(WEIGHT_TRANSPORTS[config.sglang_weight_sync]).build(config, host, urls)
    return sync
