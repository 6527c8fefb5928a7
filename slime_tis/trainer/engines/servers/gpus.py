"""The GPUs of launched servers."""

import argparse
from collections.abc import Sequence


def assigned_gpus(flags: Sequence[str], index: int) -> range | None:
    """Returns the GPUs of the `index`-th launched server; None for servers on CPUs.

    The first server begins at `--base-gpu-id`, each other one after the previous server's last GPU.

    Args:
        flags: The user's flags of the servers, in the spellings of SGLang or vLLM.
        index: Number of the server.

    Raises:
        ValueError: A size in the flags is not a number.
    """
    sizes = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    sizes.add_argument("--device")
    sizes.add_argument("--tp-size", "--tp", "--tensor-parallel-size", type=int, default=1)
    sizes.add_argument("--pp-size", "--pp", "--pipeline-parallel-size", type=int, default=1)
    sizes.add_argument("--base-gpu-id", type=int, default=0)
    try:
        options, _ = sizes.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise ValueError(f"the flags of launched servers cannot be read: {error}.") from None
    if options.device == "cpu":
        return None
    count = options.tp_size * options.pp_size
    first = options.base_gpu_id + index * count
    return range(first, first + count)
