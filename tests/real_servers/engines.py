"""A checkpoint on a server, and engines that sample from it."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_tis.peft_directory import AdapterConfig
from slime_tis.trainer.configs.servers import server_config
from slime_tis.trainer.data.sample import Prompt, Sampling
from slime_tis.trainer.engines.local.load_model import load_tokenizer
from slime_tis.trainer.engines.rollout_engine import EngineHost, WeightSource
from slime_tis.trainer.engines.servers.server_engine import ServerEngine
from slime_tis.trainer.engines.servers.server_group import ServerSettings
from tests.real_servers.references import Reference
from tests.real_servers.servers import ENGINE, RealServer


@dataclass(frozen=True)
class ServedModel:
    """A checkpoint on a server, and references for its weights and for other weights."""

    checkpoint: Path
    server: RealServer
    reference: Reference
    other_reference: Reference
    directory: Path
    """For the files that engines write."""

    def references(self) -> dict[int, Reference]:
        """References by the weight version that tests give them: the others are version 1."""
        return {0: self.reference, 1: self.other_reference, 2: self.reference}

    @contextmanager
    def engine(self, **options: Any) -> Iterator[ServerEngine]:
        """An engine on the server; see `engine_with_weights` for the options."""
        options = {"servers": (self.server,), "directory": self.directory, **options}
        with engine_with_weights(self.checkpoint, self.reference, **options) as engine:
            yield engine


@contextmanager
def engine_with_weights(
    checkpoint: Path,
    reference: Reference,
    *,
    directory: Path,
    servers: tuple[RealServer, ...] = (),
    weights: WeightSource | None = None,
    sampling: Sampling | None = None,
    push: bool = True,
    adapter: AdapterConfig | None = None,
    **options: Any,
) -> Iterator[ServerEngine]:
    """An engine on given or launched servers, with the reference's weights as version 0.

    Args:
        checkpoint: Model directory of the servers.
        reference: The policy's weights.
        directory: Parent of the engine's output directory.
        servers: Servers that run; none if `options` launch one.
        weights: Source for servers that lost theirs; the reference's by default.
        sampling: Sampling parameters whose features the servers must have.
        push: Whether the weights are sent as version 0.
        adapter: Settings of adapters, which updates then send in place of weights.
        **options: Fields of ServerConfig.
    """
    if servers:
        options["url"] = tuple(server.url for server in servers)
    # The tests' models need several buckets of 1 MiB.
    config = server_config(ENGINE.name, **{"bucket_mb": 1, **options})
    host = EngineHost(
        hf_checkpoint=checkpoint,
        weights=weights or reference.named_tensors,
        output_dir=Path(tempfile.mkdtemp(dir=directory)),
        adapter=adapter,
    )
    settings = ServerSettings(config=config, sampling=sampling)
    engine = ServerEngine(settings, load_tokenizer(checkpoint), host)
    try:
        if push:
            engine.update_weights(reference.named_tensors, 0)
        yield engine
    finally:
        engine.close()


def decode_steps(engine: ServerEngine, prompts: Sequence[Prompt]) -> None:
    """Returns when rollouts in flight on one server have decoded some steps.

    Samples 16 tokens: the server decodes them in the batches of the rollouts, which are ahead in
    its queue. If the rollouts have ended, it returns all the same.
    """
    engine.generate(prompts[:1], Sampling(max_response_len=16), seed=0)
