"""Which devices tests run on: those that ask for the fixture `device` run once on the CPU and once on the first GPU."""

from __future__ import annotations

import pytest


def device_params() -> list[object]:
    """Names of the devices of this install, as parameters."""
    from pyggml_spec.ggml import list_devices

    gpus = [device.name for device in list_devices() if device.kind == "gpu"]
    return ["CPU", *(pytest.param(name, marks=pytest.mark.gpu) for name in gpus[:1])]


def parametrise_devices(metafunc: pytest.Metafunc, scope: str) -> None:
    """One run a device for a test that needs `device`, directly or through another fixture."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", device_params(), indirect=True, scope=scope)  # type: ignore[arg-type]
