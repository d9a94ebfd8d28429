"""Pictures and videos as files: what travels, what scorers open, what people look at."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from shared.types.arrays import Array
from shared.types.part import Media

Pixels = np.ndarray[Any, Any]
MP4 = "video/mp4"
ENDINGS = {"image/png": ".png", "image/webp": ".webp", MP4: ".mp4"}
"""Of files, by media type."""
MOST_KEPT = 1 << 20
"""Bytes of a video that is its own preview."""
THREADS = 4
"""Of the encoder, whatever the host has: the file belongs to the frames alone."""
SHOWN = 16
"""Most frames of a moving preview."""


def encoded_video(frames: Pixels, rate: int, crf: int) -> Media:
    """H.264 in MP4, as browsers play it.

    Args:
        frames: uint8 [frames, height, width, 3]; height and width are even.
        rate: frames a second.
        crf: x264's constant rate factor; 0 loses nothing but half of the colours' resolution, 23 is x264's own default.
    """
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": str(crf), "preset": "veryfast"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.codec_context.thread_count = "yuv420p", THREADS
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))
    return Media(mime=MP4, data=np.frombuffer(buffer.getvalue(), np.uint8))


def frames_of(media: Media) -> Pixels:
    """uint8 [frames, height, width, 3]; of a picture one. ValueError for what holds neither."""
    if media.data is None:
        raise ValueError(f"the {media.mime} holds no pixels")
    held = np.asarray(media.data)
    if media.mime != MP4:
        return held if held.ndim == 4 else held[None]
    import av

    try:
        with av.open(io.BytesIO(_bytes(media.data)), "r") as container:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    except (av.FFmpegError, ValueError) as error:
        raise ValueError(f"the video cannot be decoded: {error}") from error


def from_file(mime: str, data: bytes) -> Media:
    """A picture's pixels, or a video as it is. ValueError for another media type, and for what is none."""
    if mime == MP4:
        video = Media(mime=MP4, data=np.frombuffer(data, np.uint8))
        frames_of(video)
        return video
    if not mime.startswith("image/"):
        raise ValueError(f"media type {mime!r}: legal are image/* and {MP4}")
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return Media(mime="image/raw", data=np.asarray(picture.convert("RGB")))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no picture that can be read: {error}") from error


def as_file(media: Media) -> tuple[str, bytes]:
    """(media type, file) in full size: PNG, MP4, or for raw frames a moving WebP."""
    if media.mime == MP4 and media.data is not None:
        return MP4, _bytes(media.data)
    frames = [Image.fromarray(frame) for frame in frames_of(media)]
    return _written(frames, "PNG") if len(frames) == 1 else _written(frames, "WEBP", lossless=True)


def preview(media: Media, side: int = 256) -> tuple[str, bytes]:
    """(media type, file) for a quick look: at most `side` pixels high and wide. An MP4 is its own preview; ValueError for one
    that is too large to be kept.
    """
    if media.mime == MP4:
        found = as_file(media)
        if len(found[1]) > MOST_KEPT:
            raise ValueError(f"a video of {len(found[1])} bytes is too large for a preview (more than {MOST_KEPT})")
        return found
    frames = frames_of(media)
    places = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), SHOWN)).round().astype(int))
    small = [Image.fromarray(frames[k]) for k in places]
    for picture in small:
        picture.thumbnail((side, side))
    return _written(small, "WEBP", quality=85)


def _written(frames: list[Image.Image], form: str, **how: Any) -> tuple[str, bytes]:
    buffer, more = io.BytesIO(), {"save_all": True, "append_images": frames[1:], "duration": 62} if len(frames) > 1 else {}
    frames[0].save(buffer, format=form, **how, **more)
    return f"image/{form.lower()}", buffer.getvalue()


def _bytes(data: Array) -> bytes:
    return np.asarray(data).tobytes()
