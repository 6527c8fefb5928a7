"""Which tokens of a response a context-parallel rank holds."""


def context_parallel_slices(
    total_length: int, response_length: int, rank: int, size: int, padded_length: int | None = None
) -> tuple[slice, slice]:
    """The response tokens whose log-probs rank `rank` of `size` computes, as two slices into the response.

    Zigzag: the sequence is cut into 2·size chunks of ⌈total/(2·size)⌉ positions, and rank r holds chunks r
    and 2·size − 1 − r. The logits at position p predict token p + 1, so that the response tokens belong to
    positions prompt − 1 … total − 2. An empty share is `slice(0, 0)`.

    Args:
        total_length: Tokens of prompt and response.
        response_length: Tokens of the response.
        rank: Rank in the context-parallel group.
        size: Size of the group; with 1 the whole response is the first slice.
        padded_length: What is cut into chunks where sequences are padded to one length; total_length if None.

    Raises:
        ValueError: if the lengths or the rank are impossible.
    """
    if not 0 <= response_length <= total_length:
        raise ValueError(
            f"response_length is {response_length} of total_length {total_length}; pass lengths of one sample."
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a context-parallel group of {size}.")
    if size == 1:
        return slice(0, response_length), slice(0, 0)
    prompt_length = total_length - response_length
    chunk = -(-(padded_length or total_length) // (2 * size))
    return _share(rank, chunk, prompt_length, total_length), _share(
        2 * size - 1 - rank, chunk, prompt_length, total_length
    )


def _share(index: int, chunk: int, prompt_length: int, total_length: int) -> slice:
    first = max(index * chunk, prompt_length - 1)
    last = min((index + 1) * chunk, total_length - 1)
    return slice(first + 1 - prompt_length, last + 1 - prompt_length) if first < last else slice(0, 0)
