"""Exception types of the package: a leaf module, so that every layer may import it.

Messages are one sentence that names the value found, the rule it breaks and the way out; the command line prints
them and exits with status 1.
"""

from __future__ import annotations


class PyggmlSpecError(Exception):
    """Base of every error this package raises on purpose.

    Where its message speaks of an argument, the name stands in backticks, which `str` leaves out.
    """

    def __str__(self) -> str:
        return self.spelled({})

    def spelled(self, names: dict[str, str]) -> str:
        """The message with other names for its arguments: on the command line they are flags."""
        import re  # nothing is imported before an error, so that the package itself imports at once

        return re.sub("`([a-z_]+)`", lambda marked: names.get(marked[1], marked[1]), super().__str__())


class NativeLibraryError(PyggmlSpecError):
    """No flavour of the native extension can be loaded on this machine."""


class ModelFileError(PyggmlSpecError):
    """A model file is missing, damaged, of another kind, or does not fit its target."""

    finding: str | None = None  # what is wrong, without the file's name and the way out, where a reader told them apart

    @classmethod
    def about(cls, file: object, reason: str, *, part: str = "", way_out: str = "") -> ModelFileError:
        """The error "PART of 'FILE' REASON; WAY OUT".

        Args:
            file: its path.
            reason: the predicate of the sentence: what was found and which rule that breaks.
            part: the key or tensor that it is about; "" = the whole file.
            way_out: what to do about the file; "" = nothing can be done.
        """
        place = f"{part} of '{file}'" if part else f"'{file}'"
        error = cls(f"{place} {reason}; {way_out}" if way_out else f"{place} {reason}")
        error.finding = f"{part or 'the file'} {reason}"
        return error


class ShapeError(PyggmlSpecError, ValueError):
    """An operand of a graph operation has the wrong shape, type or layout (ggml itself would abort the process)."""


class OptionError(PyggmlSpecError, ValueError):
    """An option or argument has a value outside its rule."""


class ContextLimitError(PyggmlSpecError):
    """A prompt or continuation does not fit into the context of this session."""


class DeviceError(PyggmlSpecError):
    """A device cannot be used, ran out of memory, or failed in the middle of a call."""


class FatalDeviceError(DeviceError):
    """A device failed again right after a failure: nothing on it can be trusted, and its engine refuses more work."""
