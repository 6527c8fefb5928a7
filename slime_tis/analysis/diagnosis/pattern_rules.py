"""The rules on the pattern of the mismatch over all tokens, as one table.

They look at the signs of Δ and at the variables and tokens that it depends on. Some use identities
of importance sampling.
"""

from slime_tis.analysis.diagnosis.engine_rules import (
    decoding,
    moe_routing,
    position,
    rounding,
    unstable,
)
from slime_tis.analysis.diagnosis.sampler_rules import (
    logit_bias,
    penalty,
    sharper_sampling,
    temperature,
    truncated_sampling,
)
from slime_tis.analysis.diagnosis.weight_rules import (
    another_model,
    stale_weights,
    weights_not_updated,
)

RULES = (
    weights_not_updated,
    stale_weights,
    another_model,
    penalty,
    logit_bias,
    decoding,
    unstable,
    temperature,
    truncated_sampling,
    position,
    moe_routing,
    rounding,
)
"""Rules on the tokens that the token rules leave; findings with equal scores keep this order."""
RULES_WITHOUT_MISMATCH = (sharper_sampling,)
"""Rules on these tokens if their mismatch is negligible."""
