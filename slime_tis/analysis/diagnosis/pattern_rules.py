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
    argmax_log_probs,
    log_probs_before_truncation,
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

RULES_ON_ALL = (weights_not_updated, stale_weights, another_model, unstable)
"""Rules that compare steps, ages or samples, or need unselected tokens; findings with equal scores
keep the order of both tables."""
RULES_ON_AFFECTED = (
    argmax_log_probs,
    penalty,
    logit_bias,
    decoding,
    temperature,
    truncated_sampling,
    log_probs_before_truncation,
    position,
    moe_routing,
    rounding,
)
"""Rules on the tokens of the samples that have a mismatch."""
RULES_WITHOUT_MISMATCH = (sharper_sampling,)
"""Rules on these tokens if their mismatch is negligible."""
