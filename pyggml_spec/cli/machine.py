"""What this machine and this install offer: flavours, devices, and graphics hardware whether or not it can be used."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from typing import Any

GPU_SIGNS = {  # vendor -> device files that its driver creates
    "NVIDIA": ("/dev/nvidia[0-9]*", "/dev/dxg"),
    "AMD": ("/dev/kfd",),
}


def find_gpu_vendors() -> list[str]:
    """Vendors whose driver shows a GPU here: a look at paths only, no driver library is loaded."""
    found = [vendor for vendor, patterns in GPU_SIGNS.items() if any(glob.glob(pattern) for pattern in patterns)]
    if os.name == "nt" and shutil.which("nvidia-smi"):
        found.append("NVIDIA")
    return found


def list_flavour_rows() -> list[dict[str, Any]]:
    """Every flavour of the native extension, best first: name, path, whether it is loaded, why it cannot be used."""
    from .. import _native
    from .._native.flavours import MODULE_PREFIX, list_flavours

    return [
        {
            "name": status.name,
            "path": str(status.path) if status.path else None,
            "loaded": f"{_native.__name__}.{MODULE_PREFIX}{status.name}" in sys.modules,
            "why_not": status.why_not,
        }
        for status in list_flavours(list(_native.__path__))
    ]


def list_device_rows() -> list[dict[str, Any]]:
    """Every device this install can compute on; memory in bytes.

    Raises: NativeLibraryError when no flavour can be loaded.
    """
    from ..ggml.backend import choose_device, list_devices

    chosen = choose_device("auto")
    return [
        {
            "name": device.name.lower(),
            "kind": device.kind,
            "description": device.description,
            "memory_free": device.memory_free,
            "memory_total": device.memory_total,
            "is_default": device == chosen,
        }
        for device in list_devices()
    ]


def explain_unused_gpus(device_kinds: set[str]) -> list[dict[str, str]]:
    """GPUs that are here but that no device of this install stands for, each with the reason."""
    if device_kinds & {"gpu", "igpu"}:
        return []
    why = "this install has no flavour for GPUs: it computes on the CPU"
    return [{"device": f"{vendor} GPU", "why_not": why} for vendor in find_gpu_vendors()]
