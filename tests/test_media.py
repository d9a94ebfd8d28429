"""Pictures and videos as files, opened again by the libraries that people open them with."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from services.controller.previews import Previews
from shared import media
from shared.types.part import Media


def moving(frames: int = 9, height: int = 32, width: int = 48) -> Any:
    """A bright square that goes to the right."""
    found = np.full((frames, height, width, 3), 40, np.uint8)
    for k in range(frames):
        found[k, 8:24, 2 + 3 * k : 14 + 3 * k] = (220, 60, 30)
    return found


def test_a_video_comes_back_nearly_as_it_was() -> None:
    frames = moving()
    video = media.encoded_video(frames, 16, 10)
    again = media.frames_of(video)
    assert again.shape == frames.shape and again.dtype == np.uint8
    inside = np.abs(again[:, 10:22].astype(int) - frames[:, 10:22]).mean()
    assert video.mime == "video/mp4" and inside < 6, inside
    assert np.asarray(video.data).nbytes < frames.nbytes / 4
    same = media.encoded_video(frames, 16, 10)
    assert np.array_equal(np.asarray(video.data), np.asarray(same.data)), "it belongs to its frames alone"
    assert (
        np.abs(media.frames_of(media.encoded_video(frames, 16, 45)).astype(int) - frames).mean()
        > np.abs(again.astype(int) - frames).mean()
    )


@pytest.mark.parametrize(
    ("held", "mime", "size"),
    [
        (Media(mime="image/raw", data=moving(1, 300, 600)[0]), "image/png", (600, 300)),
        (Media(mime="video/raw", data=moving()), "image/webp", (48, 32)),
        (media.encoded_video(moving(), 16, 10), "video/mp4", (48, 32)),
    ],
)
def test_files_for_people(held: Media, mime: str, size: tuple[int, int]) -> None:
    kind, data = media.as_file(held)
    assert kind == mime
    small, little = media.preview(held, 64)
    if mime == "video/mp4":
        assert (small, little) == (kind, data) and data[4:8] == b"ftyp"
        return
    with Image.open(io.BytesIO(data)) as picture, Image.open(io.BytesIO(little)) as thumbnail:
        assert picture.size == size and max(thumbnail.size) <= 64 and small == "image/webp"
        assert getattr(picture, "n_frames", 1) == len(media.frames_of(held))


def test_previews_are_small_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    previews = Previews(tmp_path)
    long = "a" * 250 + "/7"
    assert previews.keep("steps", 3, long, Media(mime="image/raw", data=moving(1)[0]))
    found = previews.find("steps", 3, long)
    assert found is not None and found[0] == "image/webp" and previews.find("steps", 3, "b") is None
    video = media.encoded_video(moving(), 16, 10)
    assert previews.keep("evals", "s:end", 0, video) and (previews.find("evals", "s:end", 0) or ("",))[0] == "video/mp4"
    monkeypatch.setattr(media, "MOST_KEPT", 10)
    assert not previews.keep("evals", "s:end", 1, video)
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert not previews.keep("steps", 3, "c", Media(mime="image/raw", data=moving(1)[0]))
    assert all(not path.name.startswith(".") for path in tmp_path.rglob("*"))
    previews.forget(4, 9)
    assert previews.find("steps", 3, long) is None


def test_what_is_no_video_is_said() -> None:
    with pytest.raises(ValueError, match="cannot be decoded"):
        media.frames_of(Media(mime="video/mp4", data=np.zeros(100, np.uint8)))
    with pytest.raises(ValueError, match="holds no pixels"):
        media.frames_of(Media(mime="image/raw", uri="/somewhere"))
