"""A saved run, trained again from its seed, passes through the states that it had."""

from pathlib import Path

import pytest

from mlp_research.experiment import Experiment
from mlp_research.saved_run import SavedRunFlags, open_run, restore, states_along
from tests.made import assert_bitwise, initial_state, train_through

STEPS, EPOCH = 24, 12


@pytest.fixture
def flags(trained: Path) -> SavedRunFlags:
    return SavedRunFlags(trained, mesh_data=1, compile_cache=False)


def opened(flags: SavedRunFlags) -> Experiment:
    return open_run(flags, evaluation_batch_size=16)


def test_the_states_along_a_run_end_in_its_checkpoint(flags: SavedRunFlags):
    experiment = opened(flags)
    initial, inside, epoch, final = states_along(experiment, [0, 7, EPOCH, STEPS])
    assert [int(state.step) for state in (initial, inside, epoch, final)] == [0, 7, 12, 24]
    assert_bitwise(initial, initial_state(experiment))
    assert_bitwise(final, restore(experiment, flags))


def test_a_state_inside_a_chunk_goes_on_to_the_same_end(flags: SavedRunFlags):
    (inside,) = states_along(opened(flags), [8])
    final, _ = train_through(opened(flags), inside)
    assert_bitwise(final, restore(opened(flags), flags))


def test_a_state_is_the_readers_own(flags: SavedRunFlags):
    """It is not donated to the steps that follow it."""
    states = states_along(opened(flags), [1, 2])
    first = next(states)
    next(states)
    assert int(first.step) == 1


@pytest.mark.parametrize("steps", [[5, 4], [-1], [STEPS + 1]])
def test_steps_that_do_not_rise_within_the_run_are_refused(flags: SavedRunFlags, steps: list[int]):
    with pytest.raises(ValueError, match="must rise from 0 to at most 24"):
        list(states_along(opened(flags), steps))
