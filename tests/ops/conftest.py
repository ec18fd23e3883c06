"""Operations on every device of this install."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from devices import parametrise_devices


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run a device."""
    parametrise_devices(metafunc, scope="module")


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the device that harnesses of `native_helpers` compute on."""
    from native_helpers import on_device

    with on_device(request.param) as name:
        yield name
