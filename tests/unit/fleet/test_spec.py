"""What a fleet's spec may say, and what a change of it would do: nothing here needs Ray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from paceline_fleet.plan import DOWN_AT, StackLoad, changes, desired_stacks
from paceline_fleet.spec import FleetSpec, Replicas, read_spec

SPEC = {"fleet": "chat", "models": [{"name": "small", "backend": "oracle", "replicas": 3}]}


def written(directory: Path, **fields: object) -> Path:
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump({**SPEC, **fields}, sort_keys=False))
    return path


def spec(**model: object) -> FleetSpec:
    return FleetSpec.model_validate({**SPEC, "models": [{**SPEC["models"][0], **model}]})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fleet": "Chat Bot"}, "fleet: "),
        ({"tokns": {}}, "tokns: no such field; did you mean tokens?"),
        ({"models": []}, "models: "),
        (
            {"models": [{"name": "a", "replica": 2}]},
            "models[0].replica: no such field; did you mean replicas?",
        ),
        ({"models": [{"name": "a", "replicas": 0}]}, "0 stacks"),
        ({"models": [{"name": "a", "replicas": {"min": 3, "max": 2}}]}, "max 2 is below min 3"),
        ({"models": [{"name": "a", "executors": 2}]}, "executors: 2: a stack of a fleet has one"),
        (
            {"models": [{"name": "a", "scheduler": {"advertise": "x:1"}}]},
            "scheduler.advertise can't be set here",
        ),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "the name a is given twice"),
        ({"models": [{"name": "roster"}]}, "roster"),
        ({"address": "ip"}, "address: ip is beyond loopback: give `tls`, or insecure: true"),
        ({"ports": "50200-50100"}, "ports: 50200-50100 is no range of ports"),
        ({"ray": {"address": "head", "token_file": "t"}}, "ray.address: "),
    ],
)
def test_a_mistake_in_a_spec_is_named_with_its_field(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    path = written(tmp_path, **fields)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_spec(path)
    assert all(line.startswith(f"{path}: ") for line in str(caught.value).splitlines())


def test_paths_of_a_spec_are_relative_to_its_file_and_options_keep_their_words(tmp_path: Path) -> None:
    files = {"clients": "tokens.yaml", "stacks": "stacks"}
    models = [{"name": "a", "backend": "oracle", "executor": {"step_ms": 20, "pin": True}}]
    found = read_spec(written(tmp_path, tokens=files, models=models))
    assert found.token_files.clients == tmp_path / "tokens.yaml"
    assert found.models[0].flags("executor") == ("--step-ms=20", "--pin=true")


def test_only_what_changes_a_running_stack_replaces_it() -> None:
    old = spec()
    assert changes(old, spec()) == []
    assert changes(old, spec(replicas=5)) == ["~ small: 3 stacks -> 5 stacks"]
    [replaced] = changes(old, spec(executor={"step-ms": 9}))
    assert replaced.startswith("~ small: all stacks are replaced, new stacks first")
    [old_first] = changes(spec(surge=0), spec(surge=0, executor={"step-ms": 9}))
    assert "old stacks first" in old_first
    [placed] = changes(old, spec(gpus=1))
    assert placed.startswith("~ small: all stacks are placed anew")
    assert old.version_of(old.models[0]) == spec(replicas=5, cpus=2, surge=0).version_of(spec().models[0])


@given(
    loads=st.lists(
        st.builds(StackLoad, st.integers(0, 200), st.integers(0, 200), st.floats(0, 60)), max_size=12
    ),
    current=st.integers(1, 12),
    low=st.integers(1, 6),
    more=st.integers(0, 10),
    target=st.integers(1, 64),
)
def test_the_number_of_stacks_follows_the_load_within_bounds_and_does_not_swing(
    loads: list[StackLoad], current: int, low: int, more: int, target: int
) -> None:
    replicas = Replicas(min=low, max=low + more, target=target)
    wanted = desired_stacks(loads, current, replicas)
    total = sum(load.running + load.waiting for load in loads)
    assert low <= wanted <= low + more
    if wanted < min(current, low + more):  # one at a time, and the others have room for its streams
        assert wanted == current - 1
        assert total <= DOWN_AT * target * wanted
        # With the same load it is not wanted back.
        assert desired_stacks(loads, wanted, replicas) <= wanted
    if wanted < low + more:
        assert total <= wanted * target


def test_a_late_request_asks_for_one_more_stack_and_keeps_all() -> None:
    replicas = Replicas(min=1, max=4, target=10, max_wait_s=2)
    assert desired_stacks([StackLoad(1, 0, 3.0), StackLoad(0, 0)], 2, replicas) == 3
    assert desired_stacks([StackLoad(1, 0, 1.0), StackLoad(0, 0)], 2, replicas) == 1
