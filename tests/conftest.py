"""Fixtures of the real things: a Redis process, a model folder, settings of a mesh."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.config.settings import Settings
from shared.weights import checkpoints
from shared.weights.checkpoints import Position
from shared.wire.client import connect
from shared.wire.server import RedisServer

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


LONG = (
    "tests/mesh/",
    "tests/trainer/test_ranks",
    "tests/trainer/test_f",
    "tests/trainer/test_crash",
    "tests/trainer/test_places",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: two processes share the files in this order, and end together."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG)))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis of the tests' own: the embedded server, or with UNIMESH_TEST_REDIS=container one in Docker."""
    how = os.environ.get("UNIMESH_TEST_REDIS", "embedded")
    if how == "container":
        yield from _container()
        return
    assert how == "embedded", f"UNIMESH_TEST_REDIS={how!r}: must be embedded or container"
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.kill()


def _container() -> Iterator[str]:
    """Of the image REDIS_IMAGE, or a stand-in, started as compose.yaml does it; no reaper, which is an image too."""
    from tests.compose.deploy import base_images, engine_environment

    os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"  # before the import
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    image = os.environ.get("REDIS_IMAGE")
    if image is None:
        env = base_images(engine_environment())
        os.environ["DOCKER_HOST"], image = env.get("DOCKER_HOST", os.environ.get("DOCKER_HOST", "")), env["REDIS_IMAGE"]
        if not os.environ["DOCKER_HOST"]:
            del os.environ["DOCKER_HOST"]
    start = Path(__file__).resolve().parents[1] / "deploy" / "redis" / "start.sh"
    server = (
        DockerContainer(image)
        .with_volume_mapping(str(start), "/start.sh", "ro")
        .with_tmpfs_mount("/data")
        .with_command("sh /start.sh")
        .with_exposed_ports(6379)
        .waiting_for(LogMessageWaitStrategy("Ready to accept connections"))
    )
    with server:
        yield f"redis://{server.get_container_host_ip()}:{server.get_exposed_port(6379)}/0"


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """An empty database."""
    connect(redis_server).flushall()
    yield redis_server


@pytest.fixture
def client(redis_url: str) -> Any:
    return connect(redis_url)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with random weights."""
    from shared.models.ar.tiny import make_folder

    return make_folder(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture
def settings(redis_url: str, tmp_path: Path, model_folder: Path) -> Settings:
    return Settings(
        redis_url=redis_url,
        state=tmp_path / "state",
        roots=(model_folder.parent, tmp_path),
        bodies=f"dir:{tmp_path / 'state' / 'bodies'}",
        threads=1,
        logs=None,
    )


def recipe(model: Path | str, **changes: Any) -> dict[str, Any]:
    """A small valid `ar` recipe; `changes` replace whole sections or, as dotted keys with `__`, single values."""
    document: dict[str, Any] = {
        "domain": "ar",
        "steps": 3,
        "model": {"path": str(model)},
        "data": {"source": {"name": "sorting", "params": {}}, "batch_size": 2},
        "rollout": {"group_size": 2, "sampling": {"max_new_tokens": 4}},
        "reward": {"scorers": {"exact": {"name": "exact_match"}}},
        "algorithm": {"name": "grpo", "params": {"clip_range": 0.2}},
        "train": {"optimizer": {"lr": 1e-3}},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        place = document
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return document


def own_tensors(bundle: Any) -> dict[str, Any]:
    """A model's state, each tensor once and contiguous, as a version holds it."""
    return {name: value.detach().contiguous() for name, value in bundle.model.state_dict().items() if name not in bundle.tied}


@contextmanager
def saving(folder: Path, at: Position) -> Iterator[Path]:
    """A checkpoint whose files the block writes."""
    yield checkpoints.begin(folder, at)
    checkpoints.complete(folder, at)
