"""The files of a deployment, without Docker: valid for every profile, complete, and true to the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shared.config import specs
from tests.compose.deploy import ROOT, commands

COMPOSE = ROOT / "compose.yaml"
EXAMPLE = dict(
    line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if line and not line.startswith("#")
)
PROFILES = ("gpu", "cpu", "scorers", "models", "observe")
SERVICES = ("controller", "reward", "rollout", "trainer")
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::([-?])((?:[^{}]|\{[^}]*\})*))?\}")


def composed(env: dict[str, str]) -> dict[str, Any]:
    """compose.yaml as compose reads it: variables filled in, `${NAME:?text}` refused when empty, anchors merged."""

    def fill(match: re.Match[str]) -> str:
        name, how, rest = match.groups()
        value = env.get(name, "")
        if value or how is None:
            return value
        if how == "?":
            raise ValueError(f"{name}: {rest}")
        return str(rest)

    text = "\n".join(line for line in COMPOSE.read_text().splitlines() if not line.lstrip().startswith("#"))
    return dict(yaml.safe_load(VARIABLE.sub(fill, text)))


def chosen(document: dict[str, Any], profile: str) -> dict[str, Any]:
    services = {n: s for n, s in document["services"].items() if profile in s.get("profiles", [profile])}
    return document | {"services": services}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return composed(EXAMPLE | {"UNIMESH_TOKEN": "x" * 32})


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_fits_the_compose_specification(document: dict[str, Any], profile: str) -> None:
    schema = json.loads((Path(__file__).parent / "data" / "compose-spec.json").read_text())
    found = chosen(document, profile)
    jsonschema.Draft7Validator(schema).validate(found)
    used = {v.split(":")[0] for s in found["services"].values() for v in s.get("volumes", []) if not v.startswith((".", "/"))}
    assert used <= document["volumes"].keys()
    for service in found["services"].values():
        assert not set(service.get("depends_on", {})) - found["services"].keys()


def test_the_schema_refuses_what_is_wrong(document: dict[str, Any]) -> None:
    """Of the test itself: a mistake in the file would be seen."""
    schema = json.loads((Path(__file__).parent / "data" / "compose-spec.json").read_text())
    wrong = document | {"services": {"redis": document["services"]["redis"] | {"restrat": "always"}}}
    with pytest.raises(jsonschema.ValidationError, match="restrat"):
        jsonschema.Draft7Validator(schema).validate(wrong)


def test_a_token_is_required() -> None:
    with pytest.raises(ValueError, match="UNIMESH_TOKEN: put a random word"):
        composed(EXAMPLE)


def test_every_variable_is_in_the_example_with_the_same_default() -> None:
    text = COMPOSE.read_text()
    used = {name: (how, rest) for name, how, rest in VARIABLE.findall(text)}
    assert used.keys() | {"COMPOSE_PROFILES"} == EXAMPLE.keys()
    for name, (how, default) in used.items():
        assert how == "?" or EXAMPLE[name] == default, name


def test_profiles_hold_what_they_are_for(document: dict[str, Any]) -> None:
    always = {"redis", "controller", "reward"}
    assert set(chosen(document, "cpu")["services"]) == always | {"rollout-cpu", "trainer-cpu"}
    assert set(chosen(document, "gpu")["services"]) == always | {"rollout", "trainer"}
    assert set(chosen(document, "observe")["services"]) == always | {"prometheus", "grafana"}
    for name in ("rollout", "trainer"):
        [device] = document["services"][name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["count"] == "all" and device["capabilities"] == ["gpu"]
        assert document["services"][name]["environment"]["UNIMESH_DEVICE_COUNT"] == 1
        assert "deploy" not in document["services"][f"{name}-cpu"]


def test_one_port_is_published_and_only_on_loopback(document: dict[str, Any]) -> None:
    """And elsewhere once it is told so; the profile observe adds Grafana's, never beyond loopback."""
    ports = {name: s["ports"] for name, s in document["services"].items() if "ports" in s}
    assert ports == {"controller": ["127.0.0.1:8080:8080"], "grafana": ["127.0.0.1:3000:3000"]}
    told = composed(EXAMPLE | {"UNIMESH_TOKEN": "x" * 32, "UNIMESH_BIND": "0.0.0.0", "UNIMESH_PORT": "80"})["services"]
    assert told["controller"]["ports"] == ["0.0.0.0:80:8080"] and told["grafana"]["ports"] == ["127.0.0.1:3000:3000"]


def test_limits_and_restarts(document: dict[str, Any]) -> None:
    """NCCL's shared memory and pinned pages, Redis within its memory and asked whether it answers, everything started again."""
    services = document["services"]
    for name in ("rollout", "trainer"):
        assert services[name]["shm_size"] == "1g" and services[name]["ulimits"] == {"memlock": -1, "stack": 64 << 20}
        assert services[f"{name}-cpu"]["shm_size"] == "1g"
    redis = services["redis"]
    assert redis["mem_limit"] == "8g" and redis["environment"]["REDIS_MAXMEMORY"] == "4gb"
    assert "redis-cli ping" in redis["healthcheck"]["test"][1] and redis["volumes"][0] == "redis:/data"
    start = (ROOT / "deploy/redis/start.sh").read_text()
    assert all(word in start for word in ("noeviction", "appendonly yes", "REDIS_MAXMEMORY"))
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}


def test_services_that_work_for_a_job_share_their_folders(document: dict[str, Any]) -> None:
    ours = {n: s for n, s in document["services"].items() if s["image"].startswith("unimesh-")}
    assert len(ours) == 11
    for name, service in ours.items():
        assert service["volumes"] == ["state:/state", "bodies:/bodies", "./models:/models:ro"], name
        assert service["environment"]["UNIMESH_REDIS_URL"] == "redis://redis:6379/0" and service["init"] is True
        assert service["restart"] == "unless-stopped" and service["depends_on"]["redis"]["condition"] == "service_healthy"


def test_scorers_services_serve_every_scorer(document: dict[str, Any]) -> None:
    served: list[str] = []
    for name in ("reward-math", "reward-format", "reward-remote", "reward-pictures", "reward-models"):
        served += document["services"][name]["environment"]["UNIMESH_SCORERS"].split(",")
    assert sorted(served) == specs.names("scorer"), "each scorer by one of them"


@pytest.mark.parametrize("service", SERVICES)
def test_dockerfiles_need_no_buildkit_and_no_root(service: str) -> None:
    text = (ROOT / "deploy" / "docker" / f"{service}.Dockerfile").read_text()
    assert not re.search(r"--mount|--link|<<|^# *syntax", text, re.MULTILINE)
    assert re.search(r"^USER unimesh$", text, re.MULTILINE) and "HEALTHCHECK" in text and "ARG BASE_IMAGE=python" in text
    assert ("torch/" in text) == (service in ("rollout", "trainer"))


@pytest.mark.parametrize("service", SERVICES)
def test_locks_hold_the_versions_that_tests_run(service: str) -> None:
    """Every lock is whole (`--no-deps` installs it), without torch, and agrees with the tests' own."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{service}.txt").read_text(), re.MULTILINE))
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/dev.txt").read_text(), re.MULTILINE))
    assert pinned.items() <= tested.items(), dict(pinned.items() - tested.items())
    assert "torch" not in pinned and "async-timeout" in pinned, "Debian's Python 3.11.2 needs it for redis"
    assert ("transformers" in pinned) == (service in ("rollout", "trainer"))
    assert ("fastapi" in pinned) == (service in ("controller", "reward"))


def test_the_dashboard_asks_for_figures_that_exist() -> None:
    board = json.loads((ROOT / "deploy/grafana/dashboards/unimesh.json").read_text())
    source = (ROOT / "services/controller/metrics.py").read_text()
    known = set(re.findall(r'GaugeMetricFamily\("(\w+)"', source))
    asked = {name for p in board["panels"] for t in p["targets"] for name in re.findall(r"unimesh_\w+", t["expr"])}
    assert asked <= known and len(asked) >= 8, asked - known
    titles = " ".join(panel["title"] for panel in board["panels"]).lower()
    assert all(word in titles for word in ("throughput", "stage lag", "reward", "staleness", "dead letters"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_prometheus_asks_the_controller_with_the_token(document: dict[str, Any]) -> None:
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": ["controller:8080"]}] and scrape["metrics_path"] == "/metrics"
    written = " ".join(document["services"]["prometheus"]["entrypoint"])
    assert scrape["authorization"]["credentials_file"] in written and '"$$UNIMESH_TOKEN"' in written


def test_only_marked_blocks_of_the_guide_are_not_run() -> None:
    """What the others hold is run: the last test of test_compose.py compares."""
    blocks = re.findall(r"^```(\w*)$", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE)
    assert set(blocks[::2]) == {"sh", "console"} and set(blocks[1::2]) == {""}
    assert all("trainer unimesh" not in line and "scale rollout" not in line for line in commands())
