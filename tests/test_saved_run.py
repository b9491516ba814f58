"""A saved run, trained again from its seed, passes through the models that it had."""

from pathlib import Path
from typing import Any

import pytest

from mlp_research.analysis import saved_run
from mlp_research.analysis.saved_run import SavedRunFlags, models_along, open_run, restore
from mlp_research.checkpoints.checkpoint import Checkpoints
from mlp_research.programs.single import Experiment
from mlp_research.step import TrainState
from tests.made import assert_bitwise, initial_state, train_through

STEPS, EPOCH = 24, 12


@pytest.fixture
def flags(trained: Path) -> SavedRunFlags:
    return SavedRunFlags(trained, mesh_data=1, compile_cache=False)


def opened(flags: SavedRunFlags) -> Experiment:
    return open_run(flags, evaluation_batch_size=16)


def final_state(experiment: Experiment, flags: SavedRunFlags) -> TrainState:
    """The whole state that the run saved at its end."""
    with Checkpoints(flags.run_dir / "checkpoints", reading=True) as checkpoints:
        return checkpoints.restore(STEPS, experiment.saved_template())[0].state


def test_the_models_along_a_run_end_in_its_checkpoint(flags: SavedRunFlags):
    experiment = opened(flags)
    along = list(models_along(experiment, [0, 7, EPOCH, STEPS]))
    assert [saved.step for saved in along] == [0, 7, 12, 24]
    assert_bitwise(along[0].model, initial_state(experiment).model)
    restored = restore(experiment, flags)
    assert restored.step == STEPS
    assert_bitwise(along[-1].model, restored.model)
    assert_bitwise(restored.model, final_state(experiment, flags).model)


def test_a_state_inside_a_chunk_goes_on_to_the_same_end(flags: SavedRunFlags):
    experiment = opened(flags)
    inside = saved_run._trained(experiment, experiment.init(), 0, 8)
    final, _ = train_through(opened(flags), inside)
    assert_bitwise(final, final_state(experiment, flags))


def test_a_model_is_the_readers_own(flags: SavedRunFlags):
    """It is not donated to the steps that follow it."""
    along = models_along(opened(flags), [1, 2])
    first = next(along)
    second = next(along)
    models: list[Any] = [first.model, second.model]
    weights = [model.layers[0].weight for model in models]
    assert not any(weight.is_deleted() for weight in weights)
    assert (weights[0] != weights[1]).any()


@pytest.mark.parametrize("steps", [[5, 4], [-1], [STEPS + 1]])
def test_steps_that_do_not_rise_within_the_run_are_refused(flags: SavedRunFlags, steps: list[int]):
    with pytest.raises(ValueError, match="must rise from 0 to at most 24"):
        list(models_along(opened(flags), steps))
