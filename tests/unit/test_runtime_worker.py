"""Before torch is imported, a worker knows whether it is where the plan wants it."""

from __future__ import annotations

import re

import pytest

from hetrun.errors import ConfigError
from hetrun.runtime.worker import Place, check_place, fault_hook, read_place
from tests.dist.plans import Pipeline, make_plan

PLAN = make_plan((Pipeline((5, 3), 1, 4),))
VARIABLES = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "HETRUN_HOST": "here"}


def _place(**changes: object) -> Place:
    values = {"rank": 1, "local_rank": 1, "world_size": 2, "host": "here", "fault": None}
    return Place(**{**values, **changes})  # type: ignore[arg-type]


def test_place_is_read_from_the_variables() -> None:
    assert read_place(VARIABLES) == _place()


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "-1", "one", None])
def test_variable_that_is_no_number_is_named(name: str, value: str | None) -> None:
    variables = {key: text for key, text in VARIABLES.items() if key != name}
    if value is not None:
        variables[name] = value
    with pytest.raises(ConfigError, match=f"{name}={re.escape(repr(value or ''))}, need a number"):
        read_place(variables)


def test_rank_in_its_place_gets_its_plan() -> None:
    assert check_place(_place(), PLAN) == PLAN.split.ranks[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 3}, "started 3 ranks, the plan has 2"),
        ({"host": "there"}, "local rank 1 on 'there', the plan has it as local rank 1 on 'here'"),
        ({"local_rank": 0}, "local rank 0 on 'here'"),
    ],
)
def test_rank_out_of_place_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_place(_place(**changes), PLAN)


def test_fault_strikes_one_rank_at_one_step() -> None:
    hook = fault_hook("raise:1:3", 1)
    hook(2)
    with pytest.raises(RuntimeError, match="HETRUN_TEST_FAULT"):
        hook(3)
    fault_hook("raise:1:3", 0)(3)
    fault_hook(None, 1)(3)


@pytest.mark.parametrize("text", ["raise", "raise:1", "raise:1:x", "melt:1:1", "raise:-1:1"])
def test_fault_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HETRUN_TEST_FAULT"):
        fault_hook(text, 0)
