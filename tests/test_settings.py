"""What the environment tells services: mistakes are named with the variable, the value and what is legal."""

from __future__ import annotations

import pytest

from services.reward.served import devices, served
from shared.config import specs
from shared.config.settings import from_environment


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("UNIMESH_THREADS", "two", "a whole number, at least 0"),
        ("UNIMESH_THREADS", "-1", "a whole number, at least 0"),
        ("UNIMESH_LEASE_S", "nan", "a number, at least 0.1"),
        ("UNIMESH_DEVICE_COUNT", "1.5", "a whole number, at least 0"),
        ("UNIMESH_DEVICE_SHARE", "0", "a whole number, at least 1"),
        ("UNIMESH_HANG_S", "soon", "a number, at least 1.0"),
    ],
)
def test_a_wrong_number_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, legal: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        from_environment()
    assert str(caught.value) == f"{name}={value!r}: must be {legal}"


def test_empty_means_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose passes what nobody set as an empty word."""
    names = ("THREADS", "LEASE_S", "DEVICES", "DEVICE_COUNT", "DEVICE_SHARE", "OTLP", "SCORER_URLS", "TOKEN", "HEALTH", "SCORE")
    for name in names:
        monkeypatch.setenv(f"UNIMESH_{name}", "")
    found = from_environment()
    assert found.lease_s == 15 and found.device_count is None and found.device_share == 1 and found.threads >= 1
    assert found.devices == "auto"
    assert found.otlp is found.token is found.health is found.score is None and found.scorer_urls == ()


def test_scorers_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIMESH_SCORERS", "")
    on_devices = {"aesthetic", "clip_score", "hps_v2", "hps_v3", "image_reward", "pick_score"}
    assert list(served()) == [name for name in specs.names("scorer") if name not in on_devices] and devices(served()) == 0
    monkeypatch.setenv("UNIMESH_SCORERS", "length, regex")
    assert served() == ("length", "regex")
    monkeypatch.setenv("UNIMESH_SCORERS", "lenght")
    with pytest.raises(SystemExit, match="did you mean 'length'"):
        served()


def test_scorers_with_a_device_are_served_only_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(specs.registry())
    length = known["scorer", "length"]
    known["scorer", "heavy"] = specs.Spec("scorer", "heavy", length.params, "needs a device", {"device": True})
    monkeypatch.setattr(specs, "registry", lambda: known)
    monkeypatch.delenv("UNIMESH_SCORERS", raising=False)
    assert "heavy" not in served() and devices(served()) == 0
    monkeypatch.setenv("UNIMESH_SCORERS", "heavy,length")
    assert devices(served()) == 1
