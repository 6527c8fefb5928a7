"""A hypothesis changes the network, its input, its logits, or the reported log-probs.

Shapes: T response tokens, V vocabulary entries, S tokens of prompt and response, L sparse layers, k
experts.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

NetworkEdit = Callable[[Any, float], AbstractContextManager[None]]
"""(model, value) → a context in which the model has the fault."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Input:
    """The input of the network for one sample; the response is at the end."""

    tokens: Tensor
    """[S] token ids."""
    response: int
    """Number of response tokens."""
    positions: Tensor
    """[S] position ids."""
    temperature: float = 1.0
    """Temperature of the log-probs."""
    trained: Tensor | None = None
    """[T] bool, response tokens that the policy sampled; the others are tool output or templates.
    None means all."""
    experts: Tensor | None = None
    """[T, L, k] experts that the dump records for the response tokens."""
    mask: Tensor | None = None
    """[S, S] bool, the keys that each query attends to; None means all earlier ones."""
    cache: Any = None
    """A class of key-value caches, for hypotheses that change the cache."""
    network: NetworkEdit | None = None
    """A change of the network for this sample only."""
    prompt_network: NetworkEdit | None = None
    """A change of the network for all prompt tokens but the last."""

    @property
    def prompt(self) -> Tensor:
        """Token ids of the prompt."""
        return self.tokens[: len(self.tokens) - self.response]

    @property
    def is_plain(self) -> bool:
        """Whether the network reads only tokens and positions."""
        return self.mask is self.cache is self.network is self.prompt_network is None


PromptEdit = Callable[[Tensor, int], Tensor]
"""(token ids of the prompt, value) → the prompt that the engine reads; an empty one leaves the
prompt as it is."""
InputEdit = Callable[[Input, float, Sequence[Input]], Input]
"""(sample, value, the samples before it in its block) → the engine's input; the sample itself if
nothing changes."""
LogitsEdit = Callable[[Tensor, Input, float], Tensor]
"""(logits [T, V] divided by the temperature, sample, value) → the engine's logits."""
ReportEdit = Callable[[Tensor, Tensor, float], Tensor]
"""(log-probs [T, V], sampled tokens [T], value) → the reported log-probs [T]."""
OutputEdit = Callable[[list[Tensor], float], list[Tensor]]
"""(log-probs [T] of every sample, value) → the reported ones."""


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One fault."""

    claim: str
    """The fault in words after "the engine", a template with `value`."""
    cause: str
    """Its cause in `CAUSES`, which has the advice."""
    values: tuple[float, ...] = (0.0,)
    """Grid of the parameter, of integers if it is an integer; one value if the fault has no
    parameter."""
    _: KW_ONLY
    prompt: PromptEdit | None = None
    inputs: InputEdit | None = None
    network: NetworkEdit | None = None
    logits: LogitsEdit | None = None
    reported: ReportEdit | None = None
    outputs: OutputEdit | None = None

    @property
    def is_integer(self) -> bool:
        """Whether the parameter is an integer."""
        return all(isinstance(value, int) for value in self.values)

    @property
    def cost(self) -> int:
        """Stage of the search.

        0 without a forward pass, 1 for prompts, 2 for other inputs, 3 for the network.
        """
        if self.network is not None:
            return 3
        if self.inputs is not None:
            return 2
        if self.prompt is not None:
            return 1
        return 0
