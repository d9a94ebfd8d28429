"""docker compose for real: images, the demo's job through the published API, scaling, kills, moving; nothing stays behind."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.compose.deploy import TOKEN, Deployment, base_images, commands, engine_environment, until

pytestmark = pytest.mark.compose

STEPS = 160
SERVICES = ("controller", "rollout-cpu", "reward", "trainer-cpu")
REWARDS = "docker compose up -d --no-recreate --scale reward={}"
TAR = "docker compose run --rm --no-deps -T --entrypoint tar "


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    return base_images(engine_environment())


@pytest.fixture(scope="module")
def deployment(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    found = Deployment(tmp_path_factory.mktemp("deployment"), f"unimesh-test-{os.getpid()}", env)
    found.run("cp .env.example .env")
    print(found.run("make images"))
    yield found
    found.remove()


def test_without_a_token_nothing_starts(deployment: Deployment) -> None:
    deployment.set(COMPOSE_PROFILES="cpu", UNIMESH_PORT=str(deployment.port), UNIMESH_LEASE_S="5")
    with pytest.raises(AssertionError, match="put a random word into"):
        deployment.run("docker compose up -d")
    assert not deployment.containers()
    deployment.set(UNIMESH_TOKEN=TOKEN)


def test_it_comes_up_as_it_should(deployment: Deployment) -> None:
    """Four services and Redis; one published port, on loopback, that asks for the token; nobody is root; no torch in vain."""
    deployment.run("docker compose up -d")
    deployment.wait_up()
    assert "controller" in deployment.run("docker compose ps")
    published = {}
    for container in deployment.containers():
        ports = deployment.docker("port", container)
        if ports:
            published[deployment.docker("inspect", "--format", "{{.Name}}", container)] = ports
    assert len(published) == 1, published
    assert f"8080/tcp -> 127.0.0.1:{deployment.port}" in next(iter(published.values()))
    assert httpx.get(f"http://127.0.0.1:{deployment.port}/v1/jobs", timeout=10).status_code == 401
    for service in SERVICES:
        [container] = deployment.containers(service)
        assert deployment.docker("exec", container, "id", "-u") == "1000"
        found = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('torch', 'transformers')])"
        heavy = service in ("rollout-cpu", "trainer-cpu")
        assert deployment.docker("exec", container, "python", "-c", found) == str([heavy, heavy]), service
        until(partial(_healthy, deployment, container), 60, f"{service} is healthy")
    assert "ok   token: 1 known" in deployment.run("docker compose exec -T controller unimesh doctor --service controller")
    for command in ("unimesh jobs", "unimesh status"):
        deployment.run(f"docker compose exec -T controller {command}")


def test_the_demo_learns_while_services_are_killed_and_scaled(deployment: Deployment) -> None:
    """Warm start and reinforcement learning, as `make demo`; meanwhile every service dies once, and rewards are scaled."""
    deployment.run("docker compose exec -T trainer-cpu python -m shared.models.ar.tiny /state/models/tiny 0")
    deployment.run(
        "docker compose exec -T controller unimesh launch sft/sort model.path=/state/models/tiny name=warm-start --no-follow"
    )
    [warm] = [job["id"] for job in deployment.get("/v1/jobs")["jobs"]]
    deployment.done(warm)
    job = deployment.launch("ar/sort", f"model.path=job:{warm}", "data.source.params.seed=2000", f"steps={STEPS}", "name=demo")

    at = deployment.reaches(job, 5)["step"]
    deployment.run(REWARDS.format(3))
    until(lambda: len(deployment.workers("reward")) == 3, 60, "three reward agents")
    shown = until(lambda: _scorers(deployment, job), 30, "streams of the job")
    assert all({"waiting", "in_hand", "workers", "oldest_seconds"} <= row.keys() for row in shown)
    until(lambda: any(row["workers"] >= 3 for row in _scorers(deployment, job)), 60, "three workers on a scorer's stream")
    for service in ("rollout-cpu", "reward", "trainer-cpu", "controller", "redis"):
        container = deployment.containers(service)[0]
        deployment.docker("kill", container)
        deployment.run(REWARDS.format(3))
        view = deployment.reaches(job, at + 4)
        assert view["state"] == "running", f"{service} was killed too late: step {view['step']} of {STEPS}"
        at = view["step"]
    [container] = deployment.containers("rollout-cpu")
    os.kill(deployment.state(container)["Pid"], signal.SIGKILL)  # a crash, not a stop by hand: Docker starts it again
    until(lambda: deployment.containers("rollout-cpu") == [container], 60, "the rollout is started again")
    deployment.run(REWARDS.format(1))
    at = deployment.reaches(job, deployment.job(job)["step"] + 4)["step"]
    assert len(deployment.containers("reward")) == 1

    view = deployment.done(job)
    ledger = view["ledger"]
    assert ledger["in_flight"] == 0 and ledger["dead"] == 0 and view["dead_letters"] == 0, view
    assert ledger["issued"] == ledger["trained"] + sum(ledger["dropped"].values()), ledger
    steps = deployment.get(f"/v1/jobs/{job}/steps", limit=1000)
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert ledger["trained"] == STEPS * 32, ledger
    first, last = (statistics.fmean(s["reward"] for s in part) for part in (steps[:10], steps[-10:]))
    assert last >= first + 0.2, (first, last)
    print(f"reward {first:.3f} -> {last:.3f} over {STEPS} steps; ledger {ledger}")


def test_scorers_scale_by_themselves(deployment: Deployment) -> None:
    deployment.run("docker compose up -d --no-recreate --scale reward-math=2 reward-math")

    def both() -> bool:
        serving = [set(w["components"]) for w in deployment.workers("reward")]
        return serving.count({"math_verify", "reasoning_gym"}) == 2

    until(both, 60, "two agents that serve mathematics alone")
    deployment.docker("rm", "--force", *deployment.containers("reward-math"))


def test_what_the_doctor_finds_stands_in_the_log(deployment: Deployment) -> None:
    """A container with a fault says at its start what is wrong and what to do."""
    [redis] = deployment.containers("redis")
    deployment.docker("exec", redis, "redis-cli", "config", "set", "maxmemory-policy", "allkeys-lru")
    [reward] = deployment.containers("reward")
    deployment.docker("restart", reward)
    said = until(
        lambda: "FAIL redis" in (log := deployment.docker("logs", reward, errors=True)) and log, 60, "the doctor's word"
    )
    assert "maxmemory-policy" in said and "fix: " in said
    deployment.docker("exec", redis, "redis-cli", "config", "set", "maxmemory-policy", "noeviction")
    deployment.docker("restart", reward)
    deployment.wait_up()


def test_stopping_drains_and_jobs_move(deployment: Deployment, env: dict[str, str], tmp_path: Path) -> None:
    """A job in the middle: upgraded, stopped, copied, removed, and finished by another project from the copies."""
    warm = next(job["id"] for job in deployment.get("/v1/jobs")["jobs"] if job["name"] == "warm-start")
    job = deployment.launch("ar/sort", f"model.path=job:{warm}", "steps=60", "eval=null", "name=moves")
    deployment.reaches(job, 3)
    deployment.run("docker compose up -d --force-recreate")
    at = deployment.reaches(job, deployment.job(job)["step"] + 2)["step"]
    deployment.run("docker compose stop")
    for service in SERVICES:
        [container] = deployment.containers(service, running=False)
        assert deployment.state(container)["ExitCode"] == 0, (service, deployment.logs())
    deployment.run("docker compose start")
    at = deployment.reaches(job, at + 2)["step"]
    assert deployment.job(job)["state"] == "running"

    deployment.run("docker compose stop")
    deployment.run(f"{TAR}redis -C / -c data > redis.tar")
    deployment.run(f"{TAR}controller -C / -c state bodies > state.tar")
    deployment.run("docker compose down")
    assert deployment.left(), "the volumes stay"
    deployment.run("docker compose down -v")
    assert deployment.left() == []

    other = Deployment(tmp_path, f"{deployment.name}-moved", env)
    try:
        other.run("cp .env.example .env")
        other.set(COMPOSE_PROFILES="cpu", UNIMESH_PORT=str(other.port), UNIMESH_LEASE_S="5", UNIMESH_TOKEN=TOKEN)
        for name in ("redis.tar", "state.tar"):
            (deployment.folder / name).rename(other.folder / name)
        other.run(f"{TAR}redis -C / -x < redis.tar")
        other.run(f"{TAR}controller -C / -x < state.tar")
        other.run("docker compose up -d")
        other.wait_up()
        assert other.job(job)["step"] >= at
        view = other.done(job)
        assert view["step"] == 60 and view["ledger"]["in_flight"] == 0, view
        assert {j["name"] for j in other.get("/v1/jobs")["jobs"]} == {"warm-start", "demo", "moves"}
        other.run(f"{TAR}controller -C / -c state/jobs/JOB > job.tar", JOB=job)
        other.run("docker compose down -v")
        other.run("docker compose up -d")
        other.wait_up()
        assert other.get("/v1/jobs")["jobs"] == []
        other.run(f"{TAR}controller -C / -x < job.tar", JOB=job)
        other.run("docker compose exec -T controller unimesh restore JOB", JOB=job)
        assert other.done(job)["step"] == 60
    finally:
        other.remove()
    assert other.left() == []
    deployment.ran += other.ran


def test_the_guide_holds_what_was_run(deployment: Deployment) -> None:
    assert set(commands()) == set(deployment.ran)


def _healthy(deployment: Deployment, container: str) -> bool:
    return bool(deployment.state(container)["Health"]["Status"] == "healthy")


def _scorers(deployment: Deployment, job: str) -> list[dict[str, int]]:
    return [row for row in deployment.get("/v1/streams") if row["job"] == job and row["stage"].startswith("reward.")]
