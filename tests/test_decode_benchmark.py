"""The decoding benchmark gives all contenders the same work, and refuses results of other work."""

import pytest

from benchmarks.peers.decode_task import DecodeTask, print_rates, prompt_token_ids


def test_prompts_differ_only_in_their_last_token() -> None:
    prompts = prompt_token_ids()
    assert len({tuple(prompt[:-1]) for prompt in prompts}) == 1
    assert len({prompt[-1] for prompt in prompts}) == DecodeTask.prompts


def test_a_rate_is_printed_for_each_measured_call(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def generate(new_tokens: int) -> int:
        calls.append(new_tokens)
        # Takes measurable time of the processor.
        sum(range(2_000_000))
        return new_tokens * DecodeTask.sequences

    print_rates(generate)
    assert calls == [DecodeTask.warm_up_tokens, DecodeTask.new_tokens, DecodeTask.new_tokens]
    assert len(capsys.readouterr().out.splitlines()) == DecodeTask.calls


def test_missing_tokens_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="2047 tokens were generated instead of 2048"):
        print_rates(lambda new_tokens: new_tokens * DecodeTask.sequences - 1)
