"""What the emulator reports: text it does not understand, and faults of the program it runs."""


class EmulatorError(Exception):
    """Base of everything the emulator raises on purpose."""


class PtxError(EmulatorError, ValueError):
    """PTX text that cannot be parsed, or an instruction that the emulator does not implement."""


class ProgramFault(EmulatorError, RuntimeError):
    """The emulated program did something that the machine does not allow or leaves undefined.

    Attributes:
      location: where each warp involved stands; filled in by the scheduler.
    """

    def __init__(self, message: str) -> None:
        """Takes the text without a location, which is added where the warp is known."""
        super().__init__(message)
        self.message = message
        self.location = ""

    def at(self, location: str) -> "ProgramFault":
        """Adds the location, once: the innermost one is the most precise."""
        if not self.location:
            self.location = location
        return self

    def __str__(self) -> str:
        """Returns message and location."""
        return f"{self.message}\n  at {self.location}" if self.location else self.message


class Deadlock(ProgramFault):
    """No warp can run and nothing is in flight."""


class RegisterFault(ProgramFault):
    """A register was read before it was written, or used while a matmul owns it."""


class UninitialisedRead(ProgramFault):
    """Shared, tensor or global memory was read before it was written."""


class OutOfBounds(ProgramFault):
    """An address outside every allocation of its state space."""


class Misaligned(ProgramFault):
    """An address, a descriptor or a tensor map that is not aligned as required."""


class DataRace(ProgramFault):
    """Two conflicting accesses without synchronisation, or without the proxy fence they need."""


class BarrierFault(ProgramFault):
    """A barrier or mbarrier used against its rules: counts, phases, transaction bytes."""


class TensorMemoryFault(ProgramFault):
    """Tensor memory used before its allocation or after its release, or never released."""


class ConvergenceFault(ProgramFault):
    """An instruction that needs converged threads was executed by some of them only."""
