"""Which models are loaded next, and which are put away for them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.cli.several_models.memory import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    PAUSE_S,
    TURN_S,
    LoadableModel,
    Moves,
    moves,
)
from paceline_router.models import ModelState

SERVING, AVAILABLE = ModelState.SERVING, ModelState.AVAILABLE


def told(found: Moves) -> tuple[list[str], list[str], float | None]:
    return found.load, found.put_away, found.again_at


def test_models_are_loaded_as_far_as_memory_goes_in_the_order_of_their_calls() -> None:
    models = {name: LoadableModel(need=4) for name in "abc"}
    assert told(moves(models, "cab", 9, 0.0)) == (["c", "a"], [], None)
    assert moves(models, "cab", None, 0.0).load == ["c", "a", "b"]


def test_the_least_recently_used_model_without_streams_goes_first_and_one_that_stays_never() -> None:
    models = {
        "stays": LoadableModel(stays=True, need=4, state=SERVING),
        "old": LoadableModel(need=4, state=SERVING, used_at=1.0),
        "new": LoadableModel(need=4, state=SERVING, used_at=2.0),
        "busy": LoadableModel(need=4, state=SERVING, busy=True, loaded_at=3.0),
        "wanted": LoadableModel(need=4),
    }
    assert told(moves(models, ["wanted"], 16, 4.0)) == ([], ["old"], None)
    models["old"].state = ModelState.DRAINING
    assert told(moves(models, ["wanted"], 16, 5.0)) == ([], [], None)  # it is on its way
    models["old"].state = AVAILABLE
    assert told(moves(models, ["wanted"], 16, 6.0)) == (["wanted"], [], None)


def test_a_model_with_streams_has_its_turn_and_goes_then_for_one_that_waits() -> None:
    models = {
        "a": LoadableModel(need=4, state=SERVING, busy=True, load_at=99.0, loaded_at=100.0),
        "b": LoadableModel(need=4),
    }
    assert told(moves(models, ["b"], 4, 101.0)) == ([], [], 100.0 + TURN_S)
    assert told(moves(models, ["b"], 4, 100.0 + TURN_S)) == ([], ["a"], None)
    assert told(moves(models, [], 4, 1e9)) == ([], [], None)  # for nobody it stays
    models["a"].load_at = 70.0
    assert told(moves(models, ["b"], 4, 129.0)) == ([], [], 130.0)  # it had its load's time
    assert told(moves(models, ["b"], 4, 130.0)) == ([], ["a"], None)


def test_a_model_between_two_requests_of_a_client_is_kept_for_the_next_until_its_turn_ends() -> None:
    """Without that, one would be put away when its first requests are answered, and loaded again at once."""
    models = {
        "a": LoadableModel(need=4, state=SERVING, load_at=99.0, loaded_at=100.0, used_at=104.0),
        "b": LoadableModel(need=4),
    }
    assert told(moves(models, ["b"], 4, 104.5)) == ([], [], 104.0 + PAUSE_S)
    assert told(moves(models, ["b"], 4, 104.0 + PAUSE_S)) == ([], ["a"], None)
    models["a"].used_at = 99.5 + TURN_S
    assert told(moves(models, ["b"], 4, 99.5 + TURN_S)) == ([], [], 100.0 + TURN_S)
    assert told(moves(models, ["b"], 4, 100.0 + TURN_S)) == ([], ["a"], None)


def test_nobody_overtakes_a_model_that_waits_for_memory() -> None:
    models = {
        "a": LoadableModel(need=3, state=SERVING, busy=True),
        "large": LoadableModel(need=4),
        "small": LoadableModel(need=1),
    }
    assert told(moves(models, ["large", "small"], 4, 1.0)) == ([], [], TURN_S)


def test_an_unused_model_goes_after_its_keep_alive_time() -> None:
    models = {
        "kept": LoadableModel(keep_alive_s=60.0, state=SERVING, used_at=10.0),
        "busy": LoadableModel(keep_alive_s=60.0, state=SERVING, used_at=10.0, busy=True),
        "stays": LoadableModel(keep_alive_s=60.0, state=SERVING, stays=True),
    }
    assert told(moves(models, [], None, 69.0)) == ([], [], 70.0)
    assert told(moves(models, [], None, 70.0)) == ([], ["kept"], None)


def test_a_model_that_has_failed_is_loaded_again_after_a_time_that_doubles() -> None:
    one = LoadableModel(state=ModelState.FAILED)
    waits = []
    for now in range(12):
        one.failed(now * 1e6)
        waits.append(one.retry_at - now * 1e6)
        assert told(moves({"x": one}, ["x"], None, one.retry_at - 0.1)) == ([], [], one.retry_at)
        assert moves({"x": one}, ["x"], None, one.retry_at).load == ["x"]
    assert waits[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert waits[-1] == LAST_RETRY_S
    one.serves(0.0)
    one.failed(0.0)
    assert one.retry_at == FIRST_RETRY_S


def test_a_model_that_stays_and_has_failed_is_loaded_again_without_a_call() -> None:
    """A balancer may send none to an address whose only model has failed."""
    models = {
        "kept": LoadableModel(stays=True, need=4, state=ModelState.FAILED, retry_at=5.0),
        "on demand": LoadableModel(need=4, state=ModelState.FAILED, retry_at=6.0),
        "other": LoadableModel(need=4, state=SERVING, busy=True),
    }
    assert told(moves(models, [], 8, 4.0)) == ([], [], 5.0)
    assert told(moves(models, [], 8, 7.0)) == (["kept"], [], None)
    assert told(moves(models, ["on demand"], 8, 7.0)) == (["kept"], [], TURN_S)  # it comes first


@settings(deadline=None, max_examples=200)
@given(
    needs=st.lists(st.integers(1, 10), min_size=2, max_size=6),
    spare=st.integers(0, 10),
    calls=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 30)), max_size=60),
    load_s=st.integers(1, 5),
)
def test_every_call_ends_in_time_however_models_that_do_not_fit_together_are_asked_for(
    needs: Sequence[int], spare: int, calls: Sequence[tuple[int, int, int]], load_s: int
) -> None:
    """A simulation of seconds: calls are (model, arrival, duration)."""
    bound = max(needs) + spare
    models = {str(number): LoadableModel(need=need) for number, need in enumerate(needs)}
    names = list(models)
    waiting = sorted((at, names[model % len(needs)], lasts) for model, at, lasts in calls)
    arrived: list[tuple[str, int]] = []
    live: list[tuple[str, int]] = []  # (model, end)
    loading: dict[str, int] = {}
    longest = max((lasts for _, _, lasts in waiting), default=0)
    # Each model's turn, with streams that began at its end, for each other one, in as many rounds as needed.
    end = 41 + (len(needs) + 1) * (int(TURN_S) + longest + load_s + 4)
    for now in range(end):
        arrived += [(name, lasts) for at, name, lasts in waiting if at == now]
        live = [(name, until) for name, until in live if until > now]
        for name, at in list(loading.items()):
            if at == now:
                models[name].state = SERVING
                models[name].serves(now)
                del loading[name]
        for name, lasts in list(arrived):
            if models[name].state is SERVING:
                arrived.remove((name, lasts))
                live.append((name, now + lasts))
        for name, one in models.items():
            if one.state is ModelState.DRAINING and not any(who == name for who, _ in live):
                one.state = AVAILABLE
            busy = any(who == name for who, _ in live)
            if one.busy and not busy:
                one.used_at = now
            one.busy = busy
        found = moves(models, list(dict.fromkeys(name for name, _ in arrived)), bound, now)
        for name in found.put_away:
            assert models[name].state is SERVING
            models[name].state = ModelState.DRAINING
        for name in found.load:
            models[name].state, loading[name] = ModelState.LOADING, now + load_s
            models[name].load_at = now
        held = sum(
            one.need or 0 for one in models.values() if one.state not in (AVAILABLE, ModelState.FAILED)
        )
        assert held <= bound
        if now > 40 and not arrived and not live:
            return
    assert not arrived, f"still waiting after {end} s: {arrived}"


def test_one_that_stays_and_nobody_calls_takes_what_nobody_uses_if_that_is_enough() -> None:
    models = {
        "stays": LoadableModel(stays=True, need=4, state=ModelState.FAILED),
        "busy": LoadableModel(need=6, state=SERVING, busy=True),
        "wanted": LoadableModel(need=1),
    }
    assert told(moves(models, [], 8, 1e6)) == ([], [], None)
    assert moves(models, ["wanted"], 8, 1e6).load == ["wanted"]  # it does not hold up others
    assert moves(models, ["stays"], 8, 1e6).put_away == ["busy"]  # a call waits for it
    models["busy"].busy = False
    assert told(moves(models, [], 8, 1e6)) == ([], ["busy"], None)
    models["other"] = LoadableModel(need=2, state=SERVING, busy=True)
    models["busy"].need = 1
    assert told(moves(models, [], 5, 1e6)) == ([], [], None)  # it would not be enough
