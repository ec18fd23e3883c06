"""Devices, the backend that computes on one, and the buffers that hold tensor data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from threading import RLock
from typing import Any

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import DeviceError, FatalDeviceError, OptionError
from pyggml_spec.ggml.context import Context
from pyggml_spec.ggml.tensor import Tensor

_FAILURES_OF_A_DEAD_DEVICE = 2  # the second one is the rebuild after the first


@dataclass(frozen=True)
class Device:
    """One compute device as ggml reports it; memory in bytes."""

    index: int
    name: str
    description: str
    kind: str  # "cpu", "gpu", "igpu" or "accel"
    memory_free: int
    memory_total: int


def list_devices() -> list[Device]:
    """Every device this flavour of the native library can use."""
    return [_describe(i) for i in range(lib.ggml_backend_dev_count())]


def _describe(index: int) -> Device:
    dev = lib.ggml_backend_dev_get(index)
    free, total = ffi.new("size_t *"), ffi.new("size_t *")
    lib.ggml_backend_dev_memory(dev, free, total)
    kinds = {
        lib.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
        lib.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
        lib.GGML_BACKEND_DEVICE_TYPE_IGPU: "igpu",
    }
    return Device(
        index=index,
        name=ffi.string(lib.ggml_backend_dev_name(dev)).decode(),
        description=ffi.string(lib.ggml_backend_dev_description(dev)).decode(),
        kind=kinds.get(lib.ggml_backend_dev_type(dev), "accel"),
        memory_free=free[0],
        memory_total=total[0],
    )


def choose_device(name: str = "auto") -> Device:
    """The device called `name` (case-insensitive), or for "auto" the first GPU, else the CPU."""
    devices = list_devices()
    if name == "auto":
        return next((d for d in devices if d.kind == "gpu"), devices[0])
    for device in devices:
        if device.name.lower() == name.lower():
            return device
    names = ", ".join(d.name.lower() for d in devices)
    raise OptionError(f"device '{name}' is not available; this install can use {names} (see `pyggml-spec devices`)")


def default_threads() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


class Backend:
    """One device opened for computing; on a CPU it owns a persistent thread pool of `n_threads`."""

    def __init__(self, device: Device, n_threads: int | None = None) -> None:
        self.device = device
        self.n_threads = default_threads() if n_threads is None else n_threads
        n_cpus = default_threads()
        if not 1 <= self.n_threads <= n_cpus:
            raise OptionError(
                f"{self.n_threads} threads do not suit the {n_cpus} CPUs of this process: use 1 to {n_cpus} "
                "(threads beyond that only wait for each other)"
            )
        self._n_failures = 0  # in a row
        self.lock: Any = RLock()  # held by whoever prepares and runs a graph
        self._pool = ffi.NULL
        self.ptr = lib.ggml_backend_dev_init(lib.ggml_backend_dev_get(device.index), ffi.NULL)
        if self.ptr == ffi.NULL:
            raise DeviceError(f"device '{device.name}' could not be opened; see `pyggml-spec doctor`")
        if device.kind == "cpu":
            self._start_threads()

    def _start_threads(self) -> None:
        params = ffi.new("struct ggml_threadpool_params *")
        lib.ggml_threadpool_params_init(params, self.n_threads)
        self._pool = lib.ggml_threadpool_new(params)
        if self._pool == ffi.NULL:
            raise DeviceError(f"the operating system refused to start {self.n_threads} threads; use fewer")
        lib.ggml_backend_cpu_set_n_threads(self.ptr, self.n_threads)
        lib.ggml_backend_cpu_set_threadpool(self.ptr, self._pool)

    def allocate(self, context: Context, what: str) -> Buffer:
        """Memory on this device for every tensor of `context` that has none yet, filled with zeros."""
        ptr = lib.ggml_backend_alloc_ctx_tensors(context.live(), self.ptr)
        if ptr == ffi.NULL:
            raise DeviceError(f"device '{self.device.name}' has no memory for {what}")
        lib.ggml_backend_buffer_clear(ptr, 0)
        return Buffer(ptr)

    @property
    def is_dead(self) -> bool:
        """Whether the device failed twice with no success in between; it is not asked again."""
        return self._n_failures >= _FAILURES_OF_A_DEAD_DEVICE

    def refuse_if_dead(self) -> None:
        """Raise FatalDeviceError when the device is dead."""
        if self.is_dead:
            raise FatalDeviceError(
                f"device '{self.device.name}' failed {self._n_failures} times in a row and is not used any more; "
                "close the engine, see `pyggml-spec doctor`, and load it again in a new process"
            )

    def compute(self, graph_ptr: Any) -> None:
        """Run a graph to its end; the GIL is released meanwhile.

        Raises:
            DeviceError: it ended early; what it wrote is undefined.
            FatalDeviceError: so did the call before.
        """
        self.refuse_if_dead()
        status = lib.ggml_backend_graph_compute(self.ptr, graph_ptr)
        if status == lib.GGML_STATUS_SUCCESS:
            self._n_failures = 0
            return
        self._n_failures += 1
        self.refuse_if_dead()
        text = ffi.string(lib.ggml_status_to_string(status)).decode()
        raise DeviceError(f"device '{self.device.name}' failed in the middle of a graph ({text})")

    def supports(self, tensor: Tensor) -> bool:
        """Whether the device has a kernel for this graph node."""
        return bool(lib.ggml_backend_supports_op(self.ptr, tensor.ptr))

    def close(self) -> None:
        """Stop the threads and release the device; safe to call twice."""
        if self.ptr != ffi.NULL:
            lib.ggml_backend_free(self.ptr)
            self.ptr = ffi.NULL
        if self._pool != ffi.NULL:
            lib.ggml_threadpool_free(self._pool)
            self._pool = ffi.NULL

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pool") and hasattr(self, "ptr") and lib is not None:
            self.close()


class Buffer:
    """Device memory of a context's tensors."""

    def __init__(self, ptr: Any) -> None:
        self.ptr = ptr

    @property
    def n_bytes(self) -> int:
        return lib.ggml_backend_buffer_get_size(self.ptr) if self.ptr != ffi.NULL else 0

    def clear(self, value: int = 0) -> None:
        """Fill with one byte value (tests poison state with it)."""
        lib.ggml_backend_buffer_clear(self.ptr, value)

    def close(self) -> None:
        """Release the memory; safe to call twice."""
        if self.ptr != ffi.NULL:
            lib.ggml_backend_buffer_free(self.ptr)
            self.ptr = ffi.NULL

    def __del__(self) -> None:
        if hasattr(self, "ptr") and lib is not None:
            self.close()
