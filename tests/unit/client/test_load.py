import pytest
from paceline.cli.load import Load, Percentiles, Trace, decode_rate, summarize
from paceline.types import Finished, FinishReason, ModelInfo, RequestLimits, Usage

USAGE = Usage(4, 1, 3, 0, 0, 1, 2, 3, 9)
END = Finished(0, FinishReason.LENGTH, USAGE)
MODEL = ModelInfo("m", "oracle", 10, 100, 100, (3, 4), False, "float32", "0", b"", RequestLimits(*[1] * 9))


def trace(started: float, *arrivals: tuple[float, int]) -> Trace:
    return Trace(started, ended=arrivals[-1][0], arrivals=list(arrivals), finished=END)


def test_decode_rate_counts_between_the_last_first_token_and_the_first_end() -> None:
    early = trace(0.0, (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1))
    late = trace(0.0, (2.0, 1), (3.0, 1), (5.0, 1))
    # From 2.0 to 4.0: two tokens of the first, one of the second.
    assert decode_rate([early, late]) == pytest.approx(3 / 2.0)


def test_decode_rate_needs_a_time_in_which_all_decode() -> None:
    assert decode_rate([trace(0.0, (1.0, 1), (2.0, 1)), trace(0.0, (3.0, 1), (4.0, 1))]) is None
    assert decode_rate([trace(0.0, (1.0, 1))]) is None
    assert decode_rate([Trace(0.0)]) is None
    assert decode_rate([]) is None


def test_tokens_of_one_delta_share_the_gap_before_it() -> None:
    assert trace(0.0, (1.0, 1), (2.0, 4)).gaps_s() == pytest.approx([0.25] * 4)


def test_summary_of_two_streams() -> None:
    summary = summarize([[trace(0.0, (1.0, 1), (2.0, 1)), trace(0.5, (1.0, 1), (2.5, 1))]])
    assert (summary.requests, summary.tokens, summary.duration_s) == (2, 4, 2.5)
    assert summary.tokens_per_s == pytest.approx(4 / 2.5)
    assert summary.ttft_ms.p50 == pytest.approx(750.0)
    assert (summary.cached_tokens, summary.preemptions) == (2, 2)


def test_free_running_clients_have_no_decode_rate() -> None:
    assert summarize([[trace(0.0, (1.0, 1), (2.0, 1))]], together=False).decode_tokens_per_s is None


@pytest.mark.parametrize("sample", [[], [5.0]])
def test_percentiles_of_next_to_nothing(sample: list[float]) -> None:
    assert Percentiles.of(sample).p99 == sum(sample)


def test_percentiles_interpolate() -> None:
    assert Percentiles.of([float(value) for value in range(101)]) == Percentiles(50.0, 90.0, 99.0, 100.0)


def test_a_prompt_that_repeats_is_one_passage_over_and_over() -> None:
    prompt = Load(prompt_tokens=10, new_tokens=1, repeats=3).prompt(MODEL, 0)
    assert len(prompt) == 10
    assert prompt[:4] == prompt[4:8]
    assert prompt[:2] == prompt[8:]


def test_prompts_are_reproducible_distinct_and_without_end_tokens() -> None:
    load = Load(prompt_tokens=50, new_tokens=1, seed=3)
    prompts = [load.prompt(MODEL, number) for number in range(4)]
    assert prompts == [load.prompt(MODEL, number) for number in range(4)]
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert not {3, 4} & {token for prompt in prompts for token in prompt}
