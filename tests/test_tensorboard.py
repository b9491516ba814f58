"""TensorBoard is given each epoch's numbers once, also by a run that was interrupted."""

import struct
from pathlib import Path
from typing import Any

from tensorboardX.proto import event_pb2

from mlp_research.storage.run_folder import RunFolder

proto: Any = event_pb2


def events(run_dir: Path) -> list[Any]:
    """All events in the order of the files, by the format of TFRecord."""
    found = []
    for file in sorted((run_dir / "tensorboard").iterdir()):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(proto.Event.FromString(content[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def points(run_dir: Path, name: str) -> dict[int, float]:
    """What TensorBoard shows: a start hides what was written before from its step on."""
    shown: dict[int, float] = {}
    for event in events(run_dir):
        if event.session_log.status == proto.SessionLog.START:
            shown = {step: value for step, value in shown.items() if step < event.step}
        for value in event.summary.value:
            if value.tag == name:
                assert event.step not in shown, f"epoch {event.step} is there twice"
                shown[event.step] = value.simple_value
    return shown


def write(run_dir: Path, epochs: range, loss: float) -> None:
    config = {"seed": 0}
    with RunFolder.open(run_dir, config, resume=(run_dir / "config.json").exists()) as folder:
        for epoch in epochs:
            folder.write_scalars(epoch, {"loss": loss, "accuracy": epoch / 8})


def test_each_number_is_a_point_over_epochs(tmp_path: Path):
    write(tmp_path, range(1, 4), 0.5)
    assert points(tmp_path, "loss") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert points(tmp_path, "accuracy") == {1: 1 / 8, 2: 2 / 8, 3: 3 / 8}


def test_what_a_resumed_run_repeats_is_shown_once(tmp_path: Path):
    write(tmp_path, range(1, 4), 0.5)  # and killed before the third epoch's checkpoint
    write(tmp_path, range(3, 6), 0.25)
    assert points(tmp_path, "loss") == {1: 0.5, 2: 0.5, 3: 0.25, 4: 0.25, 5: 0.25}


def test_two_starts_within_a_second_overwrite_nothing(tmp_path: Path):
    for epoch in range(1, 5):
        write(tmp_path, range(epoch, epoch + 1), epoch / 4)
    assert points(tmp_path, "loss") == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}


def test_points_are_on_the_disk_as_soon_as_they_are_written(tmp_path: Path):
    with RunFolder.open(tmp_path, {}, resume=False) as folder:
        folder.write_scalars(1, {"loss": 0.5})
        assert points(tmp_path, "loss") == {1: 0.5}
