"""Tests that ask for `device` run once on the CPU and once on the first GPU, if this install can use one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def device_params() -> list[object]:
    """The devices' names."""
    from pyggml_spec.ggml import list_devices

    gpus = [device.name for device in list_devices() if device.kind == "gpu"]
    return ["CPU", *(pytest.param(name, marks=pytest.mark.gpu) for name in gpus[:1])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run a device."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", device_params(), indirect=True, scope="module")


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the device that harnesses of `native_helpers` compute on."""
    from native_helpers import on_device

    with on_device(request.param) as name:
        yield name
