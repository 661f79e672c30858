"""A retraining that can be stopped and taken up again: its folder, and what it says of itself.

<folder>/session.json   what was begun, and how much of the budget is spent
<folder>/rows/          measurements to learn from, of this session and of earlier ones
<folder>/judged/        measurements that old and new are compared by, never learned from
<folder>/model-<n>/     what session n trained, until it is published or found no better
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from confpred.errors import DataError
from confpred.files import read_json, write_whole

FORMAT = "confpred-retrain/1"


@dataclass(frozen=True, slots=True)
class Session:
    """One retraining.

    Attributes:
        number: 1 for the first in this folder. It seeds what is drawn, so that each session draws
            anew and a resumed one draws the same.
        old: digest of the model that is to be beaten; None where the device has none.
        learning_s, judging_s: seconds of measuring so far, of both kinds.
        done: whether it came to a verdict.
    """

    number: int
    old: str | None
    learning_s: float = 0.0
    judging_s: float = 0.0
    done: bool = False


def default_folder(device: str) -> Path:
    """Where the sessions for the device with this key are kept."""
    return Path(platformdirs.user_data_dir("confpred")) / "retrain" / device


def open_session(folder: Path, old: str | None) -> Session:
    """The session to go on with: the last one of `folder` if it has no verdict and was begun
    against the same model, else a new one.

    Raises:
        DataError: the folder's ``session.json`` is damaged.
    """
    path = folder / "session.json"
    if not path.exists():
        return Session(1, old)
    content = read_json(path, "a retraining", FORMAT)
    content.pop("format")
    try:
        last = Session(**content)
        started = int(last.number)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if last.done or last.old != old:
        return Session(started + 1, old)
    return last


def save(folder: Path, session: Session) -> None:
    """Write what `session` says.

    Raises:
        StorageError: the file system refused.
    """
    content = {"format": FORMAT, **dataclasses.asdict(session)}
    text = json.dumps(content, indent=1) + "\n"
    write_whole(folder / "session.json", lambda file: file.write(text.encode()))


def finished(session: Session) -> Session:
    """`session` with its verdict reached."""
    return replace(session, done=True)
